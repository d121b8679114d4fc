"""What a section is made of: frozen fields, each with an answer to "what does infinity do with it?".

The answer is data on the field. The refusals, the start-up report and docs/configuration.md are all made from it, so
that none of them can say something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

_Kind = TypeVar("_Kind")


class Answer(Enum):
    """What infinity does with a key."""

    # The key means here what it means in DeepSpeed.
    HONOURED = "honoured"
    # Accepted; reported once, with the reason, when it is set.
    NO_EFFECT = "no effect here"
    # A value that switches on what infinity does not have is an error that names the nearest thing it has.
    REFUSED = "refused"


@dataclass(frozen=True)
class Honoured:
    """The key means what it says."""

    answer = Answer.HONOURED


@dataclass(frozen=True)
class NoEffect:
    """The key is accepted and changes nothing; `why` is reported once when it is set."""

    why: str
    answer = Answer.NO_EFFECT


@dataclass(frozen=True)
class Refused:
    """A value that switches the key on is an error: `why`, and what to do `instead`."""

    why: str
    instead: str
    # Values beside the default that switch nothing on.
    accepted: tuple[Any, ...] = ()
    answer = Answer.REFUSED

    def sentence(self, path: str, value: object) -> str:
        return f"{path}: {value!r} is refused: {self.why}. {self.instead}"


@dataclass(frozen=True)
class Absent:
    """Marks a whole section of a feature that infinity does not have: read only to see whether it is switched on.

    `switch` is the key that turns the feature on (None: anything in the section does). `keys` are the section's keys
    where they are known, so that a mistyped one is found even here.
    """

    switch: str | None = "enabled"
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Also:
    """Other names under which the key is accepted."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NoAuto:
    """The key that "auto" is refused for, with the reason."""

    why: str


HONOURED = Honoured()
Reply = Honoured | NoEffect | Refused


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def rewrite(cls, raw: Any) -> Any:
        """Older or shorter spellings of the section as the current one; a ValueError refuses the section."""
        return raw


def mark(field: FieldInfo, kind: type[_Kind]) -> _Kind | None:
    """The field's annotation of this kind, if it has one."""
    return next((item for item in field.metadata if isinstance(item, kind)), None)


def reply_of(field: FieldInfo) -> Reply:
    """The answer that a field of the schema carries."""
    reply = mark(field, Honoured) or mark(field, NoEffect) or mark(field, Refused)
    assert reply is not None, "every key of the schema has an answer"
    return reply


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """The section classes that a field may hold: none for a plain value, several where a `type` key chooses."""

    def classes(annotation: Any) -> Iterator[type[Section]]:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield annotation
        for argument in get_args(annotation):
            yield from classes(argument)

    return tuple(classes(field.annotation))


def spellings_of(section: type[Section]) -> dict[str, str]:
    """Every spelling of every key of a section, with the name of its field."""
    names = {name: name for name in section.model_fields}
    for name, field in section.model_fields.items():
        if also := mark(field, Also):
            names |= dict.fromkeys(also.names, name)
    return names


@dataclass(frozen=True)
class Leaf:
    """One value of a configuration, with its dotted path and the field that describes it."""

    path: str
    field: FieldInfo
    value: Any
    # False inside a section that its own `enabled` key switches off.
    in_use: bool

    @property
    def is_default(self) -> bool:
        return bool(self.value == self.field.get_default(call_default_factory=True))


def section_leaves(section: Section, path: str = "") -> Iterator[Leaf]:
    """Every value, in the order of the schema; an absent section is one leaf that is None."""
    in_use = getattr(section, "enabled", True)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from section_leaves(value, dotted(path, name))
        else:
            yield Leaf(dotted(path, name), field, value, in_use or name == "enabled")


def dotted(path: str, name: str) -> str:
    """The path of key `name` inside the section at `path`."""
    return f"{path}.{name}" if path else name
