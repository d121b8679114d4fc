"""The command `infinity`: one word for what is asked, and its options.

    infinity bench --drive FOLDER      measure this machine and write a profile
    infinity doctor                    what is installed and chosen, and what would be better
    infinity config explain FILE       every key with its value and where that comes from
    infinity estimate ...              what a training run will hold and take, as infinity-estimate
    infinity export CHECKPOINT OUT     a Hugging Face folder from a checkpoint, as infinity-export
    infinity ckpt inspect|verify|diff  what is in a checkpoint, and whether it is whole, as infinity-ckpt
    infinity completion SHELL          a script by which bash, zsh or tcsh completes all of these

Exit codes: 0; 1 where the doctor has found what stops a run, verify damage or diff a difference; 2 and one sentence for
what cannot be answered; 130 when it was interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import infinity
from infinity.cli.terminal import complain
from infinity.cli.usage import Parser
from infinity.errors import InfinityError

# Command -> (module, its line in the help). A module is loaded when its command is asked for: torch takes seconds.
COMMANDS = {
    "bench": ("infinity.cli.bench", "measure drives, memory, optimizer and computation; write a profile"),
    "doctor": ("infinity.cli.doctor", "what is installed, built and chosen, and what would be better"),
    "config": ("infinity.cli.explain", "every key of a configuration with its value and its source"),
    "export": ("infinity.cli.export", "a Hugging Face folder from a checkpoint"),
    "ckpt": ("infinity.cli.ckpt", "what is in a checkpoint, whether it is whole, and how two differ"),
    "completion": ("infinity.cli.completion", "a script by which a shell completes commands and options"),
    "estimate": ("estimators.cli", "what a training run will hold on each tier, and how long a step takes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    try:
        return _run(name, words)
    except InfinityError as error:
        complain(name, str(error))
        return 2
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in ("infinity", "estimators"):
            # Ours, and no package that is missing.
            raise
        # Without a name it is an extra that is missing, and the message names it.
        complain(name, f"{error}. `infinity doctor` says what is missing" if error.name else str(error))
        return 2
    except KeyboardInterrupt:
        complain(name, "interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read has seen enough; nothing more may be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(name: str, words: Sequence[str]) -> int:
    if name == "estimate":
        return int(importlib.import_module(COMMANDS[name][0]).main(words[1:]))
    if name not in COMMANDS:
        parser, _ = _overview()
        # Prints the help, the version or a sentence and leaves.
        parser.parse_args(words or ["--help"])
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    parser = Parser(prog=f"infinity {name}", description=module.__doc__)
    module.add_arguments(parser)
    given = parser.parse_args(words[1:])
    return int(module.run(given))


def export() -> int:
    """`infinity-export`."""
    return main(["export", *sys.argv[1:]])


def ckpt() -> int:
    """`infinity-ckpt`."""
    return main(["ckpt", *sys.argv[1:]])


def whole_parser() -> Parser:
    """All commands with all of their options in one parser, for a shell's completion."""
    parser, commands = _overview()
    for name, (module, _) in COMMANDS.items():
        importlib.import_module(module).add_arguments(commands[name])
    return parser


def _overview() -> tuple[Parser, dict[str, Parser]]:
    """What is shown where no command is named, and the commands in it."""
    parser = Parser(prog="infinity", description=__doc__)
    parser.add_argument("--version", action="version", version=f"infinity {infinity.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    return parser, {name: commands.add_parser(name, help=text) for name, (_, text) in COMMANDS.items()}
