"""Traffic from the plan alone: what the kernel counts, known bytes a parameter, and sums over mixed homes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from estimators.resources import Cache
from estimators.traffic import Link, Traffic, kept_nbytes, traffic
from infinity.memory.folder import IN_MEMORY, look
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import PlanRequest
from infinity.plan.spec import ModelSpec, ParamSpec, UnitSpec
from infinity.plan.types import Kind, PartitionSpec, Tier, Topology
from tests.support.cells import kept
from tests.support.oracle import io_nbytes

WIDTH, LAYERS = 512, 12
WARM_STEPS, STEPS = 4, 4


class Model(nn.Module):
    """Enough layers for arenas to hold a part of them, and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x).square().mean()


def configuration(param: str, states: str, dtype: str, folder: Path, *, batches: int = 1, early: bool = False,
                  overlap: bool = True, buffers: int = 4, grads: str = "cpu",
                  every_step: str = "off") -> dict[str, object]:  # fmt: skip
    def device(name: str) -> dict[str, object]:
        return {"device": name, **({"nvme_path": str(folder)} if name == "nvme" else {})}

    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": batches, "log_level": "error",
        "gradient_clipping": 0.0 if early else 1.0, "overlap": overlap,
        "checkpoint": {"path": str(folder / "checkpoints"), "every_step": every_step},
        "bf16": {"enabled": dtype == "bf16"}, "check_grad_overflow": not early, "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 50_000, "stage3_prefetch_bucket_size": 500_000,
            "stage3_param_persistence_threshold": 2000, "stage3_max_live_parameters": 1_500_000,
            "stage3_max_reuse_distance": 500_000, "offload_param": device(param),
            "offload_optimizer": {**device(states), "buffer_count": buffers}, "offload_gradients": device(grads),
        },
    }  # fmt: skip


def moved(config: dict[str, object], *, batches: int = 1) -> tuple[Plan, list[float]]:  # fmt: skip
    """The plan, and the bytes read and written a step by the kernel's count."""
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Model(), config=config)
    with engine:
        x = torch.randn(2, WIDTH, dtype=torch.bfloat16 if engine.config.compute_dtype == "bf16" else torch.float32)

        for step in range(WARM_STEPS + STEPS):
            if step == WARM_STEPS:
                engine.synchronize()
                engine.store.settle()
                before = io_nbytes()
            for _ in range(batches):
                engine.backward(engine(x))
                engine.step()
        engine.synchronize()
        engine.store.settle()
        read, written = (now - then for now, then in zip(io_nbytes(), before, strict=True))
    # Settling writes what is kept, which no step does.
    written -= kept_nbytes(engine.plan)
    return engine.plan, [read / STEPS, written / STEPS]


CASES = {
    "everything, fp32": ("nvme", "nvme", "fp32", {"overlap": False}),
    "everything, bf16": ("nvme", "nvme", "bf16", {"overlap": False}),
    "two micro-batches": ("nvme", "nvme", "bf16", {"overlap": False, "batches": 2}),
    "parameters, fp32": ("nvme", "cpu", "fp32", {"overlap": False}),
    "parameters, bf16": ("nvme", "cpu", "bf16", {"overlap": False}),
    "states, fp32": ("cpu", "nvme", "fp32", {}),
    "states, bf16": ("cpu", "nvme", "bf16", {}),
    "states, some of them kept": ("cpu", "nvme", "bf16", {"buffers": 30}),
    "parameters in memory, which begin none": ("cpu", "nvme", "bf16", {"early": True}),
    "begun in backward, bf16": ("nvme", "nvme", "bf16", {"early": True}),
    "begun in backward, fp32": ("nvme", "nvme", "fp32", {"early": True}),
    "gradients": ("nvme", "nvme", "bf16", {"overlap": False, "grads": "nvme"}),
    "gradients of four micro-batches": ("cpu", "nvme", "bf16", {"overlap": False, "batches": 4, "grads": "nvme"}),
    "gradients, begun in backward": ("nvme", "nvme", "bf16", {"early": True, "grads": "nvme"}),
    "recorded, parameters in memory": ("cpu", "nvme", "bf16", {"every_step": "process"}),
    "recorded, states in memory": ("nvme", "cpu", "bf16", {"overlap": False, "every_step": "process"}),
}
SHORT = [case for case in CASES if "fp32" not in case or "everything" in case]


@pytest.fixture
def drive(tmp_path):
    """A folder whose bytes the kernel counts."""
    if not Path("/proc/self/io").exists() or look(tmp_path).file_system in IN_MEMORY:
        pytest.skip("the kernel does not count what this folder takes")
    return tmp_path


@pytest.mark.parametrize("case", kept([*CASES], SHORT))
def test_the_kernel_counts_what_the_plan_foretells(case, drive):
    param, states, dtype, options = CASES[case]
    config = configuration(param, states, dtype, drive, **options)
    batches, early = options.get("batches", 1), options.get("early", False)
    plan, counted = moved(config, batches=batches)
    foretold = nvme(traffic(plan, accumulation=batches))
    errors = [a / b - 1 for a, b in zip(foretold, counted, strict=True)]
    print(f"{case}: read {errors[0]:+.2%}, written {errors[1]:+.2%}")
    if early and param == "nvme":
        # A step that begins in backward reads a few sub-groups twice: fetched ahead, and evicted before their turn. How
        # many is a matter of time.
        assert foretold[1] == pytest.approx(counted[1], rel=0.02)
        assert foretold[0] / 1.02 < counted[0] < foretold[0] * 1.25
    else:
        assert foretold == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(("batches", "early", "most"), [(1, False, 4.1), (4, False, 32.1), (1, True, 2.1)])
def test_gradients_on_a_drive_are_written_as_they_come_and_read_once_by_a_step_that_waits(batches, early, most):
    """Bytes a parameter and step beyond those of gradients in memory; several micro-batches add up in fp32."""
    request = PlanRequest(
        param_tier=Tier.NVME, optimizer_tier=Tier.NVME, compute_dtype="bf16", steps_early=early, persistence_numel=0,
        grad_dtype="bf16" if batches == 1 else "fp32", sub_group_numel=1 << 19, accumulates=batches > 1,
    )  # fmt: skip
    beyond = []
    for home in (Tier.CPU, Tier.NVME):
        plan = make_plan(EIGHT, Topology(), replace(request, grad_tier=home))
        beyond.append(sum(nvme(traffic(plan, accumulation=batches))))
    assert most - 1.1 * most / 4.1 < (beyond[1] - beyond[0]) / NUMEL <= most


def test_beside_the_forward_reads_lie_between_following_closely_and_not_at_all(drive):
    plan, (read, written) = moved(configuration("nvme", "nvme", "bf16", drive))
    apart = replace(plan, policy=replace(plan.policy, overlap=False, gather_ahead=False, step_behind=False))
    least, most = (nvme(traffic(each)) for each in (plan, apart))
    assert least[0] < most[0]
    # Where the forward is behind the step is a matter of time; what is written is not.
    assert 0.95 * least[0] <= read <= 1.05 * most[0]
    assert least[1] == most[1] == pytest.approx(written, rel=0.02)


def nvme(told: Traffic) -> list[int]:
    return [told.total(link) for link in (Link.NVME_READ, Link.NVME_WRITE)]


def spec(*shapes: tuple[str, tuple[int, ...]], dtype: str = "bf16") -> ModelSpec:
    """One unit a parameter."""
    units = [UnitSpec(name, (name,), dtype, True, (ParamSpec(name, shape, dtype),)) for name, shape in shapes]
    return ModelSpec(tuple(units), tuple(range(len(units))))


LAYER_NUMEL = 1 << 20
EIGHT = spec(*((f"layers.{at}.weight", (1024, 1024)) for at in range(8)))
REQUEST = PlanRequest(
    stage=3, param_tier=Tier.CPU, optimizer_tier=Tier.CPU, compute_dtype="bf16", grad_dtype="bf16",
    communication_dtype="bf16", sub_group_numel=1 << 19, persistence_numel=0, reuse_numel=0,
)  # fmt: skip
NUMEL = 8 * LAYER_NUMEL


def plan_of(dp: int = 1, **changes: Any) -> Plan:
    return make_plan(EIGHT, Topology(dp=dp, local_size=dp), replace(REQUEST, **changes))


def test_an_accelerator_takes_parameters_twice_and_gives_gradients_once():
    told = traffic(plan_of(accelerator=True))
    # Of eight units the last is not gathered again for its backward, which comes at once.
    assert told.nbytes[Link.UP] == {Kind.PARAM: 15 * 2 * LAYER_NUMEL}
    assert told.nbytes[Link.DOWN] == {Kind.GRAD: 2 * NUMEL}
    assert told.total(Link.NVME_READ) == told.total(Link.NETWORK) == 0


def test_the_optimizer_streams_each_state_twice():
    dram = traffic(plan_of(accelerator=True)).nbytes[Link.DRAM]
    # Split master: a remainder of 2 bytes and two moments of 4, read and written.
    assert dram[Kind.STATES] == 2 * 10 * NUMEL
    assert dram[Kind.PARAM] == 2 * 2 * NUMEL
    # Read by the norm and by the step.
    assert dram[Kind.GRAD] == 2 * 2 * NUMEL


@pytest.mark.parametrize("batches", [1, 3])
def test_every_micro_batch_gathers_and_reduces_anew(batches):
    one, more = (traffic(plan_of(dp=4), accumulation=count).nbytes[Link.NETWORK] for count in (1, batches))
    assert {kind: nbytes * batches for kind, nbytes in one.items()} == more
    # A rank sends its quarter to three others, forward and backward; and of its gradients all but its own quarter.
    assert one == {Kind.PARAM: 15 * 3 * (2 * LAYER_NUMEL // 4), Kind.GRAD: 3 * (2 * NUMEL // 4)}


def test_what_the_schedule_keeps_is_not_gathered_again():
    kept = traffic(plan_of(dp=4, reuse_numel=1 << 40, live_numel=1 << 40)).nbytes[Link.NETWORK]
    assert kept[Kind.PARAM] == 3 * (2 * NUMEL // 4)


def test_homes_that_differ_within_a_plan_are_summed_by_partition():
    plan = plan_of(optimizer_tier=Tier.NVME)
    on_nvme = nvme(traffic(plan))
    half = len(plan.sub_groups) // 2
    partitions, at = [], 0
    for partition in plan.partitions:
        key = partition.key
        if key.kind is Kind.STATES and key.index >= half:
            partition = PartitionSpec(key=key, sections=partition.sections, home=Tier.CPU)
        partitions.append(partition)
        at += partition.nbytes if partition.extent else 0
    homes = tuple(Tier.NVME if index < half else Tier.CPU for index in range(len(plan.sub_groups)))
    mixed = replace(plan, partitions=tuple(partitions), placement=replace(plan.placement, states=homes))
    assert nvme(traffic(mixed))[1] == on_nvme[1] // 2


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_lives_in_memory_is_written_to_the_drive_behind_each_step_that_is_recorded(accelerator):
    memory = dict(param_tier=Tier.GPU, accelerator=accelerator, optimizer_tier=Tier.CPU)
    without, with_records = (traffic(plan_of(recorded=recorded, **memory)).nbytes for recorded in (False, True))
    # Parameters of 2 bytes; remainders of 2 and two moments of 4.
    assert with_records[Link.NVME_WRITE] == {Kind.PARAM: 2 * NUMEL, Kind.STATES: 10 * NUMEL}
    down = {kind: nbytes - without[Link.DOWN].get(kind, 0) for kind, nbytes in with_records[Link.DOWN].items()}
    assert down.get(Kind.PARAM, 0) == (2 * NUMEL if accelerator else 0)
    assert with_records[Link.NVME_READ] == without[Link.NVME_WRITE] == {}


def test_everything_in_memory_moves_nothing_over_a_drive():
    assert nvme(traffic(plan_of())) == [0, 0]


def test_an_arena_gives_up_what_was_used_longest_ago():
    cache = Cache(2)
    assert [cache.use(index, 1) for index in (0, 1, 0, 2, 0, 1)] == [False, False, True, False, True, False]
