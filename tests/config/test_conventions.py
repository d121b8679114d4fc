"""DeepSpeed's conventions: what infinity lacks is said and left out, unless the result depends on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from infinity.config import DEEPSPEED, STRICT, Config, Conventions, ResolveContext, load_config, resolve
from infinity.errors import ConfigError


def tolerant(raw: Any) -> Config:
    return load_config(raw, conventions=DEEPSPEED)


def said(raw: Any) -> dict[str, str]:
    return dict(tolerant(raw).provenance.foreign)


def test_a_foreign_key_is_left_out_with_its_path_and_the_key_that_was_meant() -> None:
    raw = {
        "gradient_cliping": 0.5, "fp16": {"enabled": False, "loss_scal": 0},
        "elasticity": {"enabled": False, "min_gpu": 1},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="3 problems"):
        load_config(raw)
    config = tolerant(raw)
    assert config.gradient_clipping == 1.0
    found = config.provenance.foreign
    assert set(found) == {"gradient_cliping", "fp16.loss_scal", "elasticity.min_gpu"}
    assert found["fp16.loss_scal"] == "fp16.loss_scal: unknown key; did you mean 'fp16.loss_scale'? It is ignored"


@pytest.mark.parametrize("conventions", [STRICT, DEEPSPEED, Conventions(default_optimizer=False)])
def test_the_resolved_configuration_says_how_it_was_read(conventions: Conventions) -> None:
    config = load_config({"gradient_clipping": "auto"}, conventions=conventions)
    assert resolve(config, ResolveContext()).sections.provenance.conventions == conventions


def test_dotted_keys_are_in_their_sections() -> None:
    raw = {
        "zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization": {"offload_param": {"device": "cpu"}}, "optimizer.params.lr": 1e-4,
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-6}},
    }  # fmt: skip
    before = repr(raw)
    config = tolerant(raw)
    assert not config.provenance.foreign and repr(raw) == before
    assert config.zero_optimization.stage == 3
    assert [config.zero_optimization.offload_param.device, config.zero_optimization.offload_optimizer.device] == [  # type: ignore[union-attr]
        "cpu", "cpu",
    ]  # fmt: skip
    assert config.optimizer is not None and config.optimizer.params.lr == 1e-4
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: unknown key"):
        load_config({"zero_optimization.stage": 3})


def test_a_section_comes_before_a_dotted_key_and_unknown_ones_are_said() -> None:
    raw = {
        "zero_optimization": {"stage": 2}, "zero_optimization.stage": 3, "fp16.enabled.x": 1, "fp16": {"enabled": True},
        "zero_optimization.stge": 1, "a.b": 1, "bf16": False, "bf16.enabled": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="bf16: False is not a section"):
        tolerant(raw)
    del raw["bf16"], raw["bf16.enabled"]
    found = said(raw)
    assert found["zero_optimization.stage"] == (
        "zero_optimization.stage = 3 is ignored: section zero_optimization has stage = 2"
    )
    assert found["fp16.enabled.x"] == "fp16.enabled.x = 1 is ignored: enabled is True, which is no section"
    assert "did you mean 'zero_optimization.stage'?" in found["zero_optimization.stge"]
    assert set(found) == {"zero_optimization.stage", "fp16.enabled.x", "zero_optimization.stge", "a.b"}


@pytest.mark.parametrize(
    ("raw", "path", "reason"),
    [
        ({"dev_micro_batch_size_per_gpu": 4}, "dev_micro_batch_size_per_gpu", "unknown key"),
        ({"bf16": {"auto_cast": False}}, "bf16.auto_cast", "unknown key here"),
        ({"activation_checkpointing": {"number_checkpoints": False}}, "activation_checkpointing.number_checkpoints",
         "the space for checkpoints grows in the first step"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
         "zero_optimization.offload_param.device", "it needs stage 3, and at stage 2 the parameters stay"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme", "nvme_path": "/d"}}},
         "zero_optimization.offload_param.device", "it needs stage 3"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
         "zero_optimization.zero_hpz_partition_size", "with the same result"),
        ({"zero_optimization": {"elastic_checkpoint": True}}, "zero_optimization.elastic_checkpoint",
         "every checkpoint loads"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
         "zero_optimization.offload_optimizer.super_offload", "with the same result"),
        ({"aio": {"use_gds": True}}, "aio.use_gds", "pinned CPU memory"),
        ({"compile": {"deepcompile": True, "offload_activation": True}}, "compile", "engine.compile()"),
        ({"use_data_before_expert_parallelism": True}, "use_data_before_expert_parallelism", "no order of axes"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bfloat16", "the same key as bf16"),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, "bfloat16", "the same key as bf16"),
    ],
)  # fmt: skip
def test_what_no_result_depends_on_is_said_and_ignored(raw: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(ConfigError):
        load_config(raw)
    config = tolerant(raw)
    assert list(config.provenance.foreign) == [path]
    assert config.provenance.foreign[path].startswith((f"{path} = ", f"{path}: "))
    assert reason in config.provenance.foreign[path] and "ignored" in config.provenance.foreign[path]
    # The setting is gone, so that the engine cannot act on it.
    assert not config.bf16.enabled
    assert config.zero_optimization.offload_param is None
    assert config.zero_optimization.zero_hpz_partition_size == 1


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantised collectives are not supported. Remove"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "delayed updates change the result. Remove"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "sub-groups of ranks are not supported. Remove"),
        ({"tensor_parallel": {"partition_config": {"layer_specs": []}}}, "and write parallel.plan where it has none"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "Lion, with one moment, takes 8"),
        ({"parallel": {"context": 2}}, "parallel.context: unknown key; the keys of parallel are pipeline, plan"),
        ({"memory": {"gpu": {"max_byte": 1}}}, "did you mean 'memory.gpu.max_bytes'"),
        ({"optimizer": {"type": "Lamb"}}, 'Set the type to "AdamW", or pass any elementwise torch.optim'),
        ({"weight_quantization": {"quantized_initialization": {}}}, "Remove the section and do this in the program"),
        ({"elasticity": {"enabled": True}}, "Set the batch keys for the number of ranks"),
        ({"comet": {"enabled": True}}, "Remove the section, and enable tensorboard"),
        ({"gradient_clipping": "none"}, "expected a finite number of at least 0"),
        ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "leave param_dtype out, or set bf16"),
    ],
)
def test_what_the_result_depends_on_stays_refused_with_a_next_step(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tolerant(raw)
    assert reason in str(caught.value)


def test_a_section_without_its_switch_is_off_as_in_deepspeed() -> None:
    raw = {
        "tensor_parallel": {"enabled": False}, "elasticity": {"max_gpus": 4}, "compile": {"debug_log": True},
        "autotuning": {"fast": True}, "curriculum_learning": {"curriculum_type": "seqlen"},
    }  # fmt: skip
    assert not said(raw)
    with pytest.raises(ConfigError, match="4 problems"):
        load_config(raw)


def test_the_type_of_the_parameters_is_checked() -> None:
    assert load_config({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}})
    assert load_config({"data_types": {"param_dtype": "bfloat16"}, "bf16": {"enabled": "auto"}})
    with pytest.raises(ConfigError, match="leave param_dtype out, or set bf16"):
        load_config({"data_types": {"param_dtype": "bf16"}})


def test_a_sub_group_size_of_zero_is_the_default() -> None:
    resolved = resolve(load_config({"zero_optimization": {"sub_group_size": 0}}), ResolveContext())
    assert resolved.zero.sub_group_size == 10**9
    assert "zero_optimization.sub_group_size = 1000000000  (default: the file has 0)" in resolved.explain()


@pytest.mark.parametrize("never", [float("inf"), "inf", "Infinity", '{"steps_per_print": Infinity}'])
def test_infinite_steps_per_print_means_never(never: Any) -> None:
    source = never if str(never).startswith("{") else {"steps_per_print": never}
    for conventions in (STRICT, DEEPSPEED):
        assert load_config(source, conventions=conventions).steps_per_print is None
    resolved = resolve(load_config(source), ResolveContext())
    assert "steps_per_print = none  (file: no progress lines)" in resolved.explain()


@pytest.mark.parametrize("wrong", [float("-inf"), "-inf", float("nan"), "nan", True, -1, "often", [1]])
def test_other_steps_per_print_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match='expected a whole number of at least 0, or "inf" for never'):
        load_config({"steps_per_print": wrong}, conventions=DEEPSPEED)


def test_comments_and_trailing_commas_are_read_and_strings_stay() -> None:
    text = """{ // "a": 1
      "train_batch_size": 4, # four
      "csv_monitor": {"output_path": "http://x/*y*/, }", "job_name": "a\\\\", /* "b":
      2 */ },
      "zero_optimization": {"stage": 2,  /* last */ },
    }"""
    config = tolerant(text)
    assert config.train_batch_size == 4 and config.zero_optimization.stage == 2
    assert config.csv_monitor.output_path == "http://x/*y*/, }" and config.csv_monitor.job_name == "a\\"
    with pytest.raises(ConfigError, match="line 2, column 40: not valid JSON"):
        tolerant('{ // a\n  "train_batch_size": 4, /* b */ "a b" }')


@pytest.mark.parametrize("text", ['{"' + '\\"' * 10**6, "{" + "/*" * 10**6, "{" + '"' * 10**6, "{" + ", " * 10**6])
def test_a_hostile_text_takes_no_time(text: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ConfigError):
        tolerant(text)
    assert time.perf_counter() - began < 20


def test_the_command_shows_what_a_run_of_deepspeeds_ignores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"comms_config": {"verbose": false}, "zero_optimization": {"stage": 2,},}')
    assert main(["config", "explain", str(path), "--as-deepspeed"]) == 0
    shown = capsys.readouterr().out
    assert "comms_config: unknown key" in shown and "It is ignored" in shown
    assert main(["config", "explain", str(path)]) != 0


def test_another_librarys_name_of_a_key_is_told() -> None:
    told = tolerant({"communication_timeout": 30}).provenance.foreign["communication_timeout"]
    assert "did you mean 'watchdog_seconds'?" in told


@pytest.mark.parametrize("axis", [{"tensor_parallel": {"autotp_size": 2}}, {"parallel": {"pipeline": 2}}])
def test_a_batch_that_clients_count_over_all_ranks_is_that_of_the_data_ranks(axis: dict[str, Any]) -> None:
    raw = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, **axis}
    context = ResolveContext(world_size=4, detected=True)
    assert resolve(tolerant(raw), context).train_batch == 12
    assert resolve(tolerant({**raw, "train_batch_size": 12}), context).train_batch == 12
    for config in (load_config(raw), tolerant({**raw, "train_batch_size": 48})):
        with pytest.raises(ConfigError, match=r"is not train_micro_batch_size_per_gpu 3 x .* = 12"):
            resolve(config, context)
