"""`infinity.tile_sequence`: a transformers language model whose loss and MLPs go a few tokens at a time, by one call.

The model's code is not rewritten. When the model is called with labels, its head computes the loss while the head's
weights are gathered, and `loss_function`, which transformers lets a program set, returns it unchanged. Every MLP that
takes one tensor and returns one runs tile by tile.
"""

from __future__ import annotations

import copy
import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn

from infinity.errors import ConfigError, StateError
from infinity.plan.spec import TILE_TOKENS
from infinity.tiling.sequences import tiled_cross_entropy, tiled_mlp
from infinity.zero.forwards import set_forward


def tile_sequence(model: nn.Module, *, tile_tokens: int = TILE_TOKENS, mlps: bool = True) -> nn.Module:
    """Make a transformers causal language model compute its loss and its MLPs `tile_tokens` tokens at a time.

    mlps: False leaves the MLPs as they are, so that nothing but the head is computed twice.

    Call it before `infinity.initialize`. Called with labels, the model then returns its loss and no logits; without
    labels it returns logits as before. MLPs are the modules whose class name ends with "MLP" and which take one tensor;
    a mixture of experts stays as it is. Returns the model. ConfigError for one that has no linear head or no
    `loss_function`.
    """
    # peft's wrapper forwards reads of attributes to the inner model, but not assignments.
    inner = getattr(model, "get_base_model", lambda: model)()
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or not hasattr(inner, "loss_function"):
        raise ConfigError(
            f"tile_sequence needs a transformers model with a linear head and a loss_function, {type(model).__name__} "
            "has not: call infinity.tiled_cross_entropy(hidden, head, labels) in its forward"
        )
    loss = _TiledLoss(inner, head, inner.loss_function, tile_tokens)
    inner.register_forward_pre_hook(loss.before, with_kwargs=True)
    inner.register_forward_hook(loss.after)
    inner.loss_function = loss.give
    set_forward(head, loss.head)
    for module in model.modules() if mlps else ():
        if type(module).__name__.endswith("MLP") and len(inspect.signature(type(module).forward).parameters) == 2:
            set_forward(module, _TiledForward(module, tile_tokens))
    return model


class _TiledForward:
    """The forward of one MLP."""

    def __init__(self, mlp: nn.Module, tile_tokens: int) -> None:
        self._mlp = mlp
        self._tile_tokens = tile_tokens

    def __call__(self, hidden: Tensor) -> Tensor:
        plain = MethodType(type(self._mlp).forward, self._mlp)
        return tiled_mlp(self._mlp, hidden, tile_tokens=self._tile_tokens, forward=plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TiledForward:
        return _TiledForward(memo.get(id(self._mlp), self._mlp), self._tile_tokens)


class _TiledLoss:
    """Puts the loss in the place of the logits, from the head to `loss_function`, in calls that have labels."""

    def __init__(self, model: Any, head: nn.Linear, usual: Any, tile_tokens: int) -> None:
        """usual: the `loss_function` of the model, called with (logits, labels, ...)."""
        self._model = model
        self._head = head
        self._usual = usual
        self._tile_tokens = tile_tokens
        # Of the call under way: its keyword arguments, and the loss that the head has computed.
        self._given: dict[str, Any] | None = None
        self._made: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _TiledLoss:
        # In `memo` before it is filled, because the hooks of the copied model and head refer to it.
        duplicate = memo[id(self)] = object.__new__(_TiledLoss)
        model, head = (copy.deepcopy(each, memo) for each in (self._model, self._head))
        _TiledLoss.__init__(duplicate, model, head, self._usual, self._tile_tokens)
        return duplicate

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the arguments of a call of the model."""
        part_of_logits = kwargs.get("logits_to_keep", 0)
        whole = isinstance(part_of_logits, int) and part_of_logits == 0
        self._given = kwargs if kwargs.get("labels") is not None and whole else None
        self._made = None

    def head(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward: return the loss of a call with labels, logits otherwise."""
        given, self._given = self._given, None
        # An adapter may have wrapped the head since: then it computes only a part of the logits.
        if given is None or self._model.get_output_embeddings() is not self._head:
            return type(self._head).forward(self._head, hidden)
        head = self._head
        words = head.__dict__.get("_infinity_vocabulary")
        shifted = given.get("shift_labels")
        self._made = tiled_cross_entropy(
            hidden, head, given["labels"] if shifted is None else shifted, shift=shifted is None,
            ignore_index=given.get("ignore_index", -100), divisor=given.get("num_items_in_batch"),
            tile_tokens=self._tile_tokens,
            # The forward that the tensor axis gives the head has copied its input.
            vocabulary=None if words is None else words.of_copied(),
        )  # fmt: skip
        return self._made

    def give(self, logits: Tensor, labels: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Replace the model's loss function: return the loss that the head has computed."""
        if self._made is None:
            return self._usual(logits, labels, *args, **kwargs)
        if logits is not self._made:
            raise StateError(
                f"{type(self._model).__name__} changes its logits between its head and its loss (a scale, a cap), "
                "which are not there when the loss is tiled: train it without infinity.tile_sequence"
            )
        return logits

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take the logits out of the model's output."""
        made, self._made, self._given = self._made, None, None
        if made is None:
            return None
        if isinstance(output, tuple):
            return (output[0], *(value for value in output[1:] if value is not made))
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
