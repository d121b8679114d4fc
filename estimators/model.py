"""What is to be sized: a preset, a config.json, its values, or a module; all become the tree that a plan is made from.

A module is walked by duck typing, so that this package imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimators.adapters import Lora, adapted
from estimators.architectures import block_classes, model_tree
from estimators.presets import preset, preset_name
from infinity.config import DtypeName
from infinity.config.load import hub_cache
from infinity.config.untrusted import read_json, read_metadata, reason
from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, dtype_name, module_tree

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PRECISIONS: dict[str, DtypeName] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Described:
    """A model that may be sized. Without `values` (those of a config.json) activations are not known."""

    name: str
    values: Mapping[str, Any] | None = None
    module: Any = None
    # Adapters that are trained in the place of the model's own weights.
    lora: Lora | None = None

    def with_adapters(self, lora: Lora | None) -> Described:
        """The same model frozen and with adapters; ConfigError for a module, which the program wraps itself."""
        if lora is not None and self.module is not None:
            raise ConfigError(
                f"{self.name} is a module: wrap it by peft.get_peft_model and give that, which is sized as it is"
            )
        return replace(self, lora=lora)

    def tree(self, compute_dtype: str) -> ModuleNode:
        """The tree of modules and parameters, trained in `compute_dtype`."""
        if self.module is not None:
            return module_tree(self.module, compute_dtype=compute_dtype)
        assert self.values is not None
        root = model_tree(self.values, compute_dtype=compute_dtype)
        return root if self.lora is None else adapted(root, self.lora, str(self.values["model_type"]), self.hidden_size)

    @property
    def adapted_layers(self) -> frozenset[str] | None:
        """The last parts of the names of the layers with adapters; None where all is trained."""
        if self.lora is None or self.values is None:
            return None
        paths = self.lora.on(model_tree(self.values, compute_dtype="bf16"), str(self.values["model_type"]))
        return frozenset(path.rpartition(".")[2] for path in paths)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Class names of modules that are not to be cut, as the engine takes them from the model."""
        if self.module is not None:
            return tuple(getattr(self.module, "_no_split_modules", None) or ())
        assert self.values is not None
        return block_classes(self.values)

    @property
    def hidden_size(self) -> int | None:
        if self.module is not None:
            hidden = getattr(getattr(self.module, "config", None), "hidden_size", None)
        else:
            assert self.values is not None
            hidden = self.values.get("hidden_size", self.values.get("n_embd"))
        return hidden if isinstance(hidden, int) else None

    @property
    def dtype(self) -> DtypeName | None:
        """What "auto" makes of the precision: the dtype of the weights."""
        if self.module is not None:
            dtypes = [dtype_name(param.dtype) for param in self.module.parameters() if param.is_floating_point()]
            return _PRECISIONS.get(dtypes[0]) if dtypes else None
        assert self.values is not None
        named = self.values.get("dtype") or self.values.get("torch_dtype")
        return _PRECISIONS.get(dtype_name(named)) if isinstance(named, str) else None

    @property
    def quantized(self) -> str | None:
        """How the file says that the weights are stored quantized: "gptq, 4 bits"; None where it does not."""
        found = (self.values or {}).get("quantization_config")
        if not isinstance(found, Mapping):
            return None
        bits = found.get("bits") or next((n for n in (4, 8) if found.get(f"load_in_{n}bit")), None)
        return f"{found.get('quant_method') or 'quantized'}" + (f", {bits} bits" if bits else "")

    @property
    def positions_max(self) -> int | None:
        """The longest sequence that the model takes, where that is known."""
        values = self.values or {}
        longest = values.get("max_position_embeddings", values.get("n_positions"))
        return longest if isinstance(longest, int) else None


def described(source: Any) -> Described:
    """From a preset's name, the path of a config.json (or of its folder), the values of one, or a module."""
    if isinstance(source, Described):
        return source
    if isinstance(source, Mapping):
        return Described(str(source.get("_name_or_path") or source.get("model_type")), values=source)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        known = preset_name(source) if isinstance(source, str) and (_is_id(source) or os.sep not in source) else None
        if known is not None and not os.path.exists(path):
            return Described(known, values=preset(known))
        if isinstance(source, str) and _is_id(source) and not os.path.exists(path.parent):
            path = _cached(source)
            return Described(source.rpartition("/")[2], values=_read(path))
        return Described(_name(path), values=_read(path))
    if hasattr(source, "named_modules"):
        config = getattr(source, "config", None)
        values = config.to_dict() if config is not None and hasattr(config, "to_dict") else None
        return Described(type(source).__name__, values=values, module=source)
    raise ConfigError(
        f"a model is sized from a name, a config.json, its values or a module, not from {type(source).__name__}"
    )


def _is_id(text: str) -> bool:
    """Whether a text may be the id of a model on the hub: an owner and a name."""
    return _ID.fullmatch(text) is not None and not text.endswith(".json") and not os.path.exists(text)


def _cached(model_id: str) -> Path:
    """The config.json of a model that Hugging Face's tools have downloaded before; ConfigError says how to get it."""
    folder = hub_cache() / f"models--{model_id.replace('/', '--')}"
    try:
        newest = folder / "snapshots" / read_metadata(folder / "refs" / "main", 4096).decode().strip()
    except (OSError, ValueError):
        newest = folder
    files = [newest / "config.json", *sorted(folder.glob("snapshots/*/config.json"))]
    found = next((file for file in files if os.path.isfile(file)), None)
    if found is None:
        name = model_id.rpartition("/")[2]
        raise ConfigError(
            f"{model_id} is not a known model (--list), and the hub's cache here ({hub_cache()}) does not have it. Get "
            f"its config.json, a few kB: `hf download {model_id} config.json --local-dir {name}`, and give the folder "
            f"{name}. Nothing is downloaded for you"
        )
    return found


def _name(path: Path) -> str:
    return Path(os.path.realpath(path)).parent.name if path.name == "config.json" else path.name


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(file) and os.sep not in str(path) and file.suffix != ".json":
        # Such a path is no file: it was meant as a name.
        return preset(str(path))
    try:
        values = read_json(file, strict=False)
    except OSError as error:
        raise ConfigError(f"{file}: the model's configuration cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {reason(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a model's configuration is an object, not {type(values).__name__}")
    return values
