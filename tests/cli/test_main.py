"""The command `infinity`: each word does its work, and says in one sentence what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.cli.main import COMMANDS, main
from infinity.cli.terminal import format_table

ROOT = Path(__file__).resolve().parents[2]
MODEL = "--layers 2 --hidden 64 --intermediate 128 --heads 4 --vocab 100".split()


def test_every_command_is_in_the_help(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 8


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("bensch", "infinity: COMMAND: unknown: bensch; did you mean bench?"),
        ("xyz", f"infinity: COMMAND: unknown: xyz, which is none of {', '.join(COMMANDS)}"),
        ("--verison", "infinity: --verison: unknown option; did you mean --version?"),
        ("bench --second 5", "infinity bench: --second: unknown option; did you mean --seconds?"),
        ("bench --secunds=5", "infinity bench: --secunds: unknown option; did you mean --seconds?"),
        ("bench --seconds x", "infinity bench: --seconds: invalid float value: 'x'"),
        ("bench here", "infinity bench: here: not expected here; see infinity bench --help"),
        (
            "ckpt inpect a",
            "infinity ckpt: inspect|verify|diff|from-swap|killed: unknown: inpect; did you mean inspect?",
        ),
        ("ckpt diff a b --al", "infinity ckpt: --al: unknown option; did you mean --all?"),
        (
            "ckpt",
            "infinity ckpt: the following arguments are required: inspect|verify|diff|from-swap|killed; "
            "see infinity ckpt --help",
        ),
        ("config expalin a", "infinity config: action: unknown: expalin; did you mean explain?"),
        ("estimate gpt2 --rank 2", "infinity-estimate: --rank: unknown option; did you mean --ranks?"),
        ("estimate gpt2 --ranks x", "infinity-estimate: --ranks: x is not a positive number"),
        ("estimate gpt2 --dtype bf61", "infinity-estimate: --dtype: unknown: bf61; did you mean bf16?"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused_in_one_line_with_what_was_meant(capsys, line, sentence):
    with pytest.raises(SystemExit) as left:
        main(line.split())
    assert left.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", sentence + "\n")


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"infinity {infinity.__version__}\n"


def test_explain_says_each_value_and_its_source(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "graph_harvesting": True}))
    assert main(["config", "explain", str(path), "--ranks", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train_batch_size = 8  (file)" in lines
    assert "zero_optimization.stage = 0  (default)" in lines
    assert any(line.startswith("train_micro_batch_size_per_gpu = 2  (auto: 8 = 2 a rank x") for line in lines)
    assert lines[-1].startswith("graph_harvesting = True: no effect here")


def test_explain_shows_one_section(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    assert main(["config", "explain", str(path), "--only", "aio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("aio.") for line in lines)


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ('{"aio": {"depth": 1}}', [], "aio.depth: unknown key"),
        ('{"train_batch_size": 3}', ["--ranks", "2"], "train_batch_size"),
        (
            '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}', [],
            "1 rank assumed = 8: nearest valid choices are train_batch_size 8",
        ),
        ('{"train_batch_size": 3, "gradient_accumulation_steps": 2}', [], "say with --ranks N how many"),
        ("{}", ["--ranks", "0"], "at least 1"),
        ("{}", ["--only", "oai"], "no such key"),
        ("{", [], "line 1"),
    ],
)
def test_explain_refuses_in_a_sentence(tmp_path, capsys, text, words, sentence):
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert main(["config", "explain", str(path), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err


def test_estimate_is_the_estimators_command(capsys):
    assert main(["estimate", *MODEL]) == 0
    shown = capsys.readouterr().out
    assert "parameters" in shown
    assert main(["estimate", "missing.json"]) == 2


def test_estimate_and_explain_load_no_torch(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    code = (
        "import sys\nfrom infinity.cli.main import main\n"
        f"main(['config', 'explain', 'ds.json'])\nmain(['estimate', *{MODEL!r}])\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=60,
                   stdout=subprocess.DEVNULL)  # fmt: skip


@pytest.mark.parametrize("words", [["bench"], ["export", "a", "b"], ["ckpt", "inspect", "a"]])
def test_without_torch_a_command_is_refused_in_one_line(words):
    command = [sys.executable, "-m", "tests.support.bare", "--without", "torch", str(ROOT / "infinity" / "__main__.py")]
    reply = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (reply.returncode, reply.stdout) == (2, "")
    assert reply.stderr == f"infinity {words[0]}: No module named 'torch'. `infinity doctor` says what is missing\n"


def test_the_module_is_the_command():
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "config", "explain", "nowhere.json"], capture_output=True, text=True,
        cwd=ROOT, timeout=60, check=False,
    )  # fmt: skip
    assert reply.returncode == 2
    assert reply.stderr.startswith("infinity config: nowhere.json: ")


def test_columns_are_as_wide_as_their_widest_cell():
    assert format_table([["", "a"], ["long name", "1.5"]]) == "             a\nlong name  1.5"


@pytest.mark.parametrize("words", [["config", "explain", "{}"], ["estimate", "gpt2"]])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    """As with `| head -1`: no traceback, the exit code of a closed pipe."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "infinity", *words], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
