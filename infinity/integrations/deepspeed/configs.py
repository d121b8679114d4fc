"""`deepspeed.runtime.config`: a checked configuration for a program that reads one without an engine."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from infinity.config.load import load_config
from infinity.config.resolve import ResolveContext, ResolvedConfig, resolve
from infinity.config.section import spellings_of
from infinity.config.training import Bf16, Fp16
from infinity.config.zero import OffloadOptimizer, OffloadParam, ZeroOptimization
from infinity.distributed.groups import detect
from infinity.engine.deepspeed_names import CONFIGURED
from infinity.errors import UnknownNameError
from infinity.integrations.deepspeed.entry import conventions

__all__ = [
    "Bf16", "DeepSpeedConfig", "DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig", "Fp16",
]  # fmt: skip


class DeepSpeedZeroOffloadParamConfig(OffloadParam):
    """The section `zero_optimization.offload_param`."""


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer):
    """The section `zero_optimization.offload_optimizer`."""

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes are asked to overlap with the step, which they always do here."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroConfig(ZeroOptimization):
    """The section `zero_optimization`; its keys, in every spelling, are keyword arguments and attributes."""

    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_field(cls, raw: Any) -> Any:
        names = spellings_of(ZeroOptimization)
        found = {names.get(key, key): value for key, value in ZeroOptimization.rewrite(raw).items()}
        return {"overlap_comm": found.get("stage") == 3, **found}

    def __getattr__(self, name: str) -> Any:
        field = spellings_of(ZeroOptimization).get(name, name)
        if field == name:
            raise UnknownNameError(f"zero_optimization has no key {name!r}: docs/configuration.md lists them")
        return getattr(self, field)


_NAMES = {
    "zero_config": "zero_optimization", "float16_config": "fp16", "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing", "checkpoint_config": "checkpoint",
}  # fmt: skip


class DeepSpeedConfig:
    """A file, dictionary or JSON text as `initialize()` reads it, for the ranks of this run; see `explain()`.

    Its attributes are the keys at the top level with their resolved values, DeepSpeed's names of some of them
    (`zero_config`, `fp16_enabled`, ...), and those of `engine.config`.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        ranks = detect()
        context = ResolveContext(world_size=ranks.world_size, local_size=ranks.local_size, program=False)
        self.resolved: ResolvedConfig = resolve(load_config(config, conventions=conventions()), context)

    def __getattr__(self, name: str) -> Any:
        if name == "resolved":
            raise AttributeError(name)
        config = self.resolved.sections
        if name == "monitor_config":
            # The sections of monitors among others.
            return config
        if name in _NAMES:
            return getattr(config, _NAMES[name])
        if name in CONFIGURED:
            return CONFIGURED[name](self.resolved)
        if name in vars(config):
            return getattr(config, name)
        if hasattr(self.resolved, name):
            return getattr(self.resolved, name)
        raise UnknownNameError(
            f"DeepSpeedConfig.{name}: the configuration has no such value; its keys are in docs/configuration.md"
        )
