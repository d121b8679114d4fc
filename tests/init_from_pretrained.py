"""Memory and values of `from_pretrained` at stage 3: `python -m tests.init_from_pretrained [--json FILE]`.

A GPT-2 of 124 M random parameters is saved as safetensors and as .bin, in one file and in shards. transformers loads it
as it does under DeepSpeed's stage 3, on one and two ranks, with parameters on NVMe and in CPU memory; then it trains.
Losses and weights are compared with plain torch. The private memory of every rank while it loads is sampled (pages of
the mapped weight files apart) and compared with what should bound it: the rank's own partitions where they stay in
memory, the window of 256 MB, and the largest unit.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
from infinity.zero.deferred_init import WINDOW_NBYTES
from tests.support.private_memory import PrivatePeak
from tests.support.spawn import run_ranks
from tests.support.zero3_names import transformers_at_stage_3

FORMATS = ("safetensors", "safetensors sharded", "bin", "bin sharded")
STEPS, TOKENS, RATE = 2, 32, 1e-3


@dataclass(frozen=True)
class Case:
    """One load on one rank, in bytes and seconds. own, files: peaks of private memory above that before the load."""

    format: str
    tier: str
    ranks: int
    rank: int
    own: int
    files: int
    bound: int
    seconds: float
    equal: bool
    trained: bool
    losses: list[float]
    difference: float


def settings(tier: str, folder: str, ranks: int) -> dict[str, Any]:
    """Return the configuration of a run."""
    home = {"device": tier, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home},
    }


def save(folder: Path, size: dict[str, int]) -> None:
    """Save one model in every format."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    nbytes = sum(param.nbytes for param in model.parameters())
    for name in FORMATS:
        target = folder / name.replace(" ", "-")
        if name.startswith("safetensors"):
            model.save_pretrained(target, max_shard_size=nbytes // 4 if "sharded" in name else 2 * nbytes)
            continue
        model.config.save_pretrained(target)
        values = model.state_dict()
        del values["lm_head.weight"]
        names = list(values)
        parts = [names[start::3] for start in range(3)] if "sharded" in name else [names]
        if len(parts) == 1:
            torch.save(values, target / "pytorch_model.bin")
            continue
        files = {f"pytorch_model-{index + 1:05}-of-00003.bin": part for index, part in enumerate(parts)}
        for file, part in files.items():
            torch.save({each: values[each].clone() for each in part}, target / file)
        placed = {each: file for file, part in files.items() for each in part}
        index = {"metadata": {"total_size": nbytes}, "weight_map": placed}
        (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def batch(step: int, rank: int, vocabulary: int) -> Tensor:
    """Return one rank's tokens of a step."""
    return torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))


def train_plain(rank: int, world: int, path: str, ranks: int) -> dict[str, Any]:
    """Train with torch alone on the batches of all ranks; return the mean losses, and some weights before and after."""
    model = GPT2LMHeadModel.from_pretrained(path).train()
    loaded = sample(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        each = [batch(step, index, model.config.vocab_size) for index in range(ranks)]
        tokens = torch.cat(each)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "loaded": loaded, "weights": sample(model)}


def sample(named: nn.Module | list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return some elements of each weight."""
    pairs = named.named_parameters() if isinstance(named, nn.Module) else named
    return {name: param.detach().reshape(-1)[::97][:1000].clone() for name, param in pairs}


def load(rank: int, world: int, path: str, tier: str, folder: str, train: bool) -> dict[str, Any]:
    """Load under `infinity.Init`, and train; the returned memory is that of the load."""
    config = settings(tier, folder, world)
    with transformers_at_stage_3(config):
        # What the first use of a thread, a group and a format takes is not the model's.
        infinity.init_distributed()
        if world > 1:
            torch.distributed.barrier()
        gc.collect()
        begin = time.monotonic()
        with PrivatePeak() as peak:
            model = GPT2LMHeadModel.from_pretrained(path).train()
        seconds = time.monotonic() - begin
    total = sum(param.nbytes for param in model.parameters())
    largest = model.transformer.wte.weight.nbytes + model.transformer.wpe.weight.nbytes
    own = -(-total // world) if tier == "cpu" else 0
    found = {
        "own": peak.own, "files": peak.files, "bound": own + WINDOW_NBYTES + largest, "seconds": seconds,
        "samples": peak.samples,
    }  # fmt: skip
    found["loaded"] = {}
    for name, module in model.named_modules():
        # A module at a time: the whole model is not gathered.
        params = list(module.named_parameters(prefix=name, recurse=False))
        with infinity.read([param for _, param in params]):
            found["loaded"] |= sample(params)
    if not train:
        return found
    engine, *_ = infinity.initialize(model=model, config=config)
    losses = []
    with engine:
        for step in range(STEPS):
            tokens = batch(step, rank, model.config.vocab_size)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with infinity.read(model):
            found["weights"] = sample(model)
    return {**found, "losses": losses}


def main(argv: list[str] | None = None) -> int:
    """Run every case; return 1 if one is out of bounds or differs from plain torch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--folder", help="where checkpoints and swap files go (default: a temporary folder)")
    parser.add_argument("--tiers", nargs="+", default=["nvme", "cpu"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    given = parser.parse_args(argv)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        save(folder, {})
        (folder / "swap").mkdir()
        for ranks in given.ranks:
            plain = run_ranks(train_plain, 1, str(folder / "safetensors"), ranks, timeout=900)[0]
            for tier in given.tiers:
                for name in FORMATS:
                    # One format a tier is trained: what the others load is compared with it.
                    train = name == FORMATS[0]
                    path = str(folder / name.replace(" ", "-"))
                    rows = run_ranks(load, ranks, path, tier, str(folder / "swap"), train, timeout=900)
                    cases += [_case(name, tier, ranks, rank, row, rows, plain) for rank, row in enumerate(rows)]
                    for case in cases[-ranks:]:
                        print(_line(case), flush=True)
    if given.json:
        rows = {"command": "python -m tests.init_from_pretrained", "cases": [asdict(case) for case in cases]}
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    bad = [case for case in cases if not case.equal or case.own > case.bound or case.difference > 1e-3]
    print("ok" if not bad else f"{len(bad)} of {len(cases)} cases are out of bounds")
    return bool(bad)


def _case(name: str, tier: str, ranks: int, rank: int, row: dict[str, Any], rows: Any, plain: Any) -> Case:
    losses, difference = row.get("losses", []), 0.0
    if losses:
        mean = [sum(each) / ranks for each in zip(*(other["losses"] for other in rows), strict=True)]
        difference = max(abs(ours - theirs) for ours, theirs in zip(mean, plain["losses"], strict=True))
        difference = max(
            [difference, *((row["weights"][key] - value).abs().max().item() for key, value in plain["weights"].items())]
        )
    # A tied weight has two names here, and one there.
    equal = all(torch.equal(row["loaded"][key], value) for key, value in plain["loaded"].items())
    return Case(
        name, tier, ranks, rank, row["own"], row["files"], row["bound"], round(row["seconds"], 2), equal, bool(losses),
        losses, difference,
    )  # fmt: skip


def _line(case: Case) -> str:
    trained = f", trains (largest difference {case.difference:.1e})" if case.trained else ""
    return (
        f"{case.format:20} {case.tier:5} rank {case.rank} of {case.ranks}: own {case.own / 1e6:7.1f} MB of "
        f"{case.bound / 1e6:7.1f}, pages of files {case.files / 1e6:7.1f} MB, {case.seconds:.1f} s{trained}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
