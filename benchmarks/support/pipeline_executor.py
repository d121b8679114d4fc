"""Task: the host time of a pipeline's action, ours and torch's, with messages and with messages that cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from infinity.distributed.groups import ProcessGroups, detect
from infinity.distributed.links import Boundary, Gradients, PipelineLinks
from infinity.parallel.executor import PipelineExecutor
from infinity.plan.pipeline import Action, ActionKind, make_tables
from infinity.plan.types import Topology
from support.machine import median

ROWS, WIDTH = 8, 64
SCHEDULES = {"1f1b": 1, "interleaved": 2}
_THEIRS = {"1f1b": schedules.Schedule1F1B, "interleaved": schedules.ScheduleInterleaved1F1B}
_WARM = 3

# Wall clock and the thread's CPU time, on which backward runs, too.
Seconds = tuple[float, float]


class Scale(nn.Module):
    """What a stage computes: as little as autograd lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Handler:
    """Runs stages by autograd."""

    def __init__(self, modules: dict[int, nn.Module], last: int) -> None:
        self._modules, self._last = modules, last
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._batch = torch.ones(ROWS, WIDTH)

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        stage, _, micro_batch = action
        hidden = self._batch if received is None else received[0]
        made = self._modules[stage](hidden)
        if stage == self._last:
            made = made.sum()
        self._open[stage, micro_batch] = hidden, made
        return (made,)

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        hidden, made = self._open.pop((action.stage, action.micro_batch))
        torch.autograd.backward(made, None if grads is None else grads[0])
        gradient, hidden.grad = hidden.grad, None
        return (gradient,)

    def backward_weight(self, action: Action) -> None:
        raise AssertionError(action)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`micro_batches`, `rounds`.

    Returns, by schedule, seconds of an action (wall clock, CPU time of the thread) for `loop`, which runs the handler
    on tensors that lie ready, and for `ours` and `torch`, each also `free`: with messages that cost nothing; the fewest
    of all rounds, because what runs beside them only adds time. Beside them `isend`, `irecv` and `wait`, torch's calls
    alone, medians.
    """
    torch.set_num_threads(1)
    m, rounds = options["micro_batches"], options["rounds"]
    groups = ProcessGroups(detect(), Topology(pp=2, local_size=2), timeout_seconds=300)
    rank = groups.pipeline.index
    found: dict[str, Any] = {}
    for schedule, virtual in SCHEDULES.items():
        links = PipelineLinks(
            groups.pipeline_forward, groups.pipeline_backward, groups.pipeline, device=torch.device("cpu")
        )
        executor, tables = PipelineExecutor(links, index=rank), make_tables(schedule, 2, m, virtual)
        own = range(rank, 2 * virtual, 2)
        handler = Handler({stage: Scale() for stage in own}, 2 * virtual - 1)
        keys = [(ROWS, WIDTH)] * m
        ours = lambda run=executor.run, given=(tables, handler, keys): run(*given)  # noqa: E731
        theirs = _torchs(schedule, [Scale() for _ in own], own, m, groups.pipeline_forward.process_group)
        contenders: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "ours": (ours, _nothing), "ours free": (ours, partial(_free_of_messages, links)),
            "torch": (theirs, _nothing), "torch free": (theirs, _torch_free_of_messages),
            "loop": (_loop(handler, tables[rank]), _nothing),
        }  # fmt: skip
        rows: dict[str, list[Seconds]] = {name: [] for name in contenders}
        for index in range(rounds + _WARM):
            for name, (step, under) in contenders.items():
                dist.barrier()
                with under():
                    seconds = _timed(step)
                if index >= _WARM:
                    rows[name].append(seconds)
        count = len(tables[rank])
        found[schedule] = {
            name: [min(column) / count for column in zip(*each, strict=True)] for name, each in rows.items()
        }
    calls = _calls(rank, rounds * 10)
    groups.close()
    return {**found, **calls}


def _timed(step: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def _loop(handler: Handler, actions: tuple[Action, ...]) -> Callable[[], None]:
    """The plain loop, on tensors that lie ready; stage 0 and the last one get what they get in a pipeline."""

    def step() -> None:
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                handler.forward(action, ready[action] if action.stage else None)
            else:
                handler.backward(action, None if action.stage == handler._last else gradients)

    ready = {action: (torch.ones(ROWS, WIDTH, requires_grad=True),) for action in actions}
    gradients = (torch.ones(ROWS, WIDTH),)
    return step


def _torchs(schedule: str, modules: list[Scale], own: range, m: int, group: Any) -> Callable[[], Any]:
    """A step of torch's runtime, without cutting a batch and putting outputs together."""
    stages = [
        PipelineStage(module, index, 2 * len(own), torch.device("cpu"), group=group)
        for module, index in zip(modules, own, strict=True)
    ]
    made = _THEIRS[schedule](
        stages[0] if schedule == "1f1b" else stages, m, loss_fn=lambda output, _: output.sum(), scale_grads=False
    )
    batches = [(torch.ones(ROWS, WIDTH),)] * m if own[0] == 0 else [()] * m
    targets = [torch.zeros(1)] * m if own[0] == 1 else None

    def step() -> None:
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[Tensor] | None = [] if targets else None
        made._step_microbatches(batches, [{}] * m, targets, losses, return_outputs=False)

    return step


class _Over:
    """A message that is over."""

    def wait(self) -> bool:
        return True


class _Silent:
    """A process group whose messages are over at once."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Over:
        return _Over()

    recv = send


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _free_of_messages(links: PipelineLinks) -> Iterator[None]:
    """In the block, messages of our links are over at once; all is counted and named that is."""
    with ExitStack() as stack:
        for end in links._ends.values():
            stack.enter_context(patch.object(end.wire, "process_group", _Silent()))
        yield


@contextmanager
def _torch_free_of_messages() -> Iterator[None]:
    """In the block, torch's runtime asks for its messages, and none is sent."""
    with patch.object(schedules, "_batch_p2p", lambda operations, desc=None: [_Over() for _ in operations]):
        yield


def _calls(rank: int, rounds: int) -> dict[str, Seconds]:
    """Seconds of torch's calls for one message of this size, whose receive is posted before it is sent."""
    rows: dict[str, list[Seconds]] = {"isend": [], "irecv": [], "wait": []}
    there, here = torch.ones(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    works: list[Any] = []
    for turn in range(rounds):
        rows["irecv"].append(_timed(lambda: works.append(dist.irecv(here, src=1 - rank, tag=turn))))  # noqa: B023
        dist.barrier()
        rows["isend"].append(_timed(lambda: works.append(dist.isend(there, dst=1 - rank, tag=turn))))  # noqa: B023
        dist.barrier()
        rows["wait"].append(_timed(works[0].wait))
        works[1].wait()
        works.clear()
    return {name: tuple(median(column) for column in zip(*row, strict=True)) for name, row in rows.items()}  # type: ignore[misc]

