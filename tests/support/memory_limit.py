"""A hard memory limit for a child process tree: a version-1 control group where one can be made, else RLIMIT_DATA."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CONTROLLER = Path("/sys/fs/cgroup/memory")


@dataclass
class Limited:
    """What a limited run did. `peak` is the control group's highest use in bytes, None under RLIMIT_DATA."""

    returncode: int
    stdout: str
    stderr: str
    peak: int | None
    how: str


def run_limited(command: Sequence[str], *, limit_nbytes: int, timeout: float, env: dict[str, str]) -> Limited:
    """Run `command` so that it and its children are killed (or refused memory) beyond `limit_nbytes`."""
    group = _make_group(limit_nbytes)

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, limit_nbytes))

    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, preexec_fn=enter, check=False
        )
        peak = int((group / "memory.max_usage_in_bytes").read_text()) if group is not None else None
        how = "control group" if group is not None else "RLIMIT_DATA"
        return Limited(done.returncode, done.stdout, done.stderr, peak, how)
    finally:
        if group is not None:
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def control_group(limit_nbytes: int | None) -> Iterator[Callable[[], None]]:
    """What a child calls before it begins (`preexec_fn`), to be killed beyond the limit; None: no limit. OSError where
    no control group can be made.
    """
    if limit_nbytes is None:
        yield lambda: None
        return
    group = _make_group(limit_nbytes)
    if group is None:
        raise OSError(f"no control group can be made under {_CONTROLLER}")
    try:
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _make_group(limit_nbytes: int) -> Path | None:
    group = _CONTROLLER / f"infinity-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_nbytes))
    except OSError:
        return None
    return group
