"""An interpreter in which only what pyproject.toml declares can be found, whatever else is installed.

    python -m tests.support.bare [--extra NAME ...] [--without NAME ...] SCRIPT [ARGUMENT ...]

Declared are the project's dependencies, those of the extras that are named, and all that these depend on themselves. An
import of anything else, or of what `--without` names, fails as it does where it is not installed, and
`importlib.metadata` does not know it either.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# The checkout, however it is installed here.
OURS = {"infinity", "infinity-engine"}
# How an error message names the missing extra.
EXTRA = re.compile(r"infinity-engine\[(\w+)\]")


def canonical(name: str) -> str:
    """Return a distribution's name in the normal form of the package index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(*extras: str, everywhere: bool = False) -> list[Requirement]:
    """The project's own requirements, with those of extras; extras that name extras are resolved.

    `everywhere`: also those of other versions of Python.
    """
    table = project()
    texts = [*table["dependencies"], *(text for extra in extras for text in table["optional-dependencies"][extra])]
    found = []
    for requirement in map(Requirement, texts):
        if canonical(requirement.name) == "infinity-engine":
            found += declared(*requirement.extras, everywhere=everywhere)
        elif everywhere or requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of the distributions that pip would install; raise LookupError if one is not installed."""
    wanted = [(canonical(each.name), "", each) for each in requirements]
    wanted += [(canonical(each.name), extra, each) for _, _, each in [*wanted] for extra in sorted(each.extras)]
    seen: set[tuple[str, str]] = set()
    while wanted:
        name, extra, origin = wanted.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            raise LookupError(f"{origin} is declared and not installed here: install it (`make test` does)") from None
        for each in map(Requirement, needs):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                wanted += [(canonical(each.name), inner, each) for inner in ("", *sorted(each.extras))]
    return {name for name, _ in seen}


def modules_of(distribution: metadata.Distribution) -> set[str]:
    """Return the top-level modules and packages that a distribution installs."""
    found = set()
    for file in distribution.files or ():
        name = file.parts[0] if len(file.parts) > 1 else inspect.getmodulename(file.name)
        if name is not None and name.isidentifier() and name != "__pycache__":
            found.add(name)
    return found


class DeclaredOnly:
    """A meta path finder that replaces `PathFinder` and hides some distributions."""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed | OURS
        kept, others = set(), set()
        for distribution in metadata.distributions():
            (kept if self._knows(distribution) else others).update(modules_of(distribution))
        self.refused = others - kept

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for a hidden module, which no other finder knows."""
        return None if name.partition(".")[0] in self.refused else PathFinder.find_spec(name, path, target)

    def find_distributions(self, context: Any) -> Iterator[metadata.Distribution]:
        """Yield the distributions that `importlib.metadata` may see."""
        return (each for each in metadata.MetadataPathFinder.find_distributions(context) if self._knows(each))

    def invalidate_caches(self) -> None:
        """Clear the caches of `PathFinder`."""
        PathFinder.invalidate_caches()

    def _knows(self, distribution: metadata.Distribution) -> bool:
        return canonical(distribution.metadata["Name"]) in self._allowed


def check_told(reply: subprocess.CompletedProcess[str]) -> dict:
    """Assert that `bare_run` succeeded in any environment; return its report."""
    assert reply.returncode == 0, reply.stderr[-3000:]
    told = json.loads(reply.stdout.splitlines()[-1])
    assert len(told["losses"]) == 4
    assert all(map(math.isfinite, told["losses"]))
    assert told["losses"][3] < told["losses"][0]
    assert {words for words, code in told["codes"].items() if code} == set(), reply.stderr[-6000:]
    for module, said in told["refusals"].items():
        assert EXTRA.search(said), f"{module} is not behind an error that names its extra: {said}"
    return told


def main() -> None:
    """Run a script as `python SCRIPT` would, in the bare interpreter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    finder = DeclaredOnly(closure(declared(*given.extra)) - set(given.without))
    sys.meta_path[:] = [finder if each is PathFinder else each for each in sys.meta_path]
    for name in [*sys.modules]:
        if name.partition(".")[0] in finder.refused:
            del sys.modules[name]
    sys.argv[:] = [given.script, *given.arguments]
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
