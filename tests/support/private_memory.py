"""This process's private memory: now, and sampled, apart by what it is: memory of its own, and pages of files."""

from __future__ import annotations

import gc
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.memory.tiers.pinned import trim

_MAPPING = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


@dataclass(frozen=True)
class Private:
    """Private bytes: `own` (anonymous memory, heap and stacks), `files` (pages of mapped files)."""

    own: int
    files: int


def private_now() -> Private:
    """Add up the kernel's figures of every mapping of this process."""
    own = files = 0
    of_file = False
    for line in Path("/proc/self/smaps").read_bytes().splitlines():
        if line.startswith((b"Private_Clean:", b"Private_Dirty:")):
            nbytes = int(line.split()[1]) << 10
            own, files = (own, files + nbytes) if of_file else (own + nbytes, files)
        elif (found := _MAPPING.match(line)) is not None:
            of_file = found[1].startswith(b"/")
    return Private(own, files)


def own_nbytes() -> int:
    """Return the bytes that would be free without this process, once garbage is gone."""
    gc.collect()
    trim()
    return psutil.Process().memory_full_info().uss


class PrivatePeak:
    """`with PrivatePeak() as peak:` samples every 10 ms; then `peak.own` and `peak.files` are how much either grew."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._start = Private(0, 0)
        self.own = self.files = self.samples = 0

    def __enter__(self) -> PrivatePeak:
        self._start = private_now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            now = private_now()
            self.own = max(self.own, now.own - self._start.own)
            self.files = max(self.files, now.files - self._start.files)
            self.samples += 1
            if self._stop.wait(0.01):
                return
