"""What a plan is asked for, in the plan's own words."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.types import ADAM_MOMENTS, Kind, Tier

# A sub-group on NVMe is one read and one write. This many elements keep the drive at its bandwidth; more only takes
# memory, and makes the first forward units wait longer for their step. It is also fine enough a grain to divide states
# between tiers by. The configuration's bound may be lower.
SPLIT_NUMEL = 1 << 21


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The configuration's decisions as numbers of elements, tiers and names of dtypes."""

    stage: int = 3
    # None: decided by budget ("auto").
    param_tier: Tier | None = Tier.GPU
    optimizer_tier: Tier | None = Tier.GPU
    # Share of the optimizer states' elements at `optimizer_tier`; the rest is on the GPU tier.
    optimizer_share: float = 1.0
    # Elements of this rank's parameters in CPU memory when `param_tier` is NVMe.
    param_cpu_numel: int = 0
    # Sub-groups whose states have memory at once where they live on NVMe, if that is more than the step needs.
    state_buffers: int = 0
    # Whether a drive is given, so that a budget may put on it what does not fit into memory.
    drive: bool = False
    compute_dtype: str = "fp32"
    grad_dtype: str = "fp32"
    communication_dtype: str = "fp32"
    # What the optimizer keeps of an element beside the master weight, in fp32.
    moments: tuple[Kind, ...] = ADAM_MOMENTS
    sub_group_numel: int = 1_000_000_000
    # What a sub-group needs at most where states may move; see `SPLIT_NUMEL`.
    split_numel: int = SPLIT_NUMEL
    prefetch_numel: int = 50_000_000
    persistence_numel: int = 100_000
    persistent_total_numel: int = 2**63 - 1
    live_numel: int = 1_000_000_000
    reuse_numel: int = 1_000_000_000
    # Whether the device has memory of its own, so that copies between CPU and device need staging buffers.
    accelerator: bool = False
    # Whether the device has tensors of its own type in the CPU's memory. What is not on a drive then lies in such
    # tensors; what drives read and write is CPU memory, and needs staging buffers to be stepped.
    unified: bool = False
    # Whether the gradients of several micro-batches are added.
    accumulates: bool = False
    # Whether gradients are summed over ranks once a step at stages 2 and 3, too.
    reduces_once: bool = False
    # Whether transfers and the step may run beside the computation.
    overlap: bool = True
    # Whether a step may begin in backward, where all that it changes is on NVMe.
    steps_early: bool = False
