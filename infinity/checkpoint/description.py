"""What a Hugging Face folder needs of a model besides its weights, as a value that JSON carries.

A checkpoint keeps it, so an export needs neither the model's code nor the libraries that it came from. It says which
tensor is stored under which names (the experts of a mixture may be one tensor in memory and many in the file), the
configurations, and the folder that the model came from. Files are copied from that folder only if the model in this
process names it: a folder that a checkpoint names is shown to the reader and never opened.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infinity.checkpoint.json_bodies import ExportBody
from infinity.checkpoint.weight_writer import Entry, WeightFile, cut_into_shards, index_of
from infinity.errors import ConfigError
from infinity.plan.types import FLOATING_DTYPES, TORCH_NAMES

# The dtypes of an export, by the names that users give.
FLOATS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16",
}  # fmt: skip
SHARD_NBYTES = 5_000_000_000
_CONFIG = "config.json"
# Files of a model's folder that an export copies unchanged.
_COMPANIONS = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the model: its name (the first, if it is tied), its dtype (the plan's name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    # A buffer keeps its dtype in every export.
    is_buffer: bool = False

    def stored_dtype(self, dtype: str) -> str:
        """The dtype that it has in an export to `dtype`, by the plan's names."""
        return self.dtype if self.is_buffer or self.dtype not in FLOATING_DTYPES else dtype


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a stored tensor lies in the model: elements from `start` on of the flattened `source`."""

    name: str
    source: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """See the module's text.

    texts: JSON files by name, such as "config.json". weights: by the stem of the file's name; None where all tensors
    are stored under their own names.
    """

    class_name: str
    texts: Mapping[str, Any] = field(default_factory=dict)
    origin: str | None = None
    weights: Mapping[str, Sequence[TensorLocation]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Why an export is impossible, in a sentence; "" where it is possible.
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """Return the value that `to_json` encoded. ValueError for anything else, such as a file name that leads out of
        the folder.
        """
        found = ExportBody.model_validate(value)
        weights = None if found.weights is None else {
            stem: [TensorLocation(each.name, each.source, each.start, each.shape) for each in places]
            for stem, places in found.weights.items()
        }  # fmt: skip
        return cls(found.class_name, found.texts, found.origin, weights, found.aliases, found.refusal)

    def misplaced(self, sources: Sequence[TensorSource]) -> str:
        """Return the name of a stored tensor that overlaps another or exceeds its source; "" where there is none."""
        numels = {source.name: math.prod(source.shape) for source in sources}
        places = [place for group in (self.weights or {}).values() for place in group]
        before, end = "", 0
        for place in sorted(places, key=lambda place: (place.source, place.start)):
            numel = math.prod(place.shape)
            if place.start + numel > numels.get(place.source, sys.maxsize):
                return place.name
            if numel and place.source == before and place.start < end:
                return place.name
            before, end = (place.source, place.start + numel) if numel else (before, end)
        return ""

    def shards(
        self, sources: Sequence[TensorSource], dtype: str, *, stem: str = "model", nbytes_max: int | None = SHARD_NBYTES
    ) -> list[WeightFile]:
        """Return the weight files for the tensors of a model. Tensors that are not in `sources` are left out.

        ConfigError where the model's library computes what it saves.
        """
        if self.refusal:
            raise ConfigError(f"export: {self.refusal}")
        known = {source.name: source for source in sources}
        if self.weights is None:
            metadata = {alias: name for alias, name in self.aliases.items() if name in known}
            # By name: a checkpoint's tensors have another order than the module's.
            in_order = sorted(sources, key=lambda source: source.name)
            stored = [Entry(each.name, each.stored_dtype(dtype), each.shape, each.name) for each in in_order]
            # As the safetensors library writes models with tied weights.
            return cut_into_shards(stored, stem, nbytes_max, metadata)
        shards = []
        for group, places in self.weights.items():
            stored = [
                Entry(place.name, known[place.source].stored_dtype(dtype), place.shape, place.source, place.start)
                for place in places
                if place.source in known
            ]
            whole = group != "model"
            shards += cut_into_shards(stored, group if whole else stem, None if whole else nbytes_max)
        return shards

    def companions(self, shards: Sequence[WeightFile], dtype: str, *, stem: str = "model") -> dict[str, str]:
        """Return the small text files of the folder, by name."""
        texts = {}
        for name, value in self.texts.items():
            if name == _CONFIG:
                key = "torch_dtype" if "torch_dtype" in value and "dtype" not in value else "dtype"
                value = {**value, key: TORCH_NAMES[dtype]}
            texts[name] = json.dumps(value, indent=2, sort_keys=True) + "\n"
        numbered = [shard for shard in shards if "-of-" in shard.name]
        if numbered:
            texts[f"{stem}.safetensors.index.json"] = index_of(numbered)
        return texts


def copy_files(origin: Path | str | None, folder: Path) -> None:
    """Copy tokenizer files (and the code of models that bring their own) from a model's folder, if that exists.

    origin: comes from the model in memory or from the user, never from a checkpoint.
    """
    if not origin or not Path(origin).is_dir():
        return
    for pattern in _COMPANIONS:
        for path in sorted(Path(origin).glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def float_dtype(dtype: str) -> str:
    """Return the plan's name of the dtype that a user asks for; ConfigError for an unknown one."""
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} of an export: there are fp32, bf16 and fp16")
    return FLOATS[name]
