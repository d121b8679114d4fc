"""`infinity config explain FILE`: print every key of a configuration with its resolved value and its source.

    infinity config explain FILE [--ranks N] [--hidden 4096] [--dtype bf16] [--only zero_optimization] [--as-deepspeed]

The values are those of initialize(), computed by the same code. A value that only a program or its model can give
prints as "auto". With --as-deepspeed they are those of a program that was written for DeepSpeed, and what it ignores is
printed too. A block-sparse layout (`sparse_attention`) is drawn as 32 blocks of tokens have it.
"""

from __future__ import annotations

import argparse

from infinity.cli.terminal import say
from infinity.config import DEEPSPEED, STRICT, ResolveContext, load_config, resolve, unfilled
from infinity.config.sparse_attention import SparseAttention
from infinity.errors import ConfigError
from infinity.plan.block_layouts import block_layout

# Blocks of a layout's drawing, of a head and of the second one where heads may differ.
_DRAWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("action", choices=["explain"], help="the action")
    parser.add_argument("file", metavar="FILE", help="a configuration (JSON)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks (default: 1)")
    parser.add_argument("--hidden", type=int, metavar="N", help="the model's hidden size, for sizes derived from it")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="type of the model's weights")
    parser.add_argument("--as-deepspeed", action="store_true", help="read the file as for a program of DeepSpeed's")
    parser.add_argument("--only", metavar="KEY", help="print only this key or section")


def run(given: argparse.Namespace) -> int:
    """Print one line a key, then the keys that were set without effect or ignored; return 0.

    Raises:
        ConfigError: the configuration or an option is invalid.
    """
    if given.ranks < 1:
        raise ConfigError(f"--ranks {given.ranks}: at least 1 is needed")
    if given.hidden is not None and given.hidden < 1:
        raise ConfigError(f"--hidden {given.hidden}: at least 1 is needed")
    context = ResolveContext(
        world_size=given.ranks, hidden_size=given.hidden, model_dtype=given.dtype, no_auto=unfilled(), program=False
    )
    config = load_config(given.file, conventions=DEEPSPEED if given.as_deepspeed else STRICT)
    resolved = resolve(config, context)
    lines = resolved.explain().splitlines()
    if given.only:
        lines = [line for line in lines if line.startswith((f"{given.only} =", f"{given.only}."))]
        if not lines:
            raise ConfigError(f"--only {given.only}: there is no such key or section; leave it out to see all")
    section = config.sparse_attention
    if section is not None and (given.only or "sparse_attention").startswith("sparse_attention"):
        lines += _drawn(section)
    for line in [*lines, *resolved.report(), *config.provenance.foreign.values()]:
        say(line)
    return 0


def _drawn(section: SparseAttention) -> list[str]:
    """Return a layout as text: a line a row of blocks, whose columns are blocks of keys."""
    layout = block_layout(section, 2 if section.per_head else 1, _DRAWN, 0)
    titles = ["head 0", "head 1"][: layout.patterns] if layout.patterns > 1 else ["all heads"]
    lines = []
    for head, title in enumerate(titles):
        lines.append(f'sparse_attention "{section.mode}", {title}, {_DRAWN * section.block:,} tokens:')
        lines += [f"  {line}" for line in layout.draw(head)]
    return lines
