"""DeepSpeed's names, for programs that were written with them; each is thin over a public verb of ours.

    import infinity.deepspeed as deepspeed            one line changed; touches nothing global
    infinity run --as-deepspeed train.py              no line changed: `import deepspeed` finds these names
    infinity.deepspeed.install()                      the same in a notebook, before transformers is imported

The configuration is read with DeepSpeed's conventions: a key that nobody knows is a warning, and without an optimizer
in the file or in the call the engine has none.
"""

from __future__ import annotations

from infinity.engine.engine import Engine as DeepSpeedEngine
from infinity.engine.launch import add_config_arguments
from infinity.integrations.deepspeed import accelerator as accelerator
from infinity.integrations.deepspeed import (
    checkpoint,
    checkpointing,
    comm,
    launcher,
    ops,
    pipe,
    runtime,
    utils,
)
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.as_module import __infinity__, __version__, install
from infinity.integrations.deepspeed.comm import init_distributed
from infinity.integrations.deepspeed.entry import init_inference, initialize, tp_model_init
from infinity.integrations.deepspeed.pipe import PipelineModule
from infinity.integrations.deepspeed.runtime import zero
from infinity.integrations.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from infinity.integrations.deepspeed.runtime.pipe.engine import PipelineEngine
from infinity.integrations.deepspeed.utils import OnDevice, log_dist, logger

__all__ = [
    "DeepSpeedEngine", "DeepSpeedOptimizer", "OnDevice", "PipelineEngine", "PipelineModule", "__infinity__",
    "__version__", "accelerator", "add_config_arguments", "checkpoint", "checkpointing", "comm", "get_accelerator",
    "init_distributed", "init_inference", "initialize", "install", "launcher", "log_dist", "logger", "ops", "pipe",
    "runtime", "tp_model_init", "utils", "zero",
]  # fmt: skip
