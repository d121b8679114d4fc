"""Names of a checkpoint's files, and the check that none leads out of the checkpoint's folder.

Names in metadata are checked when it is parsed (`infinity.config.untrusted.plain_name`); here links are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from infinity.config.untrusted import leads_out
from infinity.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
TEMPORARY = ".part"

_OWN = re.compile(r"([0-9a-f]{12})\.(rank-\d{5,}\.(json|weights\.bin|frozen\.bin|states\.bin)|client\.safetensors)")


def index_name(identity: str, rank: int) -> str:
    """Return the name of a rank's index."""
    return f"{identity}.rank-{rank:05}.json"


def data_name(identity: str, rank: int, part: str) -> str:
    """Return the name of one of a rank's data files; `part` is "weights", "frozen" or "states"."""
    return f"{identity}.rank-{rank:05}.{part}.bin"


def client_name(identity: str) -> str:
    """Return the name of the file that holds the client state's tensors."""
    return f"{identity}.client.safetensors"


def identity_of(name: str) -> str | None:
    """Return the id of the save that writes a file of this name; None for a name that no save uses."""
    found = _OWN.fullmatch(name.removesuffix(TEMPORARY))
    return None if found is None else found.group(1)


def is_ours(name: str) -> bool:
    """Return whether a save writes files of this name into a checkpoint's folder."""
    return identity_of(name) is not None or name.removesuffix(TEMPORARY) == MANIFEST


def is_tag(tag: str) -> bool:
    """Return whether `tag` can name a checkpoint's folder."""
    return bool(tag) and tag not in (".", "..", LATEST, MANIFEST) and not set("/\0") & set(tag) and tag == tag.strip()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file; CheckpointError for a link that leads out of the folder."""
    if leads_out(folder, name):
        raise CheckpointError(
            folder / name, f"it is a link to {os.path.realpath(folder / name)}, outside the checkpoint's folder",
            "Copy the files themselves (cp -rL), if you trust where it leads",
        )  # fmt: skip
    return folder / name
