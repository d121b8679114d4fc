"""Sections of the configuration: frozen fields, annotated if infinity does not honour their key.

The annotation is the one source of refusals, of the start-up report and of docs/configuration.md, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Honoured:
    """The reply to a key that means here what it means in DeepSpeed; it needs no annotation."""

    answer = "honoured"


@dataclass(frozen=True)
class NoEffect:
    """Mark a key that is accepted but changes nothing; `why` is reported once if it is set."""

    why: str
    answer = "no effect here"


@dataclass(frozen=True)
class Refused:
    """Mark a key that must stay off.

    Any value but the default is an error that says `why`, and what to do `instead`: the nearest feature of infinity.
    """

    why: str
    instead: str
    # Values that are allowed beside the default.
    accepted: tuple[Any, ...] = ()
    # If results do not depend on the key: why DeepSpeed's conventions ignore it instead of refusing it.
    ignored: str = ""
    answer = "refused"

    def sentence(self, path: str, value: object) -> str:
        return f"{path}: {value!r} is refused: {self.why}. {self.instead}"


@dataclass(frozen=True)
class Absent:
    """Mark the section of a feature that infinity lacks; it is read only to see whether the feature is on.

    switch: the key that turns the feature on; None if any content does.
    keys: the section's keys if they are known, so that misspelt ones are reported.
    absent: what a section without the switch means in DeepSpeed.
    """

    switch: str | None = "enabled"
    keys: tuple[str, ...] = ()
    absent: bool = False


@dataclass(frozen=True)
class Also:
    """List other accepted names of the key."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Differs:
    """Mark an honoured key whose meaning is not quite DeepSpeed's; `how` completes "honoured, but"."""

    how: str


@dataclass(frozen=True)
class NoAuto:
    """Refuse "auto" for the key, with the reason."""

    why: str


TYPE_NAMED = NoAuto("name the type")
Reply = Honoured | NoEffect | Refused


class Section(BaseModel):
    """A frozen group of keys that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def rewrite(cls, raw: Any) -> Any:
        """Convert older or shorter spellings of the section to the current one; raise ValueError to refuse it."""
        return raw


_Section = TypeVar("_Section", bound=Section)


def mark(field: FieldInfo, kind: type[_Kind]) -> _Kind | None:
    """Return the field's annotation of type `kind`, or None."""
    return next((item for item in field.metadata if isinstance(item, kind)), None)


def reply_of(field: FieldInfo) -> Reply:
    """Return what infinity does with the field's key."""
    return mark(field, NoEffect) or mark(field, Refused) or Honoured()


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """Return the section classes that a field may hold: none for a plain value, several if a `type` key chooses."""

    def classes(annotation: Any) -> Iterator[type[Section]]:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield annotation
        for argument in get_args(annotation):
            yield from classes(argument)

    return tuple(classes(field.annotation))


def types_of(section: type[Section]) -> tuple[str, ...]:
    """Return the values of the `type` key that choose a section class."""
    return get_args(section.model_fields["type"].annotation)


def spellings_of(section: type[Section]) -> dict[str, str]:
    """Return accepted spelling -> field name, for every key of a section."""
    names = {name: name for name in section.model_fields}
    for name, field in section.model_fields.items():
        if also := mark(field, Also):
            names |= dict.fromkeys(also.names, name)
    return names


@dataclass(frozen=True)
class Leaf:
    """One value of a configuration, with its dotted path and its field."""

    path: str
    field: FieldInfo
    value: Any
    # False inside a section whose `enabled` key is false.
    in_use: bool

    @property
    def is_default(self) -> bool:
        return bool(self.value == self.field.get_default(call_default_factory=True))


def section_leaves(section: Section, path: str = "") -> Iterator[Leaf]:
    """Yield every value in the order of the schema; an absent section is one leaf with the value None."""
    in_use = getattr(section, "enabled", True)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from section_leaves(value, dotted(path, name))
        else:
            yield Leaf(dotted(path, name), field, value, in_use or name == "enabled")


def replaced(section: _Section, path: str, value: Any) -> _Section:
    """Return a copy of `section` with another value at a dotted path."""
    head, _, rest = path.partition(".")
    return section.model_copy(update={head: replaced(getattr(section, head), rest, value) if rest else value})


def dotted(path: str, name: str) -> str:
    """Return the dotted path of key `name` inside the section at `path`."""
    return f"{path}.{name}" if path else name
