"""The doctor's facts as a value: versions, packages, libraries, back ends, limits and folders.

Imports only the standard library. It loads `engine_facts`, which needs torch, if all required packages work.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from infinity.cli.packages import Package, look_at_packages
from infinity.errors import InfinityError
from infinity.memory.folder import FolderInfo, look
from infinity.ops import build
from infinity.ops.cores import allowed_cores, quota_cores, thread_count
from infinity.ops.file import File


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One folder. `named`: the user named it for offloading; `trouble`: why no file can be created there."""

    folder: str
    named: bool
    place: FolderInfo
    direct: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine as a run would find it. Facts that need torch are empty or 0 if a required package is missing."""

    python: str
    packages: tuple[Package, ...]
    accelerator: str
    compiler: str
    # Path and origin of each native library, or "Python fallback".
    adam: str
    aio: str
    simd: str
    # The back end that a queue selects.
    backend: str
    # Back end -> why it does not work; empty if it works.
    backends: dict[str, str]
    io_uring_disabled: bool
    processor: str
    cores: int
    quota_cores: float | None
    threads: int
    torch_threads: int
    memory_nbytes: int
    free_nbytes: int
    # None if unlimited.
    memlock_nbytes: int | None
    huge_pages: str
    folders: tuple[FolderFacts, ...] = ()


def examine(folders: Iterable[str], named: Collection[str] = ()) -> Facts:
    """Return the facts of this machine and `folders`; `named` are the folders that the user named for offloading."""
    packages = tuple(look_at_packages())
    works = not any(package.trouble for package in packages if not package.extra)
    # Imported here because it needs torch, which may be missing.
    seen = importlib.import_module("infinity.cli.engine_facts").see() if works else None
    built = build.native_report(cuda=seen is not None and seen.is_accelerator)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cores = len(allowed_cores())
    return Facts(
        python=platform.python_version(), packages=packages, accelerator=seen.accelerator if seen else "",
        compiler="" if built["compiler"] == "none" else built["compiler"], adam=built["adam"], aio=built["aio"],
        simd=built.get("simd", "reference"), backend=seen.backend if seen else "",
        backends=seen.backends if seen else {},
        io_uring_disabled=_first_word("/proc/sys/kernel/io_uring_disabled") not in ("", "0"),
        processor=seen.processor if seen else "", cores=cores, quota_cores=quota_cores(),
        threads=thread_count(cores), torch_threads=seen.torch_threads if seen else 0,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_nbytes=seen.free_nbytes if seen else 0,
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        huge_pages=_selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        folders=tuple(_folder(folder, folder in named) for folder in folders),
    )  # fmt: skip


def _folder(folder: str, named: bool) -> FolderFacts:
    """Return the facts of a folder; try it with a file of one block that is unlinked at once."""
    place = look(folder)
    path = place.path / f".infinity-doctor-{uuid.uuid4().hex}"
    try:
        file = File.create(path, 4096)
    except InfinityError as error:
        reason = os.strerror(getattr(error, "errno", 0)) if getattr(error, "errno", None) else str(error)
        return FolderFacts(folder, named, place, direct=False, trouble=reason.lower())
    finally:
        path.unlink(missing_ok=True)
    with file:
        return FolderFacts(folder, named, place, direct=file.direct)


def _first_word(path: str) -> str:
    try:
        return Path(path).read_text().split()[0]
    except (OSError, IndexError):
        return ""


def _selected(path: str) -> str:
    """Return the selected word of a kernel setting, which stands in brackets."""
    try:
        text = Path(path).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
