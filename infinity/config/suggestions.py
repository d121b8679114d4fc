"""Finding the key that was meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import get_args

from infinity.config.section import Section, dotted, sections_of, spellings_of

# More keys than this in one line help nobody.
_LISTED = 16


def unknown_key(path: str, key: str, known: Iterable[str], schema: type[Section]) -> str:
    """The one-line complaint about a key that its section does not have."""
    section = path.removesuffix(key).rstrip(".")
    candidates = sorted(set(known))
    meant = [dotted(section, name) for name in _meant(key, candidates)]
    places = _places(schema)
    elsewhere = [place for place in places if place.rpartition(".")[2] == key]
    near = [name for name in candidates if _one_edit_apart(key, name)]
    if path in places:
        # What chooses the section by its type has the key in another one of its types.
        kinds = " or ".join(_types_with(schema, path.split("."), ()))
        return f"{path}: unknown key for this type: it is one of {kinds}; the keys here are {', '.join(candidates)}"
    if elsewhere and not near:
        return f"{path}: unknown key here; it belongs at {_either(elsewhere[:3])}"
    if meant:
        return f"{path}: unknown key; did you mean {_either(meant)}?"
    if len(candidates) > _LISTED:
        return f"{path}: unknown key; nothing like it exists. docs/configuration.md lists the keys"
    return f"{path}: unknown key; the keys of {section or 'the top level'} are {', '.join(candidates)}"


def _meant(key: str, candidates: list[str]) -> list[str]:
    """Names one typing slip away, all of them; else the most similar one."""
    # A ratio alone loses short names: of "lr", a slip leaves half or nothing.
    folded = key.strip().lower()
    slips = [name for name in candidates if _one_edit_apart(key, name) or name.lower() == folded]
    return slips or difflib.get_close_matches(folded, candidates, n=1)


def _one_edit_apart(left: str, right: str) -> bool:
    """One character inserted, deleted or replaced, or two neighbours swapped."""
    if abs(len(left) - len(right)) > 1 or left == right:
        return False
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    left, right = left[start:], right[start:]
    swapped = len(left) >= 2 and left[1::-1] + left[2:] == right
    return left[1:] == right[1:] or left[1:] == right or left == right[1:] or swapped


def _types_with(schema: type[Section], path: list[str], types: tuple[str, ...]) -> list[str]:
    """The types of a section, of those that choose it, that have the key at a path. `types`: where it begins."""
    name, *rest = path
    if name not in (names := spellings_of(schema)):
        return []
    sections = sections_of(schema.model_fields[names[name]])
    if not rest:
        return [*types]
    chosen = {section: get_args(section.model_fields["type"].annotation) for section in sections[1:] and sections}
    found = [kind for section in sections for kind in _types_with(section, rest, chosen.get(section, types))]
    return list(dict.fromkeys(found))


@functools.cache
def _places(schema: type[Section], path: str = "") -> list[str]:
    """Every dotted path of a schema."""
    places = []
    for name, field in spellings_of(schema).items():
        places.append(dotted(path, name))
        for section in sections_of(schema.model_fields[field]):
            places += _places(section, dotted(path, name))
    return list(dict.fromkeys(places))


def _either(paths: list[str]) -> str:
    return " or ".join(f"'{path}'" for path in paths)
