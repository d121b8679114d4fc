"""The required and optional packages of infinity, each imported to check that it works.

Imports only the standard library. tests/cli/test_doctor compares the tables with pyproject.toml.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

# Distribution -> its module.
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic", "safetensors": "safetensors",
    "ninja": "ninja", "py-cpuinfo": "cpuinfo",
}  # fmt: skip
# Extra -> (its distribution, the module whose import uses it).
EXTRAS = {
    "hf": ("transformers", "infinity.integrations.huggingface"),
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "wandb": ("wandb", "wandb"), "completion": ("shtab", "shtab"),
    "liger": ("liger-kernel", "liger_kernel.transformers"),
}  # fmt: skip
# The modules behind `infinity.initialize`, the checkpoint commands and the estimator.
_OURS = ("infinity.engine.initialize", "infinity.cli.ckpt", "estimators.cli")


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution."""

    name: str
    # Empty if it is not installed.
    version: str
    # Why it cannot be used; empty if it works.
    trouble: str = ""
    # The extra that installs it; empty if every run needs it.
    extra: str = ""


def look_at_packages() -> Iterator[Package]:
    """Yield the required packages; if all of them work, also broken modules of infinity and the packages of extras."""
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
    """Return why a module cannot be imported, or an empty string."""
    try:
        importlib.import_module(module)
    # A broken package may raise any exception.
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return said[0]
    return ""
