"""Memory of `load_hf` and `Init` where an axis divides the model: `python -m tests.load_shards [--axis pipeline]`.

A Llama of 700 M parameters in bf16 is written as safetensors, with values from a generator, and loaded by two ranks
that have a shard each of every matrix, or a stage of the blocks each. The private memory of each rank is sampled from
before `load_hf` until its partitions are filled, and compared with what should bound it: the rank's own partitions, the
largest shard, and 256 MB.
Then whole tensors are put together, a few or all of them, and compared with the files. `Init` builds the same model
from its constructor, with its window of 256 MB beside the bound; its tensors are compared with an ordinary one's.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.checkpoint.weight_files import WeightFolder
from infinity.plan.plan import Plan
from infinity.plan.types import Tier
from infinity.zero.deferred_init import WINDOW_NBYTES
from tests.support.private_memory import PrivatePeak
from tests.support.spawn import run_ranks

RANKS = 2
LARGE = {
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 8000, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """One load on one rank, in bytes and seconds. own: the peak of private memory above that before the load."""

    how: str
    tier: str
    rank: int
    numel: int
    own: int
    partitions: int
    largest: int
    bound: int
    seconds: float
    compared: int


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """Write config.json and one file a layer, with values from a generator."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = LlamaConfig(**sizes, dtype="bfloat16")
    shape.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in AutoModelForCausalLM.from_config(shape).named_parameters()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        files.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for file, names in files.items():
        tensors = {name: torch.randn(shapes[name], generator=generator).bfloat16() for name in names}
        safetensors.torch.save_file(tensors, folder / f"model-{file}.safetensors")
    index = {"weight_map": {name: f"model-{file}.safetensors" for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def settings(tier: str, drive: str, axis: str = "tensor") -> dict[str, Any]:
    """The configuration of a run; all ranks lie along `axis`."""
    home = {"device": tier, "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}},
        "parallel": {axis: RANKS},
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_max_live_parameters": 4e7,
            "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip


def partitions_nbytes(plan: Plan) -> int:
    """Bytes of a rank's partitions in memory, with the buffers of those on a drive."""
    held = sum(spec.nbytes for spec in plan.partitions if spec.home in (Tier.GPU, Tier.CPU))
    return held + plan.pools.param_nbytes + plan.pools.states_nbytes


def _built(folder: str, config: dict[str, Any] | None) -> Any:
    """The folder's model from its constructor, under `Init` if there is a configuration."""
    torch.manual_seed(0)
    with infinity.Init(config=config, enabled=config is not None):
        return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16)


def load(
    rank: int, world: int, folder: str, tier: str, drive: str, every: int, how: str = "load", axis: str = "tensor"
) -> Load:
    """Load the folder, its matrices cut among the ranks, or its blocks; compare each `every`th tensor with its file.

    how: "load", or "init" for the model's constructor instead of its files. axis: "tensor" or "pipeline".
    """
    # What the first use of threads and groups takes is not the model's.
    infinity.init_distributed()
    torch.distributed.barrier()
    gc.collect()
    begin = time.monotonic()
    with ExitStack() as stack:
        with PrivatePeak() as peak:
            config = settings(tier, drive, axis)
            model = infinity.load_hf(folder, config) if how == "load" else _built(folder, config)
            for name, param in model.named_parameters():
                # Optimizer states of all would take six times the memory of the weights.
                param.requires_grad_("norm" in name)
            engine, *_ = infinity.initialize(model=model, config=config)
        stack.enter_context(engine)
        seconds = time.monotonic() - begin
        weights = WeightFolder(Path(folder))
        stack.callback(weights.close)
        named = list(model.named_parameters())
        ordinary = dict(_built(folder, None).named_parameters()) if how == "init" else {}
        for name, param in named[::every]:
            expected = ordinary[name].detach() if how == "init" else weights.tensors[name].whole()
            assert torch.equal(infinity.state(param).master, expected.float()), name
        partitions = partitions_nbytes(engine.plan)
        largest = max(param.nbytes for _, param in named)
    numel = sum(tensor.numel for tensor in weights.tensors.values())
    bound = partitions + largest + WINDOW_NBYTES * (2 if how == "init" else 1)
    compared = len(named[::every])
    return Load(f"{how} {axis}", tier, rank, numel, peak.own, partitions, largest, bound, round(seconds, 1), compared)


def main(argv: list[str] | None = None) -> int:
    """Load on every tier; return 1 if a rank took more memory than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--folder", help="where files go (default: a temporary folder)")
    parser.add_argument("--tiers", nargs="+", default=["cpu", "nvme"])
    parser.add_argument("--axis", choices=["tensor", "pipeline"], default="tensor")
    given = parser.parse_args(argv)
    loads: list[Load] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        make(folder / "model", LARGE)
        for how, tier in [*(("load", tier) for tier in given.tiers), ("init", "nvme")]:
            args = str(folder / "model"), tier, str(folder / "swap"), 20, how, given.axis
            loads += run_ranks(load, RANKS, *args, timeout=1800)
            for each in loads[-RANKS:]:
                print(
                    f"{each.how} {each.tier:5} rank {each.rank} of {RANKS}, {each.numel / 1e6:.0f} M parameters: own "
                    f"{each.own / 1e6:.1f} MB of {each.bound / 1e6:.1f} (partitions {each.partitions / 1e6:.1f}, "
                    f"largest shard {each.largest / 1e6:.1f}), {each.seconds} s, {each.compared} tensors equal",
                    flush=True,
                )
    if given.json:
        command = f"python -m tests.load_shards --axis {given.axis}"
        rows = {"command": command, "loads": [asdict(each) for each in loads]}
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    bad = [each for each in loads if each.own > each.bound]
    print("ok" if not bad else f"{len(bad)} of {len(loads)} loads took more than they may")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
