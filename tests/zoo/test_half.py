"""bf16 beside a loop by hand: the same bits if the loop rounds as the engine does, and why another loop has others."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.half import away_from_zero, first_difference, to_even


@pytest.mark.parametrize("name", ["t5", "clip", "llama"])
def test_a_loop_that_rounds_masters_away_from_zero_has_the_same_bits(name):
    """Losses, gradients, masters and weights of ten steps."""
    assert first_difference(name, 10, away_from_zero) is None


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_a_loop_that_rounds_to_even_parts_at_a_master_between_two_weights(name):
    """torch's rounding: everything was equal until one fp32 master lay in the middle between two bf16 values."""
    found = first_difference(name, 10, to_even)
    assert found is not None and found.what == "weights"
    assert found.masters is not None and 0 < len(found.masters) < 10
    assert set((found.masters.view(torch.int32) & 0xFFFF).tolist()) == {0x8000}


def test_the_two_roundings_differ_in_ties_only():
    masters = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    masters = masters[masters.view(torch.int32) & 0xFFFF != 0x8000]
    ties = ((masters.view(torch.int32) & -0x10000) | 0x8000).view(torch.float32)
    assert torch.equal(away_from_zero(masters), to_even(masters))
    assert 0.4 < (away_from_zero(ties) != to_even(ties)).float().mean() < 0.6
    assert torch.all(away_from_zero(ties).float().abs() > ties.abs())
