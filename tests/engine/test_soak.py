"""The soak of `tests.soak`, short: 300 steps on NVMe hold no more objects than the first hundred."""

from __future__ import annotations

import pytest

from tests import soak


def short(rank: int, world: int, folder: str, variant: str) -> tuple[list[soak.Sample], soak.Growth]:
    """A run in a process of its own, for a test before this one would leave objects that come and go."""
    return soak.run(folder, variant, steps=300, warm=100, every=50)


@pytest.mark.parametrize("variant", soak.VARIANTS)
def test_steps_on_nvme_leave_no_objects_behind(rank_pools, tmp_path, variant):
    """The limits are those of 12,000 steps: an object a step is found in 200 as well."""
    ((samples, growth),) = rank_pools[1].run(short, str(tmp_path), variant)
    assert growth.is_bounded, samples
