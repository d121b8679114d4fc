"""Everything that a file leaves open is settled in one place, with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import ResolveContext, ResolvedConfig, drives, load_config, resolve
from infinity.config.resolve import Unsolvable, changed, solve_batch
from infinity.config.schema import Config
from infinity.config.section import Absent, NoAuto, mark, section_leaves, sections_of
from infinity.errors import ConfigError

# But for those that a client fills in: tests/clients trains with them.
SHIPPED = sorted(
    path for path in Path(__file__).parents[2].glob("examples/configs/*.json") if not path.stem.startswith("trainer_")
)


def _resolved(raw: Any = None, **context: Any) -> ResolvedConfig:
    return resolve(load_config(raw), ResolveContext(**context))


def test_an_empty_file_trains_in_fp32_on_the_device() -> None:
    resolved = _resolved()
    assert (resolved.stage, resolved.compute_dtype, resolved.clip_norm) == (0, "fp32", 1.0)
    assert (resolved.param_tier, resolved.optimizer_tier, resolved.nvme_path) == ("gpu", "gpu", None)
    assert (resolved.train_batch, resolved.micro_batch, resolved.accumulation) == (1, 1, 1)
    assert resolved.grad_accum_dtype is None
    assert resolved.communication_dtype is None


def test_short_names_say_what_the_sections_say() -> None:
    resolved = _resolved(
        {
            "fp16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp16",
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "nvme_path": "unused"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "drive"},
            },
        }
    )
    assert (resolved.stage, resolved.compute_dtype) == (3, "fp16")
    assert (resolved.param_tier, resolved.optimizer_tier) == ("cpu", "nvme")
    assert (resolved.param_nvme_path, resolved.nvme_path) == (None, resolved.optimizer_nvme_path)
    assert resolved.nvme_path == ("drive",)
    assert (resolved.grad_accum_dtype, resolved.communication_dtype) == ("fp32", "fp16")


def test_a_device_by_budget_uses_any_path_that_is_given() -> None:
    sections = {"offload_param": {"device": "auto"}, "offload_optimizer": {"device": "cpu", "nvme_path": "drive"}}
    resolved = _resolved({"zero_optimization": {"stage": 3, **sections}})
    assert (resolved.param_tier, resolved.optimizer_tier, resolved.nvme_path) == ("auto", "cpu", ("drive",))
    assert resolved.sources["zero_optimization.offload_param.device"].startswith("auto: filled by budget")
    assert _resolved({"zero_optimization": {"offload_optimizer": {"device": "auto"}}}).nvme_path is None


def test_gradients_take_the_drive_of_the_states_else_of_the_parameters() -> None:
    def path(**sections: Any) -> Any:
        resolved = _resolved({"zero_optimization": {"stage": 3, **sections}})
        gradients = resolved.zero.offload_gradients
        return (resolved.grad_tier, None if gradients is None else gradients.nvme_path, resolved.folders("nvme"))

    states, params = {"device": "cpu", "nvme_path": "a"}, {"device": "nvme", "nvme_path": "b"}
    on_drive = {"device": "nvme"}
    assert path(offload_optimizer=states, offload_gradients=on_drive) == ("nvme", ("a",), ("a",))
    cpu = {"device": "cpu"}
    assert path(offload_optimizer=cpu, offload_param=params, offload_gradients=on_drive) == ("nvme", ("b",), ("b",))
    own = {"device": "nvme", "nvme_path": "c"}
    assert path(offload_optimizer=states, offload_gradients=own) == ("nvme", ("c",), ("c",))
    assert path(offload_optimizer=states, offload_param=params) == ("auto", None, ("b",))
    # A path that no home uses is only used by gradients that a section names.
    assert path(offload_optimizer=states) == ("auto", None, None)
    assert path(offload_optimizer=states, offload_gradients={}) == ("auto", ("a",), ("a",))


def test_only_a_written_number_keeps_parameters_in_cpu_memory() -> None:
    section = {"device": "nvme", "nvme_path": "drive"}
    assert _resolved({"zero_optimization": {"stage": 3, "offload_param": section}}).param_cpu_numel == 0
    section["max_in_cpu"] = 1_000_000_000
    assert _resolved({"zero_optimization": {"stage": 3, "offload_param": section}}).param_cpu_numel == 10**9


def test_a_budget_and_a_share_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave ratio out, or name a device"):
        _resolved({"zero_optimization": {"offload_optimizer": {"device": "auto", "ratio": 0.5}}})


def test_a_changed_configuration_is_that_of_a_file_with_the_change() -> None:
    path = "zero_optimization.offload_optimizer.device"
    told = changed(_resolved({"bf16": {"enabled": True}}), {path: "cpu", "zero_optimization.stage": 2})
    written = _resolved({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert (told.stage, told.optimizer_tier) == (written.stage, written.optimizer_tier) == (2, "cpu")
    assert told.sections.zero_optimization == written.sections.zero_optimization


HF = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": "auto",
        **dict.fromkeys(
            ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
        ),
    },
    "aio": {"block_size": "auto", "intra_op_parallelism": "auto"},
    "memory": {"cpu": {"max_bytes": "auto"}},
}


def test_auto_comes_from_the_model_and_the_arguments() -> None:
    resolved = _resolved(
        HF,
        world_size=4,
        hidden_size=1000,
        model_dtype="bf16",
        optimizer_lr=5e-5,
        total_num_steps=70,
        warmup_num_steps=7,
    )
    zero, scheduler = resolved.zero, resolved.sections.scheduler
    assert resolved.compute_dtype == "bf16"
    assert not resolved.sections.fp16.enabled
    assert resolved.clip_norm == 1.0
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (1_000_000, 900_000)
    assert (zero.stage3_param_persistence_threshold, zero.sub_group_size) == (10_000, 10**9)
    assert resolved.sections.optimizer is not None
    assert resolved.sections.optimizer.params.lr == 5e-5
    assert scheduler is not None
    assert scheduler.params.model_dump() == {
        "total_num_steps": 70,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 7,
        "warmup_type": "log",
    }
    assert resolved.train_batch == 4
    assert resolved.sections.provenance.autos == frozenset()
    assert resolved.sources["bf16.enabled"] == "auto: the model is bf16"
    assert resolved.sources["zero_optimization.stage"] == "file"
    assert resolved.sources["zero_optimization.legacy_stage1"] == "default"
    assert resolved.sources["optimizer.params.betas"] == "auto: the default"


def test_auto_without_knowledge_is_the_default_or_a_question() -> None:
    raw = {**HF, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    resolved = _resolved(raw)
    assert resolved.compute_dtype == "fp32"
    assert resolved.zero.stage3_prefetch_bucket_size == 50_000_000
    assert resolved.sections.scheduler is not None
    assert resolved.sections.scheduler.params.model_dump()["warmup_max_lr"] is None
    assert resolved.sources["scheduler.params.warmup_max_lr"] == "auto: the optimizer's own rate"
    with pytest.raises(ConfigError, match="total_num_steps is required"):
        _resolved(HF)


def test_auto_that_only_the_file_could_settle_is_refused_with_the_next_step() -> None:
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    no_auto = {"optimizer.params.lr": "write the rate", "scheduler.params.warmup_num_steps": "write the number"}
    with pytest.raises(ConfigError) as caught:
        _resolved(raw, no_auto=no_auto)
    assert str(caught.value) == 'configuration: optimizer.params.lr: "auto" is refused: write the rate'


def test_a_cycle_needs_a_rate_that_somebody_wrote() -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": "auto"}}
    optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-4}}
    scheduler: Any = _resolved({"optimizer": optimizer, "scheduler": cycle}).sections.scheduler
    assert scheduler.params.cycle_max_lr == 3e-4
    with pytest.raises(ConfigError, match="cycle_max_lr is required by OneCycle: give a number"):
        _resolved({"scheduler": cycle})


def test_a_precision_that_auto_switches_on_still_excludes_the_other() -> None:
    with pytest.raises(ConfigError, match="both true"):
        _resolved({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, model_dtype="bf16")


def test_every_key_takes_auto_or_says_why_not() -> None:
    def document() -> dict[str, Any]:
        offload: dict[str, Any] = {"offload_param": {}, "offload_optimizer": {}}
        return {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, "zero_optimization": offload}

    for leaf in section_leaves(load_config(document())):
        if sections_of(leaf.field) or mark(leaf.field, Absent) is not None:
            continue
        *path, name = leaf.path.split(".")
        raw = place = document()
        for part in path:
            place = place.setdefault(part, {})
        place[name] = "auto"
        if no_auto := mark(leaf.field, NoAuto):
            with pytest.raises(ConfigError) as caught:
                load_config(raw)
            assert no_auto.why in str(caught.value) or leaf.path == "scheduler.type"
        elif not leaf.path.startswith("zero_optimization.cpu_offload"):
            resolved = _resolved(raw)
            assert resolved.sources[leaf.path].startswith("auto: ")


def test_explain_shows_each_value_with_its_source() -> None:
    lines = _resolved({"bf16": {"enabled": "auto"}, "train_batch_size": 8}, world_size=2, model_dtype="bf16").explain()
    assert "bf16.enabled = true  (auto: the model is bf16)" in lines
    assert "train_batch_size = 8  (file)" in lines
    assert "train_micro_batch_size_per_gpu = 4  (auto: 8 = 4 a rank x 1 accumulated x 2 ranks)" in lines
    assert "gradient_clipping = 1.0  (default)" in lines
    assert '"auto"' not in lines


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_resolved_configuration_can_be_written_and_read_again(path: Path) -> None:
    first = resolve(load_config(path), ResolveContext(world_size=8 if path.stem == "three_axes" else 2))
    again = load_config(first.sections.model_dump_json())
    assert again == first.sections
    assert first.report() == []


def test_every_shipped_configuration_is_there() -> None:
    names = {"demo", "on_device", "cpu_offload", "nvme_offload", "two_ranks", "three_axes"}
    assert {path.stem for path in SHIPPED} == names


sizes = st.integers(1, 40)


@given(
    micro=sizes,
    accumulation=sizes,
    ranks=st.integers(1, 16),
    subset=st.sets(st.sampled_from(["total", "micro", "accumulation"])),
)
def test_any_part_of_a_consistent_triple_is_completed(
    micro: int, accumulation: int, ranks: int, subset: set[str]
) -> None:
    triple = {"total": micro * accumulation * ranks, "micro": micro, "accumulation": accumulation}
    asked = {name: value if name in subset else None for name, value in triple.items()}
    batch = solve_batch(**asked, ranks=ranks)
    assert batch.total == batch.micro * batch.accumulation * ranks
    assert all(getattr(batch, name) == triple[name] for name in subset)
    if len(subset) >= 2:
        assert (batch.total, batch.micro, batch.accumulation) == tuple(triple.values())


@given(total=sizes, micro=st.none() | sizes, accumulation=st.none() | sizes, ranks=st.integers(1, 16))
def test_whatever_does_not_fit_says_the_ranks_and_what_would(
    total: int, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    complaint = None
    try:
        batch = solve_batch(total=total, micro=micro, accumulation=accumulation, ranks=ranks)
    except Unsolvable as error:
        complaint = str(error)
    if complaint is None:
        assert batch.total == total == batch.micro * batch.accumulation * ranks
    else:
        assert f"{ranks} rank" in complaint
        assert "nearest" in complaint


@pytest.mark.parametrize(
    ("raw", "ranks", "words"),
    [
        ({"train_batch_size": 10}, 4, ("10 cannot be divided", "4 ranks detected", "8 or 12")),
        ({"train_batch_size": 2}, 4, ("nearest train_batch_size is 4",)),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2},
            2,
            ("train_micro_batch_size_per_gpu 2 x 2 ranks detected = 4", "8 or 12"),
        ),
        (
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            2,
            (
                "train_batch_size 8 or gradient_accumulation_steps 4 or train_micro_batch_size_per_gpu 4",
                "2 ranks detected",
            ),
        ),
        ({"data_parallel_size": 3}, 2, ("data_parallel_size is 3", "2 ranks are detected", "start 3 ranks")),
    ],
)
def test_batch_sizes_that_do_not_fit_name_the_nearest_that_do(
    raw: dict[str, Any], ranks: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolved(raw, world_size=ranks, detected=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "--ranks" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"assumed.*--ranks"):
        _resolved(raw, world_size=ranks)


@pytest.mark.parametrize(
    ("raw", "key", "why"),
    [
        ({"zero_optimization": {"stage": 1, "tile_parameters": 9}}, "zero_optimization.tile_parameters", "stage is 1"),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}},
            "zero_optimization.offload_optimizer.ratio",
            'device is "none"',
        ),
        ({"aio": {"drive_weights": [2, 1]}}, "aio.drive_weights", "nothing is on NVMe"),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": False}},
            "zero_optimization.cpu_offload_use_pin_memory",
            "nothing is offloaded",
        ),
    ],
)
def test_a_key_that_another_one_makes_idle_is_reported(raw: dict[str, Any], key: str, why: str) -> None:
    resolved = _resolved(raw)
    (line,) = resolved.report()
    assert line.startswith(f"{key} = ")
    assert line.endswith(why)
    (shown,) = [line for line in resolved.explain().splitlines() if line.startswith(f"{key} = ")]
    assert shown.endswith("(file; no effect here)")


def test_the_same_keys_with_what_they_need_are_not_reported() -> None:
    states = {"device": "nvme", "nvme_path": ["/a", "/b"], "ratio": 0.3}
    zero = {"stage": 3, "tile_parameters": 100, "offload_optimizer": states, "cpu_offload_use_pin_memory": False}
    assert _resolved({"zero_optimization": zero, "aio": {"drive_weights": [2, 1]}}).report() == []


def test_the_drives_of_a_file_are_known_before_anything_is_settled() -> None:
    optimizer = {"device": "nvme", "nvme_path": ["/a", "/b"]}
    checkpoints = {"offload": {"device": "nvme", "nvme_path": "/c"}}
    raw = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": {"offload_optimizer": optimizer}, "activation_checkpointing": checkpoints,
    }  # fmt: skip
    assert drives(load_config(raw)) == ("/a", "/b", "/c")
    raw["zero_optimization"] = {"offload_optimizer": {"device": "auto", "nvme_path": "/a"}}
    assert drives(load_config(raw)) == ("/a", "/c")
    raw["zero_optimization"] = {"offload_optimizer": {"device": "cpu", "nvme_path": "/a"}}
    assert drives(load_config(raw)) == ("/c",)


def test_the_file_is_named_when_resolving_fails(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3}')
    with pytest.raises(ConfigError, match=f"^{path}: "):
        _resolved(path, world_size=2)


def test_plain_adam_is_adamw_unless_told_otherwise() -> None:
    def decoupled(**optimizer: Any) -> bool:
        section = load_config({"optimizer": optimizer}).optimizer
        assert section is not None
        return section.decoupled

    assert decoupled(type="Adam")
    assert not decoupled(type="Adam", params={"adam_w_mode": False})
    assert decoupled(type="AdamW", params={"adam_w_mode": False})
    assert Config().optimizer is None


def test_checkpoints_lie_where_the_section_says() -> None:
    def home(section: dict[str, Any], **zero: Any) -> tuple[str, tuple[str, ...] | None]:
        found = _resolved({"activation_checkpointing": section, "zero_optimization": zero})
        return found.checkpoint_tier, found.checkpoint_nvme_path

    assert home({}) == ("gpu", None)
    assert home({"every": 2}) == ("gpu", None)
    assert home({"cpu_checkpointing": True}) == ("cpu", None)
    assert home({"offload": {"device": "cpu", "nvme_path": "/a"}}) == ("cpu", None)
    assert home({"offload": {"device": "nvme", "nvme_path": ["/a", "/b"]}}) == ("nvme", ("/a", "/b"))
    optimizer = {"device": "nvme", "nvme_path": "/c"}
    assert home({"offload": {"device": "nvme"}}, offload_optimizer=optimizer) == ("nvme", ("/c",))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"keep_ops": ["aten.mm"]}, "set activation_checkpointing.every to 1"),
        ({"offload": {"device": "nvme"}}, "set activation_checkpointing.offload.nvme_path"),
        ({"cpu_checkpointing": True, "offload": {"device": "nvme", "nvme_path": "/a"}}, "keep one of them"),
        ({"offload": {"device": "auto"}}, "choose"),
    ],
)
def test_checkpoints_that_cannot_be_meant_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _resolved({"activation_checkpointing": section})


def test_deepspeeds_other_keys_for_checkpoints_say_that_they_have_no_effect() -> None:
    keys = {
        "partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": True, "profile": True,
    }  # fmt: skip
    lines = _resolved({"activation_checkpointing": keys}).report()
    assert [line.partition(" =")[0] for line in lines] == [f"activation_checkpointing.{key}" for key in keys]
    assert all("no effect here: " in line for line in lines)


def test_the_data_axis_has_what_the_tensor_axis_leaves() -> None:
    names = ({"parallel": {"tensor": 2}}, {"tensor_parallel": {"autotp_size": 2}})
    for raw in (*names, {"tensor_parallel": {"tp": {"tp_size": 2}}}):
        resolved = _resolved({**raw, "data_parallel_size": 4}, world_size=8, local_size=4, detected=True)
        assert (resolved.data, resolved.tensor, resolved.train_batch, resolved.local_size) == (4, 2, 4, 4)
        assert "(auto: 4 = 1 a rank x 1 accumulated x 4 data-parallel ranks)" in resolved.explain()
    assert "parallel.tensor = 2  (file: tensor_parallel.tp.tp_size)" in resolved.explain()


def test_stages_of_a_pipeline_have_two_names() -> None:
    for raw in ({"parallel": {"pipeline": 2}}, {"pipeline": {"stages": 2}}):
        resolved = _resolved({**raw, "parallel": {"tensor": 2, **raw.get("parallel", {})}}, world_size=8, local_size=4)
        assert (resolved.data, resolved.tensor, resolved.pipeline, resolved.train_batch) == (2, 2, 2, 2)
    assert "parallel.pipeline = 2  (file: pipeline.stages)" in resolved.explain()


def test_the_model_says_how_many_stages_there_are_where_the_configuration_does_not() -> None:
    resolved = _resolved({}, world_size=8, stages=4)
    assert (resolved.data, resolved.pipeline) == (2, 4)
    assert "parallel.pipeline = 4  (the program: num_stages of the model)" in resolved.explain()
    assert _resolved({"parallel": {"pipeline": 2}}, world_size=8, stages=4).pipeline == 2
    assert _resolved({}, world_size=8, stages=1).pipeline == 1
    with pytest.raises(ConfigError, match=r"num_stages of the model is 3 but 8 ranks are detected.* nearest is 2 or 4"):
        _resolved({}, world_size=8, detected=True, stages=3)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"parallel": {"tensor": 3}}, "8 ranks are detected.* nearest is 2 or 4$"),
        ({"parallel": {"tensor": 8}}, "a node has 4 of the 8 ranks.* nearest is 4$"),
        ({"parallel": {"sequence": True}}, "leave sequence out, or set parallel.tensor to 2"),
        ({"parallel": {"tensor": 2}, "train_batch_size": 6}, r"4 data-parallel ranks \(8 ranks / parallel.tensor 2\)"),
        ({"parallel": {"tensor": 2}, "data_parallel_size": 8}, "but 4 .* are detected: start 16 ranks"),
        ({"parallel": {"tensor": 1}, "tensor_parallel": {"autotp_size": 2}}, "one size: keep parallel.tensor"),
        ({"parallel": {"pipeline": 3}}, "8 ranks are detected.* must divide them: the nearest is 2 or 4$"),
        ({"parallel": {"pipeline": 8, "tensor": 2}}, "detected, 4 beside parallel.tensor 2: .* nearest is 4$"),
        ({"parallel": {"pipeline": 2}, "pipeline": {"stages": 4}}, "one size: keep parallel.pipeline"),
        ({"parallel": {"schedule": "gpipe"}}, "parallel.schedule needs stages, but parallel.pipeline is 1"),
        ({"parallel": {"pipeline": 2, "schedule": "zigzag"}}, "1f1b"),
    ],
)
def test_axes_that_ranks_do_not_have_are_refused_with_the_nearest(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _resolved(raw, world_size=8, local_size=4, detected=True)
