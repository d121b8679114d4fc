"""Sections of the configuration: frozen fields, annotated if infinity does not honour their key.

The annotation is the one source of refusals, of the start-up report and of docs/configuration.md, so they agree.

The types of values carry their converters from JSON: other tools write "8", "false" and 5e8 for 8, false and 500000000,
and are understood. Each type also has a description of the values that it accepts, for error messages and for the type
column of docs/configuration.md.

Before any other code walks through a configuration its size is checked: what is beyond the limits here is not one but,
for example, a wrong file, a structure that contains itself or an experiment's whole record.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer
from pydantic.fields import FieldInfo

from infinity.base.sizes import Share, parse_limit
from infinity.base.tiers import drive_names
from infinity.errors import ConfigError

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


_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")


class Unusable(ValueError):
    """Report a value that can be read but not used; the message says why and what to write instead."""


@dataclass(frozen=True)
class ValueReader:
    """A converter from a JSON value; on failure it raises ValueError with the description `expected`."""

    expected: str
    convert: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        try:
            return self.convert(value)
        except Unusable:
            raise
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"expected {self.expected}") from None


def read_flag(value: Any) -> bool:
    """Return a boolean; accept 0, 1, "true" and "False" too. Raise ValueError for any other value."""
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower(), value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{value!r} is neither true nor false")


def _number(value: Any) -> int | float:
    if isinstance(value, str):
        text = value.strip()
        try:
            value = int(text)
        except ValueError:
            value = float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(value)
    return value


def _whole(minimum: float = -math.inf, maximum: float = math.inf) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        number = round(_number(value))
        if not minimum <= number <= maximum:
            raise ValueError(value)
        return number

    return convert


def _real(*, maximum: float = math.inf, above: float = -math.inf, below: float = math.inf) -> Callable[[Any], float]:
    """Return a converter to a float of at least 0 inside the other bounds."""

    def convert(value: Any) -> float:
        number = float(_number(value))
        if not (0.0 <= number <= maximum and above < number < below):
            raise ValueError(value)
        return number

    return convert


def _one_of(literal: Any, synonyms: dict[str, str] | None = None) -> BeforeValidator:
    """Return a validator of the choices of a Literal type, in any case of letters, and of `synonyms` of them."""
    choices = get_args(literal)
    known: dict[str, str] = {choice.lower(): choice for choice in choices} | (synonyms or {})

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError(value)
        return known[value.lower()]

    return _expected("one of " + ", ".join(f'"{choice}"' for choice in choices), convert)


def _interval(value: Any) -> int | None:
    """Return a number of steps; None, which means never, for infinity."""
    if value is None or (not isinstance(value, bool) and float(value) == math.inf):
        return None
    return _whole(0)(value)


def _text(accepts: Callable[[str], bool] = bool) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not accepts(value):
            raise ValueError(value)
        return value

    return convert


def _names_picture(path: str) -> bool:
    return path.lower().endswith((".html", ".json"))


def _tuple(convert: Callable[[Any], Any], length: int | None = None) -> Callable[[Any], tuple[Any, ...]]:
    def convert_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            raise ValueError(value)
        return tuple(map(convert, value))

    return convert_all


def _texts(value: Any) -> tuple[str, ...]:
    return _tuple(_text())((value,) if isinstance(value, str) else value)


def _drives(value: Any) -> tuple[str, ...] | None:
    # What accelerate writes where it was given no path.
    if value is None or (isinstance(value, str) and value.strip().lower() == "none"):
        return None
    paths = tuple(map(_expanded, _texts(value)))
    if not paths:
        raise ValueError(value)
    twice = {path for path in paths if paths.count(path) > 1}
    if twice:
        raise Unusable(f"{', '.join(sorted(twice))} is named twice: name each folder once")
    return paths


def _expanded(path: str) -> str:
    """Return a path with `~` and `$VAR` expanded."""
    if "\0" in path:
        raise Unusable("a path has no NUL character: remove it")
    expanded = os.path.expanduser(os.path.expandvars(path))
    if (unset := _VARIABLE.search(expanded)) is not None:
        raise Unusable(f"the environment has no variable {unset[0]}: set it, or write the path itself")
    if expanded.startswith("~"):
        raise Unusable(f"there is no home folder {expanded.partition('/')[0]}: write the path itself")
    return expanded


def _path(accepts: Callable[[str], bool] = bool) -> Callable[[Any], str]:
    read = _text(accepts)
    return lambda value: _expanded(read(value))


def _signals(value: Any) -> tuple[str, ...]:
    names = _texts(value)
    unknown = [name for name in names if name not in signal.Signals.__members__]
    if unknown:
        raise Unusable(f"{unknown[0]} is no signal here: give names such as SIGTERM and SIGUSR1")
    uncatchable = [name for name in names if name in ("SIGKILL", "SIGSTOP")]
    if uncatchable:
        raise Unusable(f"no program can hear {uncatchable[0]}: name a signal that is sent before it, such as SIGTERM")
    return tuple(dict.fromkeys(names))


def _check(value: Any) -> bool | str:
    return value.lower() if isinstance(value, str) and value.lower() == "sampled" else read_flag(value)


def _flag_or_auto(value: Any) -> bool | str:
    return value.lower() if isinstance(value, str) and value.lower() == "auto" else read_flag(value)


def _limit(value: Any) -> int | Share | None:
    return None if value is None else parse_limit(value)


def _expected(words: str, convert: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(ValueReader(words, convert))


Flag = Annotated[bool, _expected("true or false", read_flag)]
Check = Annotated[bool | Literal["sampled"], _expected('true, false or "sampled"', _check)]
FlagOrAuto = Annotated[bool | Literal["auto"], _expected('true, false or "auto"', _flag_or_auto)]
Int = Annotated[int, _expected("a whole number", _whole())]
Natural = Annotated[int, _expected("a whole number of at least 0", _whole(0))]
Count = Annotated[int, _expected("a whole number of at least 1", _whole(1))]
Interval = Annotated[int | None, _expected('a whole number of at least 0, or "inf" for never', _interval)]
Weight = Annotated[float, _expected("a finite number of at least 0", _real())]
Fraction = Annotated[float, _expected("a number from 0 to 1", _real(maximum=1.0))]
Seconds = Annotated[
    float, _expected("a number of seconds above 0, up to 1e9 (31 years)", _real(above=0.0, maximum=1e9))
]
Positive = Annotated[float, _expected("a finite number above 0", _real(above=0.0))]
Betas = Annotated[tuple[float, float], _expected("two numbers of at least 0 and below 1", _tuple(_real(below=1.0), 2))]
FractionAboveZero = Annotated[float, _expected("a number above 0, up to 1", _real(maximum=1.0, above=0.0))]
SignalNames = Annotated[tuple[str, ...], _expected('a list of signals such as ["SIGTERM", "SIGUSR1"]', _signals)]
Text = Annotated[str, _expected("a text that is not empty", _text())]
Place = Annotated[str, _expected("a path", _path(lambda text: True))]
Location = Annotated[str, _expected("a path that is not empty", _path())]
Picture = Annotated[str, _expected('the path of a ".html" or ".json" file', _path(_names_picture))]
Texts = Annotated[tuple[str, ...], _expected("a list of texts", _texts)]
Drives = Annotated[tuple[str, ...] | None, _expected("a folder on a drive, or a list of one folder a drive", _drives)]
Shares = Annotated[tuple[float, ...], _expected("a list of finite numbers above 0", _tuple(_real(above=0.0)))]
Limit = Annotated[
    int | Share | None,
    _expected('an amount of bytes such as 16000000000, "16GB", "1.5GiB", or a share such as "80%"', _limit),
    PlainSerializer(lambda limit: str(limit) if isinstance(limit, Share) else limit),
]
_HALVES = {"float16": "fp16", "half": "fp16", "torch.float16": "fp16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}


def _home(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in {"none", "cpu"} | drive_names():
        raise ValueError(value)
    return value.lower()


def _device(value: Any) -> str:
    return "auto" if isinstance(value, str) and value.lower() == "auto" else _home(value)


def _grad_device(value: Any) -> str:
    device = _device(value)
    if device == "none":
        raise ValueError(value)
    return device


def _styles(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(value)
    read = _text()
    return {read(pattern): read(style) for pattern, style in value.items()}


def _splits(value: Any) -> dict[str, int | tuple[int, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(value)
    read, number, rows = _text(), _whole(2), _tuple(_whole(1))
    return {read(name): rows(each) if isinstance(each, (list, tuple)) else number(each) for name, each in value.items()}


_Half = Literal["bf16", "fp16"]
Half = Annotated[_Half, _one_of(_Half, _HALVES)]
_Dtype = Literal["fp32", "fp16", "bf16"]
_DTYPES = {"float32": "fp32", "float": "fp32", "torch.float32": "fp32", **_HALVES}
Dtype = Annotated[_Dtype, _one_of(_Dtype, _DTYPES)]
Stage = Annotated[Literal[0, 1, 2, 3], _expected("0, 1, 2 or 3", _whole(0, 3))]
Device = Annotated[str, _expected('one of "none", "cpu", "nvme", "auto"', _device)]
GradDevice = Annotated[str, _expected('one of "cpu", "nvme", "auto"', _grad_device)]
HomeDevice = Annotated[str, _expected('one of "none", "cpu", "nvme"', _home)]
Styles = Annotated[dict[str, str] | None, _expected("an object of patterns and styles", _styles)]
_ReduceOp = Literal["mean", "sum"]
ReduceOp = Annotated[_ReduceOp, _one_of(_ReduceOp)]
_LogLevel = Literal["debug", "info", "warning", "error", "critical"]
LogLevel = Annotated[_LogLevel, _one_of(_LogLevel)]
_EveryStep = Literal["off", "process", "power"]
EveryStep = Annotated[_EveryStep, _one_of(_EveryStep)]
_TagValidation = Literal["Ignore", "Warn", "Fail"]
TagValidation = Annotated[_TagValidation, _one_of(_TagValidation)]
Counts = Annotated[tuple[int, ...], _expected("a list of whole numbers of at least 1", _tuple(_whole(1)))]
Naturals = Annotated[tuple[int, ...], _expected("a list of whole numbers of at least 0", _tuple(_whole(0)))]
Layers = Annotated[
    tuple[int, ...] | Literal["all"],
    _expected('"all", or a list of whole numbers of at least 0', lambda value: (
        "all" if isinstance(value, str) and value.lower() == "all" else _tuple(_whole(0))(value)
    )),
]  # fmt: skip
_LayoutMode = Literal["dense", "fixed", "variable", "bigbird", "bslongformer"]
LayoutMode = Annotated[_LayoutMode, _one_of(_LayoutMode)]
_Direction = Literal["bidirectional", "unidirectional"]
Direction = Annotated[_Direction, _one_of(_Direction)]
_Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]
Schedule = Annotated[_Schedule, _one_of(_Schedule)]
_SumAt = Literal["micro_batch", "step"]
SumAt = Annotated[_SumAt, _one_of(_SumAt)]
_NsMethod = Literal["standard", "gram"]
NsMethod = Annotated[_NsMethod, _one_of(_NsMethod)]
_NsDtype = Literal["bf16", "fp32"]
NsDtype = Annotated[_NsDtype, _one_of(_NsDtype)]
OptimBits = Annotated[Literal[8, 32], _expected("8 or 32", _whole(8, 32))]
_AdjustLr = Literal["original", "match_rms_adamw"]
AdjustLr = Annotated[_AdjustLr, _one_of(_AdjustLr)]
Splits = Annotated[
    dict[str, int | tuple[int, ...]] | None,
    _expected('an object such as {"gate_up_proj": 2, "qkv_proj": [2048, 512, 512]}', _splits),
]
NsSteps = Annotated[int, _expected("a whole number from 1 to 99", _whole(1, 99))]
Coefficients = Annotated[
    tuple[float, float, float], _expected("three finite numbers", _tuple(lambda value: float(_number(value)), 3))
]
_WarmupType = Literal["log", "linear"]
WarmupType = Annotated[_WarmupType, _one_of(_WarmupType)]

TEXT_LENGTH_MAX = 4 << 20
DEPTH_MAX = 64
VALUES_MAX = 10_000
# The largest float is below 2**1024.
_INT_BITS_MAX = 1024


class _Repr(reprlib.Repr):
    """`repr` with limits that leave the value of any setting whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlong = 400
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxdict = 20


_repr = _Repr()


def shown(value: object) -> str:
    """Return `repr(value)` for a message, cut where it is long or deep."""
    return _repr.repr(value)


def check_text(origin: str, length: int) -> None:
    """Raise ConfigError if a text of `length` bytes from `origin` is too long for a configuration."""
    if length > TEXT_LENGTH_MAX:
        raise ConfigError(
            f"{origin}: {length:,} bytes are too many for a configuration, which has at most {TEXT_LENGTH_MAX:,}: give "
            "the path of the JSON file with infinity's or DeepSpeed's keys"
        )


def check_structure(origin: str, raw: Mapping[Any, Any]) -> None:
    """Raise ConfigError if `raw` is nested too deeply, has too many values or holds an integer beyond every float."""
    count = 0
    left: list[tuple[str, int, Any]] = [("", 0, raw)]
    while left:
        path, depth, value = left.pop()
        count += 1
        if count > VALUES_MAX:
            raise ConfigError(
                f"{origin}: a configuration has at most {VALUES_MAX:,} values: pass only the keys in "
                "docs/configuration.md"
            )
        if depth > DEPTH_MAX:
            raise ConfigError(
                f"{origin}: {'.'.join(path.split('.')[:4])}... goes deeper than {DEPTH_MAX} levels (does the structure "
                "contain itself?): no key of the configuration is nested that far"
            )
        if isinstance(value, int) and value.bit_length() > _INT_BITS_MAX:
            raise ConfigError(f"{origin}: {path}: an integer of {value.bit_length()} bits is too great for any setting")
        if isinstance(value, Mapping):
            left += [(f"{path}.{key}" if path else f"{key}", depth + 1, inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(path, depth + 1, inner) for inner in value]
