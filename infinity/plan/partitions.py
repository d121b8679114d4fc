"""Every partition of a rank: what it holds, its home and, on a drive, its extent in the tier's file of the rank."""

from __future__ import annotations

from collections import Counter

from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.placement import Placement
from infinity.plan.stepping import changed_by, undoable
from infinity.plan.types import (
    ADAM_MOMENTS,
    ArraySection,
    Extent,
    Key,
    Kind,
    PartitionSpec,
    Tier,
    aligned_nbytes,
    pack_sections,
)


def states_kinds(compute_dtype: str, moments: tuple[Kind, ...] = ADAM_MOMENTS) -> list[tuple[Kind, str]]:
    """The optimizer states of an element and their dtypes: what completes PARAM to the fp32 master, and the moments."""
    master = {"fp32": [], "bf16": [(Kind.REMAINDER, "int16")], "fp16": [(Kind.MASTER, "fp32")]}[compute_dtype]
    return [*master, *((kind, "fp32") for kind in moments)]


def make_partitions(
    layouts: tuple[UnitLayout, ...], groups: tuple[SubGroup, ...], placement: Placement, *, compute_dtype: str,
    grad_dtype: str, moments: tuple[Kind, ...] = ADAM_MOMENTS, twice: bool = False,
) -> tuple[tuple[PartitionSpec, ...], int]:  # fmt: skip
    """Return every partition, those of units first, then one for each sub-group; and the size of all files together.

    twice: give what a step in backward changes a second extent. See [Note: slots].
    """
    made: list[tuple[Key, tuple[ArraySection, ...], Tier]] = []
    for layout, placed in zip(layouts, placement.units, strict=True):
        numel = layout.partition_numel(placed.parts)
        sections = pack_sections([(Kind.PARAM, layout.dtype, numel)])
        made.append((Key(Kind.PARAM, layout.index), sections, placed.param))
        if layout.trainable:
            sections = pack_sections([(Kind.GRAD, grad_dtype, numel)])
            made.append((Key(Kind.GRAD, layout.index), sections, placed.grad))
    kinds = states_kinds(compute_dtype, moments)
    # There are thousands of sub-groups, and few sizes.
    by_numel: dict[int, tuple[ArraySection, ...]] = {}
    for group, home in zip(groups, placement.states, strict=True):
        numel = group.numel
        if numel not in by_numel:
            by_numel[numel] = pack_sections([(kind, dtype, numel) for kind, dtype in kinds])
        made.append((Key(Kind.STATES, group.index), by_numel[numel], home))
    specs = []
    # The ends of the tiers' files.
    ends: Counter[Tier] = Counter()
    spared = {key for group in groups if twice and undoable(group, placement) for key in changed_by(group)}
    for key, sections, home in made:
        extent = spare = None
        if home.on_drive and (nbytes := aligned_nbytes(sections, home)):
            extent = Extent(ends[home], nbytes)
            ends[home] += nbytes
            if key in spared:
                spare = Extent(ends[home], nbytes)
                ends[home] += nbytes
        specs.append(PartitionSpec(key=key, sections=sections, home=home, extent=extent, spare=spare))
    return tuple(specs), ends.total()


def fetch_nbytes_by_unit(partitions: tuple[PartitionSpec, ...], placement: Placement) -> tuple[int, ...]:
    """Bytes read from NVMe to gather each unit: 0 for one that is whole for good."""
    sizes = [0] * len(placement.units)
    for spec in partitions:
        if spec.key.kind is Kind.PARAM and spec.extent is not None and not placement.units[spec.key.index].whole:
            sizes[spec.key.index] = spec.nbytes
    return tuple(sizes)
