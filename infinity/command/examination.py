"""What the doctor looks at, as a value: versions, libraries, back ends, limits and folders."""

from __future__ import annotations

import os
import platform
import resource
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from infinity.command.folder import Place, look
from infinity.errors import ExtensionError, InfinityError
from infinity.free_memory import free_cpu_nbytes
from infinity.memory.device import Device
from infinity.ops import build
from infinity.ops.aio import BACKENDS, File, Queue
from infinity.ops.cores import allowed_cores, quota_cores, thread_count


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One folder. `named`: somebody means to offload to it; `trouble`: why a file cannot be made there."""

    folder: str
    named: bool
    place: Place
    direct: bool
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine as a run would find it."""

    python: str
    torch: str
    accelerator: str
    compiler: str
    # Path of a library and where it came from, or "plain twin".
    adam: str
    aio: str
    simd: str
    # What a queue takes by itself; and by back end why it does not work (empty: it does).
    backend: str
    backends: dict[str, str]
    io_uring_disabled: bool
    cores: int
    quota_cores: float | None
    threads: int
    torch_threads: int
    memory_nbytes: int
    free_nbytes: int
    # None: unlimited.
    memlock_nbytes: int | None
    huge_pages: str
    folders: tuple[FolderFacts, ...] = ()


def examine(folders: Iterable[str], named: Collection[str] = ()) -> Facts:
    """Look at this machine. `named` are those of the folders that somebody means to offload to."""
    device = Device.detect(0)
    built = build.describe(cuda=device.is_accelerator)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cores = len(allowed_cores())
    free = device.free_nbytes()
    return Facts(
        python=platform.python_version(), torch=torch.__version__,
        accelerator="" if free is None else f"{device.torch}, {free / 1e9:.1f} GB free",
        compiler="" if built["compiler"] == "none" else built["compiler"], adam=built["adam"], aio=built["aio"],
        simd=built.get("simd", "reference"), backend=_chosen(), backends={name: _trouble(name) for name in BACKENDS},
        io_uring_disabled=_first_word("/proc/sys/kernel/io_uring_disabled") not in ("", "0"), cores=cores,
        quota_cores=quota_cores(), threads=thread_count(cores), torch_threads=torch.get_num_threads(),
        memory_nbytes=int(psutil.virtual_memory().total), free_nbytes=free_cpu_nbytes(),
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        huge_pages=_selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        folders=tuple(_folder(folder, folder in named) for folder in folders),
    )  # fmt: skip


def _chosen() -> str:
    with Queue() as queue:
        return queue.backend


def _trouble(backend: str) -> str:
    """Why a back end does not work here."""
    try:
        Queue(backend).close()
    except ExtensionError as error:
        return " ".join(str(error).split())
    return ""


def _folder(folder: str, named: bool) -> FolderFacts:
    """A folder, tried out with a file of one block that loses its name at once."""
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
    """The word in brackets of a kernel's setting."""
    try:
        text = Path(path).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
