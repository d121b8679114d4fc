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
    Honoured,
    NoAuto,
    Refused,
    Section,
    dotted,
    mark,
    reply_of,
    sections_of,
)
from infinity.config.values import ValueReader

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Configuration

Made from the schema by `python docs/make_configuration.py`; change the schema, not this page.

A configuration is the path of a JSON file, a dictionary or a JSON text. Every key is optional, and an empty
configuration trains. The names are DeepSpeed's, so that an existing file runs unchanged; keys marked "Ours" are not in
DeepSpeed. Every key has one of three answers:

- **honoured**: it means here what it means in DeepSpeed.
- **no effect here**: it is accepted. Setting it is reported once, with the reason.
- **refused**: a value that switches on what infinity does not have is an error that says what to do instead. The
  default is always accepted.

An unknown key, at any level, is an error that says which key was meant. `"auto"` is accepted wherever no reason against
it is given, and is resolved from the model, the arguments and the number of ranks; a learning rate or a number of
warm-up steps that nothing in the program says is refused by `initialize()`. `infinity config explain FILE` prints every
value that `initialize()` takes, with its source; what only the program or its model says is shown as `auto`. Numbers
and booleans may be written as strings, whole numbers as `5e8`.
"""

_TABLE = "| key | type | default | answer | meaning |\n|---|---|---|---|---|\n"


def render() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(Config, "", "Top level"))


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
    if not isinstance(reply, Honoured):
        text += f": {reply.why}"
    if isinstance(reply, Refused):
        text += f". {reply.instead}"
    if no_auto := mark(field, NoAuto):
        text += f'; not "auto": {no_auto.why}'
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
