"""The configuration: DeepSpeed's keys, checked strictly and resolved in one place. Imports no torch.

`load_config(source)` checks a file, a dictionary or a JSON text. `resolve(config, context)` resolves every "auto" and
the batch sizes; the engine reads only the `ResolvedConfig` that it returns.
"""

from infinity.base.sizes import Share, format_bytes, parse_bytes
from infinity.config.load import Source, load_config
from infinity.config.resolve import DtypeName, ResolveContext, ResolvedConfig, TierName, drives, resolve, unfilled
from infinity.config.schema import DEEPSPEED, STRICT, Config, Conventions

__all__ = [
    "DEEPSPEED",
    "STRICT",
    "Config",
    "Conventions",
    "DtypeName",
    "ResolveContext",
    "ResolvedConfig",
    "Share",
    "Source",
    "TierName",
    "drives",
    "format_bytes",
    "load_config",
    "parse_bytes",
    "resolve",
    "unfilled",
]
