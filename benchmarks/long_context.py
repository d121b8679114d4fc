"""Claim: the loss of a long sequence takes a fraction of its logits' memory, and is the same.

    python benchmarks/long_context.py [--tokens 4096] [--width 512] [--words 32000] [--dtypes float32,bfloat16]

`plain` is `F.cross_entropy(head(hidden).float(), labels)`, `tiled` is `infinity.tiled_cross_entropy`; each in a process
of its own. A row shows the loss, resident memory at the peak of forward and backward beyond hidden states, weights and
their gradients, the same as a share of the logits in fp32, and seconds. Exit code 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from support.launch import run_ranks
from support.machine import MIB, describe
from support.table import Table, claim

# Of the logits in fp32; and the largest relative difference of the loss and of the weights' gradient norm.
PEAK, APART = 0.34, {"float32": 1e-6, "bfloat16": 1e-3}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--tile-tokens", type=int, default=1024)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    given = parser.parse_args()
    logits_nbytes = 4 * given.tokens * given.words
    print(describe())
    print(f"{given.tokens} tokens, {given.words} words: logits of {logits_nbytes / MIB:.0f} MiB in fp32")
    table = Table("loss:.6f", "gradient:.6f", "MiB:.0f", "of logits:.2f", "s:.2f")
    holds = True
    for dtype in given.dtypes.split(","):
        rows: dict[str, dict[str, Any]] = {}
        for how in ("plain", "tiled"):
            options = {
                "how": how, "dtype": dtype, "tokens": given.tokens, "width": given.width, "words": given.words,
                "tile_tokens": given.tile_tokens,
            }  # fmt: skip
            (rows[how],) = run_ranks("long_loss", options)
            row = rows[how]
            share = row["peak"] / logits_nbytes
            table.row(f"{how}, {dtype}", row["loss"], row["norm"], row["peak"] / MIB, share, row["seconds"])
        apart = max(abs(rows["tiled"][key] / rows["plain"][key] - 1) for key in ("loss", "norm"))
        share = rows["tiled"]["peak"] / logits_nbytes
        claim(f"{dtype}: they are within {apart:.1e} <= {APART[dtype]:.0e}", apart <= APART[dtype])
        claim(f"{dtype}: the peak is {share:.2f} <= {PEAK} of the logits", share <= PEAK)
        holds = holds and apart <= APART[dtype] and share <= PEAK
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
