"""A module's description for exports: `describe_model(module)`. Weights are not read, only names and shapes.

transformers and peft decide what they store under which name. They are called with meta tensors, so each tensor that
they would save is a view of one of the model's, and its offset says where it begins. Neither library is imported here:
a model of its class exists only if it was imported before.

What a Hugging Face folder needs of a model besides its weights, as a value that JSON carries.

A checkpoint keeps it, so an export needs neither the model's code nor the libraries that it came from. It says which
tensor is stored under which names (the experts of a mixture may be one tensor in memory and many in the file), the
configurations, and the folder that the model came from. Files are copied from that folder only if the model in this
process names it: a folder that a checkpoint names is shown to the reader and never opened.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.base.untrusted import plain_name
from infinity.checkpoint.format import ExportBody, TensorLocation
from infinity.checkpoint.pieces import persistent_buffers, tied_names
from infinity.checkpoint.weight_writer import Entry, WeightFile, cut_into_shards, index_of
from infinity.errors import ConfigError
from infinity.log import logger
from infinity.plan.spec import dtype_name
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
        return cls(**dict(ExportBody.model_validate(value)))

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


# Every parameter of the module is whole.
_AS_IS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


def describe_model(module: nn.Module, shapes: Mapping[str, tuple[int, ...]] = _AS_IS) -> Description:
    """Describe an export of `module`. Never raises: a model that cannot be exported can still be saved.

    shapes: of parameters of which the module has a shard, the whole ones, by name.
    """
    try:
        return _describe(module, shapes)
    except Exception as error:
        reason = f"{type(module).__name__} could not be described ({type(error).__name__}: {error})"
        return Description(type(module).__name__, refusal=reason)


def saved_module(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return what a manifest says of the module, for readers that have none of the model's code. shapes: as above."""
    kind = type(module)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}", "export": describe_model(module, shapes).to_json()
    }  # fmt: skip


def _describe(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Description:
    name = type(module).__name__
    if _of_library(module, "peft"):
        return _of_adapters(module, name, shapes)
    aliases = tied_names(module)
    if not _of_library(module, "transformers"):
        return Description(name, aliases=aliases)
    model: Any = module
    config = copy.deepcopy(model.config)
    config.update({"architectures": [name]})
    texts = {"config.json": json.loads(config.to_json_string(use_diff=True))}
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        texts["generation_config.json"] = json.loads(model.generation_config.to_json_string(use_diff=True))
    folder = getattr(model.config, "_name_or_path", None)
    origin = os.path.abspath(folder) if folder and os.path.isdir(folder) else None
    return Description(name, texts, origin, _as_stored(model, shapes), aliases)


def sources_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]] = _AS_IS) -> list[TensorSource]:
    """Return all tensors of a module's state dict, tied ones once. shapes: see `describe_model`."""
    params = [
        TensorSource(name, dtype_name(param.dtype), shapes.get(name, tuple(param.shape)))
        for name, param in module.named_parameters()
    ]
    buffers = persistent_buffers(module).items()
    return params + [TensorSource(name, dtype_name(b.dtype), tuple(b.shape), is_buffer=True) for name, b in buffers]


def _of_library(module: nn.Module, library: str) -> bool:
    classes = {"peft": ("peft", "PeftModel"), "transformers": ("transformers", "PreTrainedModel")}
    loaded, name = classes[library]
    base = getattr(sys.modules.get(loaded), name, None) if loaded in sys.modules else None
    return base is not None and isinstance(module, base)


class _NoCopies(TorchDispatchMode):
    """Turns copies into the tensors themselves, so that views stay views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return args[0]
        return func(*args, **(kwargs or {}))


def _shadows(module: nn.Module, shapes: Mapping[str, tuple[int, ...]] = _AS_IS) -> dict[str, Tensor]:
    """Return meta tensors under the names of the module's own."""
    named = {**dict(module.named_parameters()), **persistent_buffers(module)}
    return {
        name: torch.empty(shapes.get(name, tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in named.items()
    }


def _places(shadows: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> tuple[list[TensorLocation], list[str]]:
    """Return where each saved tensor lies in the model, and the names of those that lie in no tensor of it."""
    names = {tensor.untyped_storage()._cdata: name for name, tensor in shadows.items()}
    places, others = [], []
    for name, tensor in saved.items():
        source = names.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous() or tensor.dtype is not shadows[source].dtype:
            others.append(name)
        else:
            places.append(TensorLocation(name, source, int(tensor.storage_offset()), tuple(tensor.shape)))
    return places, others


def _as_stored(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[TensorLocation]] | None:
    """Return how transformers stores the model's tensors; None where it stores each under its own name."""
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    shadows = _shadows(model, shapes)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor for name, tensor in shadows.items() if name not in ignored}
    try:
        with _NoCopies():
            saved = revert(model, dict(kept)) if revert is not None else kept
        places, others = _places(shadows, saved)
        placed_numel = sum(torch.Size(place.shape).numel() for place in places)
        if others or placed_numel != sum(tensor.numel() for tensor in kept.values()):
            raise ValueError(f"{len(others)} tensors are stored as no range of a tensor of the model")
    except Exception as error:
        logger.info("weights are exported under the names that they have in memory: %s", error)
        places, _ = _places(shadows, kept)
    if {place.name for place in places} == set(shadows) and all(place.name == place.source for place in places):
        return None
    return {"model": places}


def _of_adapters(model: Any, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Description:
    """Describe a peft model's adapters as peft saves them: "default" in the folder, others in folders of their own."""
    peft: Any = sys.modules["peft"]
    shadows = _shadows(model, shapes)
    texts: dict[str, Any] = {}
    weights = {}
    for adapter, config in model.peft_config.items():
        prefix = "" if adapter == "default" else f"{plain_name(adapter)}/"
        base = config.base_model_name_or_path
        look: bool | str = "auto"
        if base and not os.path.isdir(base):
            # "auto" would ask the hub about the base model.
            targets = getattr(config, "target_modules", None) or ()
            layers = sys.modules["peft.utils.other"].EMBEDDING_LAYER_NAMES
            look = not isinstance(targets, str) and any(name in targets for name in layers)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
            saved = peft.get_peft_model_state_dict(
                model, state_dict=dict(shadows), adapter_name=adapter, save_embedding_layers=look
            )
        places, others = _places(shadows, saved)
        if others or not places:
            refusal = (
                f"peft computes what it saves of {config.peft_type} ({', '.join(others[:5]) or 'nothing'}): use "
                "model.save_pretrained(folder, state_dict=engine.state_dict()) on rank 0"
            )
            return Description(name, refusal=refusal)
        weights[f"{prefix}adapter_model"] = places
        texts[f"{prefix}adapter_config.json"] = _adapter_config(model, config)
    return Description(name, texts, None, weights)


def _adapter_config(model: Any, config: Any) -> Any:
    """Return what peft writes into adapter_config.json."""
    config = copy.deepcopy(config)
    base_name = config.base_model_name_or_path
    if base_name is None:
        base_name = model.get_base_model().__dict__.get("name_or_path") or None
    vars(config).update(inference_mode=True, base_model_name_or_path=base_name)
    mapping = None
    if config.task_type is None:
        base = type(model.get_base_model())
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return json.loads((Path(folder) / "adapter_config.json").read_text())
