"""What programs written for DeepSpeed bring beside infinity's keys: dotted keys, comments, keys of other engines.

Each is found here, left out or put in its place, and described in a sentence that the engine logs once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from infinity.config.bounds import shown
from infinity.config.schema import Config
from infinity.config.section import Refused, replaced, reply_of, section_leaves, sections_of, spellings_of
from infinity.config.tiers import drive_names

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
    sections = {name: spelled for name, spelled in spellings_of(Config).items() if _is_section(spelled)}
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


def _is_section(name: str) -> bool:
    return bool(sections_of(Config.model_fields[name]))


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
