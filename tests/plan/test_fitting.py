"""A plan that does not fit has the bounds lowered that nobody chose, and nothing else of it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infinity.config import ResolveContext, load_config, resolve
from infinity.plan.capacity import Capacity, within
from infinity.plan.capacity_report import refuse
from infinity.plan.inputs import KEYS, PlanInputs, Reserve, lowered_in_words
from infinity.plan.plan import Plan
from infinity.plan.spec import ModuleNode, ParamSpec
from infinity.plan.types import Tier, Topology

NVME = {"device": "nvme", "nvme_path": "drive"}


def tree() -> ModuleNode:
    """Sixteen blocks of 8 M elements behind an embedding of 16 M."""

    def linear(path: str, rows: int) -> ModuleNode:
        return ModuleNode(path, "Linear", {"weight": ParamSpec(f"{path}.weight", (rows, 1024), "bf16")})

    def block(path: str) -> ModuleNode:
        return ModuleNode(path, "Block", children={name: linear(f"{path}.{name}", 4096) for name in ("up", "down")})

    blocks = ModuleNode("layers", "ModuleList", children={str(at): block(f"layers.{at}") for at in range(16)})
    return ModuleNode("", "Model", children={"embed": linear("embed", 16_000), "layers": blocks})


def inputs(process: int | None, *, zero: dict[str, Any] | None = None, **top: Any) -> PlanInputs:
    """150 M parameters on NVMe, and one memory of so many bytes."""
    raw = {
        "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3, "offload_param": NVME, "offload_optimizer": NVME, "offload_gradients": {"device": "cpu"},
            **(zero or {}),
        },
        **top,
    }  # fmt: skip
    return PlanInputs(
        tree(), resolve(load_config(raw), ResolveContext()), Topology(), False,
        Capacity(process=process),
    )  # fmt: skip


def in_memory(plan: Plan) -> int:
    held = plan.nbytes_by_tier()
    return held[Tier.GPU] + held[Tier.CPU]


@pytest.fixture(scope="module")
def whole() -> int:
    """Bytes that the plan takes as it is asked for."""
    return in_memory(inputs(None).plan())


def test_what_fits_is_as_it_was_asked_for(whole):
    asked = inputs(whole)
    plan = asked.plan()
    assert plan.request == asked.request and lowered_in_words(asked.request, plan) == ""


@pytest.mark.parametrize("share", [0.98, 0.9, 0.8])
def test_a_tight_plan_is_lowered_until_it_fits_and_its_units_stay(whole, share):
    asked = inputs(int(whole * share))
    plan = asked.plan()
    assert asked.fits(plan) and in_memory(plan) <= int(whole * share)
    free = inputs(None).plan()
    assert plan.layouts == free.layouts, "the norm is summed by unit: a cut would change bits"
    assert [placed.whole for placed in plan.placement.units] == [placed.whole for placed in free.placement.units]
    assert "gathered at once instead of" in lowered_in_words(asked.request, plan)
    # No more is lowered than has to be: what is left over is less than the next larger step.
    assert in_memory(plan) >= int(whole * share) - sum(free.full_nbytes()) // 8 - max(free.full_nbytes())


def test_what_somebody_chose_stays_and_is_named_when_only_it_would_do(whole):
    """The same memory in which nobody's choice would have been lowered."""
    limit = int(whole * 0.8)
    zero = inputs(None).config.zero
    names = [path.removeprefix("zero_optimization.") for path in KEYS.values()]
    chosen = {name: getattr(zero, name) for name in names if "." not in name}
    asked = inputs(limit, zero={**chosen, "offload_optimizer": {**NVME, "buffer_count": 4}})
    plan = asked.plan()
    assert not asked.fits(plan)
    assert plan.request.live_numel == asked.request.live_numel
    with pytest.raises(ValueError, match="stage3_max_live_parameters"):
        refuse(asked, plan)
    left = inputs(limit, zero={"stage3_prefetch_bucket_size": chosen["stage3_prefetch_bucket_size"]})
    lowered = left.plan()
    assert left.fits(lowered) and lowered.request.prefetch_numel == left.request.prefetch_numel


def test_gradients_go_to_the_drive_where_lower_bounds_do_not_do(whole):
    """Where they do, gradients stay; and gradients that leave memory make bounds no lower than they must be."""
    shares, open_ = [], {"offload_gradients": {"device": "auto"}}
    for share in (1.0, 0.9, 0.6, 0.5, 0.45, 0.4):
        asked = inputs(int(whole * share), zero=open_)
        plan = asked.plan()
        assert asked.fits(plan)
        shares.append(plan.request.grad_share if plan.request.grad_tier is Tier.NVME else 0.0)
        assert (shares[-1] > 0) == (not asked.fits(inputs(int(whole * share)).plan()))
    assert shares[0] == shares[1] == 0 and shares == sorted(shares) and shares[-1] > 0


def test_where_the_least_is_too_much_it_is_what_the_refusal_speaks_of(whole):
    asked = inputs(None)
    least = in_memory(inputs(1).plan())
    # Where not even the values fit, nothing is tried; so this is the plan as it was asked for.
    assert least == whole
    at_rest = sum(sum(kinds.values()) for tier, kinds in asked.plan().bytes_at_home().items() if tier is not Tier.NVME)
    tight = inputs(at_rest + (1 << 20))
    plan = tight.plan()
    assert not tight.fits(plan) and in_memory(plan) < whole
    with pytest.raises(ValueError, match=r"That is with .* gathered at once instead of"):
        refuse(tight, plan)
    barely = inputs(in_memory(plan))
    assert barely.fits(barely.plan()), "the smallest there is, to the byte"


def test_what_is_set_aside_is_not_the_plans_and_is_said():
    free = Capacity(process=4 << 30)
    reserve = Reserve(
        taken_nbytes=300 << 20, overhead_nbytes=50 << 20, activation_nbytes=200 << 20, activations="1 x 128 tokens",
        gaps_nbytes=100 << 20,
    )  # fmt: skip
    config = inputs(None).config.sections.memory
    limits = within(config, free, ranks=1, accelerator=False, by_budget=False, reserved=reserve.by_tier())
    assert limits.process == (4 << 30) - (350 << 20)
    words = reserve.in_words()
    for part in ("52.4 MB for what a process's", "210 MB for activations (1 x 128 tokens)", "105 MB for gaps"):
        assert part in words, words
    asked = replace(inputs(None), capacity=Capacity(process=1 << 20), free=free, reserve=reserve)
    with pytest.raises(ValueError, match=r"Free: 4\.29 GB of memory\. Of that is set aside: .*activations"):
        refuse(asked, asked.plan())


def test_a_limit_that_was_given_is_the_engines_own_and_is_not_lessened():
    raw = {"memory": {"cpu": {"max_bytes": "1GB"}}}
    limits = resolve(load_config(raw), ResolveContext()).sections.memory
    free, aside = Capacity(process=4 * 10**9), {Tier.GPU: 10**9, Tier.CPU: 10**9}
    assert within(limits, free, ranks=1, accelerator=False, by_budget=False, reserved=aside).process == 10**9
    poor = Capacity(process=25 * 10**8)
    assert within(limits, poor, ranks=1, accelerator=False, by_budget=False, reserved=aside).process == 5 * 10**8


def test_a_model_that_lies_in_memory_while_its_partitions_are_made_counts(whole):
    """Not only what training takes: the model as it was built is there at the beginning, next to what is made of it."""
    asked = inputs(None)
    built = 4 * asked.numels[0]
    held = replace(asked, free=Capacity(process=built), reserve=Reserve(model_nbytes_max=None))
    plan = held.plan()
    assert held.reserve.initial_nbytes(plan) > built
    with pytest.raises(ValueError, match=r"while the partitions are made .*infinity\.Init"):
        refuse(held, plan)
    streamed = replace(asked, free=Capacity(process=built), reserve=Reserve(model_nbytes_max=0))
    refuse(streamed, streamed.plan())


def test_steps_are_guessed_beside_an_accelerator_whose_drive_has_the_room():
    asked = replace(inputs(None), accelerator=True, capacity=Capacity())
    twice = asked.plan()
    once = replace(asked, config=inputs(None, speculative_step=False).config).plan()
    assert twice.policy.speculates and not once.policy.step_in_backward and not inputs(None).plan().policy.speculates
    # All that moves to the drive and back in a step is there twice: parameters, and their states.
    assert twice.nvme_nbytes == 2 * once.nvme_nbytes
    tight = replace(asked, capacity=Capacity(nvme=twice.nvme_nbytes - 1))
    assert tight.plan() == replace(once, request=tight.plan().request) and tight.fits(tight.plan())
    # Who has asked for it is told what it takes.
    wanted = replace(tight, config=inputs(None, speculative_step=True).config)
    assert not wanted.fits(wanted.plan()) and wanted.plan().nvme_nbytes == twice.nvme_nbytes
