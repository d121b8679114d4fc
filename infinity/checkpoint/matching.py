"""Matching a checkpoint's tensors with the model's; all mismatches are reported in one error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infinity.checkpoint.format import BUFFER, TensorInfo
from infinity.errors import CheckpointError, listed
from infinity.log import logger
from infinity.plan.types import FLOATING_DTYPES

# Most names of a kind that one message lists.
_SHOWN_MAX = 20


@dataclass
class Match:
    """The result. `source`: by the model's name of a tensor, the checkpoint's, or None where it has none."""

    source: dict[str, str | None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    # Parameters that were left out on purpose.
    excluded: list[str] = field(default_factory=list)


def match(
    wanted: Mapping[str, TensorInfo], aliases: Mapping[str, str], saved: Mapping[str, TensorInfo],
    tied: Mapping[str, str],
) -> Match:  # fmt: skip
    """Compare the model's tensors with a checkpoint's. aliases, tied: further names of tensors on either side."""
    names: dict[str, list[str]] = {name: [name] for name in wanted}
    for alias, name in aliases.items():
        if name in names:
            names[name].append(alias)
    found, taken = Match(), set[str]()
    for name, info in wanted.items():
        sources = [tied.get(each, each) for each in names[name]]
        source = next((each for each in sources if each in saved), None)
        taken.update(each for each in sources if each in saved)
        found.source[name] = None
        if source is None:
            found.missing.append(name)
        elif saved[source].shape != info.shape:
            found.mismatched.append(f"{name} is {list(info.shape)} in the model and {list(saved[source].shape)} here")
        elif BUFFER in saved[source].kinds and BUFFER not in info.kinds:
            found.mismatched.append(f"{name} is a parameter in the model and a buffer here")
        elif not saved[source].kinds:
            (found.missing if info.trainable else found.excluded).append(name)
        elif not _convertible(saved[source].dtype, info.dtype):
            found.mismatched.append(f"{name} is {info.dtype} in the model and {saved[source].dtype} here")
        else:
            found.source[name] = source
    found.unexpected.extend(name for name in saved if name not in taken)
    return found


def report_mismatch(found: Match, path: object, *, strict: bool) -> None:
    """Raise CheckpointError with every mismatch. strict=False: missing and unexpected tensors are a warning only."""
    lines = [
        f"{kind}: {listed(names, _SHOWN_MAX)}"
        for kind, names in (
            ("missing in the checkpoint", [_suggest(name, found.unexpected) for name in found.missing]),
            ("not in the model", [_suggest(name, found.missing) for name in found.unexpected]),
            ("of another shape or type", found.mismatched),
        )
        if names
    ]
    if found.excluded:
        logger.info("%s holds no frozen parameters: %d keep the model's values", path, len(found.excluded))
    if not lines:
        return
    text = "it and the model do not match.\n  " + "\n  ".join(lines)
    if strict or found.mismatched:
        advice = "Build the model that was saved" + (
            "" if found.mismatched else ", or pass load_module_strict=False to load what matches"
        )
        raise CheckpointError(path, text + "\nNothing was loaded", advice)
    logger.warning("%s: %s\nWhat is missing keeps the model's values.", path, text)


def _convertible(saved: str, wanted: str) -> bool:
    return saved == wanted or (saved in FLOATING_DTYPES and wanted in FLOATING_DTYPES)


def _suggest(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return f"{name} (did you mean {near[0]}?)" if near else name
