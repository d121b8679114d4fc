"""Attention over blocks is dense attention under the same mask, and computes no block that the mask hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import infinity
from infinity.config.sparse_attention import SparseAttention
from infinity.plan.block_layouts import block_layout
from infinity.tiling import sparse_attention as module
from tests.support.cells import kept

BATCH, GROUPS, MEMBERS, WIDTH = 2, 2, 2, 8
HEADS = GROUPS * MEMBERS
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense"},
    "fixed": {
        "mode": "fixed", "attention": "unidirectional", "different_layout_per_head": True,
        "num_different_global_patterns": 2,
    },
    "variable": {"mode": "variable", "num_random_blocks": 1, "local_window_blocks": [2, 3]},
    "bigbird": {"mode": "bigbird", "num_random_blocks": 1, "different_layout_per_head": True},
    "bslongformer": {"mode": "bslongformer", "global_block_indices": [0, 4]},
}  # fmt: skip
# Tokens of a block and of a sample: neither a multiple of the block nor of a square of blocks; both; few.
SIZES = ((8, 300), (16, 384), (128, 300), (4, 21))
# The last has what only some models have.
MASKS = ("plain", "all", "window", "padded", "packed", "together")


def masks(name: str, tokens: int) -> tuple[dict[str, Any], Tensor]:
    """Options of a call, and the pairs that they leave, [batch, 1, tokens, tokens]."""
    at = torch.arange(tokens)
    left = (at <= at[:, None]).expand(BATCH, 1, -1, -1)
    documents = torch.stack([(at >= tokens // 4).long() + (at >= tokens // 2), (at >= 7).long()])
    padding = torch.ones(BATCH, tokens, dtype=torch.bool)
    padding[0, : tokens // 3] = padding[1, tokens - 5 :] = False
    of_one = documents[:, None, :, None] == documents[:, None, None, :]
    match name:
        case "all":
            return {"causal": False, "padding": padding}, padding[:, None, None].expand(-1, -1, tokens, -1)
        case "window":
            return {"window": 9}, left & (at[:, None] - at < 9)
        case "padded":
            return {"padding": padding}, left & padding[:, None, None]
        case "packed":
            return {"documents": documents}, left & of_one
        case "together":
            sinks = torch.randn(HEADS, requires_grad=True)
            options = {"window": 250, "documents": documents, "padding": padding, "softcap": 2.0, "sinks": sinks}
            return options, left & of_one & padding[:, None, None] & (at[:, None] - at < 250)
    return {}, left


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, **options: Any) -> Tensor:
    """By its definition."""
    key, value = key.repeat_interleave(MEMBERS, 1), value.repeat_interleave(MEMBERS, 1)
    scores = query @ key.mT * WIDTH**-0.5
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    # A row that sees nothing has 0.
    weights = scores.sub(scores.amax(-1, keepdim=True).clamp(min=-1e30)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return weights[..., : value.shape[2]] @ value


def table(keys: dict[str, Any], block: int, tokens: int) -> Tensor:
    """The blocks of each head, [heads, blocks, blocks]."""
    layout = block_layout(SparseAttention.of({**keys, "block": block}), HEADS, -(-tokens // block), 0)
    return torch.stack([torch.from_numpy(layout.table(head)) for head in range(HEADS)])


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As attention layers have them, [batch, tokens, heads, width] transposed."""
    torch.manual_seed(0)
    shapes = [(BATCH, tokens, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [(0.5 * torch.randn(shape)).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


CELLS = [(layout, size, mask) for layout in LAYOUTS for size in SIZES for mask in MASKS]
SUITE = [(layout, SIZES[i % 3], mask) for i, layout in enumerate(LAYOUTS) for mask in MASKS]
SUITE += [("dense", SIZES[1], "together"), ("bigbird", SIZES[3], "together"), ("fixed", SIZES[3], "padded")]


@pytest.mark.parametrize(("name", "size", "mask"), kept(CELLS, SUITE))
def test_it_is_dense_attention_and_computes_the_blocks_that_are_left(
    name: str, size: tuple[int, int], mask: str
) -> None:
    (block, tokens), keys = size, LAYOUTS[name]
    query, key, value = inputs(tokens)
    options, left = masks(mask, tokens)
    blocks = table(keys, block, tokens)
    pairs = blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :tokens, :tokens]
    seen = left & pairs
    before = module.computed["blocks"]
    output = infinity.sparse_attention(query, key, value, layout={**keys, "block": block}, **options)
    more = len(blocks[0]) * block - tokens
    present = F.pad(seen, (0, more, 0, more)).unflatten(3, (-1, block)).unflatten(2, (-1, block)).any(5).any(3)
    assert module.computed["blocks"] - before == int(present.sum())
    wanted = dense(query, key, value, seen, **options)
    assert float((output - wanted).detach().abs().max()) <= 1e-6
    trained = [query, key, value, *([options["sinks"]] if "sinks" in options else [])]
    grad = 0.1 * torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(output, trained, grad), torch.autograd.grad(wanted, trained, grad), strict=True
    ):
        assert float((mine - theirs).abs().max()) <= 1e-6
    # Backward computes blocks again, and these count once.
    assert module.computed["blocks"] - before == int(present.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_computes_in_fp32_at_least(dtype: torch.dtype) -> None:
    query, key, value = inputs(150, dtype)
    output = infinity.sparse_attention(query, key, value, layout={"mode": "dense"})
    wide = [each.double() for each in (query, key, value)]
    wanted = dense(*wide, masks("plain", 150)[1])
    assert output.dtype == dtype
    assert torch.allclose(output.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    for mine, theirs in zip(
        torch.autograd.grad(output.sum(), [query, key, value]), torch.autograd.grad(wanted.sum(), wide), strict=True
    ):
        assert float((mine - theirs).abs().max()) <= 4 * torch.finfo(dtype).eps * float(theirs.abs().max())


def test_a_query_that_sees_nothing_has_nothing() -> None:
    """In a block that others see, and where no block is left."""
    for first in (38, 40):
        query, key, value = inputs(40)
        padding = (torch.arange(40) >= first).expand(BATCH, -1)
        output = infinity.sparse_attention(query, key, value, layout={"mode": "bslongformer"}, padding=padding)
        assert not output[:, :, :first].any() and bool(output[:, :, first:].all())
        for grad in torch.autograd.grad(output.sum(), [query, key, value]):
            assert not grad[:, :, :first].any() and grad.isfinite().all()


def test_what_is_large_does_not_overflow() -> None:
    query, key, value = inputs(70)
    output = infinity.sparse_attention(query * 400, key * 400, value, layout=None)
    wanted = dense(query * 400, key * 400, value, masks("plain", 70)[1])
    assert output.isfinite().all() and torch.allclose(output, wanted, atol=1e-4)


def test_no_tensor_is_of_tokens_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that any operator makes is one of the whole sequence, or a tile."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, made = 3000, []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            made.extend(each.numel() for each in (found if isinstance(found, tuple) else [found])
                        if isinstance(each, Tensor))  # fmt: skip
            return found

    monkeypatch.setattr(module, "_SCORES", 1 << 16)
    query, key, value = inputs(tokens)
    with Sizes():
        infinity.sparse_attention(query, key, value, layout={"mode": "fixed"}).sum().backward()
    whole = BATCH * HEADS * (tokens + 128) * WIDTH
    assert max(made) <= max(whole, 4 * 128**2 * BATCH * HEADS) < tokens**2


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value = inputs(20)
    with pytest.raises(ValueError, match="key heads must divide heads"):
        infinity.sparse_attention(query[:, :3], key, value, layout=None)
    with pytest.raises(ValueError, match="needs causal=True"):
        infinity.sparse_attention(query, key, value, layout=None, window=3, causal=False)
    with pytest.raises(ValueError, match="20 tokens, and the layout 1 blocks of 16"):
        short = block_layout(SparseAttention(), HEADS, 1, 0)
        infinity.sparse_attention(query, key, value, layout=short)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "mask"), [
    ("dense", "window"), ("fixed", "plain"), ("variable", "packed"), ("bigbird", "together"), ("bslongformer", "all"),
])  # fmt: skip
def test_flex_attention_gets_the_same_blocks(monkeypatch: pytest.MonkeyPatch, name: str, mask: str) -> None:
    """Uncompiled and forward, which is what it can do on the CPU."""
    monkeypatch.setattr(module, "_compiled_flex", lambda: module.flex_attention)
    tensors, tokens = [each.detach() for each in inputs(300)], 300
    options, left = masks(mask, tokens)
    layout = {**LAYOUTS[name], "block": 16}
    wanted = infinity.sparse_attention(*tensors, layout=layout, **options)
    masked, real = [], module._block_mask
    monkeypatch.setattr(module, "_block_mask", lambda *args: masked.append(real(*args)) or masked[-1])
    monkeypatch.setattr(module, "_Attention", Instead)
    found = infinity.sparse_attention(*tensors, layout=layout, **options)
    assert float((found - wanted).detach().abs().max()) <= 1e-6
    seen = left & table(LAYOUTS[name], 16, tokens).repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :300, :300]
    squares = F.pad(seen, (0, 84, 0, 84)).unflatten(3, (3, 128)).unflatten(2, (3, 128)).any(5).any(3)
    assert torch.equal(masked[0].to_dense().bool().expand_as(squares), squares)


class Instead:
    """In the place of tiles."""

    apply = staticmethod(module._flex)
