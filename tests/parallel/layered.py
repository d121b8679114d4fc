"""Models in layers for tests of pipelines, and the stages of one run in turn as ranks would run them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.parallel.layers import LayerSpec, PipelineModule, StagedLayers, TiedLayerSpec
from infinity.plan.stages import StageCut

WORDS, WIDTH, LENGTH, ROWS = 48, 16, 8, 3


class Words(nn.Embedding):
    """An embedding whose weight has another name, too."""

    @property
    def words_weight(self) -> Tensor:
        return self.weight


class Mixer(nn.Module):
    """A residual layer of a tuple: what it mixes, a mask that it passes on, and a tensor that later layers use, too."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, mask, skip = inputs
        mixed = self.outer(F.gelu(self.inner(self.norm(hidden) + skip)))
        return hidden + self.dropout(mixed) * mask[..., None], mask, skip


class Block(nn.Module):
    """A residual layer of one tensor."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.outer(F.gelu(self.inner(self.norm(hidden)))))


class Head(nn.Module):
    """Another class than the embedding whose weight it takes."""

    def __init__(self, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.words = nn.Linear(width, words, bias=False)

    @property
    def words_weight(self) -> Tensor:
        return self.words.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.words(self.norm(hidden))


def spread(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make a tuple of a tensor: itself, a mask of whole numbers, and a second that needs a gradient."""
    return hidden, torch.arange(hidden.shape[1]) % 2, hidden * 0.5


def narrow(inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the first of a tuple, turned so that it is not contiguous."""
    return inputs[0].transpose(0, 1)


def turn(hidden: Tensor) -> Tensor:
    """Turn the first two axes."""
    return hidden.transpose(0, 1)


def project(module: nn.Embedding, hidden: Tensor) -> Tensor:
    """Multiply with an embedding's weight."""
    return F.linear(hidden, module.weight)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of words."""
    return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten())


def mixed_layers(dropout: float = 0.0) -> list[Any]:
    """Tuples, functions, a module that changes its input in place, and a tied weight that a function uses."""
    return [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH), spread, LayerSpec(Mixer, dropout=dropout),
        LayerSpec(Mixer, dropout=dropout), narrow, LayerSpec(nn.Linear, WIDTH, WIDTH), nn.ReLU(inplace=True), turn,
        LayerSpec(Block, dropout=dropout), LayerSpec(Block), lambda hidden: (hidden,), nn.LayerNorm(WIDTH),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=project),
    ]  # fmt: skip


def make(layers: Iterable[Any], seed: int = 0, **options: Any) -> PipelineModule:
    """A model of these layers with this loss, as a program builds it."""
    torch.manual_seed(seed)
    return PipelineModule(layers, loss_fn=loss_of, **options)


def token_batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of words and the words behind them."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator) for _ in range(count)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def cut_of(model: PipelineModule, counts: Sequence[int]) -> StageCut:
    """The cut with these numbers of layers."""
    return StageCut(model.blocks, tuple(counts))


def whole_step(model: PipelineModule, batches: Iterable[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of an ordinary loop over micro-batches."""
    losses = []
    for inputs, labels in batches:
        loss = model(inputs, labels)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(model)


def staged_step(
    model: PipelineModule, counts: Sequence[int], batches: Iterable[Any]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Losses, and the gradients of each stage, which has a copy of the model as a rank has.

    Stages run in turn; what crosses between them is copied and becomes a leaf, and its gradient goes back as a copy.
    """
    cut = cut_of(model, counts)
    models = [copy.deepcopy(model) for _ in counts]
    stages = [StagedLayers(each, cut, own=(index,)) for index, each in enumerate(models)]
    losses = []
    for batch in batches:
        received: tuple[Tensor, ...] | None = None
        entered: list[tuple[Tensor, ...]] = []
        left: list[Any] = []
        for index, stage in enumerate(stages):
            returned = stage.forward(index, received, batch, {})
            left.append(returned)
            if index < len(stages) - 1:
                assert all(each.is_contiguous() for each in returned)
                received = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in returned)
                entered.append(received)
        losses.append(left[-1].detach())
        left[-1].backward()
        for returned, leaves in zip(left[-2::-1], entered[::-1], strict=True):
            pairs = [(one, leaf.grad) for one, leaf in zip(returned, leaves, strict=True) if leaf.grad is not None]
            torch.autograd.backward([one for one, _ in pairs], [grad.clone() for _, grad in pairs])
    for stage in stages:
        stage.remove()
    return losses, [gradients(each) for each in models]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, by name."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def layers_with(model: PipelineModule, counts: Sequence[int], name: str) -> set[int]:
    """The stages that use the parameter of a name."""
    ends = [*accumulate(counts)]
    param = dict(model.named_parameters())[name]
    users = [index for index, layer in enumerate(model.layers) if any(each is param for each in layer.parameters())]
    return {next(stage for stage, end in enumerate(ends) if index < end) for index in users}
