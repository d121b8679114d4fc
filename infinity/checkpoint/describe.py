"""A module's description for exports: `describe_model(module)`. Weights are not read, only names and shapes.

transformers and peft decide what they store under which name. They are called with meta tensors, so each tensor that
they would save is a view of one of the model's, and its offset says where it begins. Neither library is imported here:
a model of its class exists only if it was imported before.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.checkpoint.description import Description, TensorLocation, TensorSource
from infinity.checkpoint.module_tensors import persistent_buffers, tied_names
from infinity.config.untrusted import plain_name
from infinity.log import logger
from infinity.plan.spec import dtype_name

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
        if others or _numel_of(places) != sum(tensor.numel() for tensor in kept.values()):
            raise ValueError(f"{len(others)} tensors are stored as no range of a tensor of the model")
    except Exception as error:
        logger.info("weights are exported under the names that they have in memory: %s", error)
        places, _ = _places(shadows, kept)
    if {place.name for place in places} == set(shadows) and all(place.name == place.source for place in places):
        return None
    return {"model": places}


def _numel_of(places: Sequence[TensorLocation]) -> int:
    return sum(torch.Size(place.shape).numel() for place in places)


def _of_adapters(model: Any, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Description:
    """Describe a peft model's adapters as peft saves them: "default" in the folder, others in folders of their own."""
    peft: Any = sys.modules["peft"]
    shadows = _shadows(model, shapes)
    texts: dict[str, Any] = {}
    weights = {}
    for adapter, config in model.peft_config.items():
        prefix = "" if adapter == "default" else f"{plain_name(adapter)}/"
        base = config.base_model_name_or_path
        # "auto" would ask the hub about a base model that is not in a folder here.
        look = "auto" if not base or os.path.isdir(base) else _targets_embeddings(model, config)
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


def _targets_embeddings(model: Any, config: Any) -> bool:
    layers = sys.modules["peft.utils.other"].EMBEDDING_LAYER_NAMES
    targets = getattr(config, "target_modules", None) or ()
    return not isinstance(targets, str) and any(name in targets for name in layers)


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
