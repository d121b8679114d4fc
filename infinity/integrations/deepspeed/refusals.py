"""Names of DeepSpeed that infinity does not have: a program may import them, and an error says why when it uses one.

A file that imports a name at its top and uses it on one path only runs on all others. The reasons are those of the
configuration's keys where a key turns the same feature on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from infinity.config.schema import Config
from infinity.config.section import NoEffect, Refused, Section, reply_of, sections_of, spellings_of
from infinity.errors import ConfigError, InfinityError, UnknownNameError


class NoModule(InfinityError, ModuleNotFoundError):
    """Report a module or a name of DeepSpeed that infinity does not have, in an import."""


@dataclass(frozen=True)
class Refusal:
    """Stands in the tables for a name that infinity does not have; `why` says what to do instead, too."""

    why: str


def reason_of(path: str) -> str:
    """Return why infinity does not honour a key of the configuration, and what to do instead."""
    section: type[Section] = Config
    for name in path.split("."):
        field = section.model_fields[spellings_of(section)[name]]
        section = next(iter(sections_of(field)), Section)
    reply = reply_of(field)
    assert isinstance(reply, NoEffect | Refused), f"{path} is honoured"
    return f"{reply.why}. {reply.instead}" if isinstance(reply, Refused) else reply.why


class _RefusedType(type):
    """The type of a refused name, which may be a class, a function or a value there."""

    # Of the name, which a subclass says, too.
    path: str
    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls._used()

    def __getattr__(cls, name: str) -> NoReturn:
        raise UnknownNameError(f"{cls.path}.{name}: {cls.reason}")

    def _used(cls, *args: Any) -> NoReturn:
        raise ConfigError(f"{cls.path}: {cls.reason}")

    # As a number, a mapping, a list.
    __index__ = __int__ = __float__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __floordiv__ = _used
    __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __contains__ = __getitem__ = _used

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def refused_name(module: str, name: str, reason: str) -> type:
    """Return what stands for a name: it can be imported, subclassed and asked for in `isinstance`; a use is an error.
    """
    members = {"__module__": module, "__doc__": f"Refused: {reason}.", "path": f"{module}.{name}", "reason": reason}
    return _RefusedType(name, (), members)
