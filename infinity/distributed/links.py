"""Messages between neighbouring stages of a pipeline: activations to the next one, their gradients to the one before.

What crosses the boundary between two stages is a tuple of tensors. Each pair of neighbours has a link for either
direction; messages of a link have one order, which both ends know from the step's tables. The receiver posts its
receives in that order, one ahead of those that it uses; the sender goes on while no more than a given number of its
sends wait. To the watchdog a link is a channel with two members, so that it can say which rank waits for what:
"activation 3 of stage 0". Tags are those of collectives: [Note: tags] in `axis_group`.

[Note: shapes of a boundary] A receiver must know the sizes of what comes. Shapes may differ by micro-batch, so the
caller gives each micro-batch a key, such as the shapes of its inputs, which every rank has. The first time that a key
is used at a boundary, a header with shapes, strides and dtypes goes ahead of the tensors, through the group on the CPU;
both ends remember it, and forget it, in the order of the link's messages. A receive behind a header is posted only once
the header is there. Gradients have the forms of what went the other way, and no header.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.base import trace
from infinity.distributed.axis_group import AxisGroup, CollectiveTransfer
from infinity.errors import ConfigError, StateError
from infinity.plan.pipeline import MessageLink, pipeline_links

# What crosses a boundary: activations, and the gradients of those that require one.
Boundary = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]

# Boundaries of other keys that an end of a link remembers.
_KNOWN_MAX = 1024
# Numbers of a header: one for all, and 3 + 2 * dims a tensor.
_HEADER_NUMEL = 256
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
# The first message of a link.
_GREETING = "the first message of a link"


class TensorForm(NamedTuple):
    """All of a tensor but its values. Strides are those of memory without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form in which a tensor is sent: its own, or, if its memory has gaps, that of a contiguous copy."""
        stride = tensor.stride()
        if not tensor.is_contiguous() and not _is_dense(tensor):
            stride = torch.empty(tensor.shape, device="meta").stride()
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this form with any values."""
        # Half the time of torch.empty_strided with a dtype and a device.
        return _nothing_of(self.dtype, device).new_empty_strided(self.shape, self.stride)


@cache
def _nothing_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


Forms = tuple[TensorForm, ...]


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def trained_gradients(grads: Gradients | None, forms: Forms, device: torch.device, what: str) -> list[Tensor]:
    """Return the gradients of those tensors of a boundary that require one; zeros where a gradient is None.

    grads: by tensor of the boundary. forms: of the boundary. StateError, which names `what`, for other shapes.
    """
    if grads is None or len(grads) != len(forms):
        count = "none" if grads is None else f"{len(grads)}"
        raise StateError(f"{what}: the boundary has {len(forms)} tensors, and the stage returned {count}")
    found = []
    for grad, form in zip(grads, forms, strict=True):
        if not form.requires_grad:
            continue
        if grad is None:
            found.append(form.empty(device).zero_())
        elif grad.shape == form.shape and grad.dtype == form.dtype:
            found.append(grad)
        else:
            raise StateError(
                f"{what}: it has shape {list(grad.shape)} and {grad.dtype}, and what it belongs to "
                f"{list(form.shape)} and {form.dtype}"
            )
    return found


def by_tensor(gradients: Sequence[Tensor], forms: Forms) -> Gradients:
    """Return the gradients that `trained_gradients` returns by tensor of the boundary, None for the others."""
    if len(gradients) == len(forms):
        return tuple(gradients)
    rest = iter(gradients)
    return tuple(next(rest) if form.requires_grad else None for form in forms)


class BoundaryMessage(NamedTuple):
    """What crosses a boundary of one micro-batch. boundary: the stage in front of it, and the micro-batch."""

    link: MessageLink
    boundary: tuple[int, int]
    # By which the watchdog knows it, and what the sender waits for.
    name: str
    taken: str

    @classmethod
    def over(cls, link: MessageLink, boundary: tuple[int, int]) -> BoundaryMessage:
        """Return the message that goes over a link."""
        stage, micro_batch = boundary
        name = f"the gradient of micro-batch {micro_batch} behind stage {stage}"
        if link.forward:
            name = f"activation {micro_batch} of stage {stage}"
        return cls(link, boundary, name, _receiver_of(name))


class _Layout:
    """The forms of what crosses a boundary, and of what comes back as gradients."""

    __slots__ = ("back", "forms")

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self.back = tuple(form for form in forms if form.requires_grad)

    def fits(self, tensors: Gradients) -> bool:
        """Whether these tensors have the forms."""
        if len(tensors) != len(self.forms):
            return False
        for tensor, (shape, stride, dtype, requires_grad) in zip(tensors, self.forms, strict=True):
            if (
                tensor is None or tensor.shape != shape or tensor.stride() != stride or tensor.dtype != dtype
                or tensor.requires_grad is not requires_grad
            ):  # fmt: skip
                return False
        return True


class _KnownLayouts:
    """Layouts of boundaries that a header has brought, by stage and key; the oldest ones are forgotten.

    Both ends of a link ask and tell in the same order, and so know the same.
    """

    def __init__(self) -> None:
        self._layouts: dict[Hashable, _Layout] = {}

    def get(self, key: Hashable) -> _Layout | None:
        return self._layouts.get(key) if key is not None else None

    def put(self, key: Hashable, layout: _Layout) -> None:
        if key is not None:
            self._layouts[key] = layout
            if len(self._layouts) > _KNOWN_MAX:
                del self._layouts[next(iter(self._layouts))]

    def clear(self) -> None:
        self._layouts.clear()


class _Posted:
    """A message whose receives are posted: the header's, or, once the layout is known, the tensors'."""

    __slots__ = ("header", "layout", "message", "tensors", "transfers")

    def __init__(self, message: BoundaryMessage) -> None:
        self.message = message
        self.header: tuple[Tensor, CollectiveTransfer] | None = None
        self.layout: _Layout | None = None
        self.tensors: list[Tensor] = []
        self.transfers: list[CollectiveTransfer] = []

    def expect(self, header: Tensor, transfer: CollectiveTransfer) -> None:
        """The header comes first."""
        self.header = header, transfer

    def learn(self, layout: _Layout) -> Forms:
        """Return the forms of the tensors that are to be received."""
        self.layout = layout
        return layout.forms if self.message.link.forward else layout.back


@dataclass(slots=True)
class _End:
    """This rank's end of a link.

    wire: its sender and its receiver, with the process group of the direction. peer: the other one's index there.
    sent: messages whose sends have not been waited for, by name. coming, posted: messages to receive, in the sender's
    order.
    """

    wire: AxisGroup
    peer: int
    known: _KnownLayouts = field(default_factory=_KnownLayouts)
    sent: deque[tuple[str, list[CollectiveTransfer]]] = field(default_factory=deque)
    coming: deque[BoundaryMessage] = field(default_factory=deque)
    posted: deque[_Posted] = field(default_factory=deque)


class PipelineLinks:
    """The links of one rank to its neighbours on the pipeline axis. One step at a time: `begin` to `finish`."""

    def __init__(self, forward: AxisGroup, backward: AxisGroup, control: AxisGroup, *, device: torch.device) -> None:
        """forward, backward, control: the groups of the pipeline axis. device: where tensors are received."""
        self._forward, self._backward, self._control = forward, backward, control
        self.device = device
        gloo = forward.process_group is None or dist.get_backend(forward.process_group) == "gloo"
        # gloo moves bytes of CPU memory: [Note: staged collectives] in `collectives`.
        self._wired = torch.device("cpu") if gloo else device
        self._staged = self._wired.type != device.type
        # Another back end has one stream for both directions between two ranks.
        self._one_way = not gloo and forward.size == 2
        self._ends = {link: self._end(link) for link in pipeline_links(forward.size) if forward.index in link[:2]}
        # By link of activations, the end to which their gradients come back.
        self._back = {
            link: self._ends[MessageLink(link.receiver, link.sender, False)] for link in self._ends if link.forward
        }
        # By boundary and micro-batch of this step, what has crossed it and comes back as gradients.
        self._crossed: dict[tuple[int, int], _Layout] = {}
        # Links that have had their first message.
        self._met: set[MessageLink] = set()
        self._keys: Sequence[Hashable] = ()
        self._gradients = False
        self._sends_waiting = 0
        self._error = ""

    def _end(self, link: MessageLink) -> _End:
        group = self._forward if link.forward else self._backward
        sends = link.sender == group.index
        wire = AxisGroup(
            "pipeline", 0 if sends else 1, 2, group.process_group, tuple(group.members[end] for end in link[:2]),
            channel=group.watchdog.channels.of_link(link) if group.watchdog is not None else 0,
            watchdog=group.watchdog, host_waits=group.host_waits,
        )  # fmt: skip
        return _End(wire, link.receiver if sends else link.sender)

    @property
    def index(self) -> int:
        """This rank's place on the pipeline axis."""
        return self._forward.index

    def begin(
        self, order: Mapping[MessageLink, Sequence[BoundaryMessage]], keys: Sequence[Hashable], *, gradients: bool,
        sends_waiting: int,
    ) -> None:  # fmt: skip
        """Begin a step. Collective along the pipeline axis.

        order: the messages of each of this rank's links, in the sender's order. keys: by micro-batch, what tells the
        shapes at its boundaries, equal on all ranks; empty or None for a header with every message. gradients: whether
        activations come back as gradients. sends_waiting: how many sends of a link may wait as this rank goes on.
        """
        if self._error:
            raise StateError(
                f"the pipeline's messages are out of step since an error in an earlier step ({self._error}): close the "
                "engine, and load a checkpoint in a new one"
            )
        if order and self._forward.process_group is None:
            raise StateError("the pipeline's process groups are closed")
        self._keys, self._gradients, self._sends_waiting = keys, gradients, sends_waiting
        self._meet(order)
        for link, messages in order.items():
            if link.receiver == self.index:
                self._ends[link].coming.extend(messages)
                self._post(self._ends[link], 1)

    def send(self, message: BoundaryMessage, tensors: Gradients) -> None:
        """Send activations, or the gradients of those that were received, where None stands for zeros.

        Returns at once, or, if too many sends of the link wait, when the oldest is received. The tensors must not
        change before that.
        """
        link, boundary, name, taken = message
        end = self._ends[link]
        transfers: list[CollectiveTransfer] = []
        going: Sequence[Tensor | None]
        if link.forward:
            layout = self._announced(end, message, tensors, transfers)
            going, forms = tensors, layout.forms
            if self._gradients:
                self._crossed[boundary] = layout
        else:
            layout = self._crossed.pop(boundary)
            going, forms = trained_gradients(tensors, layout.forms, self.device, name), layout.back
        if trace.active():
            trace.begin_async("sends", name, sum(tensor.nbytes for tensor in going if tensor is not None))
        for number, tensor in enumerate(going):
            if tensor is not None and tensor.numel():
                if number:
                    name, taken = _numbered(message, number)
                transfers.append(self._send(end, self._dense(tensor, forms[number]), name, taken))
        end.sent.append((message.name, transfers))
        if link.forward and self._gradients and not (back := self._back[link]).posted:
            # The gradient that comes back may be the next one of its link.
            self._post(back, 1)
        while len(end.sent) > self._sends_waiting:
            self._wait_for_send(end)

    def receive(self, message: BoundaryMessage) -> Gradients:
        """Return what crosses a boundary next: new tensors, which require grad as those that were sent do.

        Of gradients, None stands for those of tensors that require none. Blocks until the tensors are there.
        """
        link, boundary, name, _ = message
        end = self._ends[link]
        if not end.posted:
            self._post(end, 1)
        posted = end.posted[0]
        assert posted.message is message, (posted.message, message)
        with trace.span(trace.WAIT, "activation" if link.forward else "gradient of an activation", name):
            layout = posted.layout or self._take_header(end, posted)
            # Posted before the wait, because behind it the stage could compute.
            if end.coming:
                self._post(end, 2)
            for transfer in posted.transfers:
                transfer.wait()
        end.posted.popleft()
        trace.end_async("receives", name)
        tensors = posted.tensors
        if self._staged:
            tensors = [tensor.to(self.device) for tensor in tensors]
        if not link.forward:
            del self._crossed[boundary]
            return by_tensor(tensors, layout.forms)
        if self._gradients:
            self._crossed[boundary] = layout
            for tensor, form in zip(tensors, layout.forms, strict=True):
                if form.requires_grad:
                    tensor.requires_grad_()
        return tuple(tensors)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is under way: tensors whose receives are posted, and those that wait to be received."""
        for end in self._ends.values():
            for posted in end.posted:
                yield from posted.tensors
            for _, transfers in end.sent:
                for transfer in transfers:
                    yield from transfer.kept

    def finish(self) -> None:
        """Wait until all that was sent is received. Call it behind the step's last message."""
        for end in self._ends.values():
            assert not end.coming and not end.posted
            while end.sent:
                self._wait_for_send(end)
        self._crossed.clear()

    def abandon(self, error: BaseException) -> None:
        """Give up the step, and the links: other ranks may be in the middle of it. Waits for nothing.

        Tensors of messages under way live as long as this object, because the back end may still use them.
        """
        self._error = self._error or f"{type(error).__name__}: {error}"

    def forget(self) -> None:
        """Forget the shapes of boundaries, for a model whose boundaries have changed. Call it on all ranks."""
        for end in self._ends.values():
            end.known.clear()

    def _meet(self, links: Container[MessageLink]) -> None:
        """Send a first message over each link that has had none.

        Other back ends than gloo connect two ranks with their first message, and the host waits for it. So all ranks
        connect in one order, before any of them computes.
        """
        wanted = [link for link in pipeline_links(self._forward.size) if link in links]
        if self._one_way and len({link.sender for link in wanted if link.forward}) > 1:
            raise ConfigError(
                "parallel.pipeline is 2 and a rank has several stages: only gloo can have messages of both directions "
                "wait for each other. Set parallel.virtual_stages to 1, or parallel.pipeline to more ranks"
            )
        for link in wanted:
            if link not in self._met:
                self._met.add(link)
                nothing = torch.zeros(1, dtype=torch.uint8, device=self._wired)
                end = self._ends[link]
                if link.sender == self.index:
                    self._send(end, nothing, _GREETING, _receiver_of(_GREETING)).wait()
                else:
                    self._receive(end, nothing, _GREETING).wait()

    def _post(self, end: _End, count: int) -> None:
        """Post receives of an end, in the sender's order, until `count` messages are posted or no more can be yet."""
        while len(end.posted) < count and end.coming and (not end.posted or end.posted[-1].layout is not None):
            message = end.coming[0]
            if message.link.forward:
                layout = end.known.get(self._key(message))
            else:
                layout = self._crossed.get(message.boundary)
                if layout is None:
                    # It cannot have been sent before the activation has gone.
                    return
            end.coming.popleft()
            posted = _Posted(message)
            end.posted.append(posted)
            if layout is not None:
                self._post_tensors(end, posted, layout)
            else:
                header = torch.empty(_HEADER_NUMEL, dtype=torch.int64, device="cpu")
                name, control = f"the shapes of {message.name}", self._control.process_group
                posted.expect(header, self._receive(end, header, name, control))

    def _post_tensors(self, end: _End, posted: _Posted, layout: _Layout) -> None:
        name, tensors = posted.message.name, posted.tensors
        for form in posted.learn(layout):
            tensor = form.empty(self._wired)
            if tensor.numel():
                said = name if not tensors else _numbered(posted.message, len(tensors))[0]
                posted.transfers.append(self._receive(end, _memory_of(tensor), said))
            tensors.append(tensor)
        if trace.active():
            trace.begin_async("receives", name, sum(tensor.nbytes for tensor in tensors))

    def _key(self, message: BoundaryMessage) -> Hashable:
        """By which both ends know a boundary's forms; None for those that they do not remember."""
        stage, micro_batch = message.boundary
        key = self._keys[micro_batch] if self._keys else None
        return None if key is None else (stage, self._gradients, key)

    def _announced(
        self, end: _End, message: BoundaryMessage, tensors: Gradients, transfers: list[CollectiveTransfer]
    ) -> _Layout:
        """Return the layout of activations to send; if the receiver does not know it, send a header first."""
        key = self._key(message)
        known = end.known.get(key)
        if known is not None and known.fits(tensors):
            return known
        forms = tuple(TensorForm.of(tensor) for tensor in tensors if tensor is not None)
        if known is None:
            layout = _Layout(forms)
            end.known.put(key, layout)
            header, name = _encode(forms, message.name), f"the shapes of {message.name}"
            transfers.append(self._send(end, header, name, _receiver_of(name), self._control.process_group))
            return layout
        if known.forms != forms:
            raise StateError(
                f"{message.name} is {_in_words(forms)}, and was {_in_words(known.forms)} for a micro-batch with the "
                f"same key ({key}): shapes at a boundary have to follow from the shapes of a micro-batch. Where the "
                "model has changed, or what of it is trained, build a new engine"
            )
        return known

    def _take_header(self, end: _End, posted: _Posted) -> _Layout:
        """Wait for the header of a posted message, and post the receives of its tensors."""
        assert posted.header is not None
        header, transfer = posted.header
        transfer.wait()
        layout = _Layout(_decode(header))
        end.known.put(self._key(posted.message), layout)
        self._post_tensors(end, posted, layout)
        return layout

    def _send(
        self, end: _End, tensor: Tensor, name: str, waits_for: str, members: Any = None
    ) -> CollectiveTransfer:  # fmt: skip
        group = members or end.wire.process_group
        return end.wire.message(group.send, end.peer, tensor, name, waits_for=waits_for)

    def _receive(self, end: _End, tensor: Tensor, name: str, members: Any = None) -> CollectiveTransfer:
        group = members or end.wire.process_group
        return end.wire.message(group.recv, end.peer, tensor, name, waits_for=name)

    def _dense(self, tensor: Tensor, form: TensorForm) -> Tensor:
        """Return the values of a tensor in the memory from which they are sent."""
        if not tensor.is_leaf:
            # A send must not keep a graph alive.
            tensor = tensor.detach()
        if tensor.stride() != form.stride:
            tensor = form.empty(tensor.device).copy_(tensor.detach())
        return _memory_of(tensor.detach().to(self._wired) if self._staged else tensor)

    def _wait_for_send(self, end: _End) -> None:
        """Wait until the oldest message of an end is received."""
        name, transfers = end.sent[0]
        with trace.span(trace.WAIT, "receiver", name):
            for transfer in transfers:
                transfer.wait()
        end.sent.popleft()
        trace.end_async("sends", name)


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor without gaps, in its order."""
    if not tensor.is_contiguous():
        tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _in_words(forms: Forms) -> str:
    """As in "float32 [2, 8] (trained), int64 [2]"."""
    return ", ".join(
        f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}{' (trained)' if form.requires_grad else ''}"
        for form in forms
    )


def _numbered(message: BoundaryMessage, number: int) -> tuple[str, str]:
    """Return the name of one of several tensors, and what its sender waits for."""
    name = f"{message.name}, tensor {number}"
    return name, _receiver_of(name)


def _receiver_of(name: str) -> str:
    return f"the receiver of {name}"


def _encode(forms: Forms, what: str) -> Tensor:
    """Return a header; StateError, which names `what`, for more than it holds."""
    numbers = [len(forms)]
    for form in forms:
        numbers += [_DTYPES.index(form.dtype), form.requires_grad, len(form.shape), *form.shape, *form.stride]
    if len(numbers) > _HEADER_NUMEL:
        raise StateError(
            f"{what} is a tuple of {len(forms)} tensors; their shapes take {len(numbers)} numbers, and at most "
            f"{_HEADER_NUMEL} can be sent"
        )
    return torch.tensor([*numbers, *[0] * (_HEADER_NUMEL - len(numbers))], dtype=torch.int64, device="cpu")


def _decode(header: Tensor) -> Forms:
    """Return the forms that `_encode` has written."""
    count, *numbers = header.tolist()
    rest = iter(numbers)
    forms = []
    for _ in range(count):
        dtype, requires_grad, dims = _DTYPES[next(rest)], bool(next(rest)), next(rest)
        shape, stride = tuple(islice(rest, dims)), tuple(islice(rest, dims))
        forms.append(TensorForm(shape, stride, dtype, requires_grad))
    return tuple(forms)
