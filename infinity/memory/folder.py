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
    # The kernel's word on the drive's cache: "write back" (volatile, a flush empties it) or "write through" (none);
    # empty if unknown. Whether it takes writes past its cache (FUA).
    write_cache: str = ""
    fua: bool = False
    # Whether the device is made by software (a virtual machine's, a volume's), which decides what a flush does.
    virtual: bool = False


def look(folder: str | os.PathLike[str], root: Path = Path("/")) -> FolderInfo:
    """Return the file system and drive of `folder`, which need not exist; `root` holds proc and sys, for tests."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    path = path if path.is_dir() else path.parent
    space, device = os.statvfs(path), path.stat().st_dev
    # The device's path in sysfs tells whether it has hardware of its own.
    hardware = os.path.realpath(_block(device, root))
    return FolderInfo(
        path=path, device=device, file_system=_file_system(path, root), free_nbytes=space.f_bavail * space.f_frsize,
        capacity_nbytes=space.f_blocks * space.f_frsize, model=_of_drive(device, root, "device/model"),
        writable=os.access(path, os.W_OK), write_cache=_of_drive(device, root, "queue/write_cache", named=False),
        fua=_of_drive(device, root, "queue/fua", named=False) == "1",
        virtual=any(part == "virtual" or part.startswith(("virtio", "vbd-")) for part in hardware.split("/")),
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


def _block(device: int, root: Path) -> Path:
    return root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"


def _of_drive(device: int, root: Path, name: str, *, named: bool = True) -> str:
    """Return what the kernel says of a drive, else the device's name if `named`, else an empty string."""
    block = _block(device, root)
    # Of a partition its drive, one folder up, has it.
    for place in (block, Path(os.path.realpath(block)).parent):
        try:
            return (place / name).read_text().strip()
        except OSError:
            continue
    return Path(os.path.realpath(block)).name if named and block.exists() else ""
