"""Suggestions for unknown keys."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

from infinity.config.section import Section, dotted, sections_of, spellings_of, types_of

# Names that other programs have for a key.
_OTHER_NAMES = {"communication_timeout": "watchdog_seconds", "comm_timeout": "watchdog_seconds"}
# A message lists the keys of a section that has at most this many.
_LISTED_MAX = 16


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
    if len(candidates) > _LISTED_MAX:
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
