"""Claim: a queue moves bytes at the drive's bandwidth.

    python benchmarks/aio.py [--folder DIR] [--mib 256] [--rounds 5] [--request-mib 16]

Alternates, in one run on one file: each back end, a plain loop of O_DIRECT calls of one thread (as dd does), and fio
where it is installed. Prints medians in GB/s, and the ratio to the plain loop.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from infinity.errors import ExtensionError
from infinity.ops.aio import BACKENDS, File, Queue

_MIB = 1 << 20


def _buffer(nbytes: int) -> torch.Tensor:
    """Page-aligned memory, touched."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)


def _queued(queue: Queue, file: File, buffer: torch.Tensor, write: bool, request_nbytes: int) -> Callable[[], None]:
    submit = queue.write if write else queue.read

    def run() -> None:
        parts = enumerate(buffer.split(request_nbytes))
        for request in [submit(file, index * request_nbytes, part) for index, part in parts]:
            request.wait()

    return run


def _plain(file: File, buffer: torch.Tensor, write: bool) -> Callable[[], None]:
    memory = memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr()))
    fd = file.descriptors.direct if file.direct else file.descriptors.buffered

    def run() -> None:
        for offset in range(0, buffer.nbytes, _MIB):
            part = [memory[offset : offset + _MIB]]
            moved = os.pwritev(fd, part, offset) if write else os.preadv(fd, part, offset)
            assert moved == part[0].nbytes

    return run


def _fio(path: str, nbytes: int, write: bool) -> float:
    """GB/s by fio: libaio, 1 MiB blocks, depth 32."""
    kind = "write" if write else "read"
    command = ["fio", "--name=x", f"--filename={path}", f"--rw={kind}", "--bs=1M", "--iodepth=32", f"--size={nbytes}"]
    command += ["--ioengine=libaio", "--direct=1", "--output-format=json"]
    reply = subprocess.run(command, capture_output=True, check=True)
    return json.loads(reply.stdout)["jobs"][0][kind]["bw_bytes"] / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--request-mib", type=int, default=16)
    options = parser.parse_args()
    nbytes = options.mib * _MIB
    buffer = _buffer(nbytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, File.create(f"{folder}/data.bin", nbytes) as file:
        queues = []
        for name in BACKENDS:
            try:
                queues.append(Queue(name))
            except ExtensionError as error:
                print(error)
        print(f"{options.mib} MiB in requests of {options.request_mib} MiB, {file}, {options.rounds} rounds")
        for write in (True, False):
            runs = {"plain loop, 1 MiB": _plain(file, buffer, write)}
            for queue in queues:
                runs[queue.backend] = _queued(queue, file, buffer, write, options.request_mib * _MIB)
            rates: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(options.rounds + 1):
                for name, run in runs.items():
                    started = time.perf_counter()
                    run()
                    # The first round writes blocks that were only reserved.
                    if repeat:
                        rates[name].append(nbytes / (time.perf_counter() - started) / 1e9)
                if repeat and shutil.which("fio"):
                    rates.setdefault("fio, 1 MiB, depth 32", []).append(_fio(file.path, nbytes, write))
            plain = statistics.median(rates["plain loop, 1 MiB"])
            for name, values in rates.items():
                median = statistics.median(values)
                kind = "write" if write else "read"
                print(
                    f"{kind:6s} {name:22s} {median:6.2f} GB/s  best {max(values):6.2f}  {median / plain:5.2f} of plain"
                )
        for queue in queues:
            queue.close()


if __name__ == "__main__":
    main()
