"""A hard memory limit for a child process tree: a version-1 control group if possible, else RLIMIT_DATA."""

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
    """The result of a limited run. `peak` is the control group's peak in bytes, None under RLIMIT_DATA."""

    returncode: int
    stdout: str
    stderr: str
    peak: int | None
    how: str


def run_limited(command: Sequence[str], *, limit_nbytes: int, timeout: float, env: dict[str, str]) -> Limited:
    """Run `command` so that it and its children are killed (or refused memory) beyond `limit_nbytes`."""
    with limited(limit_nbytes) as (enter, how):
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, preexec_fn=enter, check=False
        )
        peak = int((enter.group / "memory.max_usage_in_bytes").read_text()) if isinstance(enter, _Group) else None
    return Limited(done.returncode, done.stdout, done.stderr, peak, how)


@dataclass(frozen=True)
class _Group:
    """A function that moves its calling process into a control group."""

    group: Path

    def __call__(self) -> None:
        (self.group / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def limited(limit_nbytes: int | None) -> Iterator[tuple[Callable[[], None], str]]:
    """Yield a `preexec_fn` that limits a child's memory, and its mechanism: "control group", "RLIMIT_DATA", "nothing".

    limit_nbytes: bytes beyond which the child is killed or refused memory; None: no limit.
    """
    if limit_nbytes is None:
        yield (lambda: None), "nothing"
        return
    group = _make_group(limit_nbytes)
    if group is None:
        yield (lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, limit_nbytes))), "RLIMIT_DATA"
        return
    try:
        yield _Group(group), "control group"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def leave() -> None:
    """Remove the limit of this process; its memory stays charged."""
    if (_CONTROLLER / "cgroup.procs").exists() and os.access(_CONTROLLER / "cgroup.procs", os.W_OK):
        (_CONTROLLER / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _make_group(limit_nbytes: int) -> Path | None:
    group = _CONTROLLER / f"infinity-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_nbytes))
    except OSError:
        return None
    return group
