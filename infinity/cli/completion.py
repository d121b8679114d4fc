"""`infinity completion SHELL`: print a script with which a shell completes commands, options and files.

    infinity completion bash > ~/.local/share/bash-completion/completions/infinity
    infinity completion zsh > _infinity        in a folder of $fpath

The script is static text: completion does not start Python.
"""

from __future__ import annotations

import argparse
import importlib

from infinity.cli.terminal import say

try:
    import shtab
except ImportError as error:
    raise ImportError("this needs shtab: pip install 'infinity-engine[completion]'") from error

# Metavar of an option -> the completion of its value.
_KINDS = {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY, "CHECKPOINT": shtab.DIRECTORY, "OUT": shtab.DIRECTORY}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell that completes")


def run(given: argparse.Namespace) -> int:
    """Print the script and return 0."""
    # An import at the top would be circular: main loads this module.
    parser = importlib.import_module("infinity.cli.main").whole_parser()
    _name_files(parser)
    say(shtab.complete(parser, shell=given.shell))
    return 0


def _name_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        kind = _KINDS.get(str(action.metavar))
        if kind is not None:
            # shtab reads this attribute.
            action.complete = kind  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _name_files(below)
