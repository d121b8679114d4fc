"""`infinity.load_hf`: load a model from a Hugging Face folder directly into its tiers.

The model is built without memory for its parameters; each parameter refers to its values in the folder's safetensors
files. `infinity.initialize` reads them unit by unit, and every rank reads only the ranges of its own partitions.
transformers maps stored tensors to parameters, including renamed ones and experts that are stored separately but form
one parameter.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.base.untrusted import read_json, reason
from infinity.checkpoint.weight_files import StoredTensor, WeightFolder
from infinity.distributed.collectives import exchange
from infinity.engine.model_init import ConfigSource, open_init
from infinity.errors import ConfigError, InfinityError, listed
from infinity.log import logger
from infinity.zero import parameter
from infinity.zero.deferred_init import DeferredInit, WeightSource

try:
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )
    from transformers.initialization import no_init_weights
except ImportError as error:
    raise ImportError("infinity.load_hf needs transformers 5: pip install 'infinity-engine[hf]'") from error

# The most names of each kind that one message lists.
_NAMES_SHOWN_MAX = 20
# Characters of transformers' words that one message has.
_SAID_MAX = 400
# The most parameters that a model has for each tensor that is stored: packed experts are many in one.
_LIKENESS = 100
_GENERATION = "generation_config.json"


def load_hf(
    path: str | Path,
    config: ConfigSource = None,
    *,
    model_class: Any = None,
    strict: bool = True,
    **overrides: Any,
) -> nn.Module:
    """Load the model of a local folder (config.json and safetensors) for `infinity.initialize` with the same config.

    The parameters take no memory until `initialize`. Code that uses one earlier sees its whole value, and changes to it
    are kept. Collective.

    Arguments:
        path: a folder made by `save_pretrained` or by a download.
        config: infinity's configuration, as for `initialize`; it names the tiers.
        model_class: a transformers model class, automatic or not; default: `AutoModelForCausalLM`.
        strict: raise if the folder lacks a parameter. Otherwise the parameter is reported and gets the model's initial
            values. Names that the model lacks are only reported, as by from_pretrained().
        overrides: attributes of the model's configuration, such as `attn_implementation`.

    Returns:
        The model in training mode.

    Raises:
        ConfigError: the folder is incomplete, differs between ranks or does not match the model.
    """
    folder = Path(path)
    init = open_init(config)
    try:
        with init.groups.telling():
            model_config = _configuration(folder, overrides)
            weights = WeightFolder(folder)
            init.resources.callback(weights.close)
            _check_alike(init, weights)
            with _of_transformers(folder / "config.json"):
                model = _skeleton(model_class or transformers.AutoModelForCausalLM, model_config, weights)
            if os.path.lexists(folder / _GENERATION):
                with _of_transformers(folder / _GENERATION):
                    read_json(folder / _GENERATION, strict=False)
                    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)  # type: ignore[assignment]
            found = _match(model, weights.tensors)
            _report(model, folder, found, strict=strict)
            _adopt(model, init, found)
    except BaseException:
        init.close()
        raise
    return model.train()


def _configuration(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of the model in a folder; raise ConfigError if there is none."""
    if os.path.isfile(folder):
        raise ConfigError(f"load_hf: {folder} is a file: name the folder that it lies in, with its config.json")
    if not os.path.isdir(folder):
        raise ConfigError(
            f"load_hf: {str(folder)[:_SAID_MAX]} is not a folder; download the model first: "
            f"infinity.load_hf(huggingface_hub.snapshot_download({str(folder)[:_SAID_MAX]!r}), config)"
        )
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(
            f"load_hf: {folder} has no config.json: name the folder that save_pretrained() or a complete download made"
        )
    with _of_transformers(folder / "config.json"):
        read_json(folder / "config.json", strict=False)
        model_config = transformers.AutoConfig.from_pretrained(folder, **overrides)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ConfigError(
            f"load_hf: {folder} holds quantized weights; load it with transformers' from_pretrained() and pass the "
            "model to infinity.initialize(), or take the unquantized weights"
        )
    return model_config


@contextmanager
def _of_transformers(file: Path) -> Iterator[None]:
    """Raise ConfigError about `file` for any exception of the block, in which transformers takes what stands there.

    transformers checks some values itself and runs into the others, so that its exceptions are of all kinds.
    """
    try:
        yield
    except InfinityError:
        raise
    except Exception as error:
        said = " ".join(reason(error).split())[:_SAID_MAX]
        raise ConfigError(
            f"load_hf: transformers cannot use {file}: {type(error).__name__}: {said.rstrip('.')}. Fetch it again, or "
            "save the model with save_pretrained()"
        ) from error


@dataclass
class _Found:
    """The stored values of a model, by parameter or buffer name, and the names that do not match."""

    origins: dict[str, WeightSource] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)


def _skeleton(model_class: Any, model_config: Any, weights: WeightFolder) -> nn.Module:
    """Return the model with parameters on the meta device and real buffers, tied as its configuration says.

    ConfigError where it grows far beyond the stored weights: a number of layers may be anything in a file.
    """
    left = _LIKENESS * len(weights.tensors) + 1000

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or isinstance(param, nn.UninitializedParameter):
            return None
        nonlocal left
        left -= 1
        if left < 0:
            raise ConfigError(
                f"load_hf: {weights.folder} stores {len(weights.tensors):,} tensors, and its config.json describes a "
                f"model with more than {_LIKENESS} times as many parameters: fetch it again"
            )
        # A parameter that is registered twice must stay one object.
        meta = param.__dict__.get("_infinity_meta")
        if meta is None:
            meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param.__dict__["_infinity_meta"] = meta
        return meta

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with no_init_weights():
            make = getattr(model_class, "from_config", None) or model_class._from_config
            model = make(model_config)
    finally:
        hook.remove()
    model.tie_weights()
    return model


def _check_alike(init: DeferredInit, weights: WeightFolder) -> None:
    """Raise ConfigError unless all ranks see the same files, because every rank reads its own ranges."""
    group = init.groups.world
    if group.size == 1:
        return
    seen = exchange([float(weights.fingerprint)], group)
    others = [rank for rank, row in enumerate(seen) if row != seen[0]]
    if others:
        raise ConfigError(
            f"load_hf: {weights.folder} is not the same on every rank: rank {others[0]} sees other names, shapes or "
            "files than rank 0. Copy the folder to every node, or put it on a shared drive"
        )


def _match(model: Any, stored: Mapping[str, StoredTensor]) -> _Found:
    """Find the stored values of every parameter and buffer, by transformers' mapping of stored names."""
    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found = _Found()
    conversions: dict[str, _Conversion] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            found.unexpected.append(key)
        elif pattern is None:
            tensor = stored[key]
            found.origins[name], found.shapes[name], found.dtypes[name] = tensor, tensor.shape, tensor.dtype
        else:
            conversion = conversions.setdefault(name, _Conversion(by_pattern[pattern], name, model))
            conversion.sources.setdefault(pattern, []).append(stored[key])
    latest = _Latest()
    for conversion in conversions.values():
        shapes = conversion.shapes()
        for name, shape in shapes.items():
            found.origins[name] = conversion.in_flat_order() or _Converted(conversion, name, latest)
            found.shapes[name], found.dtypes[name] = shape, conversion.dtype
    _compare(model, wanted, found)
    return found


def _compare(model: Any, wanted: Mapping[str, Tensor], found: _Found) -> None:
    """Add missing and mismatched names to `found`; drop the names that the model allows to be missing or unexpected."""
    names = _names_by_tensor(model)
    optional = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])
    for name in wanted:
        stored = any(alias in found.origins for alias in names.get(name, [name]))
        if not stored and not any(re.search(pattern, name) for pattern in optional):
            found.missing.append(name)
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []), r"rotary_emb\.inv_freq$"]
    found.unexpected[:] = [key for key in found.unexpected if not any(re.search(pattern, key) for pattern in ignored)]
    for name, shape in found.shapes.items():
        if name not in wanted:
            found.unexpected.append(name)
        elif tuple(wanted[name].shape) != shape:
            found.mismatched.append(f"{name}: stored with shape {shape}, the model's is {tuple(wanted[name].shape)}")


def _names_by_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Return parameter name -> all names of the same parameter; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {name: aliases for aliases in names.values() for name in aliases}


def _report(model: nn.Module, folder: Path, found: _Found, *, strict: bool) -> None:
    kinds = {"Missing": found.missing, "Unexpected": found.unexpected, "Size mismatch for": found.mismatched}
    lines = [f"{kind}: {listed(names, _NAMES_SHOWN_MAX)}" for kind, names in kinds.items() if names]
    if not lines:
        return
    text = f"{type(model).__name__} and {folder} do not match.\n  " + "\n  ".join(lines)
    if found.mismatched or (strict and found.missing):
        advice = "" if found.mismatched else "\nPass strict=False to take what there is."
        raise ConfigError(f"load_hf: {text}{advice}")
    then = "What is missing gets the model's own initial values" if found.missing else "What is unexpected is not read"
    logger.warning("%s\n  %s.", text, then)


def _adopt(model: Any, init: DeferredInit, found: _Found) -> None:
    """Replace every meta parameter by one with its stored values, fill buffers, and initialize the other parameters."""
    names = _names_by_tensor(model)
    made: dict[int, nn.Parameter] = {}
    unknown = False
    for name, old in model.named_parameters():
        stored = next((alias for alias in names[name] if alias in found.origins), None)
        dtype = found.dtypes[stored] if stored is not None else old.dtype
        trains = old.requires_grad and dtype.is_floating_point
        if stored is None:
            param = nn.Parameter(torch.empty(old.shape, dtype=dtype, device="cpu"), requires_grad=trains)
            init.attach(param, name)
            unknown = True
        else:
            stand_in = parameter.placeholder(old.shape, dtype, torch.device("cpu"))
            param = nn.Parameter(stand_in, requires_grad=trains)
            init.attach(param, name, found.origins[stored])
            # transformers' initialize_weights() leaves such a parameter alone.
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        made[id(old)] = param
    for module in model.modules():
        for attribute, old in module._parameters.items():
            if old is not None:
                module._parameters[attribute] = made[id(old)]
    for name, buffer in model.named_buffers():
        if name in found.origins:
            found.origins[name].read(0, buffer.view(-1))
            buffer._is_hf_initialized = True
    if unknown:
        model.initialize_weights()


class _Conversion:
    """A conversion of stored tensors by transformers; `sources` has the tensors of each pattern in order."""

    def __init__(self, converter: WeightConverter, name: str, model: Any) -> None:
        self._converter = converter
        self._name = name
        self._model = model
        self.sources: dict[str, list[StoredTensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.sources.values()))[0].dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results, from a run on meta tensors."""
        made = self._run(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        return {name: tuple(value.shape) for name, value in made.items()}

    def values(self) -> dict[str, Tensor]:
        """Return the results of the operations on the stored values."""
        return self._run(StoredTensor.whole)

    def in_flat_order(self) -> WeightSource | None:
        """Return the concatenated stored tensors, of which ranges can be read, if the operations only concatenate."""
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self._converter.operations]
        columns = [self.sources.get(pattern, []) for pattern in self._converter.source_patterns]
        if operations == [("MergeModulelist", 0)] and len(columns) == 1:
            return _Joined(columns[0])
        equal = len({len(column) for column in columns}) == 1
        if operations == [("MergeModulelist", 0), ("Concatenate", 1)] and equal:
            return _Joined([tensor for row in zip(*columns, strict=True) for tensor in row])
        return None

    def _run(self, take: Any) -> dict[str, Tensor]:
        converter: Any = copy.deepcopy(self._converter)
        for pattern, tensors in self.sources.items():
            converter.collected_tensors[pattern] = [_Later(take, tensor) for tensor in tensors]
        try:
            made = converter.convert(self._name, model=self._model, config=self._model.config)
        except Exception as error:
            names = [tensor.name for tensors in self.sources.values() for tensor in tensors]
            stored = listed(names, _NAMES_SHOWN_MAX)
            raise ConfigError(
                f"load_hf: transformers could not make {self._name} of what is stored ({stored}): {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True, slots=True)
class _Later:
    """A stored tensor that a conversion reads when it needs it."""

    take: Any
    tensor: StoredTensor

    def __call__(self) -> Tensor:
        return self.take(self.tensor)


class _Joined:
    """A weight source of concatenated stored tensors."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self._tensors = list(tensors)

    @property
    def dtype(self) -> torch.dtype:
        """See `WeightSource`; fp32 if the tensors differ."""
        found = {tensor.dtype for tensor in self._tensors}
        return found.pop() if len(found) == 1 else torch.float32

    def read(self, start: int, target: Tensor) -> None:
        """See `WeightSource.read`."""
        stop = start + target.numel()
        at = 0
        for tensor in self._tensors:
            first, last = max(start, at), min(stop, at + tensor.numel)
            if first < last:
                tensor.read(first - at, target[first - start : last - start])
            at += tensor.numel


class _Latest:
    """A cache of the last conversion's results, because consecutive ranges are mostly of the same tensor."""

    def __init__(self) -> None:
        self._conversion: _Conversion | None = None
        self._values: dict[str, Tensor] = {}

    def values_of(self, conversion: _Conversion) -> dict[str, Tensor]:
        """Return the results of a conversion; run it unless it ran last."""
        if self._conversion is not conversion:
            # Free the old results before the new ones are allocated.
            self._values = {}
            self._values = conversion.values()
            self._conversion = conversion
        return self._values


@dataclass(frozen=True, slots=True)
class _Converted:
    """A weight source of one result of a conversion, which runs on whole tensors."""

    conversion: _Conversion
    name: str
    latest: _Latest

    @property
    def dtype(self) -> torch.dtype:
        """See `WeightSource`; fp32, because the result's type is unknown before the conversion has run."""
        return torch.float32

    def read(self, start: int, target: Tensor) -> None:
        """See `WeightSource.read`."""
        whole = self.latest.values_of(self.conversion)[self.name]
        target.copy_(whole.reshape(-1)[start : start + target.numel()])
