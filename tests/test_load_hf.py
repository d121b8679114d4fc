"""`infinity.load_hf`: the values of transformers' own loading, read by slices, in bounded memory."""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import infinity
from infinity.checkpoint.weight_files import SafetensorsFile
from infinity.errors import ConfigError, TransferError
from infinity.integrations import huggingface
from infinity.log import PhaseProgress
from infinity.zero.parameter import ReleasedParameter
from tests.support.hub import hf_config
from tests.zero.test_init import config


def save(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shard: str = "30KB", tied: bool = False
) -> Any:
    """A tiny model in a folder, and what transformers loads from it."""
    torch.manual_seed(0)
    shape = hf_config(name)
    shape.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(shape).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder)


def masters(model: Any) -> dict[str, torch.Tensor]:
    return {name: infinity.state(param).master for name, param in model.named_parameters()}


def loaded(folder: Path, drive: Path, tier: str = "nvme", **options: Any) -> dict[str, torch.Tensor]:
    settings = config(str(drive), tier)
    engine, *_ = infinity.initialize(model=infinity.load_hf(folder, settings, **options), config=settings)
    with engine:
        return masters(engine.module)


def same(ours: dict[str, torch.Tensor], theirs: Any) -> bool:
    named = dict(theirs.named_parameters())
    assert ours.keys() == named.keys()
    return all(torch.equal(ours[name], param.detach().float()) for name, param in named.items())


@pytest.mark.parametrize(("name", "dtype", "shard", "tier"), [
    ("llama", torch.float32, "30KB", "nvme"), ("llama", torch.bfloat16, "5GB", "cpu"),
    ("gpt2", torch.float16, "30KB", "none"), ("qwen2", torch.float32, "5GB", "nvme"),
    ("mixtral", torch.float32, "30KB", "nvme"),
])  # fmt: skip
def test_values_are_those_that_transformers_loads(
    name: str, dtype: torch.dtype, shard: str, tier: str, tmp_path: Path
) -> None:
    theirs = save(tmp_path, name, dtype=dtype, shard=shard)
    assert same(loaded(tmp_path, tmp_path / "drive", tier), theirs)


def test_until_initialize_a_parameter_takes_no_memory_and_says_its_shape(tmp_path: Path) -> None:
    theirs = save(tmp_path, "llama", dtype=torch.bfloat16)
    model = infinity.load_hf(tmp_path, config(str(tmp_path / "drive")))
    assert model.training
    for ours, reference in zip(model.parameters(), theirs.parameters(), strict=True):
        assert type(ours) is ReleasedParameter
        with torch._C.DisableTorchFunctionSubclass():
            assert ours.untyped_storage().nbytes() <= 4
        assert (ours.shape, ours.dtype) == (reference.shape, reference.dtype)
    for (name, ours), (_, reference) in zip(model.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(ours, reference), name


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    theirs = save(tmp_path, "llama", tied=True)
    settings = config(str(tmp_path / "drive"))
    model = infinity.load_hf(tmp_path, settings)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    engine, *_ = infinity.initialize(model=model, config=settings)
    with engine:
        assert same(masters(model), theirs)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_stored_one_by_one_are_read_in_ranges_or_converted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save(tmp_path, "mixtral")
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum("experts.3.w2" in name for name in stored) == 2
    assert any("experts.gate_up_proj" in name for name, _ in theirs.named_parameters())
    assert same(loaded(tmp_path, tmp_path / "drive"), theirs)
    monkeypatch.setattr(huggingface._Conversion, "in_flat_order", lambda self: None)
    assert same(loaded(tmp_path, tmp_path / "drive"), theirs)


def rewrite(folder: Path, change: Any) -> None:
    """Change a single file's header."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    # Another file: a loaded model maps the old one.
    file.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_names_that_do_not_match_are_an_error_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save(tmp_path, "llama", shard="5GB")
    rewrite(tmp_path, lambda header: header.update(stray=header.pop("model.layers.1.mlp.up_proj.weight")))
    settings = config(str(tmp_path / "drive"))
    with pytest.raises(ConfigError, match=r"(?s)Missing: model\.layers\.1\.mlp\.up_proj\.weight\n.*Unexpected: stray"):
        infinity.load_hf(tmp_path, settings)
    values = loaded(tmp_path, tmp_path / "drive", strict=False)
    fresh = values.pop("model.layers.1.mlp.up_proj.weight")
    assert 0.01 < float(fresh.std()) < 0.03
    named = dict(theirs.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in values.items())


def test_what_the_model_has_no_place_for_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As from_pretrained does: older versions stored buffers such as BERT's embeddings.position_ids."""
    theirs = save(tmp_path, "llama", shard="5GB")
    stored = {name: value.clone() for name, value in load_file(tmp_path / "model.safetensors").items()}
    stored["model.embeddings.position_ids"] = torch.arange(8)
    (tmp_path / "model.safetensors").unlink()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("WARNING", logger="infinity"):
        assert same(loaded(tmp_path, tmp_path / "drive"), theirs)
    (said,) = [line for line in caplog.messages if "position_ids" in line]
    assert "Unexpected: model.embeddings.position_ids" in said and "not read" in said and "Missing" not in said


def test_another_shape_is_an_error_also_when_not_strict(tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="5GB")
    shapes = r"embed_tokens\.weight: stored with shape \(96, 32\), the model's is \(100, 32\)"
    with pytest.raises(ConfigError, match=shapes):
        infinity.load_hf(tmp_path, config(str(tmp_path / "drive")), strict=False, vocab_size=100)


@pytest.mark.parametrize("nbytes", [4, 500, 20_000])
def test_a_file_that_is_cut_short_names_itself(nbytes: int, tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="5GB")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:nbytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors .*cut short"):
        infinity.load_hf(tmp_path, config(str(tmp_path / "drive")))


def test_a_file_that_shrinks_while_it_is_read_is_a_transfer_error(tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="5GB")
    settings = config(str(tmp_path / "drive"))
    model = infinity.load_hf(tmp_path, settings)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(20_000)
    with pytest.raises(TransferError, match=r"model\.safetensors failed: the file ends before it"):
        infinity.initialize(model=model, config=settings)


def test_folders_that_hold_no_safetensors_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="download the model first"):
        infinity.load_hf(tmp_path / "nowhere")
    hf_config("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: save the model again with save_pretrained"):
        infinity.load_hf(tmp_path)
    quantized = hf_config("llama")
    quantized.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantized"):
        infinity.load_hf(tmp_path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("org/name", r"org/name is not a folder; .*load_hf\(huggingface_hub.snapshot_download\('org/name'\), config\)"),
        ("file", r"file is a file: name the folder"),
        ("empty", r"empty has no config\.json: name the folder"),
        ("strange", r"cannot use .*config\.json: .*Unrecognized model.* Fetch it again"),
        ("broken", r"cannot use .*config\.json: .* Fetch it again"),
    ],
)
def test_what_is_no_folder_of_a_model_is_told_what_to_call(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for folder, text in {"empty": None, "strange": "{}", "broken": "{"}.items():
        Path(folder).mkdir()
        if text is not None:
            Path(folder, "config.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        infinity.load_hf(given)


def test_initialize_of_a_name_says_what_to_call() -> None:
    wrong: dict[str, Any] = {
        r"got 'org/name': load it first, with infinity\.load_hf\(folder, config\)": "org/name",
        r"got the class LlamaForCausalLM: pass an instance": LlamaForCausalLM,
        r"got NoneType: pass the model": None,
    }
    for told, given in wrong.items():
        with pytest.raises(ConfigError, match=told):
            infinity.initialize(given)


def test_what_is_changed_before_initialize_is_kept(tmp_path: Path) -> None:
    theirs = save(tmp_path, "llama")
    settings = config(str(tmp_path / "drive"))
    model = infinity.load_hf(tmp_path, settings, model_class=LlamaForCausalLM)
    torch.manual_seed(1)
    model.resize_token_embeddings(101)
    torch.manual_seed(1)
    theirs.resize_token_embeddings(101)
    with torch.no_grad():
        model.model.norm.weight.mul_(3)
        theirs.model.norm.weight.mul_(3)
    duplicate = copy.deepcopy(model.model.layers[0])
    assert torch.equal(duplicate.mlp.up_proj.weight, theirs.model.layers[0].mlp.up_proj.weight)
    engine, *_ = infinity.initialize(model=model, config=settings)
    with engine:
        assert same(masters(model), theirs)


def test_a_long_phase_says_bytes_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infinity"):
        PhaseProgress("reading", 4_000_000_000).advance(1_000_000_000)
        assert caplog.text == ""
        progress = PhaseProgress("reading", 4_000_000_000, every_seconds=0.01)
        time.sleep(0.02)
        progress.advance(1_000_000_000)
        progress.advance(1)
    (line,) = caplog.messages
    assert re.fullmatch(r"reading: 1\.0 of 4\.0 GB, [\d.]+ GB/s, \d+ s left", line)


def load_on_ranks(rank: int, world_size: int, folder: str, drive: str) -> dict[str, Any]:
    """Loads; rank 0 alone has looked at a weight before."""
    total = [0]
    plain = SafetensorsFile.read_into

    def counted(self: SafetensorsFile, offset: int, target: memoryview) -> None:
        total[0] += len(target)
        plain(self, offset, target)

    SafetensorsFile.read_into = counted  # type: ignore[method-assign]
    try:
        settings = config(drive)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        model = infinity.load_hf(folder, settings)
        headers = total[0]
        if rank == 0:
            float(model.model.norm.weight.sum())
        engine, *_ = infinity.initialize(model=model, config=settings)
    finally:
        SafetensorsFile.read_into = plain  # type: ignore[method-assign]
    with engine:
        return {"read": total[0] - headers, "masters": masters(model)}


def test_each_rank_reads_only_its_slices(tmp_path: Path, rank_pools: Any) -> None:
    theirs = save(tmp_path, "llama")
    world_size = 2
    results = rank_pools[world_size].run(load_on_ranks, str(tmp_path), str(tmp_path / "drive"))
    stored = sum(param.numel() * 4 for param in theirs.parameters())
    assert all(same(result["masters"], theirs) for result in results)
    # All of it once, and once more the weight that one rank had touched, which it then told the others.
    assert sum(result["read"] for result in results) <= stored + world_size * theirs.model.norm.weight.numel() * 4
    assert max(result["read"] for result in results) <= 1.3 * stored / world_size


def load_another(rank: int, world_size: int, folders: list[str], drive: str) -> str:
    try:
        infinity.load_hf(folders[rank], config(drive))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_see_different_files_all_say_so(tmp_path: Path, rank_pools: Any) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    save(Path(folders[0]), "llama")
    save(Path(folders[1]), "llama", shard="60KB")
    messages = rank_pools[2].run(load_another, folders, str(tmp_path / "drive"))
    assert all("is not the same on every rank: rank 1" in message for message in messages)
