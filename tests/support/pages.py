"""The fences of README.md, CONTRIBUTING.md and docs/*.md, and the names that a Python block gets before it runs.

The blocks of a page run in one namespace, which has `infinity` and `torch`, and in one folder of their own. An HTML
comment on the line above the fence, which a reader of the rendered page does not see, says more:

    <!-- given: engine, batch -->                              names that the page takes for granted; see `Given`
    <!-- given: model; with {"checkpoint": {"path": "out"}} --> the same, and what `config` has beside its defaults
    <!-- not run: needs a GPU -->                              the block is not run, for this reason

Blocks of console run in a folder that `prepare` has filled (tests/test_docs.py).
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.plan.hardware import ASSUMED, save_profile
from tests.support.hub import hf_model
from tests.support.models import TinyLlama, token_batch

ROOT = Path(__file__).resolve().parents[2]
_DOCS = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *_DOCS)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
_REMARK = re.compile(r"<!-- (?P<word>given|not run): (?P<what>.*?)(?:; with (?P<extra>\{.*\}))? -->\n\Z")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fence with its language, its text and the comment above it."""

    page: str
    # Number of the first line inside the fence, from 1.
    line: int
    language: str
    text: str
    given: tuple[str, ...] = ()
    config: str = "{}"
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the fences of a page in order."""
    for fence in _FENCE.finditer(text):
        above = text[: fence.start()]
        remark = _REMARK.search(above)
        word, what, extra = remark.groups() if remark else ("", "", None)
        names = tuple(name.strip() for name in what.split(",")) if word == "given" else ()
        yield Block(
            page, above.count("\n") + 2, fence["language"], fence["text"], names, extra or "{}",
            what if word == "not run" else "",
        )  # fmt: skip


def shown(page: str) -> list[Block]:
    """Return the fences of one page of this project."""
    return [*blocks(page, (ROOT / page).read_text(encoding="utf-8"))]


class Model(TinyLlama):
    """A language model that returns its loss, with the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self._modules.pop("head")

    @property
    def head(self) -> nn.Module:
        return self.lm_head


def dataset() -> list[dict[str, Tensor]]:
    """Two optimizer steps of the largest batch that a page asks for."""
    return [{name: value[0] for name, value in token_batch(0, step, batch=1).items()} for step in range(32)]


def evaluate(engine: Engine) -> float:
    """Return a loss on data that no block trains on."""
    with torch.no_grad():
        return float(engine(**token_batch(1, 0)))


class Given:
    """Makes what blocks take for granted, once it is asked for: `Given(namespace).make("engine", config)`."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def make(self, name: str, config: dict[str, Any]) -> None:
        """Put `name` into the namespace; KeyError where no page may take it for granted."""
        self._names["config"] = config
        value = self._table()[name](config)
        if value is not None:
            self._names[name] = value

    def _table(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        simple = {
            "batch": token_batch(0, 0), "dataset": dataset(), "data": dataset(), "evaluate": evaluate, "epoch": 0,
            "hidden": torch.randn(2, 16, 32), "labels": token_batch(0, 0)["labels"],
            "ids": token_batch(0, 0)["input_ids"],
        }  # fmt: skip
        makers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "config": lambda config: config,
            "model": lambda config: Model(),
            "block": lambda config: nn.ModuleDict({"mlp": nn.Linear(32, 32)}),
            # What a script for DeepSpeed calls them.
            "net": lambda config: Model(),
            "parameters": lambda config: [*self._names["net"].parameters()],
            "engine": self._engine,
            "loader": lambda config: torch.utils.data.DataLoader(dataset(), batch_size=2),
            # Files.
            "folder": lambda config: hf_model("llama").save_pretrained("folder"),
            "checkpoints": self._checkpoints,
            "profile": lambda config: save_profile(ASSUMED, "profile.json"),
        }
        return makers | {name: lambda config, value=value: value for name, value in simple.items()}

    def _checkpoints(self, config: dict[str, Any]) -> None:
        with infinity.initialize(model=TinyLlama(), config={**config, "bf16": {"enabled": True}})[0] as engine:
            for step in range(1, 5):
                engine.backward(engine(**token_batch(0, step)))
                engine.step()
                if step % 2 == 0:
                    engine.save_checkpoint("checkpoints")

    def _engine(self, config: dict[str, Any]) -> Engine:
        self._names["model"] = Model()
        return infinity.initialize(model=self._names["model"], config=config)[0]


def prepare(folder: Path) -> None:
    """Put into a page's folder what every page may name: configurations, two drives and a small text."""
    configs = ROOT / "examples" / "configs"
    shutil.copytree(configs, folder / "examples" / "configs")
    shutil.copy(configs / "nvme_offload.json", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "small.txt").write_text("The class of an object is what it was made from. " * 300, encoding="utf-8")
    for name in ("drive1", "drive2"):
        (folder / name / "offload").mkdir(parents=True)


def give(block: Block, names: dict[str, Any]) -> None:
    """Make the names that the comment above a block lists."""
    for name in block.given:
        Given(names).make(name, {**CONFIG, **json.loads(block.config)})


def run(block: Block, names: dict[str, Any]) -> None:
    """Run one block of Python in its page's namespace and the current folder, and close the engines that it leaves."""
    before, grouped = engines(), dist.is_initialized()
    try:
        give(block, names)
        # Keep line numbers, so that an error shows the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
        exec(code, names)
    finally:
        for engine in engines():
            if engine not in before:
                engine.close()
        # As a program's own `init_distributed` leaves it.
        if dist.is_initialized() and not grouped:
            dist.destroy_process_group()


def engines() -> list[Engine]:
    """Return all engines of this process."""
    # Not isinstance, because it reads every object's __class__, at which some of torch's objects warn.
    return [found for found in gc.get_objects() if type(found) is Engine]
