"""`deepspeed.ops`: optimizers under DeepSpeed's names and defaults, and the builders of its native code."""

from __future__ import annotations

import sys
from typing import Any

import torch

from infinity.errors import ConfigError, UnknownNameError
from infinity.integrations.deepspeed.refusals import reason_of
from infinity.ops.build import require
from infinity.optim.update_rules import LionOptimizer


class ForCPU(torch.optim.Optimizer):
    """An optimizer by which accelerate replaces the program's own where states are offloaded: DeepSpeed steps these few
    only. An engine steps the program's own, or refuses it by its name, so accelerate gets that one back.
    """

    def __new__(cls, model_params: Any, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__")).startswith("accelerate."):
            for each in caller.f_locals.values():
                if isinstance(each, torch.optim.Optimizer) and each.param_groups is model_params:
                    return each
        return super().__new__(cls)


class DeepSpeedCPUAdam(ForCPU, torch.optim.Adam):
    """Adam, or AdamW if `adamw_mode`; an engine steps it natively where its states live.

    It keeps the dictionaries of the groups that it is given, so a scheduler that was made for another optimizer over
    the same groups stays alive.
    """

    def __init__(
        self, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, bias_correction=bias_correction, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(
            model_params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )  # fmt: skip


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW if `adam_w_mode`: which device steps is the configuration's decision, not the class's."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, bias_correction=bias_correction)
        super().__init__(
            params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )  # fmt: skip


def _check(name: str, *, bias_correction: bool, fp32_optimizer_states: bool = True) -> None:
    if not bias_correction:
        raise ConfigError(
            f"{name}(bias_correction=False): set optimizer.params.bias_correction in the configuration instead, and "
            "make no optimizer in the program"
        )
    if not fp32_optimizer_states:
        raise ConfigError(f"{name}(fp32_optimizer_states=False): moments are fp32 here; leave it out")


class DeepSpeedCPUAdagrad(ForCPU, torch.optim.Adagrad):
    """torch's Adagrad; the engine steps it where its states live."""

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        # torch makes its sums here; an engine makes them in its tiers.
        self.state.clear()


class DeepSpeedCPULion(ForCPU, LionOptimizer):
    """Lion; the engine steps it where its states live."""


class FusedLion(LionOptimizer):
    """The same: which device steps is the configuration's decision, not the class's."""


class OpBuilder:
    """A builder of DeepSpeed's native code. infinity builds its own when it is first needed, or in `load()`."""

    NAME = ""
    # infinity's library for the same purpose; the reason why there is none.
    library = ""
    refused = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether infinity has what this builder's code does."""
        return not self.refused

    def load(self, verbose: bool = True) -> Any:
        """Build and load infinity's library for the same purpose; return it, with an interface of its own.

        Raises ConfigError where infinity has none, ExtensionError where it cannot be built.
        """
        if self.refused:
            raise ConfigError(f"{type(self).__name__}().load(): {self.refused}")
        require(self.library)
        return _Loaded(type(self).__name__)

    jit_load = load


class _Loaded:
    """What a builder has loaded: DeepSpeed's functions of it are refused by name."""

    def __init__(self, builder: str) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        raise UnknownNameError(
            f"{self._builder}().load().{name}: infinity's library is loaded, and the engine calls it by an interface "
            "of its own. Name the optimizer, and the drive (nvme_path, aio), in the configuration"
        )


NO_KERNEL = "kernels of inference and of whole layers are not for training. Use the model's own layers"
_BUILDERS = {
    "CPUAdam": ("cpu_adam", "adam"), "FusedAdam": ("fused_adam", "adam"), "CPUAdagrad": ("cpu_adagrad", "adam"),
    "CPULion": ("cpu_lion", "adam"), "FusedLion": ("fused_lion", "adam"), "AsyncIO": ("async_io", "aio"),
    "Utils": ("utils", "adam"),
}  # fmt: skip
_NO_BUILDERS = {
    "FusedLamb": ("fused_lamb", "Lamb is not elementwise. Set AdamW, or pass any elementwise optimizer"),
    "GDS": ("gds", "files are read into CPU memory. Use AsyncIOBuilder"),
    "PinMemory": ("pin_memory", "the tiers pin their memory themselves. Leave it out, or set pin_memory there"),
    "SparseAttn": ("sparse_attn", "blocks need no operator. Set the section sparse_attention"),
    "RandomLTD": ("random_ltd", reason_of("data_efficiency")),
    "Quantizer": ("quantizer", reason_of("zero_optimization.zero_quantized_weights")),
    "FPQuantizer": ("fp_quantizer", reason_of("zero_optimization.zero_quantized_weights")),
    "DeepCompile": ("dc", reason_of("compile")),
    **{
        name: (short, NO_KERNEL)
        for name, short in {
            "Transformer": "transformer", "StochasticTransformer": "stochastic_transformer",
            "Inference": "transformer_inference", "InferenceCore": "inference_core_ops",
            "InferenceCutlass": "cutlass_ops", "RaggedOps": "ragged_ops", "RaggedUtils": "ragged_device_ops",
            "SpatialInference": "spatial_inference", "EvoformerAttn": "evoformer_attn",
        }.items()
    },
}  # fmt: skip


def _builder(name: str, short: str, library: str, refused: str) -> type[OpBuilder]:
    members = {"NAME": short, "library": library, "refused": refused, "__doc__": OpBuilder.__doc__}
    return type(f"{name}Builder", (OpBuilder,), members)


# By the name of the class.
BUILDERS: dict[str, type[OpBuilder]] = {
    f"{name}Builder": _builder(name, short, *found)
    for table, found_of in ((_BUILDERS, lambda library: (library, "")), (_NO_BUILDERS, lambda why: ("", why)))
    for name, (short, said) in table.items()
    for found in (found_of(said),)
}
COMPATIBLE_OPS = {builder.NAME: not builder.refused for builder in BUILDERS.values()}
