"""Some families of the zoo, of each kind that is awkward; `python -m tests.zoo` runs all of them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from unittest import mock

import pytest

from infinity.distributed import cma_transport
from infinity.errors import DesyncError
from tests.support.cells import kept
from tests.support.spawn import RankError, RankPool
from tests.zoo.__main__ import main
from tests.zoo.families import FAMILIES, ON_SEVERAL_RANKS
from tests.zoo.train import BY_LAYER, ERROR_MAX, NOT_COMPILED, run, train

# LayerDrop, tied weights, an encoder and a decoder, a mixture of experts.
AWKWARD = ("bart LayerDrop", "llama tied", "t5", "mixtral")
# Backends of engine.compile() that the suite runs; the script runs inductor, too.
COMPILERS = (NOT_COMPILED, "aot_eager")
SOCKETS, MEMORY = 1 << 30, 1


@pytest.mark.parametrize(
    ("ranks", "name", "compiler"),
    kept(
        list(itertools.product((1, 2), AWKWARD, COMPILERS)),
        [
            (1, "t5", NOT_COMPILED),
            (2, "bart LayerDrop", NOT_COMPILED), (2, "llama tied", NOT_COMPILED), (2, "mixtral", NOT_COMPILED),
        ],
    ),
)  # fmt: skip
def test_a_family_trains_as_in_plain_torch(rank_pools, ranks, name, compiler):
    row = rank_pools[ranks].run(run, name, compiler)[0]
    assert row["error"] <= ERROR_MAX, row
    assert row["moved"] > 1e-3
    if compiler == NOT_COMPILED:
        assert row["bits"] or row["why"] == BY_LAYER, row


# Stages of other sizes, and a model that inductor's own rounding takes far from an eager one.
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "clip"])
def test_a_family_that_inductor_compiles_trains_as_in_plain_torch_compiled(rank_pools, name):
    row = rank_pools[1].run(run, name, "inductor")[0]
    assert row["error"] <= ERROR_MAX, row
    assert row["moved"] > 1e-3


def drop(rank: int, world: int, name: str, smallest: int) -> str:
    """What a rank is told that drops other layers than the others."""
    with mock.patch.object(cma_transport, "SMALLEST_NBYTES", smallest):
        try:
            train(name, rank, seed=lambda step: world * step + rank)
        except DesyncError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("name", "smallest"), kept(
    list(itertools.product(("bart LayerDrop", "whisper LayerDrop"), (SOCKETS, MEMORY))), [("bart LayerDrop", MEMORY)],
))  # fmt: skip
def test_ranks_that_drop_other_layers_of_a_stock_model_name_them(rank_pools, name, smallest):
    texts = rank_pools[2].run(drop, name, smallest, timeout=60)
    assert texts[0] == texts[1], "both ranks say the same"
    ours, theirs = re.findall(r"  rank [01]: (.+) \(number \d+\)", texts[0])
    assert ours != theirs
    assert "layers." in ours + theirs, texts[0]
    assert "(LayerDrop) needs the same seed on every rank" in texts[0]


def test_the_zoo_is_as_large_as_it_says():
    assert len({family.model_type for family in FAMILIES.values()}) >= 45
    assert len(ON_SEVERAL_RANKS) >= 12
    assert {*AWKWARD, *ON_SEVERAL_RANKS} <= FAMILIES.keys()
    assert sum(FAMILIES[name].layer_drop for name in ON_SEVERAL_RANKS) >= 4


@pytest.mark.matrix
def test_the_command_prints_and_writes_a_row_a_family(tmp_path, capsys):
    def said(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        path = tmp_path / "zoo.json"
        code = main(["--ranks", "1", "--json", str(path), *arguments])
        return code, json.loads(path.read_text())["rows"], capsys.readouterr().out

    code, (row,), text = said("--families", "gpt2")
    assert code == 0 and row["bits"] and "1 runs, 1 equal to the last bit, 0 beyond" in text
    with mock.patch("tests.zoo.__main__.ERROR_MAX", -1.0):
        code, (row,), text = said("--families", "gpt2")
    assert code == 1 and not row["ok"] and "BEYOND" in text
    trouble = "run: rank 0 of 1 failed:\nTraceback (most recent call last):\n  File x\nValueError: a shape"
    with mock.patch.object(RankPool, "run", side_effect=RankError(trouble)):
        code, (row,), text = said("--families", "gpt2", "--compile", "inductor")
    assert code == 1 and row["failure"] == trouble
    assert all(f"    {line}\n" in text for line in trouble.splitlines())
    command = json.loads((tmp_path / "zoo.json").read_text())["command"]
    assert command == "python -m tests.zoo --ranks 1 --compile inductor --families gpt2"
