"""`infinity-estimate` answers quickly, without torch, or says why it cannot."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from estimators.cli import main
from estimators.estimate import Machine, estimate
from infinity.plan.hardware import ASSUMED, ASSUMED_CPU, save_profile
from infinity.plan.types import Kind, Tier
from tests.support.clock import garbage_collector_spared, usual_seconds

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
# What a search does with it is what it does with more blocks, which take longer to plan.
FOUR_BLOCKS = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
PLAIN_8B = "--layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256".split()
NVME_FILE = str(ROOT / "examples" / "configs" / "nvme_offload.json")
CPU_FILE = str(ROOT / "examples" / "configs" / "cpu_offload.json")
_DRIVE = {"device": "nvme", "nvme_path": "nvme"}
NVME = json.dumps(
    {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": _DRIVE, "offload_optimizer": _DRIVE},
    }
)
SMALL_MACHINE = "--gpu 4GB --ram 16GB --nvme 100GB --sequence 512".split()


def answer(arguments: list[str], capsys, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


def test_a_file_a_folder_and_plain_numbers_are_one_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plain, file, folder = (
        json.loads(answer([*model, "--config", CPU_FILE, "--json"], capsys))
        for model in (PLAIN_8B, [str(tmp_path / "config.json")], [str(tmp_path)])
    )
    assert file == folder == {**plain, "model": tmp_path.name}
    assert plain["parameters"] == 8_030_261_248


def test_json_says_what_the_estimate_says(capsys):
    told = json.loads(answer(["gpt2", "--config", NVME_FILE, "--ranks", "4", "--json"], capsys))
    found = estimate("gpt2", NVME_FILE, ranks=4)
    assert told == json.loads(json.dumps(found.as_dict())), "a nearest one only where it does not fit"
    assert set(told["nbytes_by_phase"]) == {"initialise", "forward", "backward", "step", "save"}
    assert told["nbytes"]["nvme"]["exp_avg"] == found.plan.bytes_by_tier()[Tier.NVME][Kind.EXP_AVG]


def test_671_billion_parameters_take_less_than_a_second():
    with garbage_collector_spared(), usual_seconds() as taken:
        found = estimate("deepseek-v3", NVME_FILE, ranks=64)
        assert found.phases
        assert found.plan.numel > 671e9
    assert taken.seconds < 1


def test_the_whole_command_takes_less_than_three_seconds_and_no_torch():
    with usual_seconds(children=True) as taken:
        reply = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "estimators", "deepseek-v3", "--config", NVME, "--ranks", "64"],
            capture_output=True, text=True, check=True, cwd=ROOT, timeout=100,
        )  # fmt: skip
    assert taken.seconds < 3
    assert "671.03 B parameters" in reply.stdout
    assert "| torch" not in reply.stderr
    assert "| transformers" not in reply.stderr


@pytest.mark.matrix
def test_every_line_of_a_report_fits_a_hundred_columns(capsys):
    for arguments in (["--config", NVME_FILE, "--ranks", "16"], SMALL_MACHINE, ["--gpu", "2GB", "--ram", "4GB"]):
        code = 1 if arguments[-1] == "4GB" else 0
        lines = answer(["llama-3.2-1b", *arguments], capsys, code).splitlines()
        assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("model", "machine", "words"),
    [
        ("config.json", " ".join(SMALL_MACHINE), "kept"),
        ("config.json", "--gpu 1.6GB --ram 4GB --nvme 100GB --sequence 8192", "recomputed, in tiles"),
        ("config.json", "--gpu 3GB --ram 8GB --ranks 2 --sequence 8192", "recomputed, in tiles"),
        ("config.json", "--gpu 3GB --ram 8GB --ranks 2 --sequence 4096 --no-tiled-loss", "recomputed"),
        ("gpt2", "--no-gpu --ram 8GB --nvme 100GB --batch 2", "recomputed"),
        ("qwen2.5-0.5b", "--gpu 16GB --ram 32GB --checkpointing --sequence 128", "recomputed"),
    ],
)
def test_what_is_saved_is_all_that_it_takes(model, machine, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BLOCKS))
    file = tmp_path / "found.json"
    text = answer([model, *machine.split(), "--save", str(file)], capsys)
    assert "It fits." in text
    said = " ".join(text.split("It fits.")[0].split())
    assert [word for word in ("recomputed", "in tiles") if word in said] == words.split(", ")[words == "kept" :]
    saved = json.loads(file.read_text())
    assert json.dumps(saved["zero_optimization"]["stage"]) in text
    # The file says all but the loss in tiles, for which the program makes a call.
    machine = machine.replace(" --checkpointing", "").replace(" --no-tiled-loss", "")
    machine += " --tiled-loss" if "in tiles" in words else ""
    again = answer([model, "--config", str(file), *machine.split()], capsys)
    for line in text[text.index(", GB a rank") :].splitlines():
        if "Set aside" in line:
            break
        assert line in again


def test_the_largest_model_is_saved_as_it_is_shown(tmp_path, capsys):
    file = tmp_path / "found.json"
    text = answer(["gpt2-xl", "--gpu", "4GB", "--ram", "4GB", "--max", "--save", str(file)], capsys)
    assert json.loads(file.read_text())["activation_checkpointing"] == {"every": 1}
    assert file.read_text() in text


def test_nothing_that_fits_is_not_saved(tmp_path, capsys):
    file = tmp_path / "found.json"
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BLOCKS))
    assert main([str(tmp_path), "--gpu", "1GB", "--ram", "4GB", "--save", str(file)]) == 1
    assert "found.json is not written" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.matrix
def test_what_does_not_fit_is_answered_with_what_it_takes(capsys):
    text = answer(["llama-3.1-70b", "--gpu", "24GB", "--ram", "128GB", "--nvme", "2TB"], capsys, code=1)
    assert "It does not fit" in text
    assert "GB of CPU memory a node" in text
    assert "too much by" in text


def test_a_configuration_that_does_not_fit_is_said_and_told_by_the_exit_code(capsys):
    assert "too much by" in answer(["llama-3.1-8b", "--config", CPU_FILE, "--ram", "32GB"], capsys, code=1)


def test_without_a_machine_the_usual_placements_stand_side_by_side(capsys):
    text = answer(["gpt2-medium"], capsys)
    rows = text.split("bound by\n")[1].split("\n\n")[0].splitlines()
    assert [row.split("  ")[0] for row in rows] == [
        "GPU, GPU", "GPU, CPU", "GPU, NVMe", "CPU, CPU", "CPU, NVMe", "NVMe, NVMe",
    ]  # fmt: skip


def test_configurations_are_compared_by_name(capsys):
    rows = json.loads(answer(["gpt2", "--compare", NVME_FILE, CPU_FILE, "--json"], capsys))
    assert [row["name"] for row in rows] == ["nvme_offload", "cpu_offload"]
    assert rows[0]["nvme_file_nbytes"] > rows[1]["nvme_file_nbytes"] == 0


def test_names_are_listed(capsys):
    assert {"gpt2", "llama-3.1-405b", "deepseek-v3"} <= set(answer(["--list"], capsys).split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--layers, --hidden, --intermediate, --heads, --vocab missing"),
        (["--layers", "3"], "--hidden, --intermediate, --heads, --vocab missing"),
        (["nowhere.json"], "nowhere.json: the model's configuration cannot be read: No such file"),
        (["llama-3.1-80b"], "Did you mean llama-3.1-8b"),
        (["nowhere.json", "--layers", "3"], "not both"),
        ([*PLAIN_8B, "--config", '{"zero_optimisation": {}}'], "zero_optimization"),
        (["gpt2", "--sequence", "2048"], "at most 1,024 tokens"),
        (["gpt2", "--ranks", "6", "--ranks-per-node", "4", "--config", "{}"], "must divide the ranks"),
        (["gpt2", "--gpu", "1GB", "--no-gpu"], "keep one"),
        (["gpt2", "--profile", "nowhere.json"], "hardware profile cannot be read"),
        (["gpt2", "--ram", "64GB", "--nvme", "2TB"], "--gpu 24GB, or --no-gpu"),
        (["gpt2", "--gpu", "24GB"], "--ram 64GB"),
        (["gpt2", "--gpu", "24GB", "--max"], "--ram 64GB"),
        (["gpt2", "--save", "found.json"], "--save writes what a search has found: give --gpu and --ram"),
        (["gpt2", "--save", "found.json", "--config", "{}"], "--save writes what a search has found"),
        (["gpt2", "--dtype", "fp32", "--config", "{}"], "a configuration names its own"),
        (["gpt2", "--dtype", "fp32", "--compare", "{}"], "a configuration names its own"),
        (["gpt2", "--picture", "no/such/folder.svg", "--config", "{}"], "no/such/folder.svg: cannot be written"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("infinity-estimate: ")
    assert words in captured.err


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("openai-community/gpt2", "gpt2"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_an_id_finds_the_preset_of_its_last_part(name, preset, capsys):
    assert answer([name, "--config", CPU_FILE], capsys) == answer([preset, "--config", CPU_FILE], capsys)


def test_an_id_is_found_in_the_hubs_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--somebody--Else-8B"
    for revision, layers in (("0" * 40, 2), ("1" * 40, 32), ("2" * 40, 3)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "config.json").write_text(
            json.dumps({**LLAMA_8B, "num_hidden_layers": layers})
        )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1" * 40)
    assert answer(["somebody/Else-8B", "--config", "{}"], capsys).startswith("Else-8B: 8.03 B parameters")


def test_an_id_that_nobody_has_is_answered_with_the_way_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["somebody/Else-8B"]) == 2
    said = capsys.readouterr().err
    assert "`hf download somebody/Else-8B config.json --local-dir Else-8B`" in said
    assert str(tmp_path / "hub") in said


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--gpu", "24"], "24: did you mean 24GB?"),
        (["--ram", "1.5"], "1.5: did you mean 1.5GB?"),
        (["--nvme", "2kB"], "2kB: say how much"),
        (["--ram", "0"], "0: say how much"),
    ],
)
def test_a_size_without_its_unit_is_refused(option, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["gpt2", *option])
    assert left.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "bert"}'])
def test_a_file_that_is_no_known_model_is_refused(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("infinity-estimate: ")


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("Lion", ["exp_avg"]), ("Adagrad", ["sum"]), ("RMSprop", ["square_avg"]), ("Adamax", ["exp_avg", "exp_inf"])],
)
def test_what_an_optimizer_keeps_is_in_the_table_and_in_the_picture(kind, kept, tmp_path, capsys):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = json.dumps({"optimizer": {"type": kind}, "zero_optimization": zero})
    picture = tmp_path / "made.svg"
    text = answer(["gpt2", "--config", config, "--picture", str(picture)], capsys)
    assert "optimizer states in CPU memory" in text
    for name in kept:
        assert re.search(rf"^  {name} +0\.50 ", text, re.MULTILINE), text
        assert f"<title>{name}: " in picture.read_text()


def test_ranks_on_the_cpu_compute_at_the_rates_of_one(tmp_path, capsys):
    text = " ".join(answer(["gpt2-xl", "--no-gpu", "--config", CPU_FILE], capsys).split())
    assert "rates of an assumed machine: no accelerator; 16 cores of 2 TFLOP/s" in text
    beside, alone = (estimate("gpt2-xl", CPU_FILE, machine=Machine(accelerator=there)) for there in (True, False))
    assert alone.outline.seconds > 10 * beside.outline.seconds


@pytest.mark.parametrize(
    ("profile", "machine", "words"),
    [(ASSUMED, ["--no-gpu"], "to compute on the CPU"), (ASSUMED_CPU, ["--gpu", "24GB"], "give --no-gpu")],
)
def test_a_profile_of_another_kind_of_machine_is_refused(profile, machine, words, tmp_path, capsys):
    save_profile(profile, tmp_path / "profile.json")
    assert main(["gpt2", "--config", CPU_FILE, *machine, "--profile", str(tmp_path / "profile.json")]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3.2-1b", "--ram", "64GB", "--nvme", "200GB"],
        ["gpt2"],
        ["gpt2", "--config", CPU_FILE, "--ram", "8GB"],
        ["gpt2", "--ram", "4GB"],
    ],
)
def test_without_an_accelerator_nothing_is_called_one(arguments, tmp_path, capsys):
    picture = tmp_path / "made.svg"
    main([*arguments, "--no-gpu", "--picture", str(picture)])
    shown = capsys.readouterr().out + picture.read_text()
    assert "GPU" not in shown
    assert "an accelerator" not in shown.replace("no accelerator", "")


def test_one_memory_is_counted_once(capsys):
    text = answer(["gpt2", "--no-gpu", "--config", CPU_FILE, "--ram", "64GB"], capsys)
    assert text.count("a rank may have") == 1
    told = json.loads(answer(["gpt2", "--no-gpu", "--config", CPU_FILE, "--ram", "64GB", "--json"], capsys))
    assert told["limits"] == {"gpu": None, "cpu": 61 * 10**9, "nvme": None}
    together = [sum(tiers["gpu"].values()) + sum(tiers["cpu"].values()) for tiers in told["nbytes_by_phase"].values()]
    assert told["nbytes_peak"]["cpu"] == max(together)


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_sentences_are_as_wide_as_the_terminal(columns):
    """On a pseudo-terminal; a file and a pipe get the widest."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    done = subprocess.run(
        [sys.executable, "-m", "estimators", "gpt2", *SMALL_MACHINE], stdout=secondary, check=True, cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"}, timeout=60,
    )  # fmt: skip
    os.close(secondary)
    shown = b""
    while part := _read(primary):
        shown += part
    os.close(primary)
    assert done.returncode == 0
    prose, _, rest = shown.decode().partition("GPU, GB a rank")
    lines = (prose + rest[rest.index("Set aside") :]).splitlines()
    assert min(columns, 100) - 20 < max(map(len, lines)) <= min(columns, 100)
    assert columns < 80 or max(map(len, shown.decode().splitlines())) <= columns


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # The end, as Linux says it.
        return b""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, "the precision differs (bf16 in"),
        ({"bf16": {"enabled": True}}, "the batch of a step differs (16 in cpu_offload, 1 in other)"),
        ({"bf16": {"enabled": True}, "train_batch_size": 16}, "the micro-batch differs (4 in cpu_offload, 16 in"),
    ],
)
def test_a_comparison_does_not_mix_work_unless_it_is_asked_to(other, words, tmp_path, capsys):
    (tmp_path / "other.json").write_text(json.dumps(other))
    files = [CPU_FILE, str(tmp_path / "other.json")]
    assert main(["gpt2", "--compare", *files]) == 2
    assert words in capsys.readouterr().err
    head = answer(["gpt2", "--mixed", "--compare", *files], capsys).splitlines()[2]
    assert "batch" in head or "precision" in head


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_attention_heads": 30}, "num_attention_heads is 30, which does not divide the hidden size, 4,096: 32"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide the number of heads, 32: 4"),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 12}, "n_head is 12, which does not divide the width, 100: 10"),
    ],
)
def test_a_model_that_cannot_be_is_refused(sizes, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **sizes}))
    assert main([str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    if "n_head" not in sizes:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "num_attention_heads": 48, "head_dim": 128}))
        assert "B parameters" in answer([str(tmp_path)], capsys)


def test_a_quantized_model_is_said_to_be_one(tmp_path, capsys):
    stored = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, **stored}))
    text = " ".join(answer([str(tmp_path), "--config", CPU_FILE], capsys).split())
    assert "the weights are quantized (gptq, 4 bits): sized are plain ones in bf16" in text


@pytest.mark.parametrize(
    ("machine", "keys"),
    [
        ("--ram 512GB --gpu 24GB", {"train_micro_batch_size_per_gpu", "activation_checkpointing"}),
        ("--ram 64GB --gpu 24GB --nvme 1TB", {"zero_optimization", "activation_checkpointing"}),
        ("--ram 16GB --gpu 4GB", set()),
    ],
)
def test_what_does_not_fit_has_a_headline_and_the_nearest_that_does(machine, keys, tmp_path, capsys):
    said = ["llama-3.1-8b", *machine.split(), "--config"]
    told = json.loads(answer([*said, CPU_FILE, "--json"], capsys, code=1))
    assert set(told["nearest"] or {}) >= keys
    text = answer([*said, CPU_FILE], capsys, code=1)
    assert text.index("It does not fit: ") < text.index("GPU, GB a rank")
    assert ("The nearest that fits takes" in text) == bool(keys)
    if keys:
        raw, near = json.loads(Path(CPU_FILE).read_text()), told["nearest"]
        for section, values in near.items():
            for name, value in values.items() if isinstance(values, dict) else ():
                place = raw.setdefault(section, {})
                place[name] = {**place.get(name, {}), **value} if isinstance(value, dict) else value
            if not isinstance(values, dict):
                raw[section] = values
        (tmp_path / "near.json").write_text(json.dumps(raw))
        assert "It fits." in answer([*said, str(tmp_path / "near.json")], capsys)


def test_a_model_that_nothing_near_fits_is_answered_quickly():
    with usual_seconds() as taken:
        assert main(["llama-3.1-405b", "--config", CPU_FILE, "--ram", "64GB", "--gpu", "24GB", "--nvme", "4TB"]) == 1
    assert taken.seconds < 5


def test_a_limit_of_what_computes_holds_on_the_cpu_too(capsys):
    config = json.dumps({"memory": {"gpu": {"max_bytes": "1GB"}}})
    machine = ["--no-gpu", "--ram", "64GB"]
    assert "fits" in answer(["gpt2", "--config", "{}", *machine], capsys)
    assert estimate("gpt2", config, machine=Machine(None, 64 * 10**9, accelerator=False)).excess[Tier.GPU] > 0
    answer(["gpt2", "--config", config, *machine], capsys, code=1)


def test_who_loads_weights_is_told_how(capsys):
    text = " ".join(answer(["gpt2", "--config", NVME_FILE], capsys).split())
    assert "infinity.Init(config=...), or load a folder with its weights by infinity.load_hf(folder, config)" in text
