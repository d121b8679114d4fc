"""Claim: a queue moves bytes as fast as the best that fio reaches on the same drive, for little CPU time.

    python benchmarks/aio.py PART [--folder DIR] [--gib 4] [--turn-mib 512] [--rounds 8] [--distinct]

PART is read, write, mixed (half of the requests each), twin (the Python fallback and a plain loop, all
three patterns), crc
(checksums on and off) or overhead (microseconds a request in Python). All but the last alternate, in one run on one
file whose blocks were written before, in an order shuffled a round: each back end at requests of 1, 4, 16 and 64 MiB,
and fio with O_DIRECT at several settings, of which the best median counts. Each turn moves --turn-mib at the next place
of the file, so that 8 rounds of 512 MiB are 4 GiB a row. Before each turn of ours the drive rests for as long as fio
takes to start: on a drive with a budget of bursts nobody gains by order. fio uses its 16 to 64 MiB of memory again and
again, so ours does with 64 MiB; with --distinct each byte of a turn has memory of its own. CPU time is that of the
process with all its threads, user and system.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from infinity.errors import ExtensionError
from infinity.memory.tiers.pinned import page_aligned
from infinity.ops.aio import BACKENDS, File, Queue

_MIB = 1 << 20
_FIO_START_S = 0.3
# The best of a search over both engines, 128 KiB to 4 MiB and depths of 16 to 128.
_FIO = {
    "fio io_uring 1M x 32, fixed": "--ioengine=io_uring --bs=1M --iodepth=32 --fixedbufs --registerfiles",
    "fio io_uring 256k x 64, fixed": "--ioengine=io_uring --bs=256k --iodepth=64 --fixedbufs --registerfiles",
    "fio libaio 1M x 64": "--ioengine=libaio --bs=1M --iodepth=64",
}
# Large pages for fio's buffers, too, as our arenas have them.
_FIO_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(slots=True)
class Row:
    """One competitor: `run(offset)` moves a turn's bytes and returns (seconds, CPU seconds)."""

    run: Callable[[int], tuple[float, float]]
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def cpu_seconds() -> float:
    """Of this process with its threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(body: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds) that a call takes."""
    time.sleep(_FIO_START_S)
    cpu, started = cpu_seconds(), time.perf_counter()
    body()
    return time.perf_counter() - started, cpu_seconds() - cpu


def queued(
    queue: Queue, file: File, buffer: torch.Tensor, turn_nbytes: int, pattern: str, request_nbytes: int,
    checksum: bool = False,
) -> Row:  # fmt: skip
    """Our queue with requests of one size; all are submitted, then waited for in order."""

    def body(offset: int) -> None:
        requests = []
        parts = buffer.split(request_nbytes)
        for index in range(turn_nbytes // request_nbytes):
            submit = queue.write if pattern == "write" or (pattern == "mixed" and index % 2) else queue.read
            place = offset + index * request_nbytes
            requests.append(submit(file, place, parts[index % len(parts)], checksum=checksum))
        for request in requests:
            request.wait()

    return Row(lambda offset: measured(lambda: body(offset)))


def plain_loop(file: File, buffer: torch.Tensor, turn_nbytes: int, pattern: str) -> Row:
    """One thread with O_DIRECT calls of 1 MiB, as dd does."""
    memory = memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr()))
    fd = file.descriptors.direct if file.direct else file.descriptors.buffered

    def body(offset: int) -> None:
        for index, begin in enumerate(range(0, turn_nbytes, _MIB)):
            at = begin % buffer.nbytes
            part = [memory[at : at + _MIB]]
            write = pattern == "write" or (pattern == "mixed" and index % 2)
            moved = os.pwritev(fd, part, offset + begin) if write else os.preadv(fd, part, offset + begin)
            assert moved == part[0].nbytes

    return Row(lambda offset: measured(lambda: body(offset)))


def fio(path: str, nbytes: int, pattern: str, words: str) -> Row:
    """One fio process a turn, timed by fio itself."""

    def run(offset: int) -> tuple[float, float]:
        command = ["fio", "--name=x", f"--filename={path}", f"--rw={_PATTERNS[pattern]}", "--direct=1"]
        # Without marking each block that it writes: that costs fio's thread ten times what our queue uses.
        command += [f"--offset={offset}", f"--size={nbytes}", "--scramble_buffers=0"]
        command += ["--output-format=json", *words.split()]
        environment = {**os.environ, **_FIO_ENVIRONMENT}
        reply = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        job = json.loads(reply[reply.index("{") :])["jobs"][0]
        seconds = max(job[kind]["runtime"] for kind in ("read", "write")) / 1e3
        return seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds

    return Row(run)


def compete(rows: dict[str, Row], nbytes: int, file_nbytes: int, rounds: int) -> None:
    """Alternate; the first round, which warms up, does not count."""
    rng = random.Random(0)
    for number in range(rounds + 1):
        offset = number % (file_nbytes // nbytes) * nbytes
        for row in rng.sample(list(rows.values()), len(rows)):
            seconds, cpu = row.run(offset)
            if number:
                row.rates.append(nbytes / seconds / 1e9)
                row.cpu.append(cpu / (nbytes / 1e9))


def show(rows: dict[str, Row], rivals: Iterator[str]) -> None:
    """A line a row, with its ratio to the best rival's median."""
    best = max((statistics.median(rows[name].rates) for name in rivals), default=0.0)
    for name, row in rows.items():
        median = statistics.median(row.rates)
        ratio = f"{median / best:5.2f} of the best rival" if best else ""
        print(
            f"{name:34s} {median:5.2f} GB/s ({min(row.rates):.2f} to {max(row.rates):.2f})  "
            f"{statistics.median(row.cpu):6.3f} core-seconds/GB  {ratio}"
        )


def touched(nbytes: int) -> torch.Tensor:
    """Memory as the tiers' arenas are made of it."""
    return page_aligned(nbytes).fill_(1)


def queues_of(names: list[str], stack: ExitStack, file: File, buffer: torch.Tensor) -> list[Queue]:
    """A queue for each back end that works here, which knows file and buffer."""
    queues = []
    for name in names:
        try:
            queue = stack.enter_context(Queue(name))
        except ExtensionError as error:
            print(error)
            continue
        known = [what for what, thing in (("file", file), ("memory", buffer)) if queue.register(thing)]
        print(f"{name}: registered {' and '.join(known) or 'nothing'}")
        queues.append(queue)
    return queues


def drive_part(part: str, options: argparse.Namespace, file: File, stack: ExitStack) -> None:
    """Everything that moves bytes."""
    nbytes = options.turn_mib * _MIB
    buffer = touched(nbytes if options.distinct else min(64 * _MIB, nbytes))
    native = [name for name in BACKENDS if name != "python"]
    queues = queues_of({"twin": ["python"], "crc": native[:1]}.get(part, native), stack, file, buffer)
    for pattern in (part,) if part in _PATTERNS else _PATTERNS:
        rows: dict[str, Row] = {}
        if shutil.which("fio") and part != "crc":
            rows = {name: fio(file.path, nbytes, pattern, words) for name, words in _FIO.items()}
        for queue in queues:
            if part == "crc":
                for checksum, word in ((False, "off"), (True, "on")):
                    rows[f"{queue.backend}, checksums {word}"] = queued(
                        queue, file, buffer, nbytes, pattern, 16 * _MIB, checksum
                    )
                continue
            for size in (16,) if part == "twin" else (1, 4, 16, 64):
                rows[f"{queue.backend}, {size} MiB"] = queued(queue, file, buffer, nbytes, pattern, size * _MIB)
        if part == "twin":
            rows["plain loop, 1 MiB"] = plain_loop(file, buffer, nbytes, pattern)
        compete(rows, nbytes, file.nbytes, options.rounds)
        print(f"{pattern}: medians (least to most) of {options.rounds} turns of {options.turn_mib} MiB")
        show(rows, (name for name in rows if name.startswith("fio") or name.endswith("off")))


def overhead_part(file: File) -> None:
    """Microseconds of Python a request: 4 KiB read from a file in the page cache's reach, so that moving costs little.

    Submitting and waiting are timed apart; in submitting, the thread that moves the bytes competes for the cores.
    """
    buffer = touched(4096 * 4096)
    for name in BACKENDS:
        try:
            queue = Queue(name)
        except ExtensionError:
            continue
        with queue:
            submits, waits = [], []
            for _ in range(9):
                started = time.perf_counter()
                requests = [queue.read(file, index * 4096, part) for index, part in enumerate(buffer.split(4096))]
                submitted = time.perf_counter()
                while not requests[-1].done():
                    time.sleep(0.01)
                moved = time.perf_counter()
                for request in requests:
                    request.wait()
                waits.append(time.perf_counter() - moved)
                submits.append(submitted - started)
            submit, wait = (statistics.median(values) / len(requests) * 1e6 for values in (submits, waits))
            print(f"{name:10s} {submit:5.1f} us to submit, {wait:5.1f} us to wait for what is done")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*_PATTERNS, "twin", "crc", "overhead"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--turn-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--distinct", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        file = stack.enter_context(File.create(f"{folder}/data.bin", int(options.gib * 1024) * _MIB))
        with Queue() as queue:
            filling = touched(64 * _MIB)
            for offset in range(0, file.nbytes, filling.nbytes):
                queue.write(file, offset, filling[: file.nbytes - offset])
        for part in (options.part,) if options.part else (*_PATTERNS, "twin", "crc", "overhead"):
            if part == "overhead":
                overhead_part(file)
            else:
                drive_part(part, options, file, stack)


if __name__ == "__main__":
    main()
