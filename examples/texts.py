"""The text that the examples train on, cut into sequences."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset):
    """Windows of consecutive tokens; input and labels are the same."""

    def __init__(self, ids: Tensor, positions: int) -> None:
        self.windows = ids[: len(ids) // positions * positions].view(-1, positions)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def load_text(path: str | None) -> str:
    """A file, or the documentation topics in the standard library."""
    if path:
        return Path(path).read_text()
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))
