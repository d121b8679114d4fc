"""A model that an axis divides is loaded from files part by part: no rank ever has a whole matrix of a tensor axis, nor
the blocks of another stage of a pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint.weight_files import SafetensorsFile
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


def load_stage(rank: int, world: int, folder: str, drive: str) -> tuple[load_shards.Load, int]:
    """The load, and the bytes that this rank has read for it."""
    read, plain = [0], SafetensorsFile.read_into

    def counted(self: SafetensorsFile, offset: int, target: memoryview) -> None:
        read[0] += len(target)
        plain(self, offset, target)

    SafetensorsFile.read_into = counted  # type: ignore[method-assign]
    try:
        # Compares the first tensor, the table of the first stage, by a read of its own.
        return load_shards.load(rank, world, folder, "cpu", drive, 1000, "load", "pipeline"), read[0]
    finally:
        SafetensorsFile.read_into = plain  # type: ignore[method-assign]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the kernel's figures of mappings")
def test_a_stage_is_loaded_in_its_own_memory_and_reads_no_other_stage(tmp_path: Path, rank_pools: Any) -> None:
    sizes = SIZES | {"vocab_size": 8000, "num_hidden_layers": 8, "tie_word_embeddings": False}
    load_shards.make(tmp_path / "first", sizes | {"vocab_size": 64, "num_hidden_layers": 2})
    load_shards.make(tmp_path / "model", sizes)
    rank_pools[2].run(load_stage, str(tmp_path / "first"), str(tmp_path / "swap"))
    for found, read in rank_pools[2].run(load_stage, str(tmp_path / "model"), str(tmp_path / "swap")):
        stored, table = 2 * found.numel, 2 * 8000 * 512
        assert found.partitions < 0.6 * stored
        assert found.own <= found.partitions + found.largest, found
        # The stage's own weights once, and the table that is compared; some bytes are headers.
        assert read <= found.partitions + table + 100_000, (read, found)
