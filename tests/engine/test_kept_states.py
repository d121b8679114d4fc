"""States on NVMe for which there is memory stay in it from step to step: no bytes move, and no bit differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infinity.memory.partition import State
from infinity.memory.residency import Residency
from infinity.plan.partitions import kept_of
from infinity.plan.types import Key, Kind
from tests.support.checkpoints import assert_same, contents
from tests.support.oracle import CLIP, STEPS, Case, settings, train

EARLY = {"dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}}


@pytest.mark.parametrize("options", [{"clip": CLIP}, {"clip": CLIP, "overlap": False}, EARLY], ids=str)
def test_kept_states_are_never_written_and_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    written: Counter[Key] = Counter()
    flush = Residency.flush

    def noting(self: Residency, keys: Any) -> None:
        keys = [*keys]
        written.update(key for key in keys if self.partitions[key].state is State.DIRTY)
        flush(self, keys)

    def look(engine: Any) -> None:
        kept.extend(Key(Kind.STATES, index) for index in engine.plan.kept())
        others.extend({Key(Kind.STATES, index) for index in engine.plan.step_order} - {*kept})
        engine.synchronize()
        assert all(engine.store[key].state is State.DIRTY for key in kept)
        engine.save_checkpoint(tmp_path / str(count))

    found = {}
    for count in (4, 8, 1000):
        kept: list[Key] = []
        others: list[Key] = []
        written.clear()
        config = settings(tmp_path, param="nvme", optimizer="nvme", zero={"sub_group_size": 640}, **options)
        config["zero_optimization"]["offload_optimizer"]["buffer_count"] = count
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "flush", noting)
            found[count] = train(Case(), config, look=look).digest
        assert {4: not kept, 8: kept and others, 1000: not others}[count]
        # Once, when they were made; the others, for which there is no memory, in every step.
        assert all(written[key] <= 1 for key in kept)
        assert all(written[key] >= STEPS for key in others)
    assert len(set(found.values())) == 1
    first = contents(tmp_path / "4")
    for count in (8, 1000):
        assert_same(first, contents(tmp_path / str(count)))


def test_those_stepped_first_are_kept_beside_a_whole_window() -> None:
    sizes = dict.fromkeys(range(20), 10)
    order = [*range(19, -1, -1)]
    assert kept_of(order, sizes, 50) == frozenset()
    assert kept_of(order, sizes, 70) == {19, 18}
    assert kept_of(order, sizes, 200) == frozenset(order)
    # What lives elsewhere takes no room.
    del sizes[19]
    assert kept_of(order, sizes, 70) == {18, 17}
    assert kept_of(order, {}, 0) == frozenset()
