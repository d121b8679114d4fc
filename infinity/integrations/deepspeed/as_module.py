"""The names of `modules` as Python modules: below `infinity.deepspeed`, and below `deepspeed` where a program asks.

A module is made when it is imported or looked up. An import of what the tables do not have is an error that says so.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from infinity.errors import StateError, UnknownNameError
from infinity.integrations.deepspeed.entry import installed
from infinity.integrations.deepspeed.modules import ELSEWHERE, MODULES, NO_MODULES, canonical
from infinity.integrations.deepspeed.refusals import NoModule, Refusal, refused_name

# Holds a package `deepspeed` that forwards to this one, its metadata, and a command of that name.
PATH_ENTRY = Path(__file__).parents[1] / "as_deepspeed"
# Decide when they are imported whether there is a DeepSpeed.
_CLIENTS = ("accelerate", "lightning", "peft", "pytorch_lightning", "transformers", "trl")


class _Served(ModuleType):
    """A module of the tables. Each is a package, so that Python asks `_Finder` for the names that an import lacks."""

    def __init__(self, path: str) -> None:
        said = f"deepspeed.{path}" if path else "deepspeed"
        # Where every process finds it: `deepspeed` is there in those that asked for it.
        name = f"infinity.{said}"
        super().__init__(name, f"DeepSpeed's names of `{said}`, as infinity has them.")
        self.__path__: list[str] = []
        self.__package__ = name
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__file__ = str(PATH_ENTRY.joinpath("deepspeed", *path.split("."), "__init__.py"))
        names = MODULES.get(path, {})
        self.__all__ = [key for key in names if not key.startswith("_")]
        self._path = path
        for key, value in names.items():
            setattr(self, key, refused_name(said, key, value.why) if isinstance(value, Refusal) else value)

    def __getattr__(self, name: str) -> Any:
        inner = f"{self._path}.{name}" if self._path else name
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if _is_module(inner):
            found: Any = served(inner)
        elif hasattr(elsewhere := ELSEWHERE.get(self._path), name):
            return getattr(elsewhere, name)
        elif (why := _refusal(self._path)) is not None:
            found = refused_name(self.__name__.removeprefix("infinity."), name, why)
        else:
            raise UnknownNameError(_unknown(inner))
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        below = f"{self._path}." if self._path else ""
        inner = {path.removeprefix(below).partition(".")[0] for path in MODULES if path.startswith(below)}
        return sorted({*self.__all__, *inner} - {""})


@functools.cache
def _made(path: str) -> ModuleType:
    return _Served(path)


def served(path: str = "") -> ModuleType:
    """Return the module of a dotted name below `deepspeed`."""
    return _made(canonical(path))


def _refusal(path: str) -> str | None:
    """Return why infinity has nothing of a module, or of a package that it lies in."""
    while path and path not in NO_MODULES:
        path = path.rpartition(".")[0]
    return NO_MODULES[path].why if path else None


def _is_module(path: str) -> bool:
    """Return whether a dotted name is a row of the tables, or a package of one."""
    path = canonical(path)
    return path in MODULES or any(row.startswith(f"{path}.") for row in MODULES) or path in NO_MODULES


def _unknown(path: str) -> str:
    parent, _, name = path.rpartition(".")
    known = [*MODULES.get(canonical(parent), {}), *(row.rpartition(".")[2] for row in MODULES)]
    near = difflib.get_close_matches(name, known, n=1)
    return (
        f"deepspeed.{path}: infinity has no such name{f'; did you mean {near[0]}?' if near else '.'} The names that it "
        "has, and those that it refuses with a reason, are listed in docs/coming_from_deepspeed.md"
    )


class _Loader(InspectLoader):
    """Gives the import machinery the modules that are made already."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return served(self._path)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""

    def is_package(self, fullname: str) -> bool:
        return True

    def get_source(self, fullname: str) -> None:
        """Return None: the names come from a table."""


class _Command(InspectLoader):
    """The module that `python -m` runs for a name with a `main`."""

    def get_code(self, fullname: str) -> CodeType:
        parent = fullname.rpartition(".")[0]
        return compile(f"import importlib\nimportlib.import_module({parent!r}).main()", f"<{fullname}>", "exec")

    def get_source(self, fullname: str) -> None:
        """Return None."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = next((root for root in ("infinity.deepspeed", "deepspeed") if fullname.startswith(f"{root}.")), None)
        if root is None or sys.modules.get(root) is not served():
            return None
        inner = fullname.removeprefix(f"{root}.")
        parent, _, last = inner.rpartition(".")
        if last.startswith("__"):
            runs = last == "__main__" and "main" in MODULES.get(canonical(parent), {})
            return ModuleSpec(fullname, _Command()) if runs else None
        if _is_module(inner) or _refusal(inner) is not None:
            return ModuleSpec(fullname, _Loader(inner), is_package=True)
        raise NoModule(_unknown(inner))


def alias(name: str) -> ModuleType:
    """Have Python find the served modules below another name of their root, and return the root."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[name] = served()
    return served()


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
    sys.path.insert(0, str(PATH_ENTRY))
    alias("deepspeed")


served().__dict__["install"] = install
