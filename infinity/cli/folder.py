"""What lies behind a folder: its file system, its drive and how much room there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# File systems that live in memory: offloading to them saves none.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class FolderInfo:
    """A folder's file system; `path` is the nearest folder above that exists."""

    path: Path
    device: int
    file_system: str
    free_nbytes: int
    capacity_nbytes: int
    # The drive's own name, where the system tells it.
    model: str
    writable: bool


def look(folder: str | os.PathLike[str], root: Path = Path("/")) -> FolderInfo:
    """What is behind a folder, which need not exist yet. `root` stands for the file system of the system, for tests."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    path = path if path.is_dir() else path.parent
    space, device = os.statvfs(path), path.stat().st_dev
    return FolderInfo(
        path=path, device=device, file_system=_file_system(path, root), free_nbytes=space.f_bavail * space.f_frsize,
        capacity_nbytes=space.f_blocks * space.f_frsize, model=_model(device, root), writable=os.access(path, os.W_OK),
    )  # fmt: skip


def _file_system(path: Path, root: Path) -> str:
    """The type of the innermost mount that holds a path."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    found = ("", "unknown")
    real = os.path.realpath(path)
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        # The last of equal mounts hides those before it.
        if inside and len(mount) >= len(found[0]):
            found = (mount, rest.split()[0])
    return found[1]


def _model(device: int, root: Path) -> str:
    """What the drive calls itself; empty where it does not."""
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    # A partition has no name of its own: its drive, one folder up, has.
    for place in (block, Path(os.path.realpath(block)).parent):
        try:
            return (place / "device/model").read_text().strip()
        except OSError:
            continue
    return Path(os.path.realpath(block)).name if block.exists() else ""
