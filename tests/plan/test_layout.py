"""Flat layouts and sub-groups: every element has one place, on every rank, at any world size."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from infinity.plan.layout import PARTITION_ALIGNMENT, cut_sub_groups, make_layouts
from infinity.plan.spec import ModelSpec, ParamSpec, UnitSpec
from infinity.plan.types import (
    CACHE_LINE,
    DTYPE_NBYTES,
    EXTENT_ALIGNMENT,
    Extent,
    Key,
    Kind,
    PartitionSpec,
    Tier,
    align_up,
    pack_sections,
)


def random_spec(rng: random.Random, units: int = 6) -> ModelSpec:
    """Units of random parameters, some without elements, some frozen."""
    made = []
    for index in range(units):
        trainable = rng.random() < 0.8
        dtype = rng.choice(["bf16", "fp32", "fp16"] if trainable else ["bf16", "int8", "int64"])
        params = tuple(
            ParamSpec(f"u{index}.p{number}", shape, dtype, group=0 if trainable else -1)
            for number, shape in enumerate(
                rng.choice([(rng.randint(1, 300),), (rng.randint(1, 40), rng.randint(1, 40)), (0,), ()])
                for _ in range(rng.randint(1, 6))
            )
        )
        made.append(UnitSpec(f"u{index}", (f"u{index}",), dtype, trainable, params))
    return ModelSpec(tuple(made), tuple(range(units)))


@pytest.mark.parametrize("seed", range(10))
def test_slots_are_disjoint_aligned_and_independent_of_the_number_of_ranks(seed):
    spec = random_spec(random.Random(seed))
    places = set()
    for parts in (1, 2, 3, 8):
        layouts = make_layouts(spec, parts)
        for layout, unit in zip(layouts, spec.units, strict=True):
            width = DTYPE_NBYTES[layout.dtype]
            assert [slot.name for slot in layout.slots] == [param.name for param in unit.params]
            end = 0
            for slot, param in zip(layout.slots, unit.params, strict=True):
                assert slot.offset >= end and slot.offset * width % CACHE_LINE == 0
                assert slot.numel == param.numel and slot.shape == param.shape
                end = slot.offset + slot.numel
            assert layout.numel >= end and layout.numel % (parts * PARTITION_ALIGNMENT) == 0
            # Padding: a cache line for each parameter, and one alignment at the end.
            assert layout.numel < unit.numel + len(unit.params) * CACHE_LINE + parts * PARTITION_ALIGNMENT
            assert layout.nbytes == layout.numel * width
        places.add(tuple(layout.slots for layout in layouts))
    assert len(places) == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_the_overlaps_of_all_ranks_are_the_parameters(seed, parts):
    for layout in make_layouts(random_spec(random.Random(seed)), parts):
        numel = layout.partition_numel(parts)
        assert numel * parts == layout.numel
        # Every rank has all of a unit that is not partitioned.
        assert [layout.partition_start(1, rank) for rank in range(parts)] == [0] * parts
        pieces: dict[str, list[int]] = {slot.name: [] for slot in layout.slots}
        for rank in range(parts):
            last = 0
            for overlap in layout.overlaps(rank * numel, (rank + 1) * numel):
                assert last <= overlap.range_start and overlap.range_start + overlap.numel <= numel
                last = overlap.range_start + overlap.numel
                assert overlap.slot.offset + overlap.slot_start == rank * numel + overlap.range_start
                pieces[overlap.slot.name] += range(overlap.slot_start, overlap.slot_start + overlap.numel)
        assert pieces == {slot.name: list(range(slot.numel)) for slot in layout.slots}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_sub_groups_cover_every_trainable_partition_once_within_their_bound(seed, parts):
    rng = random.Random(seed)
    layouts = make_layouts(random_spec(rng, units=rng.randint(1, 10)), parts)
    numel_max = rng.choice([1, 64, 200, 1000, 10**9])
    bound = align_up(numel_max, PARTITION_ALIGNMENT)
    groups = cut_sub_groups(layouts, parts, numel_max)
    assert [group.index for group in groups] == list(range(len(groups)))
    covered: dict[int, list[int]] = {}
    for group in groups:
        assert 0 < group.numel <= bound
        for piece in group.slices:
            assert piece.start % PARTITION_ALIGNMENT == 0 and piece.numel % PARTITION_ALIGNMENT == 0
            covered.setdefault(piece.unit, []).extend(range(piece.start, piece.start + piece.numel))
        # One slice of a large partition, or whole partitions.
        whole = [piece.numel == layouts[piece.unit].partition_numel(parts) for piece in group.slices]
        assert all(whole) or len(group.slices) == 1
    expected = {
        layout.index: list(range(layout.partition_numel(parts)))
        for layout in layouts
        if layout.trainable and layout.numel
    }
    assert covered == expected


@pytest.mark.parametrize("numel_max", [64, 100, 1000, 4096])
def test_slices_of_a_large_partition_are_nearly_equal(numel_max):
    unit = UnitSpec("u", ("u",), "bf16", True, (ParamSpec("p", (10_000,), "bf16"),))
    layouts = make_layouts(ModelSpec((unit,)), 1)
    sizes = [group.numel for group in cut_sub_groups(layouts, 1, numel_max)]
    assert len(set(sizes[:-1])) <= 1 and max(sizes) - min(sizes) < len(sizes) * PARTITION_ALIGNMENT


def test_two_sub_groups_of_small_units_could_not_have_been_one():
    for seed in range(10):
        layouts = make_layouts(random_spec(random.Random(seed)), 2)
        bound = align_up(max(layout.partition_numel(2) for layout in layouts), PARTITION_ALIGNMENT)
        groups = cut_sub_groups(layouts, 2, bound)
        for group, following in pairwise(groups):
            assert group.numel + following.slices[0].numel > bound


def test_sections_lie_on_cache_lines_and_a_partition_is_padded_for_its_home():
    sections = pack_sections([(Kind.REMAINDER, "int16", 33), (Kind.EXP_AVG, "fp32", 33), (Kind.EXP_AVG_SQ, "fp32", 33)])
    assert [section.offset for section in sections] == [0, 128, 320]
    key = Key(Kind.STATES, 0)
    assert PartitionSpec(key, sections, Tier.CPU).nbytes == 512
    assert PartitionSpec(key, sections, Tier.NVME, Extent(0, 4096)).nbytes == EXTENT_ALIGNMENT
    assert PartitionSpec(key, (), Tier.NVME).nbytes == 0
    assert str(key) == "states of sub-group 0" and str(Key(Kind.PARAM, 2)) == "param of unit 2"
