"""A model that a tensor axis cuts is loaded from files shard by shard: no rank ever has a whole matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import load_shards

# Most of it is one table, of 33 MB.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the kernel's figures of mappings")
def test_shards_of_files_take_the_memory_of_partitions_and_one_shard(tmp_path: Path, rank_pools: Any) -> None:
    load_shards.make(tmp_path / "first", SIZES | {"vocab_size": 64})
    load_shards.make(tmp_path / "model", SIZES)
    # What the first load of a process takes is not the model's.
    rank_pools[2].run(load_shards.load, str(tmp_path / "first"), "cpu", str(tmp_path / "swap"), 1)
    for found in rank_pools[2].run(load_shards.load, str(tmp_path / "model"), "cpu", str(tmp_path / "swap"), 1):
        assert found.compared == 11
        assert found.largest == 32000 * 512
        # A whole table would take twice the shard.
        assert found.own <= found.partitions + found.largest, found
