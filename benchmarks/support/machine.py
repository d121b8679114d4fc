"""What the kernel and the drive say: bytes moved, resident memory, fio's rates, and what machine this is."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cpuinfo
import torch

MIB, _GIB = 1 << 20, 1 << 30
# What fio returns when SIGINT has ended it.
_FIO_STOPPED = 128


def io_nbytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to drives, by the kernel's count (O_DIRECT included)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def resident_nbytes(peak: bool = False) -> int:
    """Resident memory of this process, now or at its peak since `reset_peak`."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {wanted}")


def reset_peak() -> None:
    """Let the peak of resident memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def accelerator() -> torch.device | None:
    """The accelerator of this rank, where torch sees one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def fio_rates(folder: str, *, gib: float = 2, seconds: int = 8) -> dict[str, float] | None:
    """Bytes a second in fio's mixed pattern: {"read", "write"}; both kinds run at the same time. None without fio.

    1 MiB blocks, depth 32, half of them reads, O_DIRECT, on a file that was written before. fio's buffers lie in huge
    pages, as ours do: from small ones a virtual drive needs many more segments a request and gives half the rate.
    """
    if not has_fio():
        return None
    with _mixed(folder, gib, seconds) as process:
        return _rates(process)


def has_fio() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


@contextmanager
def fio_traffic(folder: str, *, gib: float = 2) -> Iterator[list[float]]:
    """fio's mixed pattern as long as the block runs. Its bytes a second, both ways, are in the list afterwards."""
    found: list[float] = []
    with _mixed(folder, gib, 3600) as process:
        yield found
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        found.append(sum(_rates(process, stopped=True).values()))


@contextmanager
def _mixed(folder: str, gib: float, seconds: int) -> Iterator[subprocess.Popen[str]]:
    nbytes = int(gib * _GIB) // (1 << 20) * (1 << 20)
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".fio") as file:
        common = [
            "fio", "--name=mixed", f"--filename={file.name}", f"--size={nbytes}", "--bs=1M", "--iodepth=32",
            "--ioengine=libaio", "--direct=1", "--output-format=json",
        ]  # fmt: skip
        subprocess.run([*common, "--rw=write"], capture_output=True, check=True, env=environment)
        timed = [*common, "--rw=rw", "--rwmixread=50", "--time_based", f"--runtime={seconds}"]
        with subprocess.Popen(timed, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                yield process
            finally:
                process.kill()


def _rates(process: subprocess.Popen[str], *, stopped: bool = False) -> dict[str, float]:
    """What fio says when it is over; CalledProcessError where it failed. `stopped`: by a signal of ours."""
    text, _ = process.communicate(timeout=3600)
    if process.returncode not in ((0, _FIO_STOPPED) if stopped else (0,)):
        raise subprocess.CalledProcessError(process.returncode, process.args, text)
    # What it says of a signal comes before.
    job = json.loads(text[text.index("{") :])["jobs"][0]
    return {kind: float(job[kind]["bw_bytes"]) for kind in ("read", "write")}


def describe() -> str:
    """The machine and the day, in one line."""
    model = cpuinfo.get_cpu_info().get("brand_raw") or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    cores = len(os.sched_getaffinity(0))
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    where = f"{cores} cores of {model}{device}, {memory:.0f} GiB, Linux {platform.release()}"
    return f"{time.strftime('%Y-%m-%d')}, {where}"


def median(values: Iterable[float]) -> float:
    """The median; nan of nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")
