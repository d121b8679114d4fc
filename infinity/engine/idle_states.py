"""The states of an engine that rests: to a slower tier, and back.

Names are DeepSpeed's. What holds no value between two steps (gradients, the memory of reductions) is given up; values
are moved one partition at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, StateError
from infinity.log import logger
from infinity.memory.drives import queue_options
from infinity.memory.ledger import mb
from infinity.memory.partition import Partition
from infinity.memory.scratch import DriveRefuge, MemoryRefuge, Refuge, SwapFolders
from infinity.memory.tiers.pinned import HostMemory, trim
from infinity.plan.types import Key, Kind, Tier

# DeepSpeed's names of states, and the partitions that have them: masters lie beside the moments.
_KINDS = {
    "optim_states": (Kind.STATES,), "hp_params": (Kind.STATES,), "lp_params": (Kind.PARAM,), "lp_grads": (Kind.GRAD,),
    "contiguous_grad_buffer": (),
}  # fmt: skip
_DEVICES = ("cpu", "nvme", "none")


class IdleStates:
    """Moves the states of one engine. Called from the training thread, on every rank alike."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def offload(self, include: Iterable[Any] | None, device: Any, *, pin: bool) -> None:
        """See `Engine.offload_states`. An error leaves what has not moved where it was."""
        runtime = self._runtime
        names = frozenset(_KINDS) if include is None else frozenset(map(_name, include))
        if unknown := sorted(names - _KINDS.keys()):
            raise ConfigError(f"offload_states(include=...): {', '.join(unknown)} is none of {', '.join(_KINDS)}")
        target = _name(device)
        if target not in _DEVICES:
            raise ConfigError(f"offload_states(device={target!r}): one of {', '.join(_DEVICES)}")
        if target == "none":
            logger.warning("offload_states: device is none, and nothing moves")
            return
        if runtime.gradients.begun and names & {"lp_grads", "contiguous_grad_buffer"}:
            raise StateError(
                "cannot offload states: gradients have accumulated. Call engine.step() or engine.zero_grad() first, or "
                "leave lp_grads and contiguous_grad_buffer out of `include`"
            )
        runtime.step.synchronize()
        runtime.coordinator.next_step()
        runtime.coordinator.memory.abandon()
        held = [partition for partition, _ in runtime.store.held() if self._moves(partition, names, target)]
        # What a step consumes has no value now.
        given_up = [partition for partition in held if partition.key.kind is Kind.GRAD]
        runtime.store.discard(*(partition.key for partition in given_up))
        freed = sum(partition.spec.nbytes for partition in given_up)
        if "contiguous_grad_buffer" in names:
            runtime.gradients.drop_memory()
        values = [partition for partition in held if partition.key.kind is not Kind.GRAD]
        freed += self._move(values, target, pin=pin)
        if "lp_params" in names and (target == "nvme" or runtime.device.own_memory):
            for unit in runtime.access.units:
                if not unit.placed.aliased or runtime.store[unit.key].absent:
                    unit.vacate()
        trim()
        logger.info("offloaded %s to %s: %s", ", ".join(sorted(names)), target, mb(freed))

    def reload(self) -> None:
        """See `Engine.reload_states`. An error leaves the rest where it is, for another call. Collective."""
        runtime = self._runtime
        for unit in runtime.access.units:
            if unit.placed.whole:
                runtime.coordinator.memory.gather(unit)
                unit.finish_gather()
        for key in runtime.store.offloaded():
            with runtime.store.read(key):
                pass

    def _moves(self, partition: Partition, names: frozenset[str], target: str) -> bool:
        """Whether a partition is one of those named, and nearer to the device than the target."""
        if partition.on_drive or partition.buffer is None or not partition.spec.nbytes:
            return False
        wanted = {kind for name in names for kind in _KINDS[name]}
        # Without memory of its own the device is in CPU memory already.
        nearer = target == "nvme" or (partition.spec.home.on_device and self._runtime.device.own_memory)
        return partition.key.kind in wanted and nearer

    def _move(self, partitions: list[Partition], target: str, *, pin: bool) -> int:
        if not partitions:
            return 0
        refuge = self._refuge({each.key: each.spec.nbytes for each in partitions}, target, pin=pin)
        try:
            return sum(self._runtime.store.offload(each.key, refuge) for each in partitions)
        finally:
            if not any(key in {each.key for each in partitions} for key in self._runtime.store.offloaded()):
                refuge.close()

    def _refuge(self, sizes: dict[Key, int], target: str, *, pin: bool) -> Refuge:
        runtime = self._runtime
        if target == "cpu":
            memory = HostMemory(runtime.device, pin=pin, ledger=runtime.store.ledger)
            return MemoryRefuge(memory, runtime.device)
        folders = runtime.config.nvme_path or runtime.config.zero.folders_of_others("nvme")
        if folders is None:
            raise ConfigError(
                'offload_states(device="nvme"): the configuration names no drive; set '
                "zero_optimization.offload_optimizer.nvme_path (its device may be none or cpu)"
            )
        options = queue_options(runtime.config, folders)
        return DriveRefuge(SwapFolders(Tier.NVME, folders, runtime.groups.ranks.rank, options), sizes)


def _name(given: Any) -> str:
    """The value of a member of DeepSpeed's enumerations, or the string itself."""
    return str(getattr(given, "value", given))
