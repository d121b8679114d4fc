"""Plant one fault at a time in a copy of the tree and say which test finds it: `python -m tests.mutants`.

    python -m tests.mutants [--only FILE-PREFIX ...] [--output FILE]

tests/data/mutants.tsv has a row a fault: the file, the text that is replaced (it stands there exactly once; a turned
arrow is a line's end), its replacement, the cheapest tests that fail with it, and for a fault that no test can find the
reason why none has to. Prints the finder of each, or SURVIVED; exits with 1 if a fault without a reason survives.
A library of csrc/ is built again for its fault.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SURVIVED = "SURVIVED"
# A fault may make the program wait for ever, which finds it too.
SECONDS_MAX = 300


class Mutant(NamedTuple):
    """A fault, and what finds it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str


def mutants(root: Path = ROOT) -> list[Mutant]:
    """All rows of the table."""
    rows = [line.split("\t") for line in (root / "tests/data/mutants.tsv").read_text().splitlines()[1:]]
    return [
        Mutant(file, old.replace("⏎", "\n"), new.replace("⏎", "\n"), tuple(re.split(r" (?=tests/)", tests)), reason)
        for file, old, new, tests, reason in rows
    ]


def astray(found: Sequence[Mutant], root: Path = ROOT) -> Iterator[str]:
    """Rows whose text does not stand exactly once in their file, and tests they name that are not there."""
    for each in found:
        count = (root / each.file).read_text().count(each.old) if (root / each.file).exists() else 0
        if count != 1:
            yield f"{each.file} has {count} times: {each.old}"
        for test in each.tests:
            file, _, name = test.partition("[")[0].partition("::")
            if not (root / file).exists() or (name and f"def {name}(" not in (root / file).read_text()):
                yield f"{each.file}: there is no {test}"


def finder(tests: Sequence[str], copy: Path, cache: Path | None = None) -> str:
    """Run tests in a copy of the tree, with native libraries from `cache`, and return what fails first, or SURVIVED."""
    environment = {**os.environ, "PYTHONPATH": str(copy), **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-n", "0", *tests]
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text = process.communicate(timeout=SECONDS_MAX)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end within {SECONDS_MAX} s"
    # Or all that the row names have left the suite for its matrices.
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return SURVIVED
    if process.returncode < 0:
        return f"the process ends by {signal.Signals(-process.returncode).name}"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", text, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest found no test to run: {' '.join(command)}\n{text}")
    return failed[1]


def plant(each: Mutant, copy: Path, cache: Path) -> str:
    """Return what `finder` says of a copy that has the fault; the copy is as before afterwards."""
    path = copy / each.file
    text = path.read_text()
    try:
        path.write_text(text.replace(each.old, each.new))
        return finder(each.tests, copy, cache if each.file.startswith("csrc/") else None)
    finally:
        path.write_text(text)


def main() -> int:
    """Plant the faults that the command line asks for; 1 if one survives without a reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="FILE-PREFIX", help="faults of these files")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    chosen = [each for each in mutants() if each.file.startswith(tuple(arguments.only))]
    if wrong := list(astray(chosen)):
        sys.exit("\n".join(wrong))
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy, cache = Path(folder, "tree"), Path(folder, "cache")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "_native", "runs", "site"))
        for each in chosen:
            begun = time.monotonic()
            by = plant(each, copy, cache)
            seconds = round(time.monotonic() - begun)
            print(f"{each.file}: {each.old.strip()[:80]!r}: {by} ({seconds} s)", flush=True)
            found.append({"file": each.file, "old": each.old, "by": by, "seconds": seconds, "reason": each.reason})
            if arguments.output is not None:
                record = {"date": date.today().isoformat(), "mutants": found}
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    survivors = [each for each in found if each["by"] == SURVIVED]
    unexplained = sum(not each["reason"] for each in survivors)
    print(f"{len(found)} faults, {len(survivors)} survived, {unexplained} without a reason")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
