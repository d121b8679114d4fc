"""A command-line parser with one-line errors and suggestions. Imports only the standard library."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with one-line errors and exit code 2; it accepts no abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse all words; exit with code 2 and a suggestion at an unknown one."""
        given, left = self.parse_known_args(args, namespace)
        if left:
            options = [word for word in left if word.startswith("-")]
            if options:
                name = options[0].partition("=")[0]
                self.error(f"{name}: unknown option{_meant(name, _options(self)) or self._more()}")
            self.error(f"{left[0]}: not expected here{self._more()}")
        return given

    def error(self, message: str) -> NoReturn:
        """Print a one-line error and exit with code 2."""
        if "are required" in message:
            message += self._more()
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(name) for name in action.choices]
            raise argparse.ArgumentError(
                action, f"unknown: {value!s}{_meant(str(value), names) or ', which is none of ' + ', '.join(names)}"
            )

    def _more(self) -> str:
        return f"; see {self.prog} --help"


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of its subcommands."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
