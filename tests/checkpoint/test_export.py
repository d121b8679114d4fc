"""An export is what the engine computes with, in the field's own format, from the engine and from a checkpoint."""

from __future__ import annotations

import errno
import filecmp
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import infinity
from infinity.checkpoint import model_folder as describing
from infinity.checkpoint import weight_writer
from infinity.checkpoint.extract import extract
from infinity.checkpoint.format import find, read_manifest
from infinity.checkpoint.weight_writer import Entry, WeightWriter, check_complete, cut_into_shards, index_of
from infinity.engine import export
from infinity.errors import CheckpointError, ConfigError, StateError, TransferError
from tests.checkpoint.exporting import config, export_zoo, tokens, train_and_export, with_lora, zoo
from tests.support.hub import hf_model
from tests.support.spawn import RankError

ROOT = Path(__file__).resolve().parents[2]
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(0)).logits


def from_checkpoint(folder: Path, target: Path, **options: Any) -> Path:
    saved = find(folder / "saved")
    assert saved is not None
    return extract(saved, read_manifest(saved), target, **options)


def same_files(one: Path, other: Path) -> None:
    """The same names, the same bytes."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize(("name", "world_size", "dtype"), [
    ("llama", 1, "bf16"), ("llama", 2, "fp32"), ("gpt2", 2, "bf16"), ("mixtral", 2, "bf16"), ("mixtral", 1, "fp32"),
])  # fmt: skip
def test_from_pretrained_gives_the_engines_logits(
    name: str, world_size: int, dtype: str, tmp_path: Path, rank_pools: Any
) -> None:
    (tmp_path / "base").mkdir()
    for file in ("tokenizer.json", "merges.txt", "pytorch_model.bin"):
        (tmp_path / "base" / file).write_text(file)
    for logits in rank_pools[world_size].run(train_and_export, name, dtype, str(tmp_path)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "live")
        assert loaded.dtype is TORCH[dtype]
        assert torch.equal(logits_of(loaded), logits)
    live = {path.name for path in (tmp_path / "live").iterdir()}
    assert {"config.json", "tokenizer.json", "merges.txt", "model.safetensors.index.json"} < live
    assert "pytorch_model.bin" not in live
    shards = sorted((tmp_path / "live").glob("*.safetensors"))
    assert len(shards) > 1
    stored = {key: tensor for shard in shards for key, tensor in load_file(shard).items()}
    # As transformers itself stores the model, tied weights once.
    hf_model(name).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {key: tensor.shape for key, tensor in stored.items()} == {key: t.shape for key, t in theirs.items()}
    assert all(tensor.dtype is TORCH[dtype] for tensor in stored.values())
    own = {"origin": tmp_path / "base"}
    same_files(tmp_path / "live", from_checkpoint(tmp_path, tmp_path / "again", dtype=dtype, nbytes_max=40_000, **own))
    same_files(tmp_path / "fp32", from_checkpoint(tmp_path, tmp_path / "whole", dtype="fp32", nbytes_max=None, **own))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_peft_model_is_exported_as_its_adapter(world_size: int, tmp_path: Path, rank_pools: Any) -> None:
    base = hf_model("llama")
    base.save_pretrained(tmp_path / "base")
    results = rank_pools[world_size].run(train_and_export, "lora", "bf16", str(tmp_path))
    folder = tmp_path / "live"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    # No more than the adapter and its header.
    numel = sum(p.numel() for name, p in with_lora(base).named_parameters() if "lora_" in name)
    assert (folder / "adapter_model.safetensors").stat().st_size <= 2 * numel + 4096
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    loaded = importlib.import_module("peft").PeftModel.from_pretrained(plain, folder, autocast_adapter_dtype=False)
    assert all(torch.equal(logits_of(loaded), logits) for logits in results)
    # Also from a checkpoint that has the adapter alone.
    same_files(folder, from_checkpoint(tmp_path, tmp_path / "again"))
    same_files(tmp_path / "fp32", from_checkpoint(tmp_path, tmp_path / "whole", dtype="fp32", nbytes_max=None))
    # Peft's own files have the same keys and the same configuration.
    with_lora(hf_model("llama")).save_pretrained(tmp_path / "theirs")
    assert load_file(folder / "adapter_model.safetensors").keys() == load_file(
        tmp_path / "theirs" / "adapter_model.safetensors"
    ).keys()
    ours, theirs = (json.loads((each / "adapter_config.json").read_text()) for each in (folder, tmp_path / "theirs"))
    for read in (ours, theirs):
        # The base is known by a folder; a set has no order.
        read["base_model_name_or_path"] = None
        read["target_modules"].sort()
    assert ours == theirs


@pytest.mark.parametrize(("world_size", "stage", "dtype", "tier"), [
    (1, 3, "bf16", "nvme"), (2, 0, "bf16", "none"), (2, 1, "fp32", "cpu"), (2, 2, "fp16", "nvme"),
    (2, 3, "fp16", "cpu"),
])  # fmt: skip
def test_every_stage_and_tier_exports_masters_and_what_is_computed_with(
    world_size: int, stage: int, dtype: str, tier: str, tmp_path: Path, rank_pools: Any
) -> None:
    for masters, values in rank_pools[world_size].run(export_zoo, stage, dtype, tier, str(tmp_path)):
        whole, own = (load_file(tmp_path / each / "model.safetensors") for each in ("fp32", "own"))
        buffers = {"counts": torch.arange(5), "scale": torch.tensor(1.5)}
        assert whole.keys() == own.keys() == {*values, *buffers}
        for name, value in buffers.items():
            assert torch.equal(whole[name], value) and torch.equal(own[name], value)
        for name, value in values.items():
            assert torch.equal(own[name], value) and own[name].shape == value.shape
            assert torch.equal(whole[name], masters.get(name, value.float()))
    # What is tied is stored once, and loaded as the safetensors library does it.
    fresh = zoo()
    torch.nn.init.zeros_(fresh.model.head.weight)
    load_model(fresh, tmp_path / "fp32" / "model.safetensors")
    assert fresh.model.head.weight is fresh.model.embedding.weight
    assert torch.equal(fresh.model.head.weight, whole["model.embedding.weight"])
    same_files(tmp_path / "own", from_checkpoint(tmp_path, tmp_path / "again", dtype=dtype))
    same_files(tmp_path / "fp32", from_checkpoint(tmp_path, tmp_path / "whole", dtype="fp32"))


def made(tmp_path: Path, dtype: str = "bf16", model: Any = None) -> Any:
    settings = config(str(tmp_path / "drive"), dtype)
    return infinity.initialize(model=hf_model("llama") if model is None else model, config=settings)[0]


def test_a_weight_in_tiles_is_exported_whole(tmp_path: Path) -> None:
    settings = config(str(tmp_path / "drive"), "bf16")
    settings["zero_optimization"].update(stage3_max_live_parameters=2500, stage3_prefetch_bucket_size=0)
    engine, *_ = infinity.initialize(model=hf_model("gpt2"), config=settings)
    with engine:
        assert any(slot.is_tile for layout in engine.plan.layouts for slot in layout.slots)
        engine.eval()
        wanted = logits_of(engine)
        engine.export(tmp_path / "live")
        engine.save_checkpoint(tmp_path / "saved")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "live")), wanted)
    same_files(tmp_path / "live", from_checkpoint(tmp_path, tmp_path / "again"))


def test_an_export_replaces_an_earlier_one_and_leaves_other_files(tmp_path: Path) -> None:
    with made(tmp_path) as engine:
        engine.export(tmp_path / "out", max_shard_size="15KB")
        (tmp_path / "out" / "notes.txt").write_text("mine")
        numbered = len(list((tmp_path / "out").glob("model-*")))
        assert numbered > 2
        engine.export(tmp_path / "out", max_shard_size="30KB")
        assert 0 < len(list((tmp_path / "out").glob("model-*"))) < numbered
        assert torch.isfinite(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))).all()
        assert engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "other").symlink_to("elsewhere")
        engine.save_16bit_model(tmp_path / "other", "weights.safetensors")
        same = load_file(tmp_path / "other" / "weights.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(same[0][name], tensor) for name, tensor in same[1].items())
    assert not list(tmp_path.glob(".*"))


def fail_on_rank(rank: int, world_size: int, failing: int, folder: str) -> str:
    """Exports twice; the second time the drive of one rank is full."""
    settings = config(f"{folder}/drive", "bf16")
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=settings)
    real = weight_writer.os.pwrite

    def full(fd: int, data: Any, offset: int) -> int:
        if len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with engine:
        engine.export(f"{folder}/out")
        if rank == failing:
            weight_writer.os.pwrite = full
        try:
            engine.export(f"{folder}/out", dtype="fp32")
        except (TransferError, CheckpointError) as error:
            message = str(error)
        else:
            message = ""
        finally:
            weight_writer.os.pwrite = real
        engine.backward(engine(input_ids=tokens(rank), labels=tokens(rank)).loss)
        engine.step()
        return message


def test_a_failure_of_one_rank_leaves_the_earlier_export_and_training_goes_on(
    tmp_path: Path, rank_pools: Any
) -> None:
    first, second = rank_pools[2].run(fail_on_rank, 1, str(tmp_path))
    assert "rank 1 failed" in first and "No space left" in first and "No space left" in second
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert not list(tmp_path.glob(".*"))


def elsewhere(rank: int, world_size: int, folder: str) -> None:
    engine, *_ = infinity.initialize(model=hf_model("llama"), config=config(f"{folder}/drive", "bf16"))
    with engine:
        engine.export(f"{folder}/{rank}/out")


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path, rank_pools: Any) -> None:
    with pytest.raises(RankError, match="name a folder on a drive that all nodes share"):
        rank_pools[2].run(elsewhere, str(tmp_path))
    assert not (tmp_path / "0" / "out").exists()


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with made(tmp_path, "fp32") as engine:
        with pytest.raises(ConfigError, match="'int8' of an export: there are fp32, bf16 and fp16"):
            engine.export(tmp_path / "out", dtype="int8")
        with pytest.raises(ConfigError, match="is a file; name a folder"):
            engine.export(tmp_path / "file")
        with infinity.modify(engine.module.lm_head.weight):
            engine.module.lm_head.weight[3, 4] = 1e6
        with pytest.raises(ConfigError, match=r"lm_head\.weight has values beyond 65504"):
            engine.export(tmp_path / "out", dtype="fp16")
        with pytest.raises(AttributeError, match="save_pretrained"):
            engine.export(tmp_path / "out", tokenizer="no tokenizer")
    with pytest.raises(StateError, match="cannot export: this engine was closed"):
        engine.export(tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_names_in_memory_serve_where_transformers_cannot_turn_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any, tensors: Any) -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(transformers.core_model_loading, "revert_weight_conversion", refuse)
    model = hf_model("mixtral")
    assert describing.describe_model(model).weights is None
    with made(tmp_path, "fp32", model) as engine:
        engine.eval()
        wanted = logits_of(engine)
        engine.export(tmp_path / "out", dtype="fp32")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted)


def test_an_adapter_that_peft_computes_is_refused_at_the_export_and_not_before() -> None:
    model = with_lora(hf_model("llama"))
    shadow = describing._shadows(model)
    places, others = describing._places(shadow, {"x": shadow["base_model.model.lm_head.weight"] * 2})
    assert (places, others) == ([], ["x"])
    refused = describing.Description("PeftModel", refusal="peft computes what it saves of X")
    assert describing.Description.from_json(json.loads(json.dumps(refused.to_json()))) == refused
    with pytest.raises(ConfigError, match="peft computes"):
        refused.shards([], "bf16")


def test_a_checkpoint_without_frozen_parameters_says_so(tmp_path: Path) -> None:
    model = hf_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    with made(tmp_path, model=model) as engine:
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"saved without frozen parameters, such as model\.embed_tokens\.weight"):
        from_checkpoint(tmp_path, tmp_path / "out")
    trained = load_file(from_checkpoint(tmp_path, tmp_path / "out", frozen=False) / "model.safetensors")
    assert "model.embed_tokens.weight" not in trained and len(trained) == 20


def test_16_bits_from_a_checkpoint_open_no_file_of_optimizer_states(tmp_path: Path) -> None:
    with made(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        engine.export(tmp_path / "live")
    (states,) = (tmp_path / "saved").glob("*/*.states.bin")
    states.write_bytes(b"\xff" * states.stat().st_size)
    same_files(tmp_path / "live", from_checkpoint(tmp_path, tmp_path / "again"))
    with pytest.raises(CheckpointError, match="are not those that were written"):
        from_checkpoint(tmp_path, tmp_path / "whole", dtype="fp32")
    assert not (tmp_path / "whole").exists() and not list(tmp_path.glob(".*"))


def test_an_export_from_a_checkpoint_needs_no_library_of_the_model(tmp_path: Path) -> None:
    with made(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    script = (
        "import sys\nfrom infinity.cli.main import main\n"
        f"assert main(['export', {str(tmp_path / 'saved')!r}, {str(tmp_path / 'out')!r}]) == 0\n"
        "import torch.distributed\nassert not torch.distributed.is_initialized()\n"
        "assert not {'transformers', 'peft', 'safetensors', 'infinity.engine', 'infinity.zero.unit'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)
    assert torch.isfinite(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))).all()


def test_a_tokenizer_can_be_given(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("given")

    model = hf_model("llama")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.json").write_text("base")
    model.config._name_or_path = str(tmp_path / "base")
    with made(tmp_path, model=model) as engine:
        engine.export(tmp_path / "out", tokenizer=Tokenizer())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "given"


def test_ranges_in_any_order_make_the_files_and_none_may_be_missing(tmp_path: Path) -> None:
    source = torch.arange(1000, dtype=torch.int32)
    entries = [
        Entry("a", "int32", (10, 30), "s", 0), Entry("none", "fp32", (0, 4), "n"),
        Entry("b", "int32", (700,), "s", 300),
    ]  # fmt: skip
    shards = cut_into_shards(entries, "model", 2000)
    assert [shard.name for shard in shards] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert json.loads(index_of(shards))["weight_map"]["b"] == shards[1].name
    with WeightWriter(tmp_path, shards, create=True) as writer:
        raw = source.view(torch.uint8).numpy().data
        for start, stop in ((250, 400), (900, 1000), (0, 250), (400, 900)):
            with pytest.raises(StateError, match="is not published"):
                check_complete(writer.written_nbytes, shards, tmp_path)
            writer.write("s", start, raw[4 * start : 4 * stop])
        writer.write("another", 0, raw)
        check_complete(writer.written_nbytes, shards, tmp_path)
    found = {**load_file(tmp_path / shards[0].name), **load_file(tmp_path / shards[1].name)}
    assert torch.equal(found["a"].flatten(), source[:300]) and torch.equal(found["b"], source[300:])
    assert found["none"].shape == (0, 4)
    assert export.SHARD_NBYTES == 5_000_000_000
