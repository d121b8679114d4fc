"""Checkpoints for the tests of damaged metadata: small, real, and everything in them that a checkpoint can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.checkpoint.format import MANIFEST
from infinity.ops.crc32c import checksum
from tests.checkpoint import cells
from tests.checkpoint.exporting import config, tokens
from tests.support.hostile import sealed
from tests.support.hub import hf_model

CELLS = [
    {"stage": 3, "param": "cpu", "optimizer": "cpu", "dtype": "bf16"},
    {"stage": 2, "param": "gpu", "optimizer": "cpu", "dtype": "fp32"},
]
CLIENT = {"epoch": 3, "mask": torch.arange(5), "path": ("a", 1.5, None), "counts": {1: 2}, "raw": b"\0\1"}


def save(rank: int, world: int, folder: str) -> None:
    """A checkpoint of each cell in FOLDER/DTYPE-WORLD; of one rank also a transformers model's in FOLDER/hub."""
    cells.join(world)
    for cell in CELLS:
        with cells.engine_of(Path(folder) / "nvme", cell) as engine:
            for _ in cells.train(engine, 2):
                pass
            engine.save_checkpoint(f"{folder}/{cell['dtype']}-{world}", client_state=CLIENT)
    if world == 1:
        with hub_engine(folder) as engine:
            engine.save_checkpoint(f"{folder}/hub")


def hub_engine(folder: str) -> Any:
    """An engine on a transformers model that has made one step."""
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=config(f"{folder}/nvme", "bf16", tier="cpu"))
    engine.backward(engine(input_ids=tokens(0), labels=tokens(0)).loss)
    engine.step()
    return engine


def copied(source: Path, target: Path) -> Path:
    """A checkpoint's folder with the same data files (further names of them) and metadata of its own."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        new = target / path.name
        if path.suffix == ".json":
            new.write_bytes(path.read_bytes())
        elif not new.exists():
            new.hardlink_to(path)
    return target


def change_manifest(folder: Path, text: bytes) -> None:
    """Put a body with a checksum that fits into a folder's manifest."""
    (folder / MANIFEST).write_bytes(sealed(text))


def change_index(folder: Path, manifest: dict[str, Any], rank: int, text: bytes) -> dict[str, Any]:
    """Put a body into a rank's index; returns the manifest's body that vouches for it."""
    data = sealed(text)
    info = {**manifest["ranks"][rank], "nbytes": len(data), "crc32c": checksum(data)}
    (folder / info["name"]).write_bytes(data)
    return {**manifest, "ranks": [*manifest["ranks"][:rank], info, *manifest["ranks"][rank + 1 :]]}


def body_of(path: Path) -> Any:
    """What a metadata file says."""
    return json.loads(path.read_text())["body"]


def hostile(source: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy whose manifest was changed, with a checksum that fits."""
    copied(source, target)
    body = body_of(target / "manifest.json")
    change(body)
    change_manifest(target, json.dumps(body).encode())
    return target
