"""These names as the module `deepspeed`: for this process by `install()`, for a process tree by a path entry."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import infinity
from infinity.config.conventions import DEEPSPEED, Conventions
from infinity.errors import StateError

# The release whose names these are: clients compare it.
__version__ = "0.19.8"
__infinity__ = infinity.__version__

_NAMES = "infinity.integrations.deepspeed"
# Holds a package `deepspeed` that forwards to this one, and its metadata.
PATH_ENTRY = str(Path(__file__).parents[1] / "as_deepspeed")
# Decide when they are imported whether there is a DeepSpeed.
_CLIENTS = ("accelerate", "lightning", "peft", "pytorch_lightning", "transformers", "trl")


def alias(name: str) -> ModuleType:
    """Register this package and all its submodules under another name as the same objects, and return the package."""
    package = importlib.import_module(_NAMES)
    sys.modules[name] = package
    for found in pkgutil.walk_packages(package.__path__, f"{_NAMES}."):
        sys.modules[name + found.name.removeprefix(_NAMES)] = importlib.import_module(found.name)
    return package


def installed() -> bool:
    """Return whether `import deepspeed` gives these names in this process."""
    return getattr(sys.modules.get("deepspeed"), "__infinity__", None) is not None


def conventions() -> Conventions:
    """Return DeepSpeed's conventions; parameters have its attributes only where `import deepspeed` finds these names,
    for that is what a program does that sees them.
    """
    return replace(DEEPSPEED, parameter_attributes=installed())


def install() -> None:
    """Make `import deepspeed` give these names in this process; idempotent.

    Raises StateError where the real DeepSpeed or a client that has looked for it is imported already.
    """
    if installed():
        return
    early = [name for name in ("deepspeed", *_CLIENTS) if name in sys.modules]
    if early:
        raise StateError(
            f"infinity.deepspeed.install() comes too late: {', '.join(early)} is imported already and has decided "
            "which DeepSpeed there is. Call it first in the program (in a notebook: restart the kernel), or start a "
            "script with `infinity run --as-deepspeed`"
        )
    sys.path.insert(0, PATH_ENTRY)
    alias("deepspeed")
