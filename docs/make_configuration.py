"""Writes docs/configuration.md from the schema: python docs/make_configuration.py"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from infinity.config.schema import Config
from infinity.config.section import (
    Absent,
    Also,
    Differs,
    Honoured,
    NoAuto,
    Refused,
    Section,
    ValueReader,
    dotted,
    mark,
    reply_of,
    sections_of,
)

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

Look up a key, its type, its default and what infinity does with it. This page is made from the schema by
`python docs/make_configuration.py`; change the schema, not the page.

A configuration is the path of a JSON file, a dictionary or a JSON text. Every key is optional, and the empty
configuration trains. The names are DeepSpeed's, so an existing file runs unchanged; DeepSpeed does not have the keys
marked "Ours". Every key has one of three answers:

- **honoured**: it means here what it means in DeepSpeed, but for a difference that the row names.
- **no effect here**: it is accepted. A log line says once that it is set, with the reason.
- **refused**: a value that switches on a missing feature is an error that says what to do instead. The default is
  always accepted.

An unknown key, at any level, is an error that suggests the key that was meant. In a program that runs with DeepSpeed's
names, it is a warning, and some refused keys are ignored: [Coming from DeepSpeed](coming_from_deepspeed.md) lists what
becomes of every key of DeepSpeed's. `"auto"` is accepted unless the row of a
key gives a reason against it. infinity resolves it from the model, the arguments and the number of ranks;
`initialize()` refuses an `"auto"` learning rate or number of warm-up steps that nothing else sets. `infinity config
explain FILE` prints every resolved value with its source, and `auto` for values that depend on the program or its
model. Numbers and booleans may be written as strings, whole numbers as `5e8`.
"""

_ENDING = """
Next: [Troubleshooting](troubleshooting.md) explains refusals, [Budgets and placement](memory.md) the section `memory`,
and [Coming from DeepSpeed](coming_from_deepspeed.md) what differs from DeepSpeed.
"""

_TABLE = "| key | type | default | answer | meaning |\n|---|---|---|---|---|\n"


def render() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(Config, "", "Top level")) + _ENDING


def _section(section: type[Section], path: str, title: str) -> Iterator[str]:
    inner = []
    rows = []
    for name, field in section.model_fields.items():
        if classes := sections_of(field):
            for one in classes:
                # A schedule is headed by its type as well, because its keys depend on it.
                kind = f" ({one.__name__.removesuffix('Config')})" if len(classes) > 1 else ""
                inner.append((one, dotted(path, name), f"{dotted(path, name)}{kind}"))
        else:
            rows.append(_row(name, field))
    yield f"\n## {title}\n"
    if own := _own_docstring(section):
        yield f"\n{own}\n"
    if rows:
        yield "\n" + _TABLE + "".join(rows)
    for one, place, heading in inner:
        yield from _section(one, place, heading)


def _own_docstring(section: type[Section]) -> str:
    return " ".join((section.__dict__.get("__doc__") or "").split()) if section is not Config else ""


def _row(name: str, field: FieldInfo) -> str:
    names = [name, *(also.names if (also := mark(field, Also)) else ())]
    cells = (
        "<br>".join(f"`{one}`" for one in names),
        _type(field),
        _default(field),
        _answer(field),
        " ".join((field.description or "").split()),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(field: FieldInfo) -> str:
    if absent := mark(field, Absent):
        return "a section" + (f" of {', '.join(f'`{key}`' for key in absent.keys)}" if absent.keys else "")
    words = next(_expectations(field.metadata + list(_nested(field.annotation))), None)
    if words is None:
        # The one plain type left is a schedule's own name.
        words = " or ".join(f'"{argument}"' for argument in get_args(field.annotation) if isinstance(argument, str))
    return words


def _nested(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for argument in get_args(annotation):
        yield from _nested(argument)


def _expectations(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, BeforeValidator) and isinstance(item.func, ValueReader):
            yield item.func.expected


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "absent"
    if value == sys.maxsize:
        return "no bound"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value) or "empty"
    return f"`{value}`"


def _answer(field: FieldInfo) -> str:
    reply = reply_of(field)
    text = f"**{reply.answer}**"
    if differs := mark(field, Differs):
        text += f", but {differs.how}"
    if not isinstance(reply, Honoured):
        text += f": {reply.why}"
    if isinstance(reply, Refused):
        text += f". {reply.instead}"
    if no_auto := mark(field, NoAuto):
        text += f'; not "auto": {no_auto.why}'
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
