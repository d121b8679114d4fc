"""The plan as a value: homes, extents, known byte counts, pools, refusals, equality."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.errors import CapacityError
from infinity.plan.capacity import Capacity
from infinity.plan.layout import cut_sub_groups, make_layouts
from infinity.plan.partitions import STEP_WINDOW
from infinity.plan.placement import Homes, UnitPlacement, always_whole, place
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import PlanRequest
from infinity.plan.spec import ModelSpec, ModuleNode, ParamSpec, UnitRules, UnitSpec, find_units
from infinity.plan.types import DTYPE_NBYTES, EXTENT_ALIGNMENT, Key, Kind, Tier, Topology
from tests.plan.test_prefetch import execute
from tests.support.clock import usual_seconds

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME


def model(units: int = 4, numel: int = 1 << 16, *, dtype: str = "bf16", frozen: int = 0) -> ModelSpec:
    """`units` units of `numel` elements each, the last `frozen` of them frozen."""
    made = []
    for index in range(units):
        group = -1 if index >= units - frozen else 0
        params = (ParamSpec(f"u{index}.weight", (numel,), dtype, group=group),)
        made.append(UnitSpec(f"u{index}", (f"u{index}",), dtype, group >= 0, params))
    return ModelSpec(tuple(made), tuple(range(units)))


def llama_70b() -> ModuleNode:
    """A Llama of 70 billion parameters, from its shapes."""
    hidden, inner, vocabulary, layers = 8192, 28_672, 128_256, 80

    def linear(path: str, outputs: int, inputs: int) -> ModuleNode:
        return ModuleNode(path, "Linear", {"weight": ParamSpec(f"{path}.weight", (outputs, inputs), "bf16")})

    def norm(path: str) -> ModuleNode:
        return ModuleNode(path, "Norm", {"weight": ParamSpec(f"{path}.weight", (hidden,), "bf16")})

    def block(path: str) -> ModuleNode:
        attention = {"q": (hidden, hidden), "k": (1024, hidden), "v": (1024, hidden), "o": (hidden, hidden)}
        feed_forward = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return ModuleNode(
            path, "Block",
            children={
                "norm1": norm(f"{path}.norm1"),
                **{name: linear(f"{path}.{name}", *shape) for name, shape in (attention | feed_forward).items()},
                "norm2": norm(f"{path}.norm2"),
            },
        )  # fmt: skip

    blocks = ModuleNode("layers", "ModuleList", children={str(at): block(f"layers.{at}") for at in range(layers)})
    return ModuleNode(
        "", "Llama",
        children={
            "embed": linear("embed", vocabulary, hidden), "layers": blocks, "norm": norm("norm"),
            "head": linear("head", vocabulary, hidden),
        },
    )  # fmt: skip


REQUESTS = [
    PlanRequest(stage=stage, param_tier=param, optimizer_tier=states, compute_dtype=dtype, persistence_numel=persistent,
                sub_group_numel=50_000, prefetch_numel=100_000, live_numel=300_000, reuse_numel=200_000,
                accelerator=gpu)
    for stage, param, states in itertools.product((0, 1, 2, 3), Tier, Tier)
    for dtype, persistent, gpu in (("bf16", 0, True), ("fp32", 100_000, False))
    if stage == 3 or param is GPU
]  # fmt: skip
# Steps that begin in backward: with units that are gathered, and with one unit whole.
REQUESTS += [replace(request, steps_early=True, persistence_numel=persistent)
             for request in REQUESTS if (request.stage, request.param_tier, request.optimizer_tier) == (3, NVME, NVME)
             for persistent in (0, 100_000)]  # fmt: skip
# With room for old values in CPU memory: of some, and of all.
REQUESTS += [replace(request, speculates=True, undo_numel=numel)
             for request in REQUESTS if request.stage == 3 and CPU in (request.param_tier, request.optimizer_tier)
             and request.compute_dtype == "bf16" for numel in (70_000, 10**9)]  # fmt: skip


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.stage}-{r.param_tier.value}-{r.optimizer_tier.value}")
def test_every_plan_is_sound(request_, dp):
    spec = model(5, 40_000, dtype=request_.compute_dtype, frozen=1)
    plan = make_plan(spec, Topology(dp=dp), request_)
    extents_are_disjoint(plan)
    pools_are_bounded(plan)
    old_values_have_room(plan)
    assert (
        execute(plan.schedule, list(plan.full_nbytes()), fetch_nbytes(plan), plan.budget) == plan.pools.gathered_nbytes
    )
    assert plan.reschedule(plan.schedule.uses) == plan.schedule
    kinds = [spec.key for spec in plan.partitions]
    assert len(set(kinds)) == len(kinds)
    assert {key.index for key in kinds if key.kind is Kind.PARAM} == set(range(5))
    assert {key.index for key in kinds if key.kind is Kind.GRAD} == set(range(4))
    assert all(plan.partition(key).key == key for key in kinds)
    with pytest.raises(KeyError):
        plan.partition(Key(Kind.GRAD, 4))
    assert request_.compute_dtype in plan.explain()


def fetch_nbytes(plan: Plan) -> list[int]:
    homes = plan.placement.units
    return [
        plan.partition(Key(Kind.PARAM, index)).nbytes if placed.param is NVME and not placed.whole else 0
        for index, placed in enumerate(homes)
    ]


def extents_are_disjoint(plan: Plan) -> None:
    """Extents lie one behind the other on whole blocks, and the file ends with the last. What a step in backward
    changes has two, unless a unit of its sub-group is whole: whole units are not given up for a forgotten step.
    """
    at = 0
    spared: set[Key] = set()
    for group in plan.sub_groups if plan.policy.step_in_backward else ():
        units = [plan.placement.units[piece.unit] for piece in group.slices]
        whole = any(unit.whole for unit in units)
        if {plan.placement.states[group.index], *(unit.param for unit in units)} == {NVME}:
            assert (group.index in plan.undone) == (not whole)
        if group.index in plan.undone:
            assert not whole
            spared |= {Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices)}
    for spec in plan.partitions:
        assert (spec.extent is not None) == (spec.home is NVME and spec.nbytes > 0)
        assert (spec.spare is not None) == (spec.extent is not None and spec.key in spared)
        for extent in filter(None, (spec.extent, spec.spare)):
            assert extent.offset == at and at % EXTENT_ALIGNMENT == extent.nbytes % EXTENT_ALIGNMENT == 0
            assert extent.nbytes == spec.nbytes
            at += spec.nbytes
    assert plan.nvme_nbytes == at == sum(plan.bytes_by_tier()[NVME].values())


def old_values_have_room(plan: Plan) -> None:
    """What is stepped in backward can be undone: on NVMe by a second extent, in CPU memory from a pool, for which no
    more is taken than was said. What is on the device, or whole, waits.
    """
    in_memory, kept = 0, dict[Key, int]()
    for group in plan.step_parts().in_backward:
        keys = [Key(Kind.STATES, group.index), *(Key(Kind.PARAM, piece.unit) for piece in group.slices)]
        specs = [plan.partition(key) for key in keys]
        assert all(spec.home is CPU or spec.spare is not None for spec in specs)
        assert not any(plan.placement.units[piece.unit].whole for piece in group.slices)
        kept |= {spec.key: spec.nbytes for spec in specs if spec.home is CPU}
        in_memory += group.numel if any(spec.home is CPU for spec in specs) else 0
    assert in_memory <= plan.request.undo_numel
    assert sum(kept.values()) <= plan.pools.undo_nbytes <= sum(kept.values()) + len(kept) * EXTENT_ALIGNMENT


def pools_are_bounded(plan: Plan) -> None:
    """A pool holds the busiest moment, and never more than everything that could lie there."""
    params = {
        spec.key.index: spec.nbytes for spec in plan.partitions if spec.home is NVME and spec.key.kind is Kind.PARAM
    }
    groups = [spec.nbytes for spec in plan.partitions if spec.home is NVME and spec.key.kind is Kind.STATES]
    total, largest = sum(params.values()), max(params.values(), default=0)
    order = [plan.sub_groups[index] for index in plan.step_order]
    stepped = 0
    for at in range(len(order)):
        units = {piece.unit for group in order[at : at + STEP_WINDOW] for piece in group.slices}
        stepped = max(stepped, sum(params.get(unit, 0) for unit in units))
    # One unit in use, and beside it what is fetched ahead or what is stepped.
    needed = largest + max(plan.budget.fetch_nbytes_max, stepped)
    assert min(total, needed) <= plan.pools.param_nbytes <= total
    assert plan.pools.param_nbytes < needed + EXTENT_ALIGNMENT
    assert sorted(plan.step_order) == [*range(len(plan.sub_groups))]
    hidden = [plan.visible(group) for group in order]
    assert hidden == sorted(hidden, reverse=True), "what the program can see is stepped first"
    assert plan.pools.states_nbytes == min(sum(groups), STEP_WINDOW * max(groups, default=0))
    assert plan.pools.param_nbytes % EXTENT_ALIGNMENT == plan.pools.states_nbytes % EXTENT_ALIGNMENT == 0
    staged = plan.request.accelerator and plan.request.optimizer_tier is not GPU
    assert plan.pools.staging_nbytes == 0 or staged


def placed(
    stage: int, param: Tier, states: Tier, dp: int, *, small: bool = False, frozen: bool = False
) -> UnitPlacement:
    layouts = make_layouts(model(1, 1000, frozen=int(frozen)), dp)
    persistent = 10_000 if small else 0
    request = PlanRequest(stage=stage, param_tier=param, optimizer_tier=states, persistence_numel=persistent)
    groups = cut_sub_groups(layouts, dp, 10**9)
    return place(layouts, groups, request, dp, Homes((param,), (states,) * len(groups), (CPU,))).units[0]


PLACEMENTS = [
    # stage, param, states, dp, how -> parts, param, grad, whole, aliased
    ((0, GPU, GPU, 2), {}, (1, GPU, GPU, True, True)),
    ((0, GPU, CPU, 2), {}, (1, CPU, CPU, True, False)),
    ((1, GPU, GPU, 2), {}, (2, GPU, GPU, True, True)),
    ((2, GPU, CPU, 2), {}, (2, CPU, CPU, True, False)),
    ((2, GPU, NVME, 2), {}, (2, NVME, CPU, True, False)),
    ((3, GPU, GPU, 2), {}, (2, GPU, GPU, False, False)),
    ((3, GPU, CPU, 2), {}, (2, GPU, CPU, False, False)),
    ((3, GPU, CPU, 1), {}, (1, GPU, CPU, True, True)),
    ((3, CPU, CPU, 2), {}, (2, CPU, CPU, False, False)),
    ((3, NVME, NVME, 1), {}, (1, NVME, CPU, False, False)),
    ((3, NVME, CPU, 2), {"small": True}, (2, CPU, CPU, True, False)),
    ((3, NVME, GPU, 2), {"small": True}, (2, GPU, GPU, True, True)),
    ((2, GPU, CPU, 2), {"frozen": True}, (1, GPU, CPU, True, True)),
    ((3, NVME, CPU, 2), {"frozen": True}, (2, NVME, CPU, False, False)),
    ((3, NVME, CPU, 2), {"frozen": True, "small": True}, (1, GPU, CPU, True, True)),
]


@pytest.mark.parametrize(("where", "how", "expected"), PLACEMENTS)
def test_homes_follow_the_table(where, how, expected):
    found = placed(*where, **how)
    assert (found.parts, found.param, found.grad, found.whole, found.aliased) == expected


def test_small_units_stay_whole_until_their_total_is_reached():
    layouts = make_layouts(model(4, 1000), 1)
    request = PlanRequest(3, CPU, CPU, persistence_numel=2000, persistent_total_numel=2 * layouts[0].numel)
    assert always_whole(layouts, request) == {0, 1}


def table(plan: Plan, tier: Tier) -> dict[Kind, int]:
    return plan.bytes_by_tier()[tier]


def test_a_parameter_in_bf16_takes_12_bytes_at_rest():
    numel = 4 << 16
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", persistence_numel=0)
    for dp in (1, 2):
        plan = make_plan(model(), Topology(dp=dp), request)
        assert table(plan, NVME) == {
            Kind.PARAM: 2 * numel // dp, Kind.REMAINDER: 2 * numel // dp, Kind.EXP_AVG: 4 * numel // dp,
            Kind.EXP_AVG_SQ: 4 * numel // dp,
        }  # fmt: skip
        assert plan.nvme_nbytes == 12 * numel // dp


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 12), ("fp16", 14), ("fp32", 12)])
def test_bytes_at_rest_by_dtype(dtype, nbytes):
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype=dtype, persistence_numel=0)
    assert make_plan(model(dtype=dtype), Topology(), request).nvme_nbytes == nbytes * (4 << 16)


def test_fp32_on_one_device_takes_16_bytes_a_parameter():
    numel = 4 << 16
    plan = make_plan(model(dtype="fp32"), Topology(), PlanRequest())
    assert table(plan, GPU) == {
        Kind.FULL: 4 * numel, Kind.GRAD: 4 * numel, Kind.EXP_AVG: 4 * numel, Kind.EXP_AVG_SQ: 4 * numel,
        # As autograd leaves them: of one unit at a time.
        Kind.FULL_GRAD: 4 * numel // 4,
    }  # fmt: skip
    assert not table(plan, CPU) and not table(plan, NVME)


@pytest.mark.parametrize(
    # Bytes a parameter on each of two ranks, in fp32: PARAM or FULL, GRAD, two moments.
    ("stage", "full", "grad", "moment"), [(0, 4, 4, 4), (1, 4, 2, 2), (2, 4, 2, 2), (3, 2, 2, 2)],
)  # fmt: skip
def test_stages_cut_one_kind_after_the_other(stage, full, grad, moment):
    numel, unit = 4 << 16, 1 << 16
    request = PlanRequest(stage=stage, persistence_numel=0, live_numel=1, prefetch_numel=0)
    held = table(make_plan(model(dtype="fp32"), Topology(dp=2), request), GPU)
    whole = {Kind.FULL: full * numel} if stage < 3 else {Kind.PARAM: full * numel, Kind.FULL: 4 * unit}
    # One unit's gradients as autograd leaves them, what the other rank sends, and where gradients are not kept whole
    # (there all of them) those of the unit before, which are on their way. Stage 0 sums in place.
    reducing = {0: 1, 1: 1.5, 2: 2.5, 3: 2.5}[stage] * 4 * unit + (4 * numel if stage < 2 else 0)
    moments = {Kind.EXP_AVG: moment * numel, Kind.EXP_AVG_SQ: moment * numel}
    assert held == whole | moments | {Kind.GRAD: grad * numel, Kind.FULL_GRAD: reducing}


def test_frozen_parameters_have_neither_gradients_nor_states():
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", persistence_numel=0)
    plan = make_plan(model(4, frozen=3), Topology(), request)
    assert plan.nvme_nbytes == (4 * 2 + 10) << 16


def test_padding_is_in_the_books():
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", persistence_numel=0)
    plan = make_plan(model(3, 1000), Topology(), request)
    assert plan.nvme_nbytes == sum(table(plan, NVME).values()) and table(plan, NVME)[Kind.POOL] > 0


def test_a_whole_unit_is_not_fetched_before_its_step():
    # Its partition waits on NVMe for the optimizer; no forward needs it.
    request = PlanRequest(
        stage=3, param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", persistence_numel=100_000
    )
    plan = make_plan(model(), Topology(dp=2), request)
    assert all(placed.whole and placed.param is NVME for placed in plan.placement.units)
    assert not any(plan.schedule.fetch_ahead)


def test_a_plan_that_does_not_fit_is_refused_with_numbers():
    big = model(40, 10_000_000)
    request = PlanRequest(stage=3, param_tier=CPU, optimizer_tier=CPU, compute_dtype="bf16", grad_dtype="bf16")
    plan = make_plan(big, Topology(), request)
    with pytest.raises(CapacityError) as caught:
        plan.check(Capacity(cpu=4_000_000_000), rank=3)
    text = str(caught.value)
    for part in ("rank 3 plans 5.60 GB on cpu but 4.00 GB are free", "exp_avg 1.60 GB", "master remainders 800 MB"):
        assert part in text
    assert text.index("exp_avg") < text.index("remainders"), "the largest first"
    plan.check(Capacity())
    plan.check(Capacity(cpu=sum(table(plan, CPU).values()), gpu=10**12, nvme=0))


def test_a_plan_for_70_billion_parameters_takes_less_than_a_second():
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", sub_group_numel=1 << 24)
    with usual_seconds() as taken:
        spec = find_units(llama_70b(), UnitRules())
        plan = make_plan(spec, Topology(dp=8), request)
        plan.bytes_by_tier()
    assert 70e9 < plan.numel < 71e9
    # The norms' padding apart, everything is on the eight drives.
    assert plan.nvme_nbytes == pytest.approx(12 * plan.numel / 8, rel=1e-3)
    assert taken.seconds < 1.0


def test_plans_are_equal_when_their_questions_are():
    request = PlanRequest(param_tier=NVME, optimizer_tier=NVME, compute_dtype="bf16", sub_group_numel=50_000)
    plans = [make_plan(model(), Topology(dp=2), request) for _ in range(2)]
    assert plans[0] == plans[1] and plans[0].fingerprint() == plans[1].fingerprint()
    others = [
        make_plan(model(5), Topology(dp=2), request),
        make_plan(model(), Topology(dp=1), request),
        make_plan(model(), Topology(dp=2), replace(request, sub_group_numel=60_000)),
        make_plan(model(), Topology(dp=2), replace(request, optimizer_tier=CPU)),
        make_plan(model(), Topology(dp=2), replace(request, live_numel=10)),
    ]
    assert len({plan.fingerprint() for plan in [plans[0], *others]}) == 6
    assert all(other != plans[0] for other in others)


FINGERPRINT = """
import sys
from infinity.plan.plan import make_plan
from infinity.plan.request import PlanRequest
from infinity.plan.types import Topology
from infinity.plan.types import Tier
from infinity.plan.spec import ModelSpec, ModuleNode, ParamSpec, UnitRules, find_units
root = ModuleNode("", "Model")
for name in "abcdef":
    spec = ParamSpec(f"{name}.p", (70_000,), "bf16", group=ord(name) % 3)
    root.children[name] = ModuleNode(name, "Block", {"p": spec})
request = PlanRequest(param_tier=Tier.NVME, optimizer_tier=Tier.NVME, compute_dtype="bf16", sub_group_numel=100_000)
plan = make_plan(find_units(root, UnitRules(unit_numel_max=100_000)), Topology(dp=2), request)
import infinity.plan.inputs, infinity.config
assert "torch" not in sys.modules, "the plan imports torch"
print(plan.fingerprint())
"""


def test_a_fingerprint_is_the_same_in_every_process_and_needs_no_torch():
    prints = set()
    for seed in ("0", "1", "2"):
        finished = subprocess.run(
            [sys.executable, "-c", FINGERPRINT], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        prints.add(finished.stdout.strip())
    assert len(prints) == 1


def test_widths_of_all_dtypes_are_known():
    assert all(nbytes in (1, 2, 4, 8) for nbytes in DTYPE_NBYTES.values())
