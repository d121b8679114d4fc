"""`infinity config explain` shows what `initialize` takes, for every key; what only a program can say is said so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import main
from infinity.config import ResolveContext, load_config, resolve
from infinity.config.explain import meanings
from infinity.config.section import Absent, Honoured, mark, reply_of, section_leaves, sections_of
from infinity.distributed.groups import detect
from infinity.engine.initialize import _resolve
from infinity.errors import ConfigError
from tests.support.cells import kept

_OFFLOAD = {"offload_param": {}, "offload_optimizer": {}}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "warm-up": {
        "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 3, **_OFFLOAD},
    },
    "decay": {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
    "cosine": {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
    "cycle": {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
    "range": {"optimizer": {"type": "Lion"}, "scheduler": {"type": "LRRangeTest"}},
}  # fmt: skip
# The first has all sections.
DOCUMENT = pytest.mark.parametrize("document", kept(list(DOCUMENTS), ["warm-up"]))
HIDDEN = 8


def model() -> nn.Module:
    made = nn.Linear(HIDDEN, HIDDEN).to(torch.bfloat16)
    made.config = SimpleNamespace(hidden_size=HIDDEN)
    return made


def explained(raw: Any, tmp_path: Path, capsys: Any, *words: str) -> tuple[dict[str, str], str]:
    """Key -> "value  (source)" as the command prints it, and what it complains about."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(raw))
    code = main(["config", "explain", str(file), *words])
    said = capsys.readouterr()
    assert code == (2 if said.err else 0)
    return dict(line.split(" = ", 1) for line in said.out.splitlines() if "  (" in line), said.err


def initialized(raw: Any, tmp_path: Path) -> tuple[dict[str, str], str]:
    """The same of the configuration that initialize() makes, or what it refuses."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(raw))
    try:
        resolved = _resolve(load_config(file), model(), detect(), None, None)
    except ConfigError as error:
        return {}, str(error)
    return dict(line.split(" = ", 1) for line in resolved.explain().splitlines()), ""


def with_auto(raw: dict[str, Any], path: str) -> dict[str, Any]:
    made = place = json.loads(json.dumps(raw))
    *sections, name = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = "auto"
    return made


def keys(document: dict[str, Any]) -> list[str]:
    found = section_leaves(resolve(load_config(document), ResolveContext()).sections)
    return [leaf.path for leaf in found if not sections_of(leaf.field) and not mark(leaf.field, Absent)]


@DOCUMENT
def test_every_auto_is_shown_as_initialize_takes_it(document, tmp_path, capsys):
    for path in keys(DOCUMENTS[document]):
        raw = with_auto(DOCUMENTS[document], path)
        taken, refused = initialized(raw, tmp_path)
        shown, complaint = explained(raw, tmp_path, capsys, "--hidden", str(HIDDEN), "--dtype", "bf16")
        if not refused:
            assert shown == taken, path
        elif not complaint:
            # Only a program can fill it, and initialize() says so where none did.
            assert f"{path}: \"auto\" is refused: " in refused or f"{path} is required" in refused
            assert shown[path].startswith("auto  (auto: for the program that trains to fill; initialize() refuses it")
            assert refused.rpartition(": ")[2] in shown[path]
        else:
            assert complaint == f"infinity config: {refused}\n", path


@DOCUMENT
def test_without_a_model_nothing_is_shown_that_a_model_would_change(document, tmp_path, capsys):
    """A value is shown only where every program gets it: otherwise it is "auto", with who decides."""
    for path in keys(DOCUMENTS[document]):
        raw = with_auto(DOCUMENTS[document], path)
        taken, refused = initialized(raw, tmp_path)
        shown, complaint = explained(raw, tmp_path, capsys)
        if refused or complaint:
            continue
        for key, line in shown.items():
            assert line.split("  (")[0] in ("auto", taken[key].split("  (")[0]), (path, key)


def test_a_filled_in_engine_has_what_explain_shows(tmp_path, capsys):
    """The whole of initialize(), for a file as a trainer's users write it."""
    raw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    raw = with_auto(with_auto(raw, "bf16.enabled"), "aio.block_size")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(with_auto(raw, "zero_optimization.stage3_param_persistence_threshold")))
    engine, *_ = infinity.initialize(model=model(), config=str(file))
    with engine:
        taken = engine.config.explain().splitlines()
    assert main(["config", "explain", str(file), "--hidden", str(HIDDEN), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.splitlines() == [*taken, *engine.config.report()]
    assert "bf16.enabled = true  (auto: the model is bf16)" in taken


def test_the_optimizer_that_no_file_names_is_shown(tmp_path, capsys):
    shown, _ = explained({}, tmp_path, capsys)
    assert (shown["optimizer.type"], shown["optimizer.params.lr"]) == ("AdamW  (default)", "0.001  (default)")


def test_a_number_that_does_not_count_is_not_shown(tmp_path, capsys):
    raw: dict[str, Any] = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "drive"}}
    path = "zero_optimization.offload_param.max_in_cpu"
    shown, _ = explained({"zero_optimization": raw}, tmp_path, capsys)
    assert shown[path] == "0  (default: only a number that is written counts)"
    raw["offload_param"]["max_in_cpu"] = 1000
    assert explained({"zero_optimization": raw}, tmp_path, capsys)[0][path] == "1000  (file)"


# Keys of which "none" is the whole truth: no such path, name, group or list.
NONE_IS_NONE = {
    "optimizer", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param",
    "zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.leaf_module.names",
    "zero_optimization.leaf_module.name_suffixes", "sparse_attention", "timeline.path", "wandb.group", "wandb.team",
    "activation_checkpointing.keep_ops", "checkpoint.path", "checkpoint.on_signal",
}  # fmt: skip


@pytest.mark.parametrize("document", ["warm-up", "decay", "cosine", "cycle"])
def test_an_absent_value_is_said_in_words(document):
    config = resolve(load_config(DOCUMENTS[document]), ResolveContext()).sections
    bare = [
        leaf.path for leaf in section_leaves(config)
        if leaf.value in (None, ()) and not mark(leaf.field, Absent)
        and (sections_of(leaf.field) or isinstance(reply_of(leaf.field), Honoured))
    ]  # fmt: skip
    assert set(bare) - set(meanings(config, "fp32")) <= NONE_IS_NONE


def test_who_trains_with_a_trainer_is_told_who_fills_in_a_rate(tmp_path, capsys):
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    }
    shown, complaint = explained(raw, tmp_path, capsys)
    assert not complaint
    for path in ("optimizer.params.lr", "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"):
        assert shown[path].startswith("auto  (auto: for the program that trains to fill")
