"""Predicted time: known answers where one resource decides, more of anything is never slower, bounds are bounds."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from estimators.resources import Resource, ResourceQueues, TimedArena
from estimators.step_time import Bound, predict
from estimators.traffic import Link, traffic
from infinity.plan.activations import OffloadedCheckpoints
from infinity.plan.hardware import ASSUMED, Compute, Drive, HardwareProfile
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import PlanRequest, RuleSpec
from infinity.plan.spec import ModelSpec, ParamSpec, UnitSpec
from infinity.plan.types import Kind, Tier, Topology
from tests.support.clock import usual_seconds

GB = 10**9
DRIVE = Drive(
    folder="", read_rate=2 * GB, write_rate=2 * GB, mixed_rate=2 * GB, block_nbytes=1 << 19, queue_depth=32,
    capacity_nbytes=10**12, endurance_nbytes=600 * 10**12,
)  # fmt: skip
# Computation by the number of tokens alone; memory so fast that it does not count.
PROFILE = HardwareProfile(
    cores=8, memory_nbytes=1 << 36, drives=(DRIVE,), copy_rate=1e15, adam_seconds={"bf16": 1e-15},
    norm_seconds={"bf16": 1e-15}, compute={"bf16": Compute(rate=1e12)}, up_rate=1e15, down_rate=1e15,
    network_rate=1e15,
)  # fmt: skip
REQUEST = PlanRequest(
    stage=3, param_tier=Tier.CPU, optimizer_tier=Tier.NVME, compute_dtype="bf16", grad_dtype="bf16",
    communication_dtype="bf16", sub_group_numel=1 << 20, persistence_numel=0, prefetch_numel=1 << 23,
    live_numel=1 << 24, reuse_numel=0,
)  # fmt: skip
LAYERS, NUMEL = 16, 16 << 22


def model(layers: int = LAYERS, side: int = 2048) -> ModelSpec:
    names = [f"layers.{at}.weight" for at in range(layers)]
    units = [UnitSpec(name, (name,), "bf16", True, (ParamSpec(name, (side, side), "bf16"),)) for name in names]
    return ModelSpec(tuple(units), tuple(range(layers)))


def plan_of(dp: int = 1, spec: ModelSpec | None = None, **changes: Any) -> Plan:
    return make_plan(spec or model(), Topology(dp=dp, local_size=dp), replace(REQUEST, **changes))


def machine(**changes: Any) -> HardwareProfile:
    drive = {name: changes.pop(name) for name in list(changes) if name in Drive.model_fields}
    drives = (DRIVE.model_copy(update=drive),)
    return PROFILE.model_copy(update={"drives": drives, **changes})


def test_with_everything_in_memory_a_step_takes_its_operations():
    told = predict(plan_of(optimizer_tier=Tier.CPU), PROFILE, tokens=1000)
    assert told.seconds == pytest.approx(6 * NUMEL * 1000 / 1e12, rel=0.05)
    assert told.bound_by is Bound.COMPUTE
    assert told.tokens_to_hide is None
    assert told.days_to_endurance is None


def test_products_that_make_matrices_orthogonal_are_computation():
    """Five steps of the iteration, each of three products of squares here, shared by the ranks of a unit."""
    muon = RuleSpec((Kind.MOMENTUM_BUFFER,), 2, "Muon")
    products = LAYERS * 5 * 3 * 2 * 2048**3 / 1e12
    for dp in (1, 2):
        plan = plan_of(dp=dp, rules=(muon,))
        told, other = (predict(each, PROFILE, tokens=1000) for each in (plan, plan_of(dp=dp)))
        taken = told.parts[Bound.COMPUTE] - other.parts[Bound.COMPUTE]
        assert taken == pytest.approx(products, rel=0.01), "ranks of one machine share its cores"
        assert told.seconds >= products
    own = traffic(plan_of(rules=(muon,))), traffic(plan_of())
    # One moment less is written, and read at most: its larger sub-groups leave less in memory.
    assert own[1].total(Link.NVME_WRITE) - own[0].total(Link.NVME_WRITE) == 4 * NUMEL
    assert own[1].total(Link.NVME_READ) > own[0].total(Link.NVME_READ)


def test_with_nothing_to_compute_a_step_takes_what_the_drive_needs_for_its_bytes():
    plan = plan_of()
    told = predict(plan, PROFILE, tokens=1)
    moved = traffic(plan)
    both = moved.total(Link.NVME_READ) + moved.total(Link.NVME_WRITE)
    # Reads and writes share the drive nearly all the time.
    assert told.seconds == pytest.approx(both / (2 * GB), rel=0.1)
    assert told.bound_by in (Bound.NVME_READ, Bound.NVME_WRITE)


def test_a_step_with_clipping_hides_behind_the_forward_and_without_behind_backward_too():
    plans = [plan_of(param_tier=Tier.NVME, steps_early=early) for early in (False, True)]
    tokens = round(1.2 * predict(plans[0], PROFILE, tokens=1).seconds * 1e12 / (6 * NUMEL))
    clipped, unclipped = (predict(plan, PROFILE, tokens=tokens).seconds for plan in plans)
    compute = 6 * NUMEL * tokens / 1e12
    # A third of the computation is forward: the rest of the step shows.
    assert clipped > 1.3 * compute
    assert unclipped < 1.25 * compute


def test_without_overlap_nothing_hides():
    plan = plan_of(overlap=False)
    apart, alone = (predict(plan, PROFILE, tokens=tokens).seconds for tokens in (4000, 1))
    assert apart == pytest.approx(alone + 6 * NUMEL * 4000 / 1e12, rel=0.05)


def test_computation_and_optimizer_share_the_cores_of_a_machine_without_accelerator():
    slow = machine(adam_seconds={"bf16": 5e-9}, read_rate=1e15, write_rate=1e15, mixed_rate=2e15)
    told = predict(plan_of(), slow, tokens=2000)
    assert told.seconds == pytest.approx(6 * NUMEL * 2000 / 1e12 + 5e-9 * NUMEL, rel=0.05)


def test_micro_batches_add_computation_and_not_the_step():
    plan = plan_of()
    one, four = (predict(plan, PROFILE, tokens=2000, accumulation=count) for count in (1, 4))
    assert four.tokens == 4 * one.tokens
    assert four.nvme_written_nbytes == one.nvme_written_nbytes
    assert four.seconds - one.seconds == pytest.approx(3 * 6 * NUMEL * 2000 / 1e12, rel=0.15)


def test_micro_batches_that_repeat_themselves_are_counted():
    """Each but the first and the last adds the same, so that thousands cost no more to simulate than a few."""
    plan = plan_of(param_tier=Tier.NVME)
    twenty, forty, many = (predict(plan, BALANCED, tokens=500, accumulation=n, briefly=True) for n in (20, 40, 4096))
    for name in ("seconds", "nvme_read_nbytes"):
        values = [float(getattr(told, name)) for told in (twenty, forty, many)]
        assert values[2] - values[0] == pytest.approx((values[1] - values[0]) / 20 * 4076, rel=1e-3)
    assert many.nvme_written_nbytes == twenty.nvme_written_nbytes


SETTINGS = {
    "states on NVMe": {},
    "everything on NVMe": {"param_tier": Tier.NVME},
    "everything on CPU": {"optimizer_tier": Tier.CPU},
    "accelerator": {"accelerator": True},
    "four ranks": {"dp": 4},
    "four ranks with accelerators": {"dp": 4, "accelerator": True, "param_tier": Tier.NVME},
}
# A machine on which no resource is free.
BALANCED = PROFILE.model_copy(
    update={
        "copy_rate": 4e9, "adam_seconds": {"bf16": 1e-9}, "norm_seconds": {"bf16": 2e-10}, "up_rate": 1e9,
        "down_rate": 1e9, "network_rate": 1e9,
    }
)  # fmt: skip


def faster(profile: HardwareProfile, name: str, factor: float) -> HardwareProfile:
    """A profile with one resource faster."""
    if name in Drive.model_fields:
        drives = tuple(drive.model_copy(update={name: getattr(drive, name) * factor}) for drive in profile.drives)
        return profile.model_copy(update={"drives": drives})
    value = getattr(profile, name)
    if name == "compute":
        changed: Any = {"bf16": Compute(rate=value["bf16"].rate * factor)}
    elif isinstance(value, dict):
        changed = {dtype: seconds / factor for dtype, seconds in value.items()}
    else:
        changed = value * factor
    return profile.model_copy(update={name: changed})


RESOURCES = (
    "read_rate", "write_rate", "mixed_rate", "compute", "adam_seconds", "norm_seconds", "copy_rate", "up_rate",
    "down_rate", "network_rate",
)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("early", [False, True], ids=["clipped", "unclipped"])
def test_more_of_anything_is_never_slower(setting, early):
    plan = plan_of(**SETTINGS[setting], steps_early=early)
    # Parameters that are read, stepped and written beside each other: what arrives a little earlier may be evicted in
    # another order, and be read again. There the median around a rate counts, elsewhere the rate itself.
    varies = early and setting == "everything on NVMe"
    around = (0.9, 0.95, 1.0, 1.05, 1.1) if varies else (1.0,)

    def seconds(name: str, factor: float) -> float:
        profiles = [faster(BALANCED, name, factor * each) for each in around]
        return median(predict(plan, each, tokens=1000, briefly=True).seconds for each in profiles)

    for name in RESOURCES:
        # Some of that is more than luck: a little is allowed.
        assert seconds(name, 1.6) <= seconds(name, 1.0) * 1.03, name


DECIDED = {
    "a slow drive to read": (Bound.NVME_READ, {}, {"read_rate": 1e8, "mixed_rate": 2e9}, {}),
    "a slow drive to write": (Bound.NVME_WRITE, {}, {"write_rate": 1e8, "mixed_rate": 2e9}, {}),
    "slow cores": (Bound.MEMORY, {"optimizer_tier": Tier.CPU}, {}, {"adam_seconds": {"bf16": 1e-7}}),
    "many tokens": (Bound.COMPUTE, {}, {}, {"compute": {"bf16": Compute(rate=1e10)}}),
    "a slow link up": (Bound.UP, {"accelerator": True}, {}, {"up_rate": 1e7}),
    "a slow link down": (Bound.DOWN, {"accelerator": True}, {}, {"down_rate": 1e7}),
    "a slow network": (Bound.NETWORK, {"dp": 4, "accelerator": True}, {}, {"network_rate": 1e7}),
}


@pytest.mark.parametrize("case", DECIDED)
def test_what_bounds_a_step_is_what_makes_it_faster(case):
    bound, changes, drive, update = DECIDED[case]
    profile = machine(**drive, **update)
    told = predict(plan_of(**changes), profile, tokens=100)
    assert told.bound_by is bound
    assert told.gains[bound] > 0.1 * told.seconds
    assert bound.value in told.explain()


def test_from_so_many_tokens_on_io_hides():
    plan = plan_of()
    tokens = predict(plan, PROFILE, tokens=1000).tokens_to_hide
    assert tokens is not None
    free = machine(read_rate=1e18, write_rate=1e18, mixed_rate=1e18)

    def excess(count: int) -> float:
        return predict(plan, PROFILE, tokens=count).seconds / predict(plan, free, tokens=count).seconds

    assert excess(tokens) <= 1.06
    assert excess(tokens // 2) > 1.06


def test_wear_is_what_is_written_a_day_against_what_the_drive_is_rated_for():
    told = predict(plan_of(), PROFILE, tokens=1)
    assert told.nvme_written_nbytes == traffic(plan_of()).total(Link.NVME_WRITE)
    assert told.nvme_written_nbytes_a_day == pytest.approx(told.nvme_written_nbytes * 86400 / told.seconds)
    assert told.days_to_endurance == pytest.approx(600e12 / told.nvme_written_nbytes_a_day)
    assert not told.endurance_assumed
    unrated = predict(plan_of(), machine(endurance_nbytes=None), tokens=1)
    assert unrated.endurance_assumed
    assert "assumed" in unrated.explain()
    assert any("endurance" in name for name in unrated.assumptions)


@pytest.mark.parametrize("layers", [LAYERS, 150])
def test_copies_behind_each_step_wear_the_drive_and_take_its_time(layers):
    """150 layers are merged for the simulation."""
    spec = model(layers, 2048 if layers == LAYERS else 512)
    plan = plan_of(spec=spec, optimizer_tier=Tier.CPU, recorded=True)
    told = predict(plan, PROFILE, tokens=1)
    copied = sum(each.nbytes for each in plan.partitions if each.key.kind is not Kind.GRAD)
    assert told.nvme_written_nbytes == traffic(plan).total(Link.NVME_WRITE) == copied
    assert told.seconds == pytest.approx(copied / (2 * GB), rel=0.05)
    assert told.bound_by is Bound.NVME_WRITE


def test_ranks_of_a_node_share_its_drive_and_wear_it_together():
    one, two = (predict(plan_of(dp=dp), PROFILE, tokens=1) for dp in (1, 2))
    # Each rank has half of the states and half of the drive.
    assert two.seconds == pytest.approx(one.seconds, rel=0.1)
    assert two.nvme_written_nbytes_a_day == pytest.approx(one.nvme_written_nbytes_a_day, rel=0.1)


def test_with_an_assumed_machine_the_prediction_says_so():
    assert "every rate" in predict(plan_of(accelerator=True), tokens=100).explain()
    nothing_known = PROFILE.model_copy(update={"drives": ()})
    assert any("drive" in name for name in predict(plan_of(), nothing_known, tokens=1).assumptions)


def test_a_table_is_looked_up_unless_it_is_the_head_too():
    def seconds(*shapes: tuple[str, tuple[int, int]]) -> float:
        units = [UnitSpec(name, (name,), "bf16", True, (ParamSpec(name, shape, "bf16"),)) for name, shape in shapes]
        spec = ModelSpec(tuple(units), tuple(range(len(units))))
        return predict(plan_of(spec=spec, optimizer_tier=Tier.CPU), PROFILE, tokens=1000).seconds

    layer = ("layers.0.weight", (2048, 2048))
    table, head = ("embed_tokens.weight", (8192, 2048)), ("lm_head.weight", (8192, 2048))
    assert seconds(table, layer, head) == pytest.approx(seconds(table, layer), rel=0.05)


def test_a_model_of_hundreds_of_billions_is_predicted_quickly():
    spec = model(layers=1200, side=24_000)
    plan = plan_of(dp=8, spec=spec, accelerator=True, param_tier=Tier.NVME, sub_group_numel=1 << 24)
    assert plan.numel > 600e9
    with usual_seconds() as taken:
        predict(plan, ASSUMED, tokens=4096)
    assert taken.seconds < 2.0


def test_jobs_of_a_drive_wait_for_each_other_and_those_of_cores_share_them():
    drive = [(Resource.READ, Tier.NVME), (Resource.WRITE, Tier.NVME)]
    lanes = ResourceQueues(rates=dict.fromkeys(drive, 10.0), mixed_rates=dict.fromkeys(drive, 4.0))
    ends = {}

    def party(name, resource, work, tier=None):
        yield lanes.submit(resource, work, tier)
        ends[name] = lanes.now

    for job in (("a", Resource.CORES, 1.0), ("b", Resource.CORES, 2.0), ("read", Resource.READ, 8.0, Tier.NVME),
                ("write", Resource.WRITE, 4.0, Tier.NVME)):  # fmt: skip
        lanes.begin(party(*job))
    lanes.run(lambda: len(ends) == 4)
    # Together at half speed each until the shorter ends; mixed until the write ends.
    assert ends == pytest.approx({"write": 1.0, "read": 1.4, "a": 2.0, "b": 3.0})


def test_tiers_of_drives_work_side_by_side_each_at_its_own_rate():
    slow = Tier("slow", addressable=False)
    lanes = ResourceQueues(rates={(Resource.READ, Tier.NVME): 10.0, (Resource.READ, slow): 1.0}, mixed_rates={})
    for tier in (Tier.NVME, slow):
        lanes.submit(Resource.READ, 20.0, tier)
    last = lanes.submit(Resource.READ, 20.0, Tier.NVME)
    lanes.run(lambda: last.done)
    assert lanes.now == pytest.approx(4.0)
    lanes.begin(iter([lanes.submit(Resource.READ, 1.0, slow)]))
    lanes.run(lambda: lanes.now >= 21.0)
    assert lanes.now == pytest.approx(21.0)


def test_what_a_gather_gave_back_is_written_behind_the_step_that_still_holds_it():
    """A search for 70 B parameters ended in a KeyError."""
    plan = plan_of(param_tier=Tier.NVME, optimizer_tier=Tier.NVME)
    held, other = [spec for spec in plan.partitions if spec.key.kind is Kind.PARAM][:2]
    drive = [(Resource.READ, Tier.NVME), (Resource.WRITE, Tier.NVME)]
    lanes = ResourceQueues(rates=dict.fromkeys(drive, 1e9), mixed_rates=dict.fromkeys(drive, 1e9))
    arena = TimedArena(lanes, max(held.nbytes, other.nbytes))
    done = []

    def step():
        yield from arena.fetch(held, wait=True)
        arena.release(held.key.index)
        yield from arena.fetch(other, wait=True)
        assert held.key.index not in arena
        yield arena.write(held)
        arena.release(other.key.index)
        done.append(held.key.index in arena)

    lanes.begin(step())
    lanes.run(lambda: bool(done))
    assert done == [True]
    assert (arena.read_nbytes, arena.written_nbytes) == (held.nbytes + other.nbytes, held.nbytes)


def test_parties_that_all_wait_are_an_error():
    lanes = ResourceQueues(rates={}, mixed_rates={})
    lanes.begin(iter([lambda: False]))
    with pytest.raises(RuntimeError, match="waits"):
        lanes.run(lambda: False)


def test_a_frozen_weights_backward_is_as_long_as_its_forward():
    frozen = tuple(
        replace(unit, trainable=False, params=tuple(replace(spec, group=-1) for spec in unit.params))
        for unit in model().units[1:]
    )
    plan = plan_of(spec=ModelSpec((*model().units[:1], *frozen), tuple(range(LAYERS))), optimizer_tier=Tier.CPU)
    told = predict(plan, PROFILE, tokens=1000)
    assert told.seconds == pytest.approx((4 * NUMEL + 2 * NUMEL / LAYERS) * 1000 / 1e12, rel=0.05)


@pytest.mark.parametrize("overlap", [True, False])
def test_checkpoints_on_another_tier_take_what_their_bytes_take(overlap):
    plan = plan_of(optimizer_tier=Tier.GPU, accelerator=True, param_tier=Tier.GPU, overlap=overlap)
    rates = PROFILE.model_copy(update={"up_rate": 1e9, "down_rate": 2e9, "device_copy_rate": 1e15})
    bare = predict(plan, rates, tokens=1).seconds
    for tier, nbytes_a_second in ((Tier.CPU, (1e9, 2e9)), (Tier.NVME, (1e9, 2e9, 2e9, 2e9))):
        away = OffloadedCheckpoints(tier, LAYERS, GB // LAYERS, 4)
        told = predict(plan, rates, tokens=1, offloaded=away)
        # Without computation to hide behind. With overlap links and drive work beside each other.
        alone = sum(GB / rate for rate in nbytes_a_second)
        at_least = GB / 2e9 + GB / 1e9 if overlap else alone
        assert at_least * 0.95 <= told.seconds - bare <= alone * 1.05
        on_drive = GB if tier is Tier.NVME else 0
        assert told.nvme_written_nbytes == pytest.approx(on_drive, rel=1e-3)
        assert told.nvme_read_nbytes == pytest.approx(on_drive, rel=1e-3)
        moved = traffic(plan, accumulation=3, offloaded=away).nbytes
        assert moved[Link.UP][Kind.ACTIVATION] == moved[Link.DOWN][Kind.ACTIVATION] == 3 * away.nbytes
        assert moved[Link.NVME_WRITE].get(Kind.ACTIVATION, 0) == (3 * away.nbytes if on_drive else 0)


def test_checkpoints_hide_behind_enough_computation():
    plan = plan_of(optimizer_tier=Tier.CPU, accelerator=True, param_tier=Tier.GPU)
    rates = PROFILE.model_copy(update={"up_rate": 1e10, "down_rate": 1e10, "device_copy_rate": 1e15})
    bare = predict(plan, rates, tokens=10_000).seconds
    away = predict(plan, rates, tokens=10_000, offloaded=OffloadedCheckpoints(Tier.CPU, LAYERS, GB // LAYERS)).seconds
    # The first that backward needs comes when it is asked for.
    assert 0 < away - bare < 2 * GB / LAYERS / 1e10
