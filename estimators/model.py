"""What is to be sized: a preset, a config.json, its values, or a module; all become the tree that a plan is made from.

A module is walked by duck typing, so that this package imports no torch.

Well-known models by name: the values of their public config.json files, as far as a size depends on them.

Low-rank adapters on a frozen model, as peft wraps it: names, shapes and class names are those of its `LoraConfig`.

A wrapped linear layer keeps its own parameters as `base_layer`, and has beside them `lora_A` ([rank, inputs]) and
`lora_B` ([outputs, rank]), which alone are trained. Modules of peft's without parameters are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from estimators.trees import block_classes, model_tree
from infinity.base.untrusted import read_json, read_metadata, reason
from infinity.config import DtypeName
from infinity.config.load import hub_cache
from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, ParamSpec, dtype_name, module_tree

# What a published name says beside a shape: the kind of tuning, a version of it, a date, the length of sequences.
_ADDED = re.compile(r"-(instruct|chat|hf|base|it|pt|coder|math|v0\.[12]|\d{4}|\d+[km])(?=-|$)")
# Releases of another name whose shape is a known one's.
_LIKE = (
    (re.compile(r"meta-"), ""), (re.compile(r"llama-3(\.3)?(?=-(8|70)b$)"), "llama-3.1"),
    (re.compile(r"deepseek-r1$"), "deepseek-v3"),
)  # fmt: skip


def preset(name: str) -> dict[str, Any]:
    """The values of a model's config.json by its name, in any case; ConfigError for an unknown one."""
    known = preset_name(name)
    if known is None:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
        raise ConfigError(
            f"{name} is neither a file, nor a folder with a config.json, nor the name of a known model. "
            + (f"Did you mean {' or '.join(near)}? " if near else "")
            + "--list shows the names"
        )
    return dict(PRESETS[known])


def preset_name(name: str) -> str | None:
    """The known model that a name means: in any case, with the owner of a Hugging Face id, as a chat model or not."""
    wanted = _ADDED.sub("", name.lower().rpartition("/")[2])
    for theirs, ours in _LIKE:
        wanted = theirs.sub(ours, wanted) if theirs.match(wanted) else wanted
    return wanted if wanted in PRESETS else None


def family(name: str) -> str:
    """What the sizes of one model are called together: "llama-3.1" of "llama-3.1-70b"."""
    return name.lower().rpartition("-")[0] if not name.lower().startswith("gpt2") else "gpt2"


def _model(model_type: str, sizes: tuple[int, ...], *, tied: bool = False, **others: Any) -> dict[str, Any]:
    """sizes: vocabulary, hidden, intermediate, layers, heads, heads of keys and values."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads",
    )  # fmt: skip
    return {
        "model_type": model_type, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16", **others,
    }  # fmt: skip


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024, "n_embd": width, "n_layer": layers,
        "n_head": heads, "tie_word_embeddings": True,
    }  # fmt: skip


def _mixture(
    model_type: str, sizes: tuple[int, ...], inner: int, count: int, chosen: int, **others: Any
) -> dict[str, Any]:
    return _model(
        model_type, sizes, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=chosen, **others
    )


_HEAD_128: dict[str, Any] = {"head_dim": 128}
PRESETS: Mapping[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _model("llama", (32_000, 4096, 11_008, 32, 32, 32)),
    "llama-2-13b": _model("llama", (32_000, 5120, 13_824, 40, 40, 40)),
    "llama-2-70b": _model("llama", (32_000, 8192, 28_672, 80, 64, 8)),
    "llama-3.1-8b": _model("llama", (128_256, 4096, 14_336, 32, 32, 8)),
    "llama-3.1-70b": _model("llama", (128_256, 8192, 28_672, 80, 64, 8)),
    "llama-3.1-405b": _model("llama", (128_256, 16_384, 53_248, 126, 128, 8)),
    "llama-3.2-1b": _model("llama", (128_256, 2048, 8192, 16, 32, 8), tied=True, head_dim=64),
    "llama-3.2-3b": _model("llama", (128_256, 3072, 8192, 28, 24, 8), tied=True, head_dim=128),
    "mistral-7b": _model("mistral", (32_000, 4096, 14_336, 32, 32, 8)),
    "mistral-7b-v0.3": _model("mistral", (32_768, 4096, 14_336, 32, 32, 8)),
    "mixtral-8x7b": _model(
        "mixtral", (32_000, 4096, 14_336, 32, 32, 8), num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _model(
        "mixtral", (32_000, 6144, 16_384, 56, 48, 8), num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _model("qwen2", (151_936, 896, 4864, 24, 14, 2), tied=True),
    "qwen2.5-1.5b": _model("qwen2", (151_936, 1536, 8960, 28, 12, 2), tied=True),
    "qwen2.5-3b": _model("qwen2", (151_936, 2048, 11_008, 36, 16, 2), tied=True),
    "qwen2.5-7b": _model("qwen2", (152_064, 3584, 18_944, 28, 28, 4)),
    "qwen2.5-14b": _model("qwen2", (152_064, 5120, 13_824, 48, 40, 8)),
    "qwen2.5-32b": _model("qwen2", (152_064, 5120, 27_648, 64, 40, 8)),
    "qwen2.5-72b": _model("qwen2", (152_064, 8192, 29_568, 80, 64, 8)),
    "qwen3-0.6b": _model("qwen3", (151_936, 1024, 3072, 28, 16, 8), tied=True, **_HEAD_128),
    "qwen3-1.7b": _model("qwen3", (151_936, 2048, 6144, 28, 16, 8), tied=True, **_HEAD_128),
    "qwen3-4b": _model("qwen3", (151_936, 2560, 9728, 36, 32, 8), tied=True, **_HEAD_128),
    "qwen3-8b": _model("qwen3", (151_936, 4096, 12_288, 36, 32, 8), **_HEAD_128),
    "qwen3-14b": _model("qwen3", (151_936, 5120, 17_408, 40, 40, 8), **_HEAD_128),
    "qwen3-32b": _model("qwen3", (151_936, 5120, 25_600, 64, 64, 8), **_HEAD_128),
    "qwen3-30b-a3b": _mixture("qwen3_moe", (151_936, 2048, 6144, 48, 32, 4), 768, 128, 8, **_HEAD_128),
    "qwen3-235b-a22b": _mixture("qwen3_moe", (151_936, 4096, 12_288, 94, 64, 4), 1536, 128, 8, **_HEAD_128),
    "gemma-2-2b": _model("gemma2", (256_000, 2304, 9216, 26, 8, 4), tied=True, head_dim=256),
    "gemma-2-9b": _model("gemma2", (256_000, 3584, 14_336, 42, 16, 8), tied=True, head_dim=256),
    "gemma-2-27b": _model("gemma2", (256_000, 4608, 36_864, 46, 32, 16), tied=True, head_dim=128),
    "gemma-3-1b": _model("gemma3_text", (262_144, 1152, 6912, 26, 4, 1), tied=True, head_dim=256),
    "phi-3-mini": _model("phi3", (32_064, 3072, 8192, 32, 32, 32)),
    "phi-4": _model("phi3", (100_352, 5120, 17_920, 40, 40, 10)),
    "deepseek-v3": _model(
        "deepseek_v3", (129_280, 7168, 18_432, 61, 128, 128), n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
}  # fmt: skip

# What takes every linear layer that may have adapters, as peft calls it: not the one that gives the logits.
ALL_LINEAR = "all-linear"
_LINEAR = ("Linear", "Conv1D")
_HEAD = "lm_head"
_ATTENTION = ".self_attn."
# Where peft puts the model.
_PREFIX = "base_model.model"
# The layers that peft adapts where its configuration names none, by `model_type`; of other types it wants names.
_DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), ("q_proj", "v_proj")
    ),
    "gpt2": ("c_attn",),
}  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """Adapters of one rank on the linear layers of these names; without names, on those that peft takes by default."""

    rank: int
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, rank: int, targets: str | Sequence[str] | None = None) -> Lora:
        """From the names in a text with commas between them, or in a sequence. ConfigError for what is no rank."""
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"the rank of LoRA's adapters is {rank!r}: give a positive whole number, such as 16")
        names = targets.split(",") if isinstance(targets, str) else list(targets or ())
        return cls(rank, tuple(dict.fromkeys(name.strip() for name in names if name.strip())))

    def on(self, root: ModuleNode, model_type: str) -> frozenset[str]:
        """Paths of the linear layers that get adapters in a model that is not wrapped yet: those that a target names by
        its last part or by more of it, as peft does. ConfigError where a target names none.
        """
        linear = [node.path for node in root.walk() if node.class_name in _LINEAR and node.path != _HEAD]
        # peft adapts stacked experts as well, by parameters of its own: then only attention's layers are plain ones.
        stacked = any(len(spec.shape) == 3 for spec in root.all_params().values())
        linear = [path for path in linear if not stacked or _ATTENTION in path]
        names = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
        targets = self.targets or _DEFAULT_TARGETS.get(model_type, ())
        if not targets:
            raise ConfigError(
                f"peft has no default targets for {model_type}: say by --lora-targets which layers get adapters, with "
                f"commas between them: {names}" + ("" if stacked else f"; or {ALL_LINEAR}")
            )
        if ALL_LINEAR in targets:
            if stacked:
                raise ConfigError(
                    f"{ALL_LINEAR} would adapt the experts of {model_type} too, whose adapters are not sized: name "
                    f"layers of attention by --lora-targets, with commas between them: {names}"
                )
            return frozenset(linear)
        found: set[str] = set()
        for target in targets:
            named = [path for path in linear if path == target or path.endswith(f".{target}")]
            if not named:
                raise ConfigError(
                    f"the model has no linear layer {target!r} that can be adapted: --lora-targets takes {names}"
                    + ("" if stacked else f", or {ALL_LINEAR}")
                )
            found.update(named)
        return frozenset(found)

    def code(self, model_type: str) -> str:
        """How a program makes the same model with peft."""
        names = ALL_LINEAR if self.targets == (ALL_LINEAR,) else [*self.targets]
        targets = f", target_modules={names!r}".replace("'", '"') if self.targets else ""
        # Its weights are (inputs, outputs), of which peft warns.
        turned = ", fan_in_fan_out=True" if model_type == "gpt2" else ""
        return f"model = peft.get_peft_model(model, peft.LoraConfig(r={self.rank}{targets}{turned}))"


def adapted(root: ModuleNode, lora: Lora, model_type: str, width: int | None) -> ModuleNode:
    """The tree of the same model frozen, and wrapped by peft. ConfigError where no layer has a name that was given, and
    for a rank above the model's width, whose adapters would be larger than what they adapt.
    """
    if width is not None and lora.rank > width:
        raise ConfigError(
            f"adapters of rank {lora.rank:,} are not smaller than the layers, which are {width:,} wide: give a rank "
            f"of at most {width:,}; 8 to 64 are usual"
        )
    wrapped = lora.on(root, model_type)
    specs: dict[str, ParamSpec] = {}

    def new_name(name: str) -> str:
        path, _, attribute = name.rpartition(".")
        return ".".join([_PREFIX, path, *(["base_layer"] if path in wrapped else []), attribute])

    def frozen(spec: ParamSpec) -> ParamSpec:
        # A tied parameter stays one value.
        if spec.name not in specs:
            tied = tuple(map(new_name, spec.tied))
            specs[spec.name] = replace(spec, name=new_name(spec.name), group=-1, tied=tied)
        return specs[spec.name]

    def grow(node: ModuleNode) -> ModuleNode:
        path = f"{_PREFIX}.{node.path}" if node.path else _PREFIX
        own = {name: frozen(spec) for name, spec in node.params.items()}
        if node.path in wrapped:
            return _with_adapters(node, path, own, lora.rank)
        return replace(node, path=path, params=own, children={name: grow(each) for name, each in node.children.items()})

    inner = ModuleNode("base_model", "LoraModel", children={"model": grow(root)})
    return ModuleNode("", "PeftModel", children={"base_model": inner})


def _with_adapters(node: ModuleNode, path: str, own: dict[str, ParamSpec], rank: int) -> ModuleNode:
    """peft's layer in the place of a linear one."""
    weight = own["weight"]
    outputs, inputs = reversed(weight.shape) if node.class_name == "Conv1D" else weight.shape

    def adapter(name: str, shape: tuple[int, int]) -> ModuleNode:
        inner = f"{path}.{name}.default"
        spec = ParamSpec(name=f"{inner}.weight", shape=shape, dtype=weight.dtype)
        return ModuleNode(
            f"{path}.{name}", "ModuleDict", children={"default": ModuleNode(inner, "Linear", {"weight": spec})}
        )

    base = ModuleNode(f"{path}.base_layer", node.class_name, own)
    children = {
        "base_layer": base, "lora_A": adapter("lora_A", (rank, inputs)), "lora_B": adapter("lora_B", (outputs, rank)),
    }  # fmt: skip
    return ModuleNode(path, "Linear", children=children)


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
    # By the dtype that is trained in: a search asks for them with every plan.
    _trees: dict[str, ModuleNode] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        if compute_dtype not in self._trees:
            assert self.values is not None
            root = model_tree(self.values, compute_dtype=compute_dtype)
            if self.lora is not None:
                root = adapted(root, self.lora, str(self.values["model_type"]), self.hidden_size)
            self._trees[compute_dtype] = root
        return self._trees[compute_dtype]

    @cached_property
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
            return _of_preset(known)
        if isinstance(source, str) and _is_id(source) and not os.path.exists(path.parent):
            path = _cached(source)
            return Described(source.rpartition("/")[2], values=_read(path))
        named = Path(os.path.realpath(path)).parent if path.name == "config.json" else path
        return Described(named.name, values=_read(path))
    if hasattr(source, "named_modules"):
        config = getattr(source, "config", None)
        values = config.to_dict() if config is not None and hasattr(config, "to_dict") else None
        return Described(type(source).__name__, values=values, module=source)
    raise ConfigError(
        f"a model is sized from a name, a config.json, its values or a module, not from {type(source).__name__}"
    )


@cache
def _of_preset(name: str) -> Described:
    return Described(name, values=preset(name))


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
