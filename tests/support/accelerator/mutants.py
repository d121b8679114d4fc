"""Small programs over streams, each with one missing edge in its mutant version and none in its healthy one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support import accelerator

_NUMEL = 4096


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program: `run(healthy)` returns whether its values came out right.

    names: of the two operations that have no edge in the mutant version.
    """

    run: Callable[[bool], bool]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run showed: the races, whether one of them has the mutant's names, and whether the values were right."""

    races: tuple[str, ...]
    named: bool
    values_right: bool

    @property
    def caught(self) -> bool:
        """Whether the run showed the fault by its name or by its values."""
        return self.named or not self.values_right

    @property
    def clean(self) -> bool:
        """Whether the run showed nothing."""
        return not self.races and self.values_right


def _pinned(value: float) -> Tensor:
    return torch.full((_NUMEL,), value).pin_memory()


def _all(tensor: Tensor, value: float) -> bool:
    torch.accelerator.synchronize()
    return bool((tensor.cpu() == value).all())


def _streams() -> tuple[torch.Stream, torch.Stream]:
    """The stream of computation and one for copies, the former being current after this."""
    compute, copies = torch.Stream("simulated"), torch.Stream("simulated")
    torch.accelerator.set_stream(compute)
    return compute, copies


def copy_up_over_what_compute_reads(healthy: bool) -> bool:
    """The next parameters go up into the buffer that the current layer still reads."""
    compute, copies = _streams()
    buffer = torch.full((_NUMEL,), 1.0, device="simulated")
    following = _pinned(7.0)
    # The start comes by a copy, so that computation is late.
    result = torch.empty(_NUMEL, device="simulated")
    result.copy_(_pinned(0.0), non_blocking=True)
    for _ in range(4):
        result += buffer
    if healthy:
        copies.wait_stream(compute)
    with copies:
        buffer.copy_(following, non_blocking=True)
    return _all(result, 4.0)


def compute_on_what_has_not_arrived(healthy: bool) -> bool:
    """A layer begins before its parameters are up."""
    compute, copies = _streams()
    parameters = _pinned(3.0)
    buffer = torch.zeros(_NUMEL, device="simulated")
    copies.wait_stream(compute)
    with copies:
        buffer.copy_(parameters, non_blocking=True)
    if healthy:
        compute.wait_stream(copies)
    return _all(buffer * 2, 6.0)


def source_not_held(healthy: bool) -> bool:
    """A gradient is freed while it goes down."""
    compute, copies = _streams()
    target = _pinned(0.0)
    gradient = torch.full((_NUMEL,), 5.0, device="simulated")
    copies.wait_stream(compute)
    with copies:
        target.copy_(gradient, non_blocking=True)
    if healthy:
        compute.wait_stream(copies)
    del gradient
    return _all(target, 5.0)


def lease_returned_early(healthy: bool) -> bool:
    """The host fills a pinned buffer again whose copy up has not ended."""
    _, copies = _streams()
    arrived = torch.Event("simulated")
    lease = torch.empty(_NUMEL).pin_memory()
    units = []
    for value in (1.0, 2.0):
        accelerator.host_access(lease, write=True, name="fill the lease")
        lease.fill_(value)
        with copies:
            units.append(torch.empty(_NUMEL, device="simulated"))
            units[-1].copy_(lease, non_blocking=True)
            arrived.record(copies)
        if healthy:
            arrived.synchronize()
    return all([_all(units[0], 1.0), _all(units[1], 2.0)])


def block_reused_early(healthy: bool) -> bool:
    """An activation is freed, and its block is filled again, while another stream still computes with it."""
    compute, others = _streams()
    activation = torch.full((_NUMEL,), 2.0, device="simulated")
    others.wait_stream(compute)
    with others:
        # A copy of something else makes this stream late.
        torch.empty(_NUMEL, device="simulated").copy_(_pinned(0.0), non_blocking=True)
        result = activation * 3
    if healthy:
        activation.record_stream(others)
    del activation
    reused = torch.full((_NUMEL,), 9.0, device="simulated")
    return _all(result, 6.0) and _all(reused, 9.0)


def host_reads_early(healthy: bool) -> bool:
    """The optimizer reads a gradient that is still on its way down."""
    compute, _ = _streams()
    arrived = torch.Event("simulated")
    target = _pinned(0.0)
    gradient = torch.full((_NUMEL,), 4.0, device="simulated")
    target.copy_(gradient, non_blocking=True)
    arrived.record(compute)
    if healthy:
        arrived.synchronize()
    accelerator.host_access(target, write=False, name="optimizer step")
    seen = target.clone()
    torch.accelerator.synchronize()
    return bool((seen == 4.0).all())


MUTANTS: dict[str, Mutant] = {
    "a copy up that does not wait for compute": Mutant(
        copy_up_over_what_compute_reads, frozenset({"aten::add", "copy up"})
    ),
    "compute that does not wait for a copy up": Mutant(
        compute_on_what_has_not_arrived, frozenset({"copy up", "aten::mul"})
    ),
    "a source not held while it is copied down": Mutant(source_not_held, frozenset({"copy down", "free"})),
    "a lease returned early": Mutant(lease_returned_early, frozenset({"copy up", "fill the lease"})),
    "a freed block reused too early": Mutant(block_reused_early, frozenset({"aten::mul", "free"})),
    "a host read before arrival": Mutant(host_reads_early, frozenset({"copy down", "optimizer step"})),
}


def outcome(name: str, healthy: bool, seed: int) -> Outcome:
    """Run one version of a program in this process, which has the device."""
    mutant = MUTANTS[name]
    before = torch.accelerator.current_stream()
    accelerator.reset()
    accelerator.configure(seed=seed, delays=True)
    try:
        values_right = mutant.run(healthy)
        found = accelerator.races()
    finally:
        torch.accelerator.set_stream(before)
    named = any({race.first.name, race.second.name} == mutant.names for race in found)
    return Outcome(tuple(map(str, found)), named, values_right)
