"""What is accepted, what is refused, and how it is said."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infinity.config import Config, Share, load_config
from infinity.errors import ConfigError


def _refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return str(caught.value)


def test_the_package_imports_no_torch() -> None:
    code = "import infinity.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_kind_of_source_gives_the_same_configuration(tmp_path: Path) -> None:
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw))
    configs = [load_config(source) for source in (raw, json.dumps(raw), str(path), path)]
    assert all(config == configs[0] for config in configs)
    assert load_config(configs[0]) is configs[0]
    assert configs[0].zero_optimization.stage == 2


def test_nothing_means_every_default() -> None:
    assert load_config(None) == load_config({}) == load_config("{}") == Config()


def test_a_configuration_is_frozen_hashable_and_travels() -> None:
    config = load_config({"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}, "gradient_clipping": "auto"})
    with pytest.raises(ValidationError):
        config.train_batch_size = 4
    with pytest.raises(ValidationError):
        config.zero_optimization.stage = 3
    assert hash(config) == hash(load_config(config.model_dump()))
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert copied.provenance.autos == {"gradient_clipping"}


def test_the_caller_keeps_its_dictionary_unchanged() -> None:
    raw = {
        "zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": False},
        "bfloat16": {"enabled": "true"},
    }
    before = json.dumps(raw)
    load_config(raw)
    assert json.dumps(raw) == before


OFFLOAD_PATH = "zero_optimization.offload_param.nvme_path"


@pytest.mark.parametrize(
    ("raw", "path", "value"),
    [
        ({"train_batch_size": "8"}, "train_batch_size", 8),
        ({"train_batch_size": 57.6}, "train_batch_size", 58),
        ({"zero_optimization": {"reduce_bucket_size": 5e8}}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"zero_optimization": {"sub_group_size": "1e9"}}, "zero_optimization.sub_group_size", 10**9),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", 3),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"zero_optimization": {"prefetch_bucket_size": 7}}, "zero_optimization.stage3_prefetch_bucket_size", 7),
        ({"zero_optimization": None}, "zero_optimization.stage", 0),
        ({"bf16": {"enabled": "False"}}, "bf16.enabled", False),
        ({"bfloat16": {"enabled": 1}}, "bf16.enabled", True),
        ({"aio": {"block_size": "262144"}}, "aio.block_size", 262144),
        ({"aio": {"thread_count": "4"}}, "aio.intra_op_parallelism", 4),
        ({"gradient_clipping": "0.5"}, "gradient_clipping", 0.5),
        ({"communication_data_type": "bfloat16"}, "communication_data_type", "bf16"),
        ({"optimizer": {"type": "adamw"}}, "optimizer.type", "AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}}, "optimizer.params.lr", 1e-4),
        ({"memory": {"cpu": {"max_bytes": "16GB"}}}, "memory.cpu.max_bytes", 16 * 10**9),
        ({"memory": {"cpu": {"max_bytes": "80%"}}}, "memory.cpu.max_bytes", Share(0.8)),
        ({"memory": {"cpu": {"max_bytes": "auto"}}}, "memory.cpu.max_bytes", None),
        ({"memory": {"cpu": {"max_bytes": None}}}, "memory.cpu.max_bytes", None),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/d"}}},
            "zero_optimization.offload_optimizer.nvme_path",
            ("/d",),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ["/d", "/e"]}}},
            "zero_optimization.offload_optimizer.nvme_path",
            ("/d", "/e"),
        ),
        ({"aio": {"drive_weights": [2, "1.5"]}}, "aio.drive_weights", (2.0, 1.5)),
        ({"aio": {"checksum": "true"}}, "aio.checksum", True),
        ({"aio": {"checksum": "Sampled"}}, "aio.checksum", "sampled"),
        ({"log_level": "INFO"}, "log_level", "info"),
        ({"zero_optimization": {"offload_param": {"nvme_path": "~/$DRIVE/x"}}}, OFFLOAD_PATH, ("/tmp/me/fast/x",)),
        ({"zero_optimization": {"offload_param": {"nvme_path": ["/a", "${DRIVE}"]}}}, OFFLOAD_PATH, ("/a", "fast")),
        # accelerate writes it where its own settings have no path.
        ({"zero_optimization": {"offload_param": {"nvme_path": "none"}}}, OFFLOAD_PATH, None),
        ({"checkpoint": {"path": "~/runs"}}, "checkpoint.path", "/tmp/me/runs"),
        ({"timeline": {"path": "$DRIVE/a.html"}}, "timeline.path", "fast/a.html"),
    ],
)
def test_values_are_taken_as_what_they_mean(
    raw: dict[str, Any], path: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/tmp/me")
    monkeypatch.setenv("DRIVE", "fast")
    found: Any = load_config(raw)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (
            {"train_batch_size": "eight"},
            "train_batch_size: 'eight' is not usable: expected a whole number of at least 1",
        ),
        ({"train_batch_size": 0}, "expected a whole number of at least 1"),
        ({"train_batch_size": True}, "expected a whole number"),
        ({"train_batch_size": [8]}, "expected a whole number"),
        ({"gradient_clipping": -1}, "expected a finite number of at least 0"),
        ({"aio": {"drive_weights": [1, 0]}}, "aio.drive_weights: [1, 0] is not usable: expected a list of finite"),
        ({"aio": {"drive_weights": 1}}, "expected a list of finite numbers above 0"),
        (
            {"zero_optimization": {"offload_param": {"nvme_path": []}}},
            "expected a folder on a drive, or a list of one folder a drive",
        ),
        ({"gradient_clipping": "inf"}, "expected a finite number"),
        ({"watchdog_seconds": 2**63}, "watchdog_seconds: 9223372036854775808 is not usable: expected a number of sec"),
        ({"zero_optimization": {"offload_param": {"nvme_path": "/a/$NOT_SET"}}}, "has no variable $NOT_SET: set it"),
        ({"zero_optimization": {"offload_param": {"nvme_path": "~nobody_here/a"}}}, "no home folder ~nobody_here"),
        ({"checkpoint": {"path": "a\0b"}}, "a path has no NUL character"),
        # What a message shows of a value is enough to see where it is wrong.
        (
            {"aio": {"drive_weights": [*range(1, 10), "half"]}},
            "aio.drive_weights: [1, 2, 3, 4, 5, 6, 7, 8, 9, 'half'] is not usable",
        ),
        ({"gradient_clipping": None}, "gradient_clipping: None is not usable"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale: True"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: -1"),
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled: 'maybe' is not usable: expected true or false"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not usable: expected 0, 1, 2 or 3"),
        ({"zero_optimization": 3}, "zero_optimization: 3 is not a section"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "zero_optimization.offload_param: 'cpu' is not a section"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
            """offload_optimizer.device: 'disk' is not usable: expected one of "none", "cpu", "nvme\"""",
        ),
        ({"optimizer": {}}, "optimizer.type is required"),
        ({"optimizer": {"type": 3}}, "optimizer.type: 3"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "below 1"),
        ({"scheduler": {"params": {}}}, "scheduler.type is required: one of"),
        ({"scheduler": {"type": "Warmup"}}, "scheduler.type: 'Warmup' is not one of"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
            "scheduler.params.warmup_type: 'cosine' is not usable",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}, "unknown key"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps is required by WarmupDecayLR"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.params.cycle_max_lr is required by OneCycle"),
        ({"memory": {"cpu": {"max_bytes": "much"}}}, "memory.cpu.max_bytes: 'much' is not usable: expected an amount"),
        ({"scheduler": {"type": ["WarmupLR"]}}, "scheduler.type: ['WarmupLR'] is not one of"),
        ({"zero_optimization": {"cpu_offload_use_pin_memory": "x"}}, "cpu_offload_use_pin_memory is 'x'"),
        ({"zero_optimization": {"grad_hooks": True}}, "nothing like it exists"),
        ({"aio": {"xyz": 1}}, "unknown key; the keys of aio are block_size, "),
        ({1: 2}, "1: unknown key"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_path(raw: dict[Any, Any], sentence: str) -> None:
    assert sentence in _refusal(raw)


@pytest.mark.parametrize(
    ("raw", "sentence", "way_out"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true", "keep one"),
        ({"fp16": {"enabled": True}, "check_grad_overflow": False}, "fp16.enabled is true", "use bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "check_grad_overflow": False}, "loss scale", "remove"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3", "stage to 3"),
        ({"zero_optimization": {"cpu_offload_param": True}}, "needs stage 3", "stage to 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "without a path", "nvme_path"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "none"}, "stage": 3}},
            'nvme_path is "none", which accelerate writes where it knows none', "deepspeed_config_file",
        ),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "1.5", "a number from 0 to 1"),
        ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {}}}, "both given", "keep offload_optimizer"),
        ({"zero_optimization": {"cpu_offload": "perhaps"}}, "'perhaps'", "expected true or false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/b", "/a"]}}},
            "/a is named twice",
            "name each folder once",
        ),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 1}}}, "'Lamb' is refused", 'Set the type to "AdamW"'),
        ({"optimizer": {"type": "auto"}}, '"auto" is refused', "name the type"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/b"]},
                }
            },
            "differ (/a and /a, /b)",
            "give both the same folder",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_gradients": {"device": "nvme"}}},
            "offload_gradients.device is \"nvme\" without a path",
            "set zero_optimization.offload_gradients.nvme_path, or that of offload_optimizer or offload_param",
        ),
        (
            {"zero_optimization": {"offload_gradients": {"device": "cpu"}}},
            "the optimizer states are on the device, and their gradients lie beside them",
            "leave offload_gradients out",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_gradients": {"device": "auto", "ratio": 0.5}}},
            'ratio is 0.5 but device "auto" chooses the share',
            "name a device",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_gradients": {"device": "none"}}},
            "'none'",
            'one of "cpu", "nvme", "auto"',
        ),
        (
            {
                "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
                "aio": {"drive_weights": [1, 2]},
            },
            "2 numbers but nvme_path names 1 folders",
            "leave it out",
        ),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: the same key as bf16", "keep one"),
        ({"stage": 3}, "it belongs at 'zero_optimization.stage'", "belongs"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_max_lr": 1e-3}}},
            "scheduler.params.warmup_max_lr: unknown key for this type: it is one of WarmupLR or WarmupDecayLR",
            "the keys here are cos_min_ratio, last_batch_iteration, total_num_steps",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1, "betas": [0.9, 0.9]}}},
            "optimizer.params.betas: unknown key for this type: it is one of AdamW or Adam or Lion or",
            "the keys here are dampening, lr",
        ),
    ],
)
def test_keys_that_contradict_each_other_come_with_a_way_out(raw: dict[str, Any], sentence: str, way_out: str) -> None:
    message = _refusal(raw)
    assert sentence in message
    assert way_out in message


def test_optimizer_offload_means_what_it_says_at_every_stage() -> None:
    for stage in range(4):
        load_config({"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": "d"}}})


def test_older_offload_keys_become_sections() -> None:
    zero = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_param": "true",
                "cpu_offload_use_pin_memory": 0,
            }
        }
    ).zero_optimization
    assert zero.offload_optimizer is not None
    assert zero.offload_param is not None
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", False)
    assert (zero.offload_param.device, zero.offload_param.pin_memory) == ("cpu", False)
    assert load_config({"zero_optimization": {"cpu_offload": False}}).zero_optimization.offload_optimizer is None


def test_all_problems_are_reported_at_once_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"gradient_clipp1ng": 1, "aio": {"blok_size": 1}, "zero_optimization": {"stge": 3, "stage": "x"}, '
        '"optimizer": {"type": "Adam", "params": {"lr": 1, "beta": 1}}, "comet": {"enabled": true}}'
    )
    first, *lines = _refusal(str(path)).splitlines()
    assert first == f"{path}: 6 problems:"
    assert [line.split(":")[0].strip() for line in lines] == [
        "gradient_clipp1ng",
        "aio.blok_size",
        "zero_optimization.stge",
        "optimizer.params.beta",
        "comet",
        "zero_optimization.stage",
    ]
    assert "did you mean 'gradient_clipping'?" in lines[0]


def test_a_key_that_stands_twice_is_named() -> None:
    message = _refusal('{"aio": {"queue_depth": 1, "queue_depth": 2}, "overlap": true, "overlap": true}')
    assert "aio.queue_depth: the key stands twice" in message
    assert "overlap: the key stands twice" in message


@pytest.mark.parametrize(
    ("text", "place"),
    [('{"overlap": true,\n "aio": {,}}', "line 2, column 10"), ('{"overlap": true', "line 1"), ("[1]", "JSON object")],
)
def test_a_slip_in_the_syntax_has_file_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    message = _refusal(path)
    assert message.startswith(f"{path}: ")
    assert place in message
    assert place in _refusal(text)


@pytest.mark.parametrize(
    ("text", "more_than_json"),
    [
        ('{"overlap": true,}', True),
        ('{"aio": {"drive_weights": [1, 2, ]}}', True),
        ('{\n  // states on NVMe\n  "overlap": true}', True),
        ('{"overlap": true, # yes\n "aio": {}}', True),
        ('{"overlap": true /* yes */}', True),
        ('{"overlap": }', False),
        ('{"overlap": true', False),
        ("{'overlap': true}", False),
    ],
)
def test_what_other_readers_allow_comes_with_the_next_step(text: str, more_than_json: bool) -> None:
    assert ("Comments and trailing commas are not JSON: remove them" in _refusal(text)) is more_than_json


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "No such file" in _refusal("missing.json")
    assert "missing.json" in _refusal("missing.json")
    assert "cannot be read" in _refusal(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xff{}")
    assert "cannot be read" in _refusal(tmp_path / "latin")
    assert "expected a path" in _refusal(3)


def test_keys_without_effect_are_reported_once_with_the_reason() -> None:
    report = load_config(
        {
            "zero_optimization": {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
            "flops_profiler": {"enabled": True},
            "comms_logger": {"enabled": False},
            "timers": {"throughput": {}},
            "steps_per_print": 10,
        }
    ).report()
    assert [line.split(":")[0] for line in report] == [
        "zero_optimization.overlap_comm = True",
        "timers",
        "flops_profiler",
    ]
    assert all("no effect here: " in line for line in report)
    assert load_config(None).report() == []


def test_a_feature_that_is_off_is_welcome() -> None:
    off = {"enabled": False}
    config = load_config(
        {
            "comet": {**off, "project": "x"},
            "elasticity": off,
            "data_efficiency": {**off, "anything": 1},
            "amp": off,
        }
        | {"compression_training": {}, "zero_optimization": {"zenflow": None}, "tensor_parallel": {"autotp_size": 0}}
    )
    assert config == Config()
    assert config.report() == []
