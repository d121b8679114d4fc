"""Rank 0's part of a save: the folder before it, the manifest and `latest` after it, and older checkpoints.

The rename of the manifest is the only switch. Before it no reader takes the folder for a checkpoint; after it the older
files may be removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from infinity.base import VERSION
from infinity.base.untrusted import read_metadata
from infinity.checkpoint.format import (
    LATEST,
    MANIFEST,
    NUMBER_MAX,
    FileInfo,
    Manifest,
    check_files,
    checkpoint_folders,
    client_name,
    complete,
    find,
    identity_of,
    is_ours,
    is_tag,
    latest_tag,
    read_manifest,
    replace_file,
    sync_folder,
)
from infinity.errors import CheckpointError
from infinity.log import logger
from infinity.ops.crc32c import checksum

# As DeepSpeed puts one beside its checkpoints.
SCRIPT_NAME = "zero_to_fp32.py"
_SCRIPT = '''#!/usr/bin/env python
"""The weights of this folder's checkpoints in fp32: python zero_to_fp32.py . OUT [-t TAG] [--help]"""

from infinity.integrations.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

if __name__ == "__main__":
    main()
'''
# Bytes read at a time for the checksum of a file.
_READ_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a folder are kept: the latest `keep_last` (0: all), and for good every `keep_every`-th (0:
    none).
    """

    keep_last: int = 0
    keep_every: int = 0

    def stays(self, age: int, number: int) -> bool:
        """Return whether a checkpoint with `age` newer ones is kept."""
        return not self.keep_last or age < self.keep_last or bool(self.keep_every and number % self.keep_every == 0)


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes: the id in its files' names, its number, a checkpoint whose frozen files it may share, and the
    checkpoints to remove once it is published.
    """

    id: str
    number: int
    previous: str | None
    outdated: Sequence[str]


def now() -> str:
    """Return the time as manifests have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of the software that saves."""
    return {"infinity": VERSION, "torch": str(torch.__version__), "python": sys.version.split()[0]}


def check_tag(tag: str) -> str:
    """Return the tag; CheckpointError where it cannot name a folder."""
    if not is_tag(tag):
        raise CheckpointError(
            repr(tag), "it cannot be the tag of a checkpoint, which is the name of a folder",
            'Give a name without "/", such as "step100"',
        )  # fmt: skip
    return tag


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Make the folder and hold its lock; CheckpointError where another program saves into it."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise CheckpointError(
                directory, "another save into it is under way", "Wait for it, or give each run a folder of its own"
            ) from error
        # On a file system without locks saves work, unprotected from each other.
    try:
        yield
    finally:
        # A child that was forked meanwhile has the descriptor, too, and would keep the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def prepare(directory: Path, tag: str, retention: Retention, *, latest: bool) -> SaveTarget:
    """Make the folder of a tag, and remove the leftovers of killed saves in DIR. Called under `claimed`.

    latest: whether DIR/latest will name the tag.
    """
    numbers, previous = [0], None
    with suppress(CheckpointError):
        # A damaged `latest` is replaced.
        previous = find(directory)
    for folder in checkpoint_folders(directory):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            # A damaged checkpoint stays for inspection; a folder without a manifest is the leftover of a killed save.
            if not (folder / MANIFEST).exists() and not folder.is_symlink():
                sweep(folder, keep=None)
            continue
        numbers.append(manifest.number)
        if not folder.is_symlink():
            sweep(folder, keep=manifest.id)
    if max(numbers) >= NUMBER_MAX:
        raise CheckpointError(
            directory, f"a checkpoint in it has the number {max(numbers)}, behind which there is none",
            "Move away what was not saved by this run",
        )  # fmt: skip
    (directory / tag).mkdir(exist_ok=True)
    sync_folder(directory)
    return SaveTarget(
        secrets.token_hex(6), max(numbers) + 1, None if previous is None else previous.name,
        _outdated(directory, retention, tag, latest=latest),
    )  # fmt: skip


def write_client(folder: Path, identity: str, tensors: Mapping[str, Tensor]) -> FileInfo | None:
    """Write the client state's tensors and sync them; CheckpointError where that fails. None without tensors."""
    if not tensors:
        return None
    path = folder / client_name(identity)
    alone: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        at = tensor.untyped_storage().data_ptr()
        # safetensors refuses two names for the same memory.
        alone[name] = tensor.clone() if at in memory else tensor
        memory.add(at)
    try:
        save_file(alone, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            crc = 0
            while data := file.read(_READ_NBYTES):
                crc = checksum(data, crc)
    except (OSError, SafetensorError) as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            path, f"the {needed} bytes of the client state's tensors could not be written: {error}",
            "Free space on the drive",
        ) from error  # fmt: skip
    return FileInfo(path.name, path.stat().st_size, crc)


def publish_checkpoint(directory: Path, manifest: Manifest, *, latest: bool, checked: bool) -> None:
    """Publish the manifest, then `latest`, then remove files of an older save of the tag.

    checked: verify all indexes and file sizes first.
    """
    folder = directory / manifest.tag
    unseen = [info.name for info in manifest.ranks if not (folder / info.name).is_file()]
    if unseen:
        raise CheckpointError(
            folder, f"rank 0 does not see {', '.join(unseen[:3])}, which other ranks have written",
            "Save into a folder that all nodes share",
        )  # fmt: skip
    if checked:
        check_files(folder, manifest)
    written = manifest.to_bytes()
    # A manifest that a load refuses must not replace a checkpoint: client_state may be nested too deep.
    Manifest.from_bytes(written, path=folder / MANIFEST)
    replace_file(folder / MANIFEST, written)
    sync_folder(directory)
    _put_script(directory)
    if latest:
        replace_file(directory / LATEST, (manifest.tag + "\n").encode())
    sweep(folder, keep=manifest.id)


def _put_script(directory: Path) -> None:
    """Put the script that writes weights in fp32 into a folder of checkpoints; warn where that fails."""
    path = directory / SCRIPT_NAME
    with suppress(OSError, ValueError):
        if read_metadata(path) == _SCRIPT.encode():
            return
    try:
        replace_file(path, _SCRIPT.encode())
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


def remove(outdated: list[Path]) -> None:
    """Remove checkpoints; warn about one that cannot be removed, and leave it to the next save."""
    for folder in outdated:
        try:
            sweep(folder, keep=None)
        except OSError as error:
            logger.warning("%s is outdated but could not be removed: %s", folder, error)


def remove_rank(folder: Path, identity: str, rank: int) -> None:
    """Remove the files that one rank has written for one save."""
    mark = f"{identity}.rank-{rank:05}."
    _remove(folder, [name for name in _names(folder) if name.startswith(mark)])


def remove_save(folder: Path, identity: str) -> None:
    """Remove all files of one save, and the folder if it is empty then."""
    _remove(folder, [name for name in _names(folder) if identity_of(name) == identity])
    with suppress(OSError):
        folder.rmdir()


def sweep(folder: Path, *, keep: str | None) -> None:
    """Remove the files of all saves but `keep`; keep=None: the manifest, too, and the folder if it is empty then."""
    ours = [name for name in _names(folder) if is_ours(name)]
    if keep is None and MANIFEST in ours:
        # First: without its manifest the folder is no checkpoint.
        _remove(folder, [MANIFEST])
        sync_folder(folder)
    _remove(folder, [name for name in ours if name != MANIFEST and (keep is None or identity_of(name) != keep)])
    if keep is None:
        with suppress(OSError):
            folder.rmdir()


def _outdated(directory: Path, retention: Retention, tag: str, *, latest: bool) -> list[str]:
    """Return the checkpoints to remove once `tag`, the newest, is published. The one that `latest` will name stays, and
    so do links.
    """
    if not retention.keep_last:
        return []
    named = None
    with suppress(CheckpointError):
        named = tag if latest else latest_tag(directory)
    older = [pair for pair in complete(directory) if pair[0].name != tag and not pair[0].is_symlink()]
    return [
        folder.name
        for age, (folder, manifest) in enumerate(older, 1)
        if folder.name != named and not retention.stays(age, manifest.number)
    ]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
