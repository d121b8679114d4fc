"""From a resolved configuration to what a plan is asked for: plain numbers, tiers and dtype names.

The engine and the estimator call the same two functions, so that an estimate is the plan of the same run.
"""

from __future__ import annotations

from infinity.config.resolve import ResolvedConfig
from infinity.plan.plan import PlanRequest
from infinity.plan.spec import UnitRules
from infinity.plan.types import Tier

# A sub-group on NVMe is one read and one write. This many elements keep the drive at its bandwidth; more only takes
# memory, and makes the first forward units wait longer for their step. The configuration's bound may be lower.
NVME_SUB_GROUP_NUMEL = 1 << 21


def plan_request(config: ResolvedConfig, *, accelerator: bool) -> PlanRequest:
    """What the configuration asks of the plan. `accelerator`: whether the device has memory of its own."""
    zero = config.zero
    compute = config.compute_dtype
    optimizer_tier = Tier(config.optimizer_tier)
    sub_group = zero.sub_group_size
    if optimizer_tier is Tier.NVME:
        sub_group = min(sub_group, NVME_SUB_GROUP_NUMEL)
    # Several micro-batches add up in fp32 unless the configuration says otherwise; a single one is kept as it arrives.
    grad = config.grad_accum_dtype or ("fp32" if config.accumulation > 1 else compute)
    return PlanRequest(
        stage=config.stage, param_tier=Tier(config.param_tier), optimizer_tier=optimizer_tier, compute_dtype=compute,
        grad_dtype=grad, communication_dtype=config.communication_dtype or compute, sub_group_numel=sub_group,
        prefetch_numel=zero.stage3_prefetch_bucket_size, persistence_numel=zero.stage3_param_persistence_threshold,
        persistent_total_numel=zero.stage3_model_persistence_threshold, live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance, accelerator=accelerator,
    )  # fmt: skip


def unit_rules(config: ResolvedConfig, block_classes: tuple[str, ...] = ()) -> UnitRules:
    """What bounds the units; `block_classes` is the model's own list of modules not to split."""
    zero = config.zero
    leaf = zero.leaf_module
    return UnitRules(
        # Four units' worth of budget: one in use, one arriving, and two for what the schedule keeps.
        unit_numel_max=max(zero.stage3_max_live_parameters // 4, 1),
        merge_numel_max=zero.stage3_param_persistence_threshold, block_classes=block_classes,
        leaf_classes=tuple(name.rpartition(".")[2] for name in leaf.classes),
        leaf_names=tuple(leaf.names), leaf_suffixes=tuple(leaf.name_suffixes),
    )  # fmt: skip
