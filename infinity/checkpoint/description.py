"""What a Hugging Face folder needs of a model besides its weights, as a value that JSON carries.

A checkpoint keeps it, so that an export needs neither the model's code nor the libraries that it came from: which
tensor of the model is stored under which names (the experts of a mixture are computed with in one tensor and stored one
by one), the configurations, and the folder that the model came from. Files are copied from that only where a model of
this process says it: what a checkpoint says of folders is a message to its reader, never a path that is opened.
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
from infinity.checkpoint.weight_writer import Entry, Shard, cut_into_shards, index_of
from infinity.errors import ConfigError
from infinity.plan.types import FLOATING_DTYPES, TORCH_NAMES

# What an export may be converted to, by the names that users give.
FLOATS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16",
}  # fmt: skip
SHARD_NBYTES = 5_000_000_000
_CONFIG = "config.json"
# Files of a model's folder that an export takes along as they are.
_COMPANIONS = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the model: its name (of a tied one the first), its dtype (the plan's word) and shape."""

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
    """Where a stored tensor is in the model: elements from `start` on of the flattened `source`."""

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
    # Why there can be no export, in a sentence; usually none.
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """What `to_json` gave, also after a way through a file. ValueError for anything else, as for names of files
        that lead anywhere.
        """
        found = ExportBody.model_validate(value)
        weights = None if found.weights is None else {
            stem: [TensorLocation(each.name, each.source, each.start, each.shape) for each in places]
            for stem, places in found.weights.items()
        }  # fmt: skip
        return cls(found.class_name, found.texts, found.origin, weights, found.aliases, found.refusal)

    def misplaced(self, sources: Sequence[TensorSource]) -> str:
        """A stored tensor that is no range of its own of a tensor of the model; "" where there is none."""
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
    ) -> list[Shard]:
        """The weight files for the tensors of a model. Tensors that are not in `sources` are left out.

        ConfigError where its library would save what is not in the model.
        """
        if self.refusal:
            raise ConfigError(f"export: {self.refusal}")
        known = {source.name: source for source in sources}
        if self.weights is None:
            metadata = {alias: name for alias, name in self.aliases.items() if name in known}
            # By name: the order of a checkpoint's tensors is not that of the module's.
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

    def companions(self, shards: Sequence[Shard], dtype: str, *, stem: str = "model") -> dict[str, str]:
        """The small text files of the folder."""
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
    """Copy tokenizer files (and the code of models that bring theirs) from a model's own folder, where it is. `origin`
    comes from the model in memory or from the user.
    """
    if not origin or not Path(origin).is_dir():
        return
    for pattern in _COMPANIONS:
        for path in sorted(Path(origin).glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def float_dtype(dtype: str) -> str:
    """The plan's name of the dtype that a user asks for; ConfigError where it is none."""
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} of an export: there are fp32, bf16 and fp16")
    return FLOATS[name]
