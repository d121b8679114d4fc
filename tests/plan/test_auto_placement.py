"""Homes by budget: the split is the optimum of a search through all of them, and the plan keeps every limit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

import infinity.plan.plan
from infinity.plan.capacity import Capacity
from infinity.plan.inputs import KEYS, fitted, lowered_in_words
from infinity.plan.placement import Value, choose, fill_tiers, search_placement
from infinity.plan.plan import SUB_GROUPS_MAX, Plan, make_plan
from infinity.plan.request import PlanRequest
from infinity.plan.spec import ModelSpec, ParamSpec, UnitSpec
from infinity.plan.types import Key, Kind, Tier, Topology
from tests.support.cells import kept

GPU, CPU, NVME = Tier
TRAFFIC = {Kind.PARAM: 4, Kind.STATES: 2}
AUTO = PlanRequest(
    param_tier=None, optimizer_tier=None, drive=True, compute_dtype="bf16", grad_dtype="bf16", persistence_numel=0
)


def model(numels: list[int], dtype: str = "bf16") -> ModelSpec:
    """A unit for each number of elements, used in order."""
    units = tuple(
        UnitSpec(f"u{at}", (f"u{at}",), dtype, True, (ParamSpec(f"u{at}.w", (numel,), dtype),))
        for at, numel in enumerate(numels)
    )
    return ModelSpec(units, tuple(range(len(units))))


def homes_of(plan: Plan) -> dict[Key, Tier]:
    return {spec.key: spec.home for spec in plan.partitions if spec.key.kind is not Kind.GRAD}


def worth(plan: Plan) -> tuple[int, int]:
    """Traffic of what is on the GPU tier, and of what is on the CPU tier: the first counts before the second."""
    sums = dict.fromkeys(Tier, 0)
    for spec in plan.partitions:
        if spec.key.kind in TRAFFIC:
            sums[spec.home] += TRAFFIC[spec.key.kind] * sum(section.nbytes for section in spec.sections)
    return sums[GPU], sums[CPU]


def search_all(
    values: Sequence[Value], tiers: Sequence[Tier], capacity: Capacity, plan_of: Callable[..., Plan],
    nbytes_of: Callable[[Plan], Mapping[Tier, int]], following_nbytes_of: object,
) -> Plan:  # fmt: skip
    """In place of `search_placement`: the whole plan of each of the 3**n choices of homes, and the best that fits."""
    keys = [value.key for value in values]
    choices = [dict(zip(keys, homes, strict=True)) for homes in itertools.product(tiers, repeat=len(keys))]

    def carried(homes: Mapping[Key, Tier]) -> list[int]:
        return [sum(value.traffic for value in values if homes[value.key] is tier) for tier in (GPU, CPU)]

    # The first that fits is the best: all the others carry less.
    plans = map(plan_of, sorted(choices, key=carried, reverse=True))
    return next((plan for plan in plans if capacity.fits(nbytes_of(plan))), plan_of(choices[-1]))


def draw(chance: random.Random, *, equal: bool) -> tuple[ModelSpec, PlanRequest, int]:
    """A model of up to four units and five sub-groups."""
    count = chance.randint(2, 4)
    numels = [chance.randrange(1, 40) * 1000 for _ in range(count)]
    numels = numels[:1] * count if equal else numels
    request = replace(
        AUTO, sub_group_numel=max(numels) if equal or count > 3 else max(numels) * 3 // 4,
        prefetch_numel=chance.choice([0, 20_000]), live_numel=chance.choice([1, 10**9]),
        reuse_numel=chance.choice([0, 10**9]), accelerator=chance.random() < 0.5,
    )  # fmt: skip
    return model(numels), request, chance.choice([1, 2])


def budgets(chance: random.Random, spec: ModelSpec, request: PlanRequest, dp: int) -> Capacity:
    """Limits below what the plan would hold with everything on the fastest tier."""
    total = make_plan(spec, Topology(dp=dp), request).nbytes_by_tier()[GPU]
    gpu, cpu = (int(total * chance.uniform(0.2, 1.1)) for _ in range(2))
    return Capacity(process=gpu) if chance.random() < 0.3 else Capacity(gpu=gpu, cpu=cpu)


@pytest.mark.parametrize("count", kept([8, 25], [8]))
@pytest.mark.parametrize("equal", [True, False])
def test_the_split_is_the_best_of_all_plans(equal, count, monkeypatch):
    """Every choice of homes is planned in full, its own pools and buffers included; of those that fit, none carries
    more traffic on the GPU tier, nor, with as much there, on the CPU tier.
    """
    chance = random.Random(11 + equal)
    tiers_seen: set[int] = set()
    fitting = missed = 0
    while fitting < count:
        spec, request, dp = draw(chance, equal=equal)
        capacity = budgets(chance, spec, request, dp)
        monkeypatch.setattr(infinity.plan.plan, "search_placement", search_placement)
        plan = make_plan(spec, Topology(dp=dp), request, capacity)
        if len(homes_of(plan)) > 6:
            continue
        monkeypatch.setattr(infinity.plan.plan, "search_placement", search_all)
        best = make_plan(spec, Topology(dp=dp), request, capacity)
        if not capacity.fits(best.nbytes_by_tier()):
            assert not capacity.fits(plan.nbytes_by_tier())
        elif not capacity.fits(plan.nbytes_by_tier()):
            missed += 1
        else:
            fitting += 1
            assert worth(plan) == worth(best), (spec, request, capacity)
            tiers_seen.add(len({*plan.placement.states}))
    assert {1, 2} <= tiers_seen
    # A budget may lie between what a few sub-groups take and what their pool takes: see docs/memory.md.
    assert missed <= 1


def test_nothing_is_refused_that_fits_with_everything_on_the_slowest_tier():
    """Where a plan by budget does not fit, neither does the plan that has no value in memory."""
    chance = random.Random(5)
    refused = 0
    for _ in range(200):
        spec, request, dp = draw(chance, equal=False)
        capacity = budgets(chance, spec, request, dp)
        plan = make_plan(spec, Topology(dp=dp), request, capacity)
        if capacity.fits(plan.nbytes_by_tier()):
            continue
        refused += 1
        outermost = replace(plan.request, param_tier=NVME, optimizer_tier=NVME)
        assert not capacity.fits(make_plan(spec, Topology(dp=dp), outermost).nbytes_by_tier())
    assert refused > 10


def test_parameters_go_first_and_of_equals_those_nearest_the_input():
    spec = model([64_000] * 12)
    request = replace(AUTO, live_numel=1, prefetch_numel=0)
    spare = make_plan(spec, Topology(), request).nbytes_by_tier()[GPU]
    assert set(homes_of(make_plan(spec, Topology(), request, Capacity(gpu=spare))).values()) == {GPU}
    # All parameters, one unit's whole gradients, and the states of two units with their gradients.
    param, states, grad, padded = 128_000, 640_000, 128_000, 643_072
    gpu = 12 * param + param + 2 * (states + grad)
    # The other gradients, the one sub-group on its way from NVMe (nothing is read ahead), and the states of one unit.
    plan = make_plan(spec, Topology(), request, Capacity(gpu=gpu, cpu=10 * grad + padded + states))
    assert [home for key, home in homes_of(plan).items() if key.kind is Kind.PARAM] == [GPU] * 12
    assert [*plan.placement.states] == [GPU, GPU, CPU, *[NVME] * 9]
    assert [placed.grad for placed in plan.placement.units] == [GPU, GPU, *[CPU] * 10]
    assert [placed.whole and placed.aliased for placed in plan.placement.units] == [True] * 12


def test_without_a_drive_the_rest_stays_in_memory():
    spec = model([64_000] * 4)
    plan = make_plan(spec, Topology(), replace(AUTO, drive=False), Capacity(gpu=1_000_000, cpu=10**9))
    assert set(homes_of(plan).values()) == {GPU, CPU} and plan.nvme_nbytes == 0


def test_below_stage_3_parameters_are_views_and_states_are_placed():
    spec = model([64_000] * 4)
    request = replace(AUTO, stage=2, sub_group_numel=32_000)
    limit = make_plan(spec, Topology(dp=2), request).nbytes_by_tier()[GPU] - 400_000
    plan = make_plan(spec, Topology(dp=2), request, Capacity(gpu=limit, cpu=10**9))
    assert all(placed.aliased for placed in plan.placement.units)
    assert {*plan.placement.states} == {GPU, CPU}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
def test_ratio_divides_the_states_exactly_enough(ratio, dp):
    spec = model([50_000, 80_000, 300_000, 10_000])
    request = PlanRequest(
        param_tier=CPU, optimizer_tier=CPU, optimizer_share=ratio, compute_dtype="bf16", persistence_numel=0
    )
    plan = make_plan(spec, Topology(dp=dp), request)
    numels = dict.fromkeys(Tier, 0)
    for group, home in zip(plan.sub_groups, plan.placement.states, strict=True):
        numels[home] += group.numel
    total = sum(numels.values())
    assert numels[NVME] == 0
    assert 0 <= numels[CPU] - ratio * total <= 0.01 * total
    inner = [home is GPU for home in plan.placement.states]
    assert inner == sorted(inner, reverse=True), "what is nearest the input stays"


def fitted_to(spec: ModelSpec, request: PlanRequest, capacity: Capacity) -> Plan:
    """The plan of a request whose bounds somebody chose."""
    def fits(plan: Plan) -> bool:
        return capacity.fits(plan.nbytes_by_tier())

    def plan_of(asked: PlanRequest) -> Plan:
        return make_plan(spec, Topology(), asked, capacity)

    return fitted(request, frozenset(KEYS), plan_of, fits=fits, fits_at_rest=fits, raised=False)


IN_TURN = replace(AUTO, param_tier=NVME, optimizer_tier=NVME, sub_group_numel=32_000)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("ratio", "stay"), [(0.0, 10), (0.35, 7), (0.99, 1), (1.0, 0)])
def test_a_ratio_of_the_gradients_leaves_memory_those_stepped_last_in_front(ratio, stay, dp):
    request = replace(IN_TURN, grad_tier=NVME, grad_share=ratio)
    plan = make_plan(model([64_000] * 10), Topology(dp=dp), request)
    assert [placed.grad for placed in plan.placement.units] == [CPU] * stay + [NVME] * (10 - stay)
    assert (plan.pools.grad_nbytes > 0) == (stay < 10)


def test_gradients_beside_states_on_the_device_stay_there():
    request = PlanRequest(param_tier=GPU, optimizer_tier=CPU, optimizer_share=0.5, grad_tier=NVME, compute_dtype="bf16",
                          persistence_numel=0)  # fmt: skip
    plan = make_plan(model([64_000] * 10), Topology(), request)
    assert [placed.grad for placed in plan.placement.units] == [GPU] * 5 + [NVME] * 5


def test_as_many_gradients_leave_memory_as_must():
    spec, numel = model([64_000] * 40), 40 * 64_000
    roomy = make_plan(spec, Topology(), IN_TURN)
    least = make_plan(spec, Topology(), replace(IN_TURN, grad_tier=NVME)).nbytes_by_tier()[CPU]
    most = roomy.nbytes_by_tier()[CPU]
    assert {placed.grad for placed in roomy.placement.units} == {CPU} and most - least > numel
    counts = []
    for limit in range(most, least - 1, (least - most) // 12):
        plan = fitted_to(spec, IN_TURN, Capacity(cpu=limit))
        homes = [placed.grad for placed in plan.placement.units]
        counts.append(homes.count(NVME))
        assert homes == sorted(homes, key=lambda home: home is NVME), "those nearest the input stay"
        assert plan.nbytes_by_tier()[CPU] <= limit
        if plan.request.grad_share * counts[-1] > 1 / 16:
            # With one more in memory it would not fit.
            fewer = replace(IN_TURN, grad_tier=NVME, grad_share=plan.request.grad_share - 1 / 16)
            assert make_plan(spec, Topology(), fewer).nbytes_by_tier()[CPU] > limit
            assert "of the gradients on NVMe instead of none" in lowered_in_words(IN_TURN, plan)
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] >= 35
    # Where that does not help, where no drive is there, or memory is asked for, they stay.
    for request, limit in (
        (IN_TURN, least - 1), (replace(IN_TURN, grad_tier=CPU), least), (replace(IN_TURN, drive=False), least),
    ):  # fmt: skip
        plan = fitted_to(spec, request, Capacity(cpu=limit))
        assert {placed.grad for placed in plan.placement.units} == {CPU}


def test_gradients_leave_memory_after_all_states_and_parameters():
    spec, seen = model([64_000] * 40), set()
    request = replace(AUTO, sub_group_numel=64_000, live_numel=1, prefetch_numel=0)
    for limit in range(750_000, 12_000_000, 750_000):
        plan = fitted_to(spec, request, Capacity(gpu=600_000, cpu=limit))
        fits, homes = Capacity(cpu=limit).fits(plan.nbytes_by_tier()), {*homes_of(plan).values()}
        passing = NVME in {placed.grad for placed in plan.placement.units}
        seen.add((fits, passing, CPU in homes))
        if passing:
            # One part of the gradients fewer, and nothing else in memory: that does not fit.
            fewer = replace(
                plan.request, param_tier=NVME, optimizer_tier=NVME, grad_share=plan.request.grad_share - 1 / 16
            )
            assert fits and make_plan(spec, Topology(), fewer).nbytes_by_tier()[CPU] > limit
    assert {(True, True), (True, False), (False, False)} == {each[:2] for each in seen} and (True, False, True) in seen


def test_ratio_1_and_a_cap_of_0_change_nothing():
    spec = model([50_000, 80_000, 300_000])
    plain = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16")
    assert make_plan(spec, Topology(), plain) == make_plan(
        spec, Topology(), replace(plain, optimizer_share=1.0, param_cpu_numel=0)
    )


def test_max_in_cpu_keeps_the_first_units_in_memory():
    spec = model([50_000, 80_000, 300_000, 10_000])
    request = PlanRequest(
        param_tier=NVME, optimizer_tier=NVME, param_cpu_numel=140_000, compute_dtype="bf16", persistence_numel=0
    )
    assert [placed.param for placed in make_plan(spec, Topology(), request).placement.units] == [CPU, CPU, NVME, NVME]
    # A rank has half of each: the third fits, too.
    halved = replace(request, param_cpu_numel=216_000)
    assert [placed.param for placed in make_plan(spec, Topology(dp=2), halved).placement.units] == [CPU, CPU, CPU, NVME]


def test_a_rank_has_a_bounded_number_of_sub_groups():
    spec = model([1_000_000_000] * 40)
    for tier in (NVME, None):
        plan = make_plan(spec, Topology(), replace(AUTO, param_tier=NVME, optimizer_tier=tier))
        assert SUB_GROUPS_MAX <= len(plan.sub_groups) <= SUB_GROUPS_MAX + 40
    small = make_plan(spec, Topology(), replace(AUTO, param_tier=NVME, optimizer_tier=NVME, sub_group_numel=5_000_000))
    assert len(small.sub_groups) == 8000, "the configuration's own bound is never exceeded"


def test_what_waits_for_a_step_does_not_grow_with_the_model():
    everything = replace(AUTO, param_tier=NVME, optimizer_tier=NVME, grad_tier=NVME)
    plans = [make_plan(model([1_000_000_000] * units), Topology(), everything) for units in (80, 400)]
    assert len({plan.pools for plan in plans}) == 1


def test_a_choice_of_many_values_loses_less_than_one():
    chance = random.Random(3)
    for _ in range(50):
        sizes = [chance.randrange(1, 1000) for _ in range(100)]
        room = chance.randrange(1, sum(sizes))
        worths = [2 * size for size in sizes]
        taken = choose(sizes, worths, room)
        held = sum(sizes[at] for at in taken)
        assert held <= room and room - held < min(size for at, size in enumerate(sizes) if at not in taken)


def test_choose_is_exact_for_a_few_values():
    chance = random.Random(4)
    for _ in range(60):
        count = chance.randint(1, 10)
        items = [(chance.randrange(1, 50), chance.choice([2, 4])) for _ in range(count)]
        items.sort(key=lambda item: -item[1])
        sizes, worths = [size for size, _ in items], [size * density for size, density in items]
        room = chance.randrange(0, sum(sizes) + 5)
        taken = choose(sizes, worths, room)
        best = max(
            sum(worths[at] for at in subset)
            for length in range(count + 1)
            for subset in itertools.combinations(range(count), length)
            if sum(sizes[at] for at in subset) <= room
        )
        assert sum(sizes[at] for at in taken) <= room
        assert sum(worths[at] for at in taken) == best


def test_one_budget_for_two_tiers_is_spent_once():
    values = [Value(Key(Kind.STATES, at), 100, 110, 200) for at in range(10)]
    homes = fill_tiers(values, (GPU, CPU, NVME), Capacity(process=560))
    assert [*homes.values()].count(GPU) == 5 and [*homes.values()].count(CPU) == 0
    homes = fill_tiers(values, (GPU, CPU, NVME), Capacity(process=560, gpu=220))
    assert [*homes.values()].count(GPU) == 2 and [*homes.values()].count(CPU) == 3


def test_charges_that_grow_step_by_step_end():
    """A pool that grows with every value that leaves: the rounds are bounded, and the last one is safe."""
    values = [Value(Key(Kind.STATES, at), 10, 10, 20) for at in range(100)]
    rounds = []

    def nbytes_of(homes):
        rounds.append(1)
        out = sum(home is NVME for home in homes.values())
        return {GPU: 10 * (100 - out), CPU: 9 * out, NVME: 10 * out}

    homes = search_placement(values, (GPU, CPU, NVME), Capacity(gpu=0, cpu=1000), dict, nbytes_of)
    assert nbytes_of(homes)[CPU] + 10 * sum(home is CPU for home in homes.values()) <= 1000 + 10 * 100
    assert len(rounds) < 64
