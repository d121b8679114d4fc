"""Low-rank adapters on a frozen model, as peft wraps it: names, shapes and class names are those of its `LoraConfig`.

A wrapped linear layer keeps its own parameters as `base_layer`, and has beside them `lora_A` ([rank, inputs]) and
`lora_B` ([outputs, rank]), which alone are trained. Modules of peft's without parameters are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, ParamSpec

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

