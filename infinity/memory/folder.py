"""The file system, drive and free space of a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# File systems in memory: offloading to them saves no memory.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class FolderInfo:
    """The file system and drive of a folder; `path` is the folder or its nearest existing parent."""

    path: Path
    device: int
    file_system: str
    free_nbytes: int
    capacity_nbytes: int
    # The drive's model name; empty if unknown.
    model: str
    writable: bool


def look(folder: str | os.PathLike[str], root: Path = Path("/")) -> FolderInfo:
    """Return the file system and drive of `folder`, which need not exist; `root` holds proc and sys, for tests."""
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
    """Return the type of the innermost mount that holds `path`."""
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
        # Of several mounts at one path the last one is visible.
        if inside and len(mount) >= len(found[0]):
            found = (mount, rest.split()[0])
    return found[1]


def _model(device: int, root: Path) -> str:
    """Return the model name of a drive, else the device name, else an empty string."""
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    # A partition has no model name; its drive, one folder up, has one.
    for place in (block, Path(os.path.realpath(block)).parent):
        try:
            return (place / "device/model").read_text().strip()
        except OSError:
            continue
    return Path(os.path.realpath(block)).name if block.exists() else ""
