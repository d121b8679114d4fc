"""Loading of a file, a dictionary or a JSON text into a checked `Config`; one error lists all problems.

Suggestions for unknown keys.

What programs written for DeepSpeed bring beside infinity's keys: dotted keys, comments, keys of other engines.

Each is found here, left out or put in its place, and described in a sentence that the engine logs once.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from infinity.base.tiers import drive_names
from infinity.config.conflicts import conflicts
from infinity.config.schema import STRICT, Config, Conventions, Provenance
from infinity.config.section import (
    TEXT_LENGTH_MAX,
    Absent,
    NoAuto,
    NoEffect,
    Refused,
    Section,
    check_structure,
    check_text,
    dotted,
    mark,
    read_flag,
    replaced,
    reply_of,
    section_leaves,
    sections_of,
    shown,
    spellings_of,
    types_of,
)
from infinity.errors import ConfigError

# Names that other programs have for a key.
_OTHER_NAMES = {"communication_timeout": "watchdog_seconds", "comm_timeout": "watchdog_seconds"}
# A message lists the keys of a section that has at most this many.
_KNOWN_MAX = 16


def unknown_key(path: str, key: str, known: Iterable[str], schema: type[Section]) -> str:
    """Return a one-line message about an unknown key that suggests the key that was probably meant.

    path: dotted path of the key, whose last part is `key`.
    known: the spellings that the key's section accepts.
    schema: the root section, searched for the key in other sections.
    """
    section = path.removesuffix(key).rstrip(".")
    candidates = sorted(set(known))
    meant = [dotted(section, name) for name in _meant(key, candidates)]
    places = _places(schema)
    elsewhere = [place for place in places if place.rpartition(".")[2] == key]
    near = [name for name in candidates if _one_edit_apart(key, name)]
    if path in places:
        # The section's type chooses its class, and the class of another type has the key.
        kinds = " or ".join(_types_with(schema, path.split("."), ()))
        return f"{path}: unknown key for this type: it is one of {kinds}; the keys here are {', '.join(candidates)}"
    if elsewhere and not near:
        return f"{path}: unknown key here; it belongs at {_either(elsewhere[:3])}"
    if meant:
        return f"{path}: unknown key; did you mean {_either(meant)}?"
    if len(candidates) > _KNOWN_MAX:
        return f"{path}: unknown key; nothing like it exists. docs/configuration.md lists the keys"
    return f"{path}: unknown key; the keys of {section or 'the top level'} are {', '.join(candidates)}"


def _meant(key: str, candidates: list[str]) -> list[str]:
    """Return all names that one edit or another case turns into `key`, else the most similar name."""
    # difflib's ratio misses short names: one wrong letter of "lr" halves the ratio.
    folded = key.strip().lower()
    if _OTHER_NAMES.get(folded) in candidates:
        return [_OTHER_NAMES[folded]]
    edited = [name for name in candidates if _one_edit_apart(key, name) or name.lower() == folded]
    return edited or difflib.get_close_matches(folded, candidates, n=1)


def _one_edit_apart(left: str, right: str) -> bool:
    """Return whether one insertion, deletion or replacement, or one swap of neighbours, separates two words."""
    if abs(len(left) - len(right)) > 1 or left == right:
        return False
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    left, right = left[start:], right[start:]
    swapped = len(left) >= 2 and left[1::-1] + left[2:] == right
    return left[1:] == right[1:] or left[1:] == right or left == right[1:] or swapped


def _types_with(schema: type[Section], path: list[str], types: tuple[str, ...]) -> list[str]:
    """Return the `type` values of a section for which the key at `path` exists.

    types: the `type` values that lead to `schema`; empty at the root.
    """
    name, *rest = path
    if name not in (names := spellings_of(schema)):
        return []
    sections = sections_of(schema.model_fields[names[name]])
    if not rest:
        return [*types]
    chosen = {section: types_of(section) for section in sections[1:] and sections}
    found = [kind for section in sections for kind in _types_with(section, rest, chosen.get(section, types))]
    return list(dict.fromkeys(found))


@functools.cache
def _places(schema: type[Section], path: str = "") -> list[str]:
    """Return every dotted path of a schema, in all spellings."""
    places = []
    for name, declared in spellings_of(schema).items():
        places.append(dotted(path, name))
        for section in sections_of(schema.model_fields[declared]):
            places += _places(section, dotted(path, name))
    return list(dict.fromkeys(places))


def _either(paths: list[str]) -> str:
    return " or ".join(f"'{path}'" for path in paths)


# A string or a comment; one that does not end reaches to the end of the text, so that a search takes linear time.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|(?://|#)[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_STRING_OR_LAST_COMMA = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|,(?=\s*[}\]])', re.DOTALL)


@dataclass
class Foreign:
    """The keys that were left out: dotted path -> a sentence."""

    sentences: dict[str, str] = field(default_factory=dict)

    def ignore(self, path: str, value: Any, why: str) -> None:
        """Note that the value of a key is left out."""
        self.sentences[path] = f"{path} = {shown(value)} is ignored: {why}"


def without_comments(text: str) -> str:
    """Return a JSON text without comments and trailing commas, which DeepSpeed's reader allows."""

    def keep_strings(match: re.Match[str]) -> str:
        found = match[0]
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return _STRING_OR_LAST_COMMA.sub(keep_strings, _STRING_OR_COMMENT.sub(keep_strings, text))


def unfolded(raw: Mapping[Any, Any], foreign: Foreign) -> Mapping[Any, Any]:
    """Return `raw` with its dotted top-level keys, such as "zero_optimization.stage", inside their sections.

    A section's own key comes before a dotted one.
    """
    fields, spellings = Config.model_fields, spellings_of(Config)
    sections = {name: spelled for name, spelled in spellings.items() if sections_of(fields[spelled])}
    dotted = [key for key in raw if isinstance(key, str) and key.partition(".")[0] in sections and "." in key]
    found = {key: value for key, value in raw.items() if key not in dotted}
    for key in dotted:
        *path, name = key.split(".")
        place = found
        for part in path:
            inner = place.get(part)
            if inner is not None and not isinstance(inner, Mapping):
                foreign.ignore(key, raw[key], f"{part} is {shown(inner)}, which is no section")
                break
            place[part] = place = dict(inner or {})
        else:
            if name in place and place[name] != raw[key]:
                foreign.ignore(key, raw[key], f"section {'.'.join(path)} has {name} = {shown(place[name])}")
            place.setdefault(name, raw[key])
    return found


def is_usable(field_info: FieldInfo, value: Any) -> bool:
    """Return whether a field accepts a value."""
    parts = (field_info.annotation, *field_info.metadata)
    try:
        TypeAdapter(cast(Any, Annotated)[parts]).validate_python(value)
    except ValidationError:
        return False
    return True


def tolerated(config: Config, foreign: Foreign) -> Config:
    """Return `config` without the settings that infinity lacks and that the result does not depend on."""
    given = config.provenance.given
    for leaf in list(section_leaves(config)):
        reply = None if sections_of(leaf.field) else reply_of(leaf.field)
        if isinstance(reply, Refused) and reply.ignored and not leaf.is_default and leaf.value not in reply.accepted:
            foreign.ignore(leaf.path, given.get(leaf.path, leaf.value), reply.ignored)
            config = replaced(config, leaf.path, leaf.field.get_default())
    zero = config.zero_optimization
    if zero.offload_param is not None and zero.offload_param.device in {"cpu", *drive_names()} and zero.stage != 3:
        path = "zero_optimization.offload_param"
        why = f"it needs stage 3, and at stage {zero.stage} the parameters stay on the accelerator, as in DeepSpeed"
        foreign.ignore(f"{path}.device", zero.offload_param.device, why)
        config = replaced(config, path, None)
    return config


# Sections that DeepSpeed does not have.
_OWN_SECTIONS = ("kernels", "memory", "parallel", "timeline")
# The most problems that one error lists.
_LISTED_MAX = 50
_TUNES_HEAP = re.compile("MALLOC_(MMAP|TRIM|TOP)_")

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def load_config(source: Source, *, conventions: Conventions = STRICT) -> Config:
    """Check a path, a dictionary or a JSON text and return its `Config`; for None every key has its default.

    conventions: how the source is read; `Config.provenance` keeps them. A `Config` is returned as it is, with the
    conventions that it was loaded by.

    Raises:
        ConfigError: the source cannot be read, or has unknown, refused, ill-typed or contradictory keys.
    """
    if isinstance(source, Config):
        return source
    found = _Found(tolerant=conventions.foreign_keys == "warn")
    origin, raw = _read(source, tolerant=found.tolerant)
    check_structure(origin, raw)
    found.problems.extend(_repeated(raw))
    if found.tolerant:
        raw = unfolded(raw, found.foreign)
    values = _walk(Config, raw, "", found)
    config = _validate(values, found)
    if config is not None:
        sentences = found.foreign.sentences
        config = config.from_source(Provenance(origin, found.given, frozenset(found.autos), conventions, sentences))
        if found.tolerant:
            config = tolerated(config, found.foreign)
        found.problems.extend(_refusals(config) + conflicts(config))
    if config is None or found.problems:
        raise complaint(origin, found.problems)
    return config


def complaint(origin: str, problems: list[str]) -> ConfigError:
    """Return one error that lists the problems of a configuration from `origin`, one a line."""
    if len(problems) == 1:
        return ConfigError(f"{origin}: {problems[0]}")
    listed = problems[:_LISTED_MAX]
    if len(problems) > _LISTED_MAX:
        listed.append(f"and {len(problems) - _LISTED_MAX} more")
    lines = "".join(f"\n  {line}" for line in listed)
    return ConfigError(f"{origin}: {len(problems)} problems:{lines}")


# Stands for a value that is left out: "auto", or a value whose problem is already listed.
_NOTHING = object()


def heap_is_tuned() -> bool:
    """Return whether the environment tunes the C library's heap, by variables of mallopt(3) or glibc tunables."""
    return any(map(_TUNES_HEAP.match, os.environ)) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def hub_cache() -> Path:
    """Return the cache folder of the Hugging Face hub, by the same environment variables as huggingface_hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


class _Object(dict[str, Any]):
    """A JSON object that lists its repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = tuple(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)


@dataclass
class _Found:
    problems: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    foreign: Foreign = field(default_factory=Foreign)
    # Whether foreign keys are left out; otherwise they are problems.
    tolerant: bool = False

    def reject(self, path: str, sentence: str) -> None:
        """Note that the key at `path` cannot be used, for the reason in a sentence."""
        if self.tolerant:
            self.foreign.sentences[path] = f"{sentence}{'' if sentence.endswith('?') else '.'} It is ignored"
        else:
            self.problems.append(sentence)

    def unknown(self, path: str, key: str, known: Iterable[str]) -> None:
        """Note a key at `path` that is not among the `known` ones of its section. In a section of infinity's own it is
        a problem by any conventions: no other program has put it there.
        """
        sentence = unknown_key(path, key, known, Config)
        if path.partition(".")[0] in _OWN_SECTIONS and "." in path:
            self.problems.append(sentence)
        else:
            self.reject(path, sentence)


def _read(
    source: str | os.PathLike[str] | Mapping[str, Any] | None, *, tolerant: bool
) -> tuple[str, Mapping[str, Any]]:
    if source is None:
        return "configuration", {}
    if isinstance(source, Mapping):
        return "configuration", source
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"configuration: expected a path, a dictionary or a JSON text, not {type(source).__name__}")
    if isinstance(source, str) and source.lstrip().startswith(("{", "[")):
        check_text("configuration", len(source))
        return "configuration", _parse("configuration", source, tolerant=tolerant)
    origin = os.fspath(source)
    try:
        with open(origin, encoding="utf-8-sig", opener=_without_waiting) as file:
            # A device or a pipe reports no size: the text is checked again after reading.
            check_text(origin, os.fstat(file.fileno()).st_size)
            text = file.read(TEXT_LENGTH_MAX + 1)
        check_text(origin, len(text))
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{origin}: the configuration cannot be read: {reason}. Give a path to a JSON file"
        ) from error
    return origin, _parse(origin, text, tolerant=tolerant)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, or a pipe, which has no text where no process writes to it."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def _parse(origin: str, text: str, *, tolerant: bool) -> Mapping[str, Any]:
    try:
        raw = json.loads(without_comments(text) if tolerant else text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}{_more_than_json(error)}"
        ) from error
    except RecursionError:
        raise ConfigError(f"{origin}: objects or lists are nested too deeply: no key of the configuration is") from None
    except ValueError:
        # Python limits the digits of an integer, because the conversion takes quadratic time.
        raise ConfigError(f"{origin}: a number has thousands of digits: no setting of the configuration has") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: the configuration is a JSON object {{...}}, not {type(raw).__name__}")
    return raw


def _more_than_json(error: json.JSONDecodeError) -> str:
    """Return a hint if the error is at a comment or a trailing comma, which other JSON readers allow."""
    rest = error.doc[error.pos :].lstrip(", \t\r\n")
    before = error.doc[: error.pos + 1].rstrip(" \t\r\n]}")
    trailing = rest.startswith(("]", "}")) and before.endswith(",")
    if trailing or rest.startswith(("//", "/*", "#")):
        return ". Comments and trailing commas are not JSON: remove them"
    return ""


def _repeated(raw: Any, path: str = "") -> Iterator[str]:
    if isinstance(raw, _Object):
        for name in raw.repeated:
            yield f"{dotted(path, name)}: the key stands twice in the file: keep one"
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            yield from _repeated(value, dotted(path, str(name)))


def _walk(section: type[Section], raw: Mapping[Any, Any], path: str, found: _Found) -> dict[str, Any]:
    """Return the section's values by field name; add problems, given values and "auto" paths to `found`."""
    names = spellings_of(section)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    keys = list(raw)
    if found.tolerant:
        # Of two spellings of a key its own name counts.
        keys.sort(key=lambda key: names.get(key) != key)
    for key in keys:
        value = raw[key]
        name = names.get(key)
        if name is None:
            found.unknown(dotted(path, str(key)), str(key), names)
        elif name in spelled:
            one = f"{dotted(path, key)}: the same key as {dotted(path, spelled[name])}"
            found.reject(dotted(path, key), f"{one}: keep one of the two")
        else:
            spelled[name] = key
            value = _value(section.model_fields[name], value, dotted(path, name), found)
            if value is not _NOTHING:
                values[name] = value
    return values


def _value(field_info: FieldInfo, value: Any, path: str, found: _Found) -> Any:
    if absent := mark(field_info, Absent):
        _absent(field_info, absent, value, path, found)
        return _NOTHING
    if sections := sections_of(field_info):
        return _section(sections, value, path, found)
    if isinstance(value, str) and value.strip().lower() == "auto":
        no_auto = mark(field_info, NoAuto)
        if no_auto and not (found.tolerant and field_info.default is None):
            found.problems.append(f'{path}: "auto" is refused: {no_auto.why}')
        else:
            found.autos.add(path)
        return _NOTHING
    reply = reply_of(field_info)
    if found.tolerant and isinstance(reply, NoEffect) and not is_usable(field_info, value):
        found.foreign.ignore(path, value, reply.why)
        return _NOTHING
    found.given[path] = value
    return value


def _section(sections: tuple[type[Section], ...], value: Any, path: str, found: _Found) -> Any:
    if value is None:
        found.given[path] = None
        return _NOTHING
    try:
        value = sections[0].rewrite(value)
    except ValueError as error:
        found.problems.append(f"{path}: {error}")
        return _NOTHING
    if not isinstance(value, Mapping):
        found.problems.append(f"{path}: {shown(value)} is not a section: expected an object {{...}}")
        return _NOTHING
    if len(sections) == 1:
        return _walk(sections[0], value, path, found)
    by_type = {name: section for section in sections for name in types_of(section)}
    kind = value.get("type")
    if isinstance(kind, str) and kind in by_type:
        return _walk(by_type[kind], value, path, found)
    expected = ", ".join(f'"{name}"' for name in by_type)
    if isinstance(kind, str) and kind.lower() == "auto":
        found.problems.append(f'{path}.type: "auto" is refused: name the type, one of {expected}')
    elif "type" in value:
        found.problems.append(f"{path}.type: {shown(kind)} is not one of {expected}")
    else:
        # Without a type only the section's other keys can be checked, not params.
        _walk(sections[0], {key: None for key in value if key != "params"}, path, replace(found, given={}, autos=set()))
        found.problems.append(f"{path}.type is required: one of {expected}")
    return _NOTHING


def _absent(field_info: FieldInfo, absent: Absent, value: Any, path: str, found: _Found) -> None:
    """Check the section of a feature that infinity lacks: accept it when off, else report as the field's reply says."""
    keys = value if isinstance(value, Mapping) else {}
    if absent.keys:
        unknown = [str(key) for key in keys if key not in absent.keys]
        for key in unknown:
            found.unknown(dotted(path, key), key, absent.keys)
        if unknown and not found.tolerant:
            return
    reply = reply_of(field_info)
    accepted = reply.accepted if isinstance(reply, Refused) else ()
    if not _switched_on(absent, value, accepted, missing=absent.absent if found.tolerant else True):
        return
    if found.tolerant and isinstance(reply, Refused) and reply.ignored:
        found.foreign.ignore(path, value, reply.ignored)
        return
    found.given[path] = value
    if isinstance(reply, Refused):
        switch = f"{absent.switch} = " if absent.switch in keys else ""
        said = shown(keys.get(absent.switch, value))
        found.problems.append(f"{path}: {switch}{said} is refused: {reply.why}. {reply.instead}")


def _switched_on(absent: Absent, value: Any, accepted: tuple[Any, ...], *, missing: bool) -> bool:
    if not value:
        return False
    switch = value.get(absent.switch, missing) if isinstance(value, Mapping) and absent.switch else value
    if str(switch) in map(str, accepted):
        return False
    try:
        return read_flag(switch)
    except ValueError:
        return True


def _validate(values: dict[str, Any], found: _Found) -> Config | None:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found.problems.extend(_sentence(dict(problem)) for problem in error.errors())
        return None


def _sentence(problem: dict[str, Any]) -> str:
    # For a section whose type chooses the class, pydantic adds the type to the location.
    location = [str(part) for part in problem["loc"]]
    if location[0] in ("scheduler", "optimizer"):
        del location[1]
    path = ".".join(location)
    if problem["type"] == "missing":
        return f"{path} is required"
    return f"{path}: {shown(problem['input'])} is not usable: {problem['msg'].removeprefix('Value error, ')}"


def _refusals(config: Config) -> list[str]:
    problems = []
    for leaf in section_leaves(config):
        reply = reply_of(leaf.field)
        if not isinstance(reply, Refused) or leaf.is_default or sections_of(leaf.field):
            continue
        if leaf.value not in reply.accepted:
            problems.append(reply.sentence(leaf.path, leaf.value))
    return problems
