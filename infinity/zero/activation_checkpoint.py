"""Activation checkpointing by configuration, and checkpoints that are kept on another tier until backward.

Recomputed blocks run under torch's non-reentrant `torch.utils.checkpoint`. Their `forward` is replaced on the module
object, beneath the hooks that gather and release, so a unit is gathered once for its backward. A checkpointed call
keeps its inputs. If a tier is given, the inputs go there: saved-tensor hooks around the whole model's forward see every
tensor that autograd saves outside of checkpointed calls, and offload those that torch.utils.checkpoint itself saves,
whether this file, the model or a library called it. All other tensors stay on the device.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from infinity.config import ResolvedConfig
from infinity.distributed.groups import Ranks
from infinity.errors import ConfigError
from infinity.memory.activation_tier import ActivationTier, SavedTensor
from infinity.memory.ledger import Ledger
from infinity.memory.store import open_activation_tier
from infinity.memory.tiers.device import Device
from infinity.zero.forwards import Replaced
from infinity.zero.hooks import replace_tensors

# Arguments that make a block fill a cache; a recomputed block would fill it twice.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class Checkpointing:
    """The recomputed blocks of one model, and the tier of its checkpoints.

    blocks: paths of modules. keep_ops: names of operators ("aten.mm") whose results are kept, not recomputed. tier:
    where checkpoints go, including those of the model's own calls; None leaves them on the device. `close` undoes
    everything.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str] = (), *, keep_ops: Sequence[str] = (),
        tier: ActivationTier | None = None,
    ) -> None:  # fmt: skip
        self._tier = tier
        kept = operators(keep_ops)
        self._replaced: list[Replaced] = [Recomputed(model.get_submodule(path), kept) for path in blocks]
        if tier is not None:
            self._replaced.append(OffloadedForward(model, tier))

    @classmethod
    def of(
        cls, config: ResolvedConfig, model: nn.Module, blocks: Sequence[str], ranks: Ranks, device: Device,
        ledger: Ledger,
    ) -> Checkpointing:  # fmt: skip
        """Return what a configuration asks for. ConfigError for blocks of which there are none."""
        section = config.sections.activation_checkpointing
        if section.every and not blocks:
            raise ConfigError(
                f"activation_checkpointing.every is {section.every}, but {type(model).__name__} has no blocks that it "
                "repeats: leave the key out, and call torch.utils.checkpoint in the model"
            )
        tier = open_activation_tier(config, rank=ranks.rank, device=device, ledger=ledger)
        return cls(model, blocks, keep_ops=section.keep_ops, tier=tier)

    def expect(self, backwards: Sequence[Hashable]) -> None:
        """Say in which order the backwards of several forwards will run; before each of these, `begin_forward`."""
        if self._tier is not None:
            self._tier.order.expect(backwards)

    def begin_forward(self, forward: Hashable) -> None:
        """One of the expected forwards begins."""
        if self._tier is not None:
            self._tier.order.begin_forward(forward)

    def settle(self) -> None:
        """Free the tier's space of graphs that were freed."""
        if self._tier is not None:
            self._tier.settle()

    def close(self) -> None:
        """Restore the modules' own `forward`, and free the tier's memory and files."""
        while self._replaced:
            self._replaced.pop().restore()
        if self._tier is not None:
            self._tier.close()


def operators(names: Sequence[str]) -> list[torch._ops.OpOverload]:
    """Return the overloads of operators by name: "aten.mm" (every overload) or "aten.mm.default".

    Raises ConfigError for a name that torch does not know.
    """
    found: list[torch._ops.OpOverload] = []
    for name in names:
        namespace, _, rest = name.removeprefix("torch.ops.").partition(".")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), packet_name, None) if namespace and packet_name else None
        overloads = packet.overloads() if packet is not None else []
        if packet is None or (overload and overload not in overloads):
            raise ConfigError(
                f"activation_checkpointing.keep_ops: torch has no operator {name!r}; names are those of torch.ops, "
                "such as aten.mm, aten.bmm or aten._scaled_dot_product_flash_attention"
            )
        found += [getattr(packet, each) for each in overloads if overload in ("", each)]
    return found


class Recomputed(Replaced):
    """A block's `forward`, recomputed in backward."""

    def __init__(self, module: nn.Module, kept: list[torch._ops.OpOverload]) -> None:
        super().__init__(module)
        self._options: dict[str, Any] = {"use_reentrant": False}
        if kept:
            self._options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
        self._signature = inspect.signature(self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._module.training and getattr(self._module, "gradient_checkpointing", False)
        if not torch.is_grad_enabled() or own or torch._C._are_functorch_transforms_active():
            # Nothing is kept for backward, or the module recomputes itself, or torch.func would refuse it.
            return self._forward(*args, **kwargs)
        if self._module.training:
            args, kwargs = self._without_cache(args, kwargs)
        elif self._fills_cache(args, kwargs):
            # In evaluation the program needs the cache: the next call reads it.
            return self._forward(*args, **kwargs)
        tensors, filled = _apart((args, kwargs))

        def run(*tensors: Tensor) -> Any:
            args, kwargs = filled(tensors)
            return self._forward(*args, **kwargs)

        return checkpoint(run, *tensors, **self._options)

    def _fills_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        named = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
        return named.get("use_cache") is True or any(named.get(name) is not None for name in _CACHES)

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments without those that fill a cache."""
        idle = {**dict.fromkeys(_CACHES), "use_cache": False}
        kwargs = {name: idle.get(name, value) for name, value in kwargs.items()}
        # Names of the positional arguments, by the signature.
        names = [*self._signature.parameters][: len(args)]
        names += [""] * (len(args) - len(names))
        return tuple(idle.get(name, value) for name, value in zip(names, args, strict=True)), kwargs


def _apart(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a call's arguments that need a gradient, and a function that puts tensors in their places.

    torch's checkpoint saves only positional tensors through the saved-tensor hooks; it holds everything else as it is.
    """
    taken: list[Tensor] = []
    places: dict[int, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in places:
            # An empty tensor takes its place.
            places[id(tensor)] = tensor.new_empty(0)
            taken.append(tensor)
        return places[id(tensor)]

    empty = replace_tensors(value, take)
    standing = [id(place) for place in places.values()]

    def filled(tensors: Sequence[Tensor]) -> Any:
        by_place = dict(zip(standing, tensors, strict=True))
        return replace_tensors(empty, lambda tensor: by_place.get(id(tensor), tensor))

    return taken, filled


class OffloadedForward(Replaced):
    """A model's `forward` that keeps the inputs of its checkpointed calls on a tier."""

    def __init__(self, module: nn.Module, tier: ActivationTier) -> None:
        super().__init__(module)
        self._tier = tier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return self._forward(*args, **kwargs)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Any:
        wanted = type(tensor) is Tensor and tensor.requires_grad and tensor.is_floating_point()
        if wanted and tensor.device == self._tier.device and _saved_by_checkpoint(sys._getframe(1)):
            saved = self._tier.put(tensor)
            if saved is not None:
                return saved
        # Detached, because a node that saves its own output would keep itself alive.
        return _Stays(tensor if tensor.grad_fn is None else tensor.detach())

    def _unpack(self, held: Any) -> Tensor:
        return self._tier.get(held) if isinstance(held, SavedTensor) else held.tensor()


class _Stays:
    """A tensor that stays on the device. With saved-tensor hooks, autograd leaves the check for changes to them."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {self._tensor._version}; expected "
                f"version {self._version} instead"
            )
        return self._tensor


def _saved_by_checkpoint(frame: FrameType | None) -> bool:
    """Return whether torch.utils.checkpoint saves the tensor, directly or through its own autograd function."""
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_globals is torch.utils.checkpoint.__dict__:
            return True
        frame = frame.f_back
    return False
