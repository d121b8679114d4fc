"""transformers as it loads a model at stage 3 of DeepSpeed, in a process that goes on without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from infinity.integrations.deepspeed.as_module import alias


class _Configuration:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def transformers_at_stage_3(config: dict[str, Any]) -> Iterator[None]:
    """In the block transformers builds and loads models under `infinity.Init`, as it does under DeepSpeed's stage 3."""
    # transformers refers to it weakly.
    held = _Configuration(config)
    alias("deepspeed")
    set_hf_deepspeed_config(held)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
            del sys.modules[name]
