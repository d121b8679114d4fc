"""Runs every `infinity-estimate` that README.md and sizing.md show, and writes what it prints beneath it.

    python docs/make_outputs.py

A test holds that nothing has to be written.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from estimators import cli

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/sizing.md")
_SHOWN = re.compile(r"(```console\n\$ infinity-estimate (.*)\n)(?:.*\n)*?(```)")


def refreshed(text: str) -> str:
    """The text with the output of each command as it is now."""

    def replace(match: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.main(shlex.split(match[2]))
        return match[1] + "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines()) + match[3]

    return _SHOWN.sub(replace, text)


if __name__ == "__main__":
    os.chdir(ROOT)
    for name in FILES:
        (ROOT / name).write_text(refreshed((ROOT / name).read_text()))
