"""What the phases hold: bounded by the plan's own table, and what each is known for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from estimators.phases import Phase, at_rest, bytes_by_phase, state_dict_nbytes
from infinity.plan.filling import Table, in_process
from infinity.plan.layout import UnitLayout, make_layouts
from infinity.plan.placement import Placement, UnitPlacement
from infinity.plan.plan import Plan, make_plan
from infinity.plan.pools import Scratch, left_nbytes, make_scratch, travels_alone
from infinity.plan.request import PlanRequest
from infinity.plan.spec import ModelSpec, ParamSpec, UnitSpec
from infinity.plan.types import Kind, Tier, Topology

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME
TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def model(numels: tuple[int, ...], uses: tuple[int, ...] = (), frozen: tuple[int, ...] = ()) -> ModelSpec:
    """A unit of one parameter for each of `numels`; `uses` where a unit is needed twice."""
    units = []
    for index, numel in enumerate(numels):
        param = ParamSpec(f"u{index}.weight", (numel,), "fp32", group=-1 if index in frozen else 0)
        units.append(UnitSpec(f"u{index}", (f"u{index}",), "fp32", index not in frozen, (param,)))
    return ModelSpec(tuple(units), uses or tuple(range(len(numels))))


MODELS = {
    "equal": model((1 << 16,) * 5),
    "tied": model((300_000, 70_000, 70_000, 70_000), uses=(0, 1, 2, 3, 0)),
    "uneven, one frozen": model((10, 500_000, 64, 90_000, 0, 33_333), frozen=(3,)),
}
REQUESTS = [
    PlanRequest(
        stage=stage, param_tier=param, optimizer_tier=states, compute_dtype=dtype, grad_dtype=grad,
        communication_dtype=dtype, persistence_numel=persistent, sub_group_numel=50_000, prefetch_numel=prefetch,
        live_numel=live, reuse_numel=200_000, accelerator=accelerator,
    )
    for stage, param, states in itertools.product((0, 1, 2, 3), Tier, Tier)
    for dtype, grad, persistent, accelerator in (("bf16", "fp32", 0, True), ("fp32", "fp32", 100_000, False))
    for prefetch, live in ((0, 1), (100_000, 300_000))
]  # fmt: skip


def total(table: Table, tier: Tier) -> int:
    return sum(table[tier].values())


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_bounds_every_phase_of_training(name, dp):
    for request in REQUESTS:
        plan = make_plan(MODELS[name], Topology(dp=dp), request)
        bound = plan.bytes_by_tier()
        phases = bytes_by_phase(plan)
        for phase, tier in itertools.product(TRAINING, Tier):
            assert total(phases[phase], tier) <= total(bound, tier), (phase, tier, request)
        assert phases[Phase.STEP] == at_rest(plan)


def offloaded(**changes: object) -> Plan:
    request = PlanRequest(param_tier=CPU, optimizer_tier=CPU, persistence_numel=0, live_numel=1, **changes)
    return make_plan(MODELS["equal"], Topology(dp=2), request)


def test_activations_lie_in_forward_and_backward_only():
    phases = bytes_by_phase(offloaded(), 1_000_000)
    held = {phase: table[GPU].get(Kind.ACTIVATION, 0) for phase, table in phases.items()}
    assert held == {
        Phase.INITIALISE: 0, Phase.FORWARD: 1_000_000, Phase.BACKWARD: 1_000_000, Phase.STEP: 0, Phase.SAVE: 0,
    }  # fmt: skip


def test_an_accelerator_has_only_the_unit_in_use_and_gives_it_back_for_the_step():
    plan = offloaded(accelerator=True, prefetch_numel=0)
    phases = bytes_by_phase(plan)
    unit = 4 << 16
    assert phases[Phase.FORWARD][GPU][Kind.FULL] == unit
    assert Kind.FULL not in phases[Phase.STEP][GPU]
    # In the process's own memory a released unit leaves its bytes to the next, as far as the plan has them.
    assert bytes_by_phase(offloaded(prefetch_numel=0))[Phase.STEP][GPU][Kind.FULL] == unit


def test_saving_streams_and_a_state_dictionary_is_the_whole_model():
    plan = offloaded()
    assert bytes_by_phase(plan)[Phase.SAVE] == at_rest(plan)
    assert state_dict_nbytes(plan) == 4 * (5 << 16)


def test_the_built_model_gives_its_memory_to_its_partitions():
    plan = offloaded()
    numel = 5 << 16
    begin = bytes_by_phase(plan)[Phase.INITIALISE]
    # 4 bytes an element go, 6 (of two ranks, without gradients) come, one sub-group at a time: the end weighs most.
    assert in_process(begin, accelerator=False) == 6 * numel + (4 << 16) * 5
    bounded = bytes_by_phase(plan, model_nbytes_max=1 << 16)[Phase.INITIALISE]
    # And the parameter being worked on.
    assert bounded[CPU][Kind.MODEL] == (1 << 16) + (4 << 16)


def test_tied_gradients_wait_for_their_last_use_and_are_added_beside_it():
    layouts = make_layouts(MODELS["tied"], 1)
    first, block = 4 * layouts[0].numel, 4 * layouts[1].numel
    trace = (0, 3, 2, 1, 0)
    on_device = left_nbytes(trace, layouts, accelerator=True)
    assert on_device == (first, first + block, first + block, first + block, 3 * first)
    # The heap keeps what other shapes left.
    kept = first + block + 4 * 300_000
    assert left_nbytes(trace, layouts, accelerator=False) == (first, kept, kept, kept, 3 * first + 4 * 70_000)


def one_and_several() -> tuple[UnitLayout, ...]:
    """Units of one parameter, of two, and of one with padding behind it."""
    sizes = ((1 << 16,), (1 << 14, 1 << 14), (1000,))
    units = [
        UnitSpec(f"u{unit}", (f"u{unit}",), "fp32", True, tuple(
            ParamSpec(f"u{unit}.{index}", (numel,), "fp32", group=0) for index, numel in enumerate(numels)
        ))
        for unit, numels in enumerate(sizes)
    ]  # fmt: skip
    return make_layouts(ModelSpec(tuple(units), (0, 1, 2)), 2)


def test_a_gradient_that_travels_from_where_it_lies_is_there_until_the_next_have_come():
    layouts = one_and_several()
    assert [travels_alone(layout, "fp32") for layout in layouts] == [True, False, False]
    assert not any(travels_alone(layout, "bf16") for layout in layouts), "it has to be cast"
    one, two, padded = (4 * layout.numel for layout in layouts)
    assert left_nbytes((0, 1, 2), layouts, accelerator=True) == (one, two, padded)
    assert left_nbytes((0, 1, 2), layouts, accelerator=True, wire="fp32") == (one, one + two, padded)
    # The heap has it back only then.
    assert left_nbytes((0, 1, 2), layouts, accelerator=False) == (one, two + one, padded + one)
    assert left_nbytes((0, 1, 2), layouts, accelerator=False, wire="fp32") == (one, one + two, padded + one)
    # What is put side by side with others is free as soon as it is.
    assert left_nbytes((2, 1, 0), layouts, accelerator=True, wire="fp32") == (padded, two, one)


def test_reductions_of_several_parameters_alone_need_room_side_by_side():
    layouts = one_and_several()
    largest, several = 4 << 16, 8 << 14
    placed = UnitPlacement(parts=2, param=CPU, grad=CPU, whole=False, aliased=False)
    placement = Placement(units=(placed,) * 3, states=(), grad_whole=False)
    asked = {"dp": 2, "grad_dtype": "fp32"}
    # gloo: what the other rank sends. Another backend leaves this rank's sums in one piece each: one arrives while the
    # one before is copied away.
    found = [make_scratch(layouts, placement, wire="fp32", **asked, accelerator=each) for each in (False, True)]
    assert found == [Scratch(several, largest // 2, 0), Scratch(several, 0, 2 * largest // 2)]
    cast = make_scratch(layouts, placement, wire="bf16", **asked, accelerator=False)
    assert cast == Scratch(largest // 2, largest // 4, 0), "a copy of each in the dtype that travels"
    added = make_scratch(layouts, placement, wire="fp32", **asked, accelerator=True, accumulates=True)
    assert added.down_nbytes == 2 * largest // 2, "old sums come to the device, two units' at a time"
    alone = {**asked, "dp": 1, "grad_dtype": "bf16"}
    placement = Placement(units=(replace(placed, parts=1),) * 3, states=(), grad_whole=False)
    down = make_scratch(layouts, placement, wire="fp32", **alone, accelerator=True).down_nbytes
    assert down == 2 * (largest + largest // 2), "of two units: as autograd leaves them, and as they are kept"
    at_home = Placement(units=(replace(placed, parts=1, grad=GPU),) * 3, states=(), grad_whole=False)
    assert make_scratch(layouts, at_home, wire="fp32", **alone, accelerator=True) == Scratch()
