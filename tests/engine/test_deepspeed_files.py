"""Configurations as DeepSpeed's users have them: each trains under DeepSpeed's conventions, or says why it cannot.

tests/data/ds_configs has the keys and values of published files and of dictionaries that programs make;
tests/data/ds_configs.json says where each is from, which keys are ignored, and the reason of a refusal.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.config import DEEPSPEED, load_config
from infinity.config.load import without_comments
from infinity.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"
INDEX: dict[str, dict[str, Any]] = json.loads((DATA / "ds_configs.json").read_text())
HIDDEN = 16
# A dynamic loss scale of 2**32 is halved every other step until gradients are finite in fp16.
MICRO_STEPS_MAX = 80


class Tiny(nn.Module):
    """A model with the one attribute that clients ask a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.embed = nn.Embedding(32, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.flatten())


def arguments(precision: str) -> SimpleNamespace:
    """What transformers' TrainingArguments fill in."""
    return SimpleNamespace(
        world_size=1, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_grad_norm=1.0,
        learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.01,
        save_on_each_node=False, fp16=precision == "fp16", bf16=precision == "bf16", fp16_full_eval=False,
        bf16_full_eval=False, get_warmup_steps=lambda steps: 2,
    )  # fmt: skip


def filled(raw: dict[str, Any], precision: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return `raw` with every "auto" as transformers' Trainer fills it."""
    client = pytest.importorskip("transformers.integrations.deepspeed")
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    # The class asks for a package deepspeed, and makes itself the process's configuration.
    for name in ("dep_version_check", "set_hf_deepspeed_config"):
        monkeypatch.setattr(client, name, lambda given: None)

    class Filled(client.HfTrainerDeepSpeedConfig, accelerate.HfDeepSpeedConfig):
        def fill_match(self, key: str, value: Any, given: str | None = None, must_match: bool = True) -> None:
            # The Trainer's arguments may differ from the values in the file.
            super().fill_match(key, value, given, must_match=False)

    config, given = Filled(raw), arguments(precision)
    config.trainer_config_process(given)
    config.trainer_config_finalize(given, model, num_training_steps=10)
    return config.config


def read(name: str) -> dict[str, Any]:
    return json.loads(without_comments((DATA / "ds_configs" / f"{name}.json").read_text()))


def here(raw: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return `raw` with the facts of this machine: its folder, one rank, and the monitors that are installed."""
    raw = copy.deepcopy(raw)
    zero = raw.get("zero_optimization")
    for section in (zero if isinstance(zero, dict) else {}).values():
        if isinstance(section, dict) and section.get("nvme_path"):
            section["nvme_path"] = str(tmp_path)
    if isinstance(raw.get("train_micro_batch_size_per_gpu"), int):
        if isinstance(raw.get("train_batch_size"), int):
            del raw["train_batch_size"]
        if isinstance(raw.get("gradient_accumulation_steps"), int):
            raw["gradient_accumulation_steps"] = min(raw["gradient_accumulation_steps"], 2)
    if monitor := raw.get("tensorboard"):
        monitor["output_path"] = str(tmp_path)
        monitor["enabled"] = monitor["enabled"] and importlib.util.find_spec("tensorboard") is not None
    return raw


def train(raw: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    engine, *_ = infinity.initialize(model=model, config=raw, optimizer=optimizer, conventions=DEEPSPEED)
    try:
        generator = torch.Generator().manual_seed(0)
        for _ in range(MICRO_STEPS_MAX):
            loss = engine(torch.randint(32, (2, 8), generator=generator))
            assert math.isfinite(loss.item())
            engine.backward(loss)
            engine.step()
            if engine.global_steps > engine.skipped_steps:
                break
        assert engine.global_steps > engine.skipped_steps, "no step was applied"
    finally:
        engine.close()


@pytest.mark.parametrize("name", [name for name, row in INDEX.items() if "refused" not in row])
def test_a_file_trains_and_what_is_ignored_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row, raw = INDEX[name], here(read(name), tmp_path)
    torch.manual_seed(0)
    # Some clients build the model before they fill in what is "auto".
    with infinity.Init(config=raw, conventions=DEEPSPEED):
        model = Tiny()
    if row["client"] == "transformers":
        raw = filled(raw, row["precision"], model, monkeypatch)
    monkeypatch.setattr(infinity.log, "_said", set())
    train(raw, model, None if "optimizer" in raw else torch.optim.AdamW)
    ignored = load_config(raw, conventions=DEEPSPEED).provenance.foreign
    assert sorted(ignored) == row.get("ignored", [])
    for sentence in ignored.values():
        assert caplog.text.count(sentence) == 1, "each is logged, once"


@pytest.mark.parametrize("name", [name for name, row in INDEX.items() if "refused" in row])
def test_a_file_is_refused_with_a_reason_to_act_on(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(model=Tiny(), config=here(read(name), tmp_path), conventions=DEEPSPEED)
    assert INDEX[name]["refused"] in str(caught.value)


def test_the_index_lists_every_file_and_enough_of_them() -> None:
    assert sorted(INDEX) == sorted(path.stem for path in (DATA / "ds_configs").glob("*.json"))
    assert len(INDEX) >= 40 and all(row["origin"] for row in INDEX.values())


def test_a_file_with_comments_and_trailing_commas_loads_from_its_path() -> None:
    path = DATA / "ds_configs" / "gpt_neox_base.json"
    assert load_config(path, conventions=DEEPSPEED).train_batch_size == 256
    with pytest.raises(ConfigError, match="Comments and trailing commas are not JSON"):
        load_config(path)


def test_a_foreign_key_is_a_warning_once_and_an_error_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infinity.log, "_said", set())
    raw = {"train_batch_size": 1, "a_key_of_mine": 1, "optimizer": {"type": "AdamW"}}
    for _ in range(2):
        train(raw, Tiny(), None)
    warnings = [record for record in caplog.records if "a_key_of_mine" in record.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]
    with pytest.raises(ConfigError, match="a_key_of_mine: unknown key"):
        infinity.initialize(model=Tiny(), config=raw)


def test_infinite_steps_per_print_prints_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    csv = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    for every, lines in ((1, 1), (math.inf, 0)):
        caplog.clear()
        with caplog.at_level("INFO", "infinity"):
            train({"steps_per_print": every, "csv_monitor": csv}, Tiny(), torch.optim.AdamW)
        assert sum("gradient norm" in record.getMessage() for record in caplog.records) == lines, caplog.text
    assert any((tmp_path / "run").glob("*.csv")), "monitors go on"


class Floats(nn.Module):
    """Takes floating-point inputs inside a tuple, and beside them one that no cast reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: tuple[Tensor, Tensor], *, weight: Tensor) -> Tensor:
        values, ids = inputs
        assert ids.dtype == torch.long and weight.dtype == torch.float32
        return (self.linear(values).float() * weight).sum()


@pytest.mark.parametrize("auto_cast", [True, False])
def test_auto_cast_casts_forwards_positional_inputs(auto_cast: bool) -> None:
    raw = {"fp16": {"enabled": True, "auto_cast": auto_cast}, "optimizer": {"type": "AdamW"}}
    engine, *_ = infinity.initialize(model=Floats(), config=raw)
    inputs = (torch.ones(2, 4), torch.ones(2, dtype=torch.long))
    try:
        if auto_cast:
            engine.backward(engine(inputs, weight=torch.ones(4)))
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                engine(inputs, weight=torch.ones(4))
    finally:
        engine.close()


def test_a_scheduler_of_the_program_comes_before_one_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    raw = {"optimizer": {"type": "AdamW"}, "scheduler": schedule}
    with pytest.raises(ConfigError, match='total_num_steps: "auto" is refused'):
        infinity.initialize(model=Tiny(), config=raw)
    with caplog.at_level("INFO", "infinity"):
        engine, *_, scheduler = infinity.initialize(
            model=Tiny(), config=raw, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
        )
    engine.close()
    assert type(scheduler).__name__ == "ConstantLR"
    assert "scheduler: no effect here: the program passes its own" in caplog.text
