"""The contents of a checkpoint as plain tensors, to compare checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import check_files, find, read_manifest
from infinity.memory.partition import DTYPES


def contents(directory: Path, tag: str | None = None) -> dict[tuple[str, str], Tensor]:
    """Verify a checkpoint and return (tensor, kind) -> flat tensor."""
    folder = find(directory, tag)
    assert folder is not None, f"no checkpoint {tag} in {directory}"
    manifest = read_manifest(folder)
    found = {}
    with ExtentReader(folder, manifest, check_files(folder, manifest)) as reader:
        for name, info in manifest.tensors.items():
            numel = int(torch.Size(info.shape).numel())
            for kind in info.kinds:
                values = torch.empty(numel, dtype=DTYPES[reader.dtype(name, kind)]) if numel else torch.empty(0)
                reader.read(name, kind, 0, numel, values)
                found[name, kind] = values
        sum(reader.verify())
    return found


def assert_same(first: dict[tuple[str, str], Tensor], second: dict[tuple[str, str], Tensor]) -> None:
    """Assert that two checkpoints have the same bits."""
    assert first.keys() == second.keys()
    for key, values in first.items():
        assert torch.equal(values.view(torch.uint8), second[key].view(torch.uint8)), f"{key} differs"
