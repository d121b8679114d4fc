"""Layouts have the blocks of DeepSpeed 0.17.6's, whose tables were recorded by running its `make_layout`."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity.config import load_config
from infinity.config.sparse_attention import SparseAttention
from infinity.errors import ConfigError
from infinity.plan.block_layouts import BlockLayout, block_layout

DATA = Path(__file__).parents[1] / "data" / "sparse_layouts.json"
# Each head's table in hexadecimal digits, row by row; `seed` is what Python's `random` was seeded with.
RECORDED: list[dict[str, Any]] = json.loads(DATA.read_text())


def section(case: dict[str, Any]) -> SparseAttention:
    """The section of one of DeepSpeed's classes, whose defaults are not all those of its section."""
    keys = dict(case["keys"])
    if case["mode"] == "bigbird":
        keys.setdefault("num_random_blocks", 1)
    if case["mode"] == "local":
        # A window without global blocks.
        return SparseAttention.of(
            {"mode": "bslongformer", "global_block_indices": [], "attention": "unidirectional", **keys}
        )
    return SparseAttention.of({"mode": case["mode"], **keys})


def test_layouts_have_deepspeeds_blocks() -> None:
    assert {case["mode"] for case in RECORDED} == {"dense", "fixed", "variable", "bigbird", "bslongformer", "local"}
    for case in RECORDED:
        sample = random.Random(case["seed"]).sample
        layout = BlockLayout(section(case), case["heads"], case["blocks"], sample)
        tables = [np.packbits(layout.table(head)).tobytes().hex() for head in range(case["heads"])]
        assert tables == case["layout"], case


def test_a_part_is_that_of_the_table() -> None:
    layout = block_layout(SparseAttention(mode="bigbird", num_random_blocks=2), heads=2, blocks=20, seed=3)
    rows, columns = np.array([3, 4, 19]), np.arange(2, 17)
    assert np.array_equal(layout.part(1, rows, columns), layout.table()[rows][:, columns])


def test_a_layout_is_that_of_its_seed_and_made_once() -> None:
    keys = SparseAttention(mode="variable", num_random_blocks=2, different_layout_per_head=True)
    one = block_layout(keys, 2, 16, 5)
    assert block_layout(keys.model_copy(), 2, 16, 5) is one
    assert not np.array_equal(block_layout(keys, 2, 16, 6).table(), one.table())
    assert not np.array_equal(one.table(0), one.table(1))


def test_a_layout_of_a_million_tokens_has_no_table() -> None:
    layout = block_layout(SparseAttention(mode="bslongformer"), 8, 65_536, 0)
    (row,) = layout.part(0, np.array([60_000]), np.arange(65_536))
    assert row.sum() == 4
    assert row[[0, 59_999, 60_000, 60_001]].all()


@pytest.mark.parametrize("window", [None, 1, 40, 48, 49])
def test_keys_of_a_query_are_those_of_the_blocks_of_its_row(window: int | None) -> None:
    for keys in ({"mode": "dense"}, {"mode": "bslongformer"}, {"mode": "bigbird", "num_random_blocks": 2}):
        layout = BlockLayout(SparseAttention.of({"block": 16, **keys}), 2, 24, random.Random(0).sample)
        query, key = np.arange(24 * 16)[:, None], np.arange(24 * 16)[None, :]
        shown = (key <= query) & (query - key < (window or 24 * 16))
        there = shown.reshape(24, 16, 24, 16).any(axis=(1, 3))
        counts = [np.count_nonzero(layout.table(head) & there) for head in range(layout.patterns)]
        assert layout.keys_of_causal(window) == pytest.approx(np.mean(counts) / 24 * 16)


def test_a_layout_is_drawn() -> None:
    small = block_layout(SparseAttention(num_local_blocks=2, attention="unidirectional"), 1, 5, 0)
    assert small.draw() == ["#....", "##...", ".##..", ".###.", ".#.##"]
    large = block_layout(SparseAttention(mode="bslongformer"), 1, 100, 0).draw()
    assert len(large) == 25 and large[10] == "+........+++" + "." * 13


REFUSED = [
    ({"mode": "fixed", "num_global_blocks": 3}, "num_global_blocks is 3, which does not divide num_local_blocks 4"),
    ({"num_different_global_patterns": 5, "different_layout_per_head": True}, "set it to 4 or less"),
    ({"num_different_global_patterns": 2}, "set different_layout_per_head to true"),
    ({"horizontal_global_attention": True, "attention": "unidirectional"}, "leave one of them out"),
    ({"mode": "variable", "local_window_blocks": []}, "such as [4]"),
    ({"mode": "variable", "global_block_end_indices": [1, 2]}, "global_block_indices has 1 numbers"),
    ({"mode": "bslongformer", "global_block_indices": [3], "global_block_end_indices": [3]}, "ends are exclusive"),
    ({"mode": "bigbird", "num_random_blocks": 2, "attention": "unidirectional"}, "the first row has one block"),
    ({"mode": "circular"}, 'sparse_attention.mode: \'circular\' is not usable: expected one of "dense"'),
    ({"block": 0}, "sparse_attention.block: 0 is not usable: expected a whole number of at least 1"),
    ({"layers": "some"}, "sparse_attention.layers"),
]


@pytest.mark.parametrize(("keys", "said"), REFUSED)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], said: str) -> None:
    """In a configuration and in a program."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config({"sparse_attention": keys})
    with pytest.raises(ConfigError, match=re.escape(said)):
        SparseAttention.of(keys)


def test_a_misspelt_key_is_told_the_right_one() -> None:
    with pytest.raises(ConfigError, match="num_local_blocks"):
        load_config({"sparse_attention": {"num_local_block": 4}})


def test_more_random_blocks_than_a_row_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_random_blocks is 3, and 32 tokens are 2 blocks of 16: set it to 2"):
        block_layout(SparseAttention(mode="variable", num_random_blocks=3), 1, 2, 0)
