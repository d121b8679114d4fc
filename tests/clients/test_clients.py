"""Programs of accelerate, Trainer and TRL, unchanged, equal DDP: what the suite keeps of the matrices here."""

from __future__ import annotations

import pytest

from tests.clients.accelerate_matrix import cells_of, judged
from tests.clients.run import run_together
from tests.clients.test_trl import OFFLOADED, PLAIN, assert_alike
from tests.clients.trainer_matrix import ALL, DIGITS, SAVES, difference

SHORT = {"accumulation": 4, "rows": 22}
LOOPS = [
    ("short last step", SHORT, [{**SHORT, "stage": 3, "offload": "nvme"}]),
    ("saves", {"saves": True}, [{"saves": True, "stage": 3, "offload": "cpu"}]),
    ("tensor axis", {}, [{"tensor": 2, "plugin": True, "stage": 1}]),
]


@pytest.mark.timeout(400)
def test_programs_of_three_clients_equal_ddp_save_and_go_on(tmp_path):
    """In one start of two ranks, which is what takes the time."""
    whole = {"stage": 3, "offload": "nvme", "arguments": SAVES, "acts": ALL, "folder": str(tmp_path / "saved")}
    trainers = [
        {"arguments": SAVES, "acts": ALL}, whole, {**whole, "resume": "checkpoint-3"},
        {"arguments": {"optim": "rmsprop"}}, {"stage": 2, "offload": "cpu", "arguments": {"optim": "rmsprop"}},
        {"stage": 2, "offload": "cpu", "arguments": {"optim": "adafactor"}},
    ]  # fmt: skip
    loops, found, (plain_trl, trl) = run_together(2, {
        "accelerate_cells": cells_of(LOOPS), "trainer_cells": trainers, "trl_cells": [PLAIN[0], OFFLOADED[0]],
    })  # fmt: skip
    rows = judged(2, LOOPS, loops)
    divided = rows[-1]["wrong"].pop()
    assert [row["wrong"] for row in rows] == [[], [], []]
    assert "ParallelismConfig(tp_size=2) is for models of DTensors" in divided["error"]
    *found, refused = found
    assert [row.get("error") for row in found] == [None] * len(found)
    plain, trained, resumed, plain_rmsprop, rmsprop = found
    assert difference(plain, trained, resumed=False) < DIGITS
    assert difference(trained, resumed, resumed=True) == 0.0
    # accelerate would have DeepSpeed's Adam step where states are offloaded.
    assert difference(plain_rmsprop, rmsprop, resumed=False) < DIGITS
    assert "ConfigError: optimizer Adafactor is not elementwise" in refused["error"]
    assert_alike(trl, plain_trl)
