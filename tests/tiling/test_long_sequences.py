"""What tests.long_sequences runs, at a length that plain torch can hold: the same loss and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.engine.activation_forecast import LiveBytes
from tests.long_sequences import TILE, configuration, make, text

TOKENS = 16_384


@pytest.mark.timeout(300)
@pytest.mark.parametrize("window", [False, True])
def test_a_long_sequence_has_plain_torchs_loss_and_gradients(tmp_path: Path, window: bool) -> None:
    """Attention over blocks, MLPs and loss in tiles, inputs of recomputed blocks and all states on NVMe."""
    ids, plain = text(TOKENS), make(TOKENS, window, 1)
    expected = plain(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    model = make(TOKENS, window, 1)
    infinity.tile_sequence(model, tile_tokens=TILE)
    engine, *_ = infinity.initialize(model=model, config=configuration(str(tmp_path)))
    with engine:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        for (name, param), other in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            grad = infinity.state(param).grad
            assert grad is not None and other.grad is not None
            assert float((grad - other.grad).abs().max()) <= 1e-6, name


class Block(torch.nn.Module):
    """A wide MLP in tiles, as blocks have one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(16, 256), torch.nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + infinity.tiled_mlp(self, x, tile_tokens=64, forward=lambda each: self.narrow(self.wide(each).relu()))


class Narrowing(torch.nn.Module):
    """A block whose inside is narrower than what it hands on, as attention's heads may be."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.out = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.out(self.within(x)))


def test_the_gradient_of_a_blocks_output_waits_while_its_inside_goes_back() -> None:
    live = LiveBytes(torch.nn.Sequential(block := Narrowing()), ["0"], lambda _: None)
    with live.counting():
        output = torch.nn.Sequential(block)(torch.randn(1, 1000, 64, requires_grad=True))
    assert output.requires_grad
    # At the end live input, inside and output. Made again: the inside, the last layer's output and the block's.
    # And three gradients: one that comes in, one that goes out, and the one that goes around.
    assert live.found("").nbytes == 4 * 1000 * ((64 + 4 + 64) + (4 + 64 + 64) + 3 * 64)


def test_a_block_that_is_computed_again_has_one_tile_at_a_time() -> None:
    """What the count of a forward says of backward grows with the tokens between the tiles, not with those in them."""
    found = []
    for tokens in (512, 4096):
        model = torch.nn.Sequential(Block(), Block())
        live = LiveBytes(model, ["0", "1"], lambda _: None)
        with live.counting():
            output = model(torch.randn(1, tokens, 16, requires_grad=True))
        assert output.requires_grad
        found.append(live.found("").nbytes)
    # A token of a block has 64 bytes, some five times; of its tile 1,024, some two times.
    assert found[1] - found[0] <= (4096 - 512) * 64 * 12
