"""The packages that infinity needs and those that it can use, each one imported to see whether it works.

Imports the standard library only. tests/cli/test_doctor compares the tables with pyproject.toml.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

# Distribution -> what must be importable of it.
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic", "safetensors": "safetensors",
    "ninja": "ninja", "py-cpuinfo": "cpuinfo",
}  # fmt: skip
# Extra -> the distribution that it brings, and the module that infinity uses it through.
EXTRAS = {
    "hf": ("transformers", "infinity.integrations.huggingface"),
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "wandb": ("wandb", "wandb"), "completion": ("shtab", "shtab"),
}  # fmt: skip
# What `infinity.initialize`, the checkpoint commands and the estimator load.
_OURS = ("infinity.engine.initialize", "infinity.cli.ckpt", "estimators.cli")


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution. `version` is empty where it is not installed; `trouble`: why it cannot be used."""

    name: str
    version: str
    trouble: str = ""
    # Empty for what every run needs.
    extra: str = ""


def look_at_packages() -> Iterator[Package]:
    """What infinity needs, then infinity itself where that is there, then what its extras bring."""
    needed = [_package(name, module) for name, module in REQUIRED.items()]
    yield from needed
    if any(package.trouble for package in needed):
        return
    for module in _OURS:
        trouble = _trouble(module)
        if trouble:
            yield Package("infinity-engine", _version("infinity-engine"), f"{module}: {trouble}")
    for extra, (name, module) in EXTRAS.items():
        yield _package(name, module, extra)


def _package(name: str, module: str, extra: str = "") -> Package:
    version = _version(name)
    if not version and extra:
        return Package(name, "", "not installed", extra)
    return Package(name, version, _trouble(module), extra)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _trouble(module: str) -> str:
    """Why a module cannot be imported. A broken package may raise whatever it likes."""
    try:
        importlib.import_module(module)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return said[0]
    return ""
