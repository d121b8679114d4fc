"""What README.md, CONTRIBUTING.md and docs/*.md show is true: Python and commands run, configurations load, links lead
somewhere.

See tests/support/pages.py for the comments by which a page says what a block needs.
"""

from __future__ import annotations

import ast
import errno
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from docs import make_benchmarks, make_clients, make_devices, make_life, make_outputs
from infinity.base.command_line import Parser
from infinity.cli.main import COMMANDS, main
from infinity.config import load_config
from infinity.memory.partition import State
from tests.support import bare, pages
from tests.support.models import TinyLlama
from tests.support.pages import PAGES, ROOT, Block, shown
from tests.support.syntax import parsed

# Most blocks that may say why they are not run.
NOT_RUN_MAX = 2
PICTURED = "llama-3.1-8b --gpu 24GB --ram 64GB --nvme 1TB".split()
WORD = re.compile(r"[A-Za-z_]{2,}")
EVERY = [block for page in PAGES for block in shown(page)]


def example(path: str) -> Any:
    """The module of an example; the first imports matplotlib."""
    return importlib.import_module(f"examples.{Path(path).stem}")


def of(language: str) -> list[Block]:
    """The blocks in one language that are to be checked."""
    return [block for block in EVERY if block.language == language and not block.not_run]


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(block.page == page for block in of(language))]


def test_every_block_is_of_a_kind_that_is_checked():
    assert {block.language for block in EVERY} == {"python", "json", "console", "text"}
    assert not any(re.search(r"^ *(\$|import|from) ", block.text, re.M) for block in of("text"))
    left_out = [block for block in EVERY if block.not_run]
    assert len(left_out) <= NOT_RUN_MAX and all(len(block.not_run.split()) >= 3 for block in left_out)
    assert len(of("python")) >= 20 and len(of("json")) >= 5 and len(of("console")) >= 12


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed_config", "config.json"])
    names: dict[str, Any] = {"__name__": "page"}
    if page != "README.md":
        # That one's block is the first that a reader tries: it needs nothing.
        pages.prepare(tmp_path)
        names |= {"infinity": infinity, "torch": torch}
    ran = 0
    for block in of("python"):
        if block.page == page:
            pages.run(block, names)
            ran += 1
    assert ran, page


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_a_configuration_loads(block: Block, tmp_path: Path) -> None:
    text = block.text if block.text.lstrip().startswith("{") else f"{{{block.text}}}"
    (tmp_path / "config.json").write_text(text)
    config = load_config(tmp_path / "config.json")
    for key in json.loads(text):
        assert key in config.model_fields_set, key


def commands(block: Block) -> list[str]:
    """The lines that are typed; a line may go on behind a backslash."""
    return re.findall(r"^ *\$ (.+)$", block.text.replace("\\\n", " "), re.M)


def understood(line: str) -> None:
    """Give a command line to the parser of what it starts; whatever is wrong with it raises."""
    words = shlex.split(line, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    match words:
        case ["pip", "install", *options]:
            check_install(options)
        case ["make", target]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M), target
        case ["infinity", *options]:
            check_command(options)
        case ["infinity-estimate" | "infinity-export" | "infinity-ckpt" as script, *options]:
            assert script in bare.project()["scripts"]
            check_command([script.partition("-")[2], *options])
        case ["python", script, *options]:
            example(script).parse(options)
        case ["torchrun", *options]:
            launch = importlib.import_module("torch.distributed.run").get_args_parser().parse_args(options)
            example(launch.training_script).parse(launch.training_script_args)
        case _:
            raise AssertionError(f"nothing is known of this command: {line}")


def check_command(words: list[str]) -> None:
    """A command of `infinity` and its options are known."""
    parser = Parser(prog=words[0])
    importlib.import_module(COMMANDS[words[0]][0]).add_arguments(parser)
    parser.parse_args(words[1:])


def check_install(options: list[str]) -> None:
    """What pip is asked to install is this project, with extras that it has."""
    (what,) = (word for word in options if not word.startswith("-"))
    named = re.fullmatch(r"(?:\.|infinity-engine)(?:\[(.+)\])?", what)
    assert named, what
    assert set((named[1] or "hf").split(",")) <= set(bare.project()["optional-dependencies"]), what


@pytest.mark.parametrize("page", pages_with("console"))
def test_command_lines_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [(block, line) for block in of("console") if block.page == page for line in commands(block)]
    assert lines, page
    for block, line in lines:
        try:
            understood(line)
        except (SystemExit, Exception) as error:
            pytest.fail(f"{block}: {line}: {error!r}")


# Programs that the test below does not start, with the reason.
NOT_STARTED = {
    "make": "its targets are this test's own surroundings",
    "pip": "it would change the environment that the tests run in",
    "torchrun": "tests/test_examples.py and tests/test_finetune.py start two ranks of both examples",
    "infinity bench": "tests/cli/test_bench.py starts it; it measures for 5 seconds at least",
    "infinity-estimate": "test_a_page_shows_what_the_estimator_prints runs it and compares every line",
}  # fmt: skip
# What a command is given beside its own options, so that it takes a second or two.
SMALL = {
    "python examples/train_lm.py": "--dim 32 --layers 2 --heads 2 --seq 32 --steps 2",
    "python examples/make_small_model.py": "--data small.txt --vocabulary 300 --hidden 32 --layers 2 --heads 2",
    "python examples/finetune_hf.py": "--data small.txt --seq 32 --steps 2 --tokens 4",
}


def start(line: str) -> None:
    """Run a command in this process and the current folder, small; a status that is no answer raises."""
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    program, *options = [*words, *SMALL.get(" ".join(words[:2]), "").split()]
    if program == "python":
        example(options[0]).main(options[1:])
    else:
        assert program == "infinity" and main(options) in (0, 1), line


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_run_and_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs word for word, in any order; numbers, and which of its weights a list names first, are another run's."""
    monkeypatch.chdir(tmp_path)
    pages.prepare(tmp_path)
    weights = {word for name, _ in TinyLlama().named_parameters() for word in WORD.findall(name)}
    for block in of("console"):
        lines = [line for line in commands(block) if block.page == page and not line.startswith((*NOT_STARTED,))]
        if not lines:
            continue
        pages.give(block, {})
        capsys.readouterr()
        for line in lines:
            start(line)
        printed = capsys.readouterr().out
        output = re.sub(r"^ *\$ .*$", "", block.text, flags=re.M)
        assert {*WORD.findall(output)} <= {*WORD.findall(printed)} | weights, printed


def test_every_program_that_is_not_started_is_shown_and_has_a_reason():
    lines = [line for block in of("console") for line in commands(block)]
    assert all(any(line.startswith(program) for line in lines) for program in NOT_STARTED)
    assert all(len(why.split()) >= 5 for why in NOT_STARTED.values())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and the public repository make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page: str, text: str) -> list[str]:
    """The relative links of a page that lead to no file or no heading."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        # Made while the site is built: the page of CONTRIBUTING.md, and the anchors of the Python API.
        if path == "contributing.md" or (anchor and file.name == "api.md"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found():
    text = "[a](docs/memory.md#what-a-rank-may-use) [b](docs/gone.md) [c](docs/memory.md#gone) [d](https://example.org)"
    assert broken_links("README.md", text) == ["docs/gone.md", "docs/memory.md#gone"]


def messages() -> str:
    """Every text of the package's sources, with `{}` where a value is put into it."""
    found = []
    for folder in ("infinity", "estimators"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_the_messages_that_troubleshooting_explains_are_in_the_sources():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+)`$", page, re.M)
    assert len(quoted) >= 40
    sources = messages()
    for message in quoted:
        pieces = [piece for piece in message.split("...") if len(piece.strip()) > 2]
        assert pieces, message
        # What the system says itself.
        if message != os.strerror(errno.ENOSPC):
            assert all(piece.strip() in sources for piece in pieces), message


WRONG = (
    "infinity ckpt inspekt out", "infinity-estimate gpt2 --vram 24GB", "infinity export out", "make coffee",
    "pip install '.[everything]'", "pip install infinity", "python examples/train_lm.py --layer-count 2",
    "python examples/gone.py", "torchrun --ranks 2 examples/train_lm.py", "deepspeed train.py",
)  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_found(line: str) -> None:
    with pytest.raises((SystemExit, AssertionError, ImportError, KeyError, ValueError)):
        understood(line)


def test_comments_say_what_a_block_is_given():
    text = (
        "a\n<!-- given: model, data; with {\"bf16\": {}} -->\n```python\nx = 1\n```\n\n"
        "<!-- not run: needs a GPU -->\n```python\ny\n```\n\n<!-- given: engine -->\n\n```json\n{}\n```\n"
    )
    first, second, third = pages.blocks("p.md", text)
    assert (first.given, first.config, first.text, first.line) == (("model", "data"), '{"bf16": {}}', "x = 1\n", 4)
    assert (second.given, second.not_run, second.line) == ((), "needs a GPU", 9)
    assert (third.given, third.language) == ((), "json"), "a comment stands right above its block"


def test_an_error_in_a_block_names_the_line_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = pages.blocks("docs/timeline.md", "text\n\n```python\nx = 1\nx.gone\n```\n")
    with pytest.raises(AttributeError) as caught:
        pages.run(block, {})
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("timeline.md", 5)
    (unknown,) = pages.blocks("p.md", "<!-- given: luck -->\n```python\nx = 1\n```\n")
    with pytest.raises(KeyError, match="luck"):
        pages.run(unknown, {})


def test_the_benchmarks_and_their_plots_are_what_the_results_say():
    assert make_benchmarks.PAGE.read_text(encoding="utf-8") == make_benchmarks.render(), "run docs/make_benchmarks.py"
    plots = make_benchmarks.plots()
    assert {path: path.read_text(encoding="utf-8") for path in make_benchmarks.PLOTS.glob("*.svg")} == plots


def test_the_architecture_names_functions_that_exist_and_the_states_of_a_partition():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = re.findall(r"^\|[^|]*\| `(\w+)` \| `([\w/]+\.py)` \|", page, re.M)
    assert len(walk) >= 35
    for name, file in walk:
        source = (ROOT / "infinity" / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", source, re.M), f"{name} is not in {file}"
    assert re.findall(r"^\| ([A-Z]+) \|", page, re.M) == [state.name for state in State]


def test_the_table_of_clients_is_what_the_results_say():
    page = make_clients.PAGE.read_text(encoding="utf-8")
    assert page == make_clients.refreshed(page), "run docs/make_clients.py"


def test_the_tables_of_devices_are_what_the_results_say():
    page = make_devices.PAGE.read_text(encoding="utf-8")
    assert page == make_devices.refreshed(page), "run docs/make_devices.py"


def test_the_life_of_a_parameter_is_what_its_script_draws():
    assert make_life.PICTURE.read_text(encoding="utf-8") == make_life.drawn(), "run docs/make_life.py"


def test_a_figure_is_judged_by_its_limit():
    row = make_benchmarks.Row
    assert row("ratio", (0.95, 1.2), ">= 0.95").holds and not row("ratio", (0.94, 1.2), ">= 0.95").holds
    assert row("share", (-0.5, 5.0), "<= 5", "%").cells() == ["share", "-0.5, 5 %", "<= 5 %", "holds"]
    assert row("share", (5.1,), "<= 5").cells()[-1] == "**no**"
    assert row("only said", (3.0,)).verdict == ""


def test_what_benchmarks_units_writes_becomes_a_topic():
    seconds = {"step": 1e-4, "cpu": 2e-4, "initialize": 3e-4}
    cases = {str(count): {key: count * value for key, value in seconds.items()} for count in (200, 3200)}
    raw = {"machine": "2026-11-25, 2 cores", "limit": 1.3, "rounds": 9, "cases": {"kept": cases}}
    made = make_benchmarks.ADAPTERS["units"](raw)
    assert [row["figures"] for row in made["rows"]] == [[1.0], [1.0], [1.0]]
    assert made["table"][0] == ["kept, 200 units", 100, 200, 300]


@pytest.mark.slow
@pytest.mark.parametrize("name", make_outputs.FILES)
def test_a_page_shows_what_the_estimator_prints(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's picture, too, is what the command draws that it shows."""
    monkeypatch.chdir(ROOT)
    made, ask = tmp_path / "estimate.svg", make_outputs.cli.main

    def drawing(words: list[str]) -> int:
        return ask([*words, "--picture", str(made)] if words == PICTURED else words)

    monkeypatch.setattr(make_outputs.cli, "main", drawing)
    text = (ROOT / name).read_text()
    assert "$ infinity-estimate" in text
    assert make_outputs.refreshed(text) == text
    if "sizing" in name:
        assert made.read_text() == (ROOT / "docs" / "pictures" / "estimate.svg").read_text()
