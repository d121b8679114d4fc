"""The command `infinity`: a subcommand and its options.

    infinity bench --drive FOLDER      measure this machine and write a profile
    infinity doctor                    report what is installed and selected, and recommend improvements
    infinity config explain FILE       print every key with its value and its source
    infinity estimate ...              predict memory and step time of a run, same as infinity-estimate
    infinity export CHECKPOINT OUT     write a Hugging Face folder from a checkpoint, same as infinity-export
    infinity ckpt inspect|verify|diff|from-swap
                                       inspect, verify, compare or make checkpoints, same as infinity-ckpt
    infinity run SCRIPT ...            start a script on this machine's devices, with DeepSpeed's names if asked

Exit codes: 0 success; 1 the doctor found a problem that prevents a run, verify found damage or diff a difference; 2 the
command failed, with one sentence on standard error; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from infinity.base import VERSION
from infinity.base.command_line import Parser
from infinity.cli.terminal import complain
from infinity.errors import InfinityError
from infinity.log import keep_standard_descriptors

# Command -> (module, help). Only the module of the given command is imported, because importing torch takes seconds.
COMMANDS = {
    "bench": ("infinity.cli.bench", "measure drives, memory, optimizer and computation; write a profile"),
    "doctor": ("infinity.cli.doctor", "report what is installed, built and selected, and recommend improvements"),
    "config": ("infinity.cli.explain", "print every key of a configuration with its value and its source"),
    "export": ("infinity.cli.export", "write a Hugging Face folder from a checkpoint"),
    "ckpt": ("infinity.cli.ckpt", "inspect, verify or compare checkpoints"),
    "run": ("infinity.cli.run", "start a script on this machine's devices, with DeepSpeed's names if asked"),
    "estimate": ("estimators.cli", "predict a training run's memory on each tier and the time of a step"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` excludes the program's name and defaults to sys.argv."""
    keep_standard_descriptors()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    try:
        return _run(name, words)
    except InfinityError as error:
        complain(name, str(error))
        return 2
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in ("infinity", "estimators"):
            # A bug in infinity, not a missing package.
            raise
        # infinity's own ImportErrors have no name; their message names the missing extra.
        complain(name, f"{error}. `infinity doctor` says what is missing" if error.name else str(error))
        return 2
    except KeyboardInterrupt:
        complain(name, "interrupted")
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe; without this, Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(name: str, words: Sequence[str]) -> int:
    if name == "estimate":
        return int(importlib.import_module(COMMANDS[name][0]).main(words[1:]))
    if name not in COMMANDS:
        parser = Parser(prog="infinity", description=__doc__)
        parser.add_argument("--version", action="version", version=f"infinity {VERSION}")
        commands = parser.add_subparsers(dest="command", metavar="COMMAND")
        for command, (_, text) in COMMANDS.items():
            commands.add_parser(command, help=text)
        # Prints the help, the version or an error, and exits.
        parser.parse_args(words or ["--help"])
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    parser = Parser(prog=f"infinity {name}", description=module.__doc__)
    module.add_arguments(parser)
    given = parser.parse_args(words[1:])
    return int(module.run(given))


def export() -> int:
    """Run the command `infinity-export`."""
    return main(["export", *sys.argv[1:]])


def ckpt() -> int:
    """Run the command `infinity-ckpt`."""
    return main(["ckpt", *sys.argv[1:]])
