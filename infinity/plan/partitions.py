"""Every partition of a rank: what it holds, its home and, on a drive, its extent in the tier's file of the rank.

The order in which sub-groups are stepped, and what a window of them has in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice

from infinity.plan.layout import SubGroup, UnitLayout
from infinity.plan.placement import Placement
from infinity.plan.request import RuleSpec
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

# Sub-groups in memory at once while stepping from NVMe: one being stepped, those being read, and two being written.
STEP_READS = 2
STEP_WINDOW = 1 + STEP_READS + 2
# A step that has to wait for the norm reads its first sub-groups when the gradients of only so many units are still to
# come: late enough that backward has fetched what it needs, early enough for the drive.
SOON_UNITS = 2


def first_uses(uses: Sequence[int]) -> dict[int, int]:
    """The position at which each unit is used first."""
    first: dict[int, int] = {}
    for position, unit in enumerate(uses):
        first.setdefault(unit, position)
    return first


def step_order_of(groups: tuple[SubGroup, ...], placement: Placement, uses: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of sub-groups: first those with units that stay whole, which are up to date once a step is over (the ones
    that go on beside its end last); then in the order in which the next forward needs their parameters, so that the
    step may go on beside it.
    """
    first_use = first_uses(uses)
    # There are thousands of sub-groups and few units.
    ranks = [
        (not placed.whole or placed.refreshed_apart, not placed.whole or placed.refreshed_at_use,
         first_use.get(unit, len(uses)))
        for unit, placed in enumerate(placement.units)
    ]  # fmt: skip

    def rank(group: SubGroup) -> tuple[bool, bool, int, int]:
        if len(group.slices) == 1:
            return *ranks[group.slices[0].unit], group.index
        apart, at_use, first = zip(*(ranks[piece.unit] for piece in group.slices), strict=True)
        return all(apart), all(at_use), min(first), group.index

    return tuple(group.index for group in sorted(groups, key=rank))


def changed_by(group: SubGroup) -> list[Key]:
    """The partitions that a sub-group's step changes: its states, then its parameters."""
    return [Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices)]


def read_by(group: SubGroup) -> list[Key]:
    """The partitions that a sub-group's step only reads: gradients."""
    return [Key(Kind.GRAD, piece.unit) for piece in group.slices]


def undone_of(
    groups: Sequence[SubGroup], order: Sequence[int], placement: Placement, *, memory_numel: int
) -> tuple[int, ...]:
    """Sub-groups whose old values can be kept until a step is known to be wanted, so that it may begin in backward: see
    [Note: slots]. All whose values lie on NVMe; of those with values in CPU memory, so many elements. The step comes to
    these last, and their gradients come first.
    """
    found = []
    # Of each unit, whether its parameters are on a drive; None where they cannot be undone.
    params = [None if unit.whole or unit.param.on_device else unit.param.on_drive for unit in placement.units]
    for index in reversed(order):
        states, on_drive = placement.states[index], {params[piece.unit] for piece in groups[index].slices}
        if states.on_device or None in on_drive:
            continue
        if not states.on_drive or False in on_drive:
            numel = groups[index].numel
            if numel > memory_numel:
                continue
            memory_numel -= numel
        found.append(index)
    return tuple(sorted(found))


def first_reads(order: Sequence[SubGroup], in_memory: Callable[[SubGroup], bool]) -> Sequence[SubGroup]:
    """What a step reads ahead while the last gradients are still to come: nothing where it begins with what the one
    before has left in memory, else its first sub-groups, as many as leave room for one that the program steps itself.
    """
    return () if any(map(in_memory, order)) else order[: STEP_WINDOW - 1]


def kept_of(order: Sequence[int], sizes: Mapping[int, int], room_nbytes: int) -> frozenset[int]:
    """Sub-groups that stay in an arena from step to step: those stepped first, in what room it has beside the window of
    those that come and go. `sizes`: bytes by index of those that live elsewhere.
    """
    if sum(sizes.values()) > room_nbytes:
        room_nbytes -= STEP_WINDOW * max(sizes.values())
    found: list[int] = []
    for index in filter(sizes.__contains__, order):
        room_nbytes -= sizes[index]
        if room_nbytes < 0:
            break
        found.append(index)
    return frozenset(found)


def stepped_nbytes(
    groups: tuple[SubGroup, ...], order: tuple[int, ...], sizes: dict[Key, int], window: int = STEP_WINDOW
) -> int:
    """Bytes of partitions of units in memory while a window of consecutive sub-groups is stepped, at most.

    sizes: bytes of those that pass through memory.
    """
    by_unit = {key.index: nbytes for key, nbytes in sizes.items()}
    # A unit may be thousands of sub-groups in a row: more of them than a window has change nothing.
    runs = groupby(([piece.unit for piece in groups[index].slices] for index in order) if by_unit else ())
    units = [{*those} & by_unit.keys() for those, run in runs for _ in islice(run, window)]
    windows = (set[int]().union(*units[at : at + window]) for at in range(len(units)))
    return max((sum(by_unit[unit] for unit in each) for each in windows), default=0)


def states_kinds(compute_dtype: str, moments: tuple[Kind, ...] = ADAM_MOMENTS) -> list[tuple[Kind, str]]:
    """The optimizer states and their dtypes: what completes PARAM to the fp32 master, and what the optimizer keeps."""
    master = {"fp32": [], "bf16": [(Kind.REMAINDER, "int16")], "fp16": [(Kind.MASTER, "fp32")]}[compute_dtype]
    return [*master, *((kind, kind.dtype) for kind in moments)]


def make_partitions(
    layouts: tuple[UnitLayout, ...], groups: tuple[SubGroup, ...], placement: Placement, *, compute_dtype: str,
    grad_dtype: str, rules: Sequence[RuleSpec] = (RuleSpec(),), undone: Sequence[int] = (), recorded: bool = False,
) -> tuple[tuple[PartitionSpec, ...], int]:  # fmt: skip
    """Return every partition, those of units first, then one for each sub-group; and the size of all files together.

    undone: sub-groups of which what lies on NVMe is given a second extent. recorded: so is everything that is trained,
    and what lies in memory has its extents there, too. See [Note: slots].
    """
    made: list[tuple[Key, tuple[ArraySection, ...], Tier]] = []
    for layout, placed in zip(layouts, placement.units, strict=True):
        numel = layout.partition_numel(placed.parts)
        sections = pack_sections([(Kind.PARAM, layout.dtype, numel)])
        made.append((Key(Kind.PARAM, layout.index), sections, placed.param))
        if layout.trainable:
            sections = pack_sections([(Kind.GRAD, grad_dtype, numel)])
            made.append((Key(Kind.GRAD, layout.index), sections, placed.grad))
    kinds = [states_kinds(compute_dtype, rule.moments) for rule in rules]
    # There are thousands of sub-groups, and few sizes.
    by_numel: dict[tuple[int, int], tuple[ArraySection, ...]] = {}
    for group, home in zip(groups, placement.states, strict=True):
        numel, rule = group.numel, layouts[group.slices[0].unit].rule
        if (numel, rule) not in by_numel:
            by_numel[numel, rule] = pack_sections([(kind, dtype, numel // kind.block) for kind, dtype in kinds[rule]])
        made.append((Key(Kind.STATES, group.index), by_numel[numel, rule], home))
    specs = []
    # The ends of the tiers' files.
    ends: Counter[Tier] = Counter()
    spared = {key for index in undone for key in changed_by(groups[index])}
    if recorded:
        spared |= {key for key, *_ in made if key.kind is Kind.STATES or layouts[key.index].trainable}
    for key, sections, home in made:
        extent = spare = None
        drive = home if home.on_drive else Tier.NVME if recorded and key.kind is not Kind.GRAD else None
        if drive is not None and (nbytes := aligned_nbytes(sections, drive)):
            extent = Extent(ends[drive], nbytes)
            ends[drive] += nbytes
            if key in spared and key.kind is not Kind.GRAD:
                spare = Extent(ends[drive], nbytes)
                ends[drive] += nbytes
        specs.append(PartitionSpec(key=key, sections=sections, home=home, extent=extent, spare=spare))
    return tuple(specs), ends.total()


def fetch_nbytes_by_unit(partitions: tuple[PartitionSpec, ...], placement: Placement) -> tuple[int, ...]:
    """Bytes read from NVMe to gather each unit: 0 for one that is whole for good."""
    sizes = [0] * len(placement.units)
    for spec in partitions:
        if spec.key.kind is Kind.PARAM and spec.home.on_drive and not placement.units[spec.key.index].whole:
            sizes[spec.key.index] = spec.nbytes
    return tuple(sizes)
