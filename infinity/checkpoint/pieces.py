"""The bytes of a rank's partitions that a checkpoint holds, and the tensors' elements that they are.

A piece is a range of one partition's buffer that becomes one extent: the whole partition where each rank has its own,
an equal share of it where every rank has the same. A load fills whole partitions. `tensor`: the rank's index on the
tensor axis; arrays of what that axis cuts name their shard.

The names of a module's tensors: parameters, the further names of tied ones, and the buffers of a state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from infinity.checkpoint.format import BUFFER, PARAM, Array, ShardRanges, TensorInfo, block_of, values_numel
from infinity.errors import CheckpointError
from infinity.memory.partition import DTYPES
from infinity.plan.layout import Slice, Slot
from infinity.plan.partitions import states_kinds
from infinity.plan.plan import Plan, model_params
from infinity.plan.spec import dtype_name
from infinity.plan.types import CACHE_LINE, DTYPE_NBYTES, Key, Kind, PartitionSpec

WEIGHTS, FROZEN, STATES = "weights", "frozen", "states"


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Bytes [begin, begin + nbytes) of a partition's buffer; `arrays` count their offsets from `begin`."""

    key: Key
    part: str
    begin: int
    nbytes: int
    arrays: tuple[Array, ...]


def shares(plan: Plan, index: int, tensor: int = 0, *, frozen: bool = True) -> list[TensorSpan]:
    """Return what this rank writes; all ranks together write every element once. frozen: with untrained parameters.

    What the tensor axis does not cut is the same on all of its ranks, and the first one's arrays have it; so it is with
    what several ranks of the pipeline axis have.
    """
    found = []
    others = {slot.name for unit in plan.told_elsewhere for slot in plan.layouts[unit].slots}
    for spec in _specs(plan, frozen=frozen):
        for piece in _pieces(plan, spec, index, tensor, shared=plan.topology.dp > 1):
            arrays = tuple(
                array for array in piece.arrays
                if (tensor == 0 or array.shard is not None) and array.tensor not in others
            )  # fmt: skip
            if arrays:
                found.append(replace(piece, arrays=arrays))
    return found


def holdings(plan: Plan, index: int, tensor: int = 0) -> list[TensorSpan]:
    """Return what this rank holds: one piece for each partition of parameters and states."""
    return [piece for spec in _specs(plan, frozen=True) for piece in _pieces(plan, spec, index, tensor, shared=False)]


def shard_ranges(slot: Slot, tensor: int) -> ShardRanges | None:
    """Return what a rank of the tensor axis has of a slot's parameter; None where that is all of it."""
    if slot.shard is None or slot.shard.parts == 1:
        return None
    return ShardRanges(slot.shard.dim, tuple(each for each in slot.shard.ranges(tensor) if each[0] < each[1]))


def _specs(plan: Plan, *, frozen: bool) -> Iterator[PartitionSpec]:
    for spec in plan.partitions:
        kept = spec.key.kind is Kind.PARAM and (frozen or plan.layouts[spec.key.index].trainable)
        if kept or spec.key.kind is Kind.STATES:
            yield spec


def _pieces(plan: Plan, spec: PartitionSpec, index: int, tensor: int, *, shared: bool) -> Iterator[TensorSpan]:
    """Yield the pieces of one partition. shared: only this rank's share of a partition that every rank has."""
    states = spec.key.kind is Kind.STATES
    units = [spec.key.index] if not states else [piece.unit for piece in plan.sub_groups[spec.key.index].slices]
    part = STATES if states else WEIGHTS if plan.layouts[spec.key.index].trainable else FROZEN
    numel = spec.sections[0].numel if spec.sections else 0
    if not shared or any(plan.placement.units[unit].parts > 1 for unit in units):
        arrays = [
            array
            for section in spec.sections
            for array in _arrays(
                plan, spec.key, section.kind.value, section.dtype, index, tensor, 0, numel, section.offset
            )
        ]
        yield TensorSpan(spec.key, part, 0, spec.nbytes, tuple(arrays))
        return
    unit = max(CACHE_LINE, *(section.kind.block for section in spec.sections))
    # A rank's share begins at a multiple of the unit.
    dp = plan.topology.dp
    first, last = (numel if at == dp else numel * at // dp // unit * unit for at in (index, index + 1))
    for section in spec.sections:
        width, own = DTYPE_NBYTES[section.dtype], section.kind.span(first, last - first)
        arrays = list(_arrays(plan, spec.key, section.kind.value, section.dtype, index, tensor, first, last, 0))
        begin = section.offset + own.start * width
        yield TensorSpan(spec.key, part, begin, (own.stop - own.start) * width, tuple(arrays))


def _arrays(
    plan: Plan, key: Key, kind: str, dtype: str, index: int, tensor: int, first: int, last: int, offset: int
) -> Iterator[Array]:
    """Yield the parts of tensors in elements [first, last) of a partition, which no block of the kind crosses. offset:
    the byte of element `first`.
    """
    width, block = DTYPE_NBYTES[dtype], block_of(kind)
    for piece, at in _stretches(plan, key):
        begin, end = max(first, at), min(last, at + piece.numel)
        if begin >= end:
            continue
        layout, parts = plan.layouts[piece.unit], plan.placement.units[piece.unit].parts
        flat = layout.partition_start(parts, index) + piece.start + begin - at
        for overlap in layout.overlaps(flat, flat + end - begin):
            yield Array(
                tensor=overlap.slot.name, kind=kind, dtype=dtype, start=overlap.tensor_start // block,
                numel=values_numel(kind, overlap.numel), extent=0,
                offset=offset + (begin - first + overlap.range_start) // block * width,
                shard=shard_ranges(overlap.slot, tensor),
            )  # fmt: skip


def _stretches(plan: Plan, key: Key) -> Iterator[tuple[Slice, int]]:
    """Return what a partition holds: (slice of a unit's partition, its start in this one)."""
    if key.kind is Kind.PARAM:
        numel = plan.layouts[key.index].partition_numel(plan.placement.units[key.index].parts)
        return iter([(Slice(key.index, 0, numel), 0)])
    return plan.sub_groups[key.index].placed()


def tensor_kinds(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the kinds that are kept of each tensor, by name."""
    kinds = [
        [kind.value for kind, _ in states_kinds(plan.request.compute_dtype, rule.moments)]
        for rule in plan.request.rules
    ]
    return {
        name: (PARAM, *(kinds[param.rule] if param.trainable else ())) for name, param in model_params(plan).items()
    }


def tensors_of(plan: Plan, module: nn.Module, *, frozen: bool = True) -> dict[str, TensorInfo]:
    """Return the tensors of the whole model, buffers included, in whole shapes, with the kinds that a checkpoint keeps
    of each. `frozen`: with the elements of parameters that are not trained.
    """
    kinds = tensor_kinds(plan)
    tensors = {
        name: TensorInfo(
            shape=param.shape, dtype=param.dtype, trainable=param.trainable,
            kinds=kinds[name] if param.trainable or frozen else (),
        )
        for name, param in model_params(plan).items()
    }  # fmt: skip
    for name, dtype, buffer in buffers_of(module):
        tensors[name] = TensorInfo(tuple(buffer.shape), dtype, trainable=False, kinds=(BUFFER,))
    return tensors


def plan_in_short(plan: Plan) -> dict[str, Any]:
    """Return what a manifest says of the plan."""
    topology, request = plan.topology, plan.request
    return {
        "fingerprint": plan.fingerprint(), "stage": request.stage, "world_size": topology.world_size,
        "dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "compute_dtype": request.compute_dtype,
    }  # fmt: skip


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by identity."""
    return {id(param): name for name, param in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters and buffers that several modules share, each with the first."""
    every = list(chain(module.named_parameters(remove_duplicate=False), _persistent(module)))
    first = {id(tensor): name for name, tensor in reversed(every)}
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has, by their first names in it."""
    return _each_once(_persistent(module))


def checkpoint_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint keeps, by name; CheckpointError for a dtype that it cannot keep."""
    # The module may leave out of its state dict what it would keep by itself.
    kept = module.state_dict(keep_vars=True).keys()
    found = _each_once(each for each in module.named_buffers(remove_duplicate=False) if each[0] in kept)
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES.values():
            raise CheckpointError(
                name, f"a buffer of dtype {buffer.dtype} cannot be kept in a checkpoint",
                "Register it with persistent=False, or keep its real and imaginary parts",
            )  # fmt: skip
    return found


def buffers_of(module: nn.Module) -> tuple[tuple[str, str, Tensor], ...]:
    """Return the buffers that a checkpoint keeps: name, dtype, values."""
    return tuple((name, dtype_name(buffer.dtype), buffer) for name, buffer in checkpoint_buffers(module).items())


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every name of a buffer in the state dict."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _each_once(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
