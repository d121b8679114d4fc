"""An estimate *is* a plan for a model that is not built, and what follows from it: bytes by phase, time, wear.

    estimate("llama-3.1-8b", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, ranks=8)

Nothing is computed here that the engine does not decide in the same way: the tree is that of transformers, the rules
and the request are made by the engine's own functions, and `make_plan` is called with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from estimators.activations import activations
from estimators.architectures import completed, known
from estimators.compute import step_flops
from estimators.machine import Limits, Machine
from estimators.model import Described, described
from infinity.config import ResolveContext, ResolvedConfig, load_config, resolve
from infinity.errors import ConfigError
from infinity.plan.activation import Activations
from infinity.plan.hardware import ASSUMED, HardwareProfile, load_profile
from infinity.plan.phases import Phase, at_rest, bytes_by_phase
from infinity.plan.plan import Plan, make_plan
from infinity.plan.request import plan_request, unit_rules
from infinity.plan.spec import ModelSpec, find_units
from infinity.plan.time import StepTime, predict
from infinity.plan.topology import Topology
from infinity.plan.traffic import Link, Traffic, traffic
from infinity.plan.types import Kind, Tier

# Tokens of a sequence where nobody says how long it is, as far as the model takes so many.
SEQUENCE = 4096
RANKS_PER_NODE = 8
# `infinity.Init` holds so much of a model that is being built; the rest is in its tiers already.
INIT_NBYTES = 256 * 10**6

Table = Mapping[Tier, Mapping[Kind, int]]


@dataclass(frozen=True)
class Workload:
    """What a rank computes on in one micro-batch."""

    batch: int
    sequence: int
    # Whether every layer's activations are computed again in backward.
    checkpointing: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Estimate:
    """What a training run will hold and do. Bytes are one rank's; what follows is worked out when it is asked for."""

    model: Described
    config: ResolvedConfig
    plan: Plan
    work: Workload
    profile: HardwareProfile
    machine: Machine

    @cached_property
    def activations(self) -> Activations | None:
        """What autograd keeps; None for a module of which no hyper-parameters are known."""
        return self._activations(self.work.checkpointing)

    @cached_property
    def activations_otherwise(self) -> Activations | None:
        """The same with checkpointing the other way."""
        return self._activations(not self.work.checkpointing)

    def _activations(self, checkpointing: bool) -> Activations | None:
        if self._values is None:
            return None
        return activations(
            self._values, batch=self.work.batch, sequence=self.work.sequence,
            compute_dtype=self.config.compute_dtype, checkpointing=checkpointing,
            accelerator=self.machine.accelerator,
        )  # fmt: skip

    @property
    def _values(self) -> Mapping[str, Any] | None:
        """Those of the config.json, completed; None where its architecture is not known."""
        values = self.model.values
        return completed(values) if values is not None and values.get("model_type") in known() else None

    @cached_property
    def at_rest(self) -> Table:
        """Bytes between two steps."""
        return at_rest(self.plan)

    @cached_property
    def phases(self) -> Mapping[Phase, Table]:
        """Bytes at each phase's busiest moment, activations included."""
        used = self.activations.nbytes if self.activations is not None else 0
        return bytes_by_phase(
            self.plan, used, model_dtype=self.config.compute_dtype, model_nbytes_max=INIT_NBYTES
        )

    def peak(self, tier: Tier, *, saving: bool = False) -> int:
        """The most bytes that any phase holds on a tier, and no less than what the plan reserves there.

        saving: count `state_dict()`, which makes a whole model on rank 0, as well.
        """
        phases = [table for phase, table in self.phases.items() if saving or phase is not Phase.SAVE]
        reserved = sum(self.plan.bytes_by_tier()[tier].values())
        return max(reserved, *(sum(table[tier].values()) for table in phases))

    @property
    def limits(self) -> Limits:
        """What a rank may plan with on the machine that was given."""
        return self.machine.limits(self.plan.topology.local_size)

    @cached_property
    def excess(self) -> Mapping[Tier, int]:
        """Bytes by which each tier is too small, as far as anything is known of it."""
        found = {}
        together = not self.plan.request.accelerator
        for tier in Tier:
            limit = self.limits.cpu if together and tier is Tier.GPU else self.limits.of(tier)
            # Without an accelerator both tiers are the same memory.
            needed = self.peak(tier) + (self.peak(Tier.GPU) if together and tier is Tier.CPU else 0)
            if limit is not None and needed > limit and not (together and tier is Tier.GPU):
                found[tier] = needed - limit
        return found

    @property
    def fits(self) -> bool:
        """Whether every tier has what the run will take, as far as anything is known of it."""
        return not self.excess

    @property
    def accumulation(self) -> int:
        return self.config.accumulation

    @property
    def _early(self) -> bool:
        # As the engine decides it: nothing has to be known of all gradients before the first is used.
        checked = self.config.compute_dtype != "bf16" or self.config.config.bf16.check_grad_overflow
        return not checked and not self.config.clip_norm and not self.plan.placement.grad_whole

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes a step by link."""
        return traffic(
            self.plan, accumulation=self.accumulation, early=self._early, overlap=self.config.config.overlap
        )

    @cached_property
    def time(self) -> StepTime:
        """A step on the machine that the profile describes, and what bounds it."""
        return self._predicted(briefly=False)

    @cached_property
    def outline(self) -> StepTime:
        """The same in a fraction of the time, without what would have to change to make it faster."""
        return self._predicted(briefly=True)

    def _predicted(self, *, briefly: bool) -> StepTime:
        return predict(
            self.plan, self.profile, tokens=self.work.tokens, flops=self.flops, accumulation=self.accumulation,
            early=self._early, overlap=self.config.config.overlap, briefly=briefly,
        )  # fmt: skip

    @cached_property
    def flops(self) -> float:
        """Operations of one micro-batch's forward and backward."""
        return step_flops(
            self.model.tree(self.config.compute_dtype), self._values or {}, tokens=self.work.tokens,
            sequence=self.work.sequence, checkpointing=self.work.checkpointing,
        )  # fmt: skip

    def of_node(self, table: Table) -> dict[Tier, int]:
        """Totals of all of a node's ranks."""
        return {tier: sum(kinds.values()) * self.plan.topology.local_size for tier, kinds in table.items()}

    def with_checkpointing(self, checkpointing: bool) -> Estimate:
        """The same run with layers computed again in backward, or not: the plan is the same."""
        return replace(self, work=replace(self.work, checkpointing=checkpointing))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for programs."""
        time, plan = self.time, self.plan
        return {
            "model": self.model.name,
            "parameters": plan.numel,
            "ranks": plan.topology.world_size,
            "ranks_per_node": plan.topology.local_size,
            "stage": plan.request.stage,
            "dtype": plan.request.compute_dtype,
            "units": len(plan.layouts),
            "sub_groups": len(plan.sub_groups),
            "fingerprint": plan.fingerprint(),
            "batch": self.work.batch,
            "sequence": self.work.sequence,
            "accumulation": self.accumulation,
            "checkpointing": self.work.checkpointing,
            "nbytes": _plain(plan.bytes_by_tier()),
            "nbytes_at_rest": _plain(self.at_rest),
            "nbytes_by_phase": {phase.value: _plain(table) for phase, table in self.phases.items()},
            "nbytes_of_node": {
                phase.value: {tier.value: nbytes for tier, nbytes in self.of_node(table).items()}
                for phase, table in self.phases.items()
            },
            "activations": _activations_as_dict(self.activations),
            "activations_otherwise": _activations_as_dict(self.activations_otherwise),
            "gathered_nbytes_max": plan.schedule.peak_nbytes,
            "nvme_file_nbytes": plan.nvme_nbytes,
            "limits": {tier.value: self.limits.of(tier) for tier in Tier},
            "fits": self.fits,
            "traffic_nbytes": {link.value: self.traffic.total(link) for link in Link},
            "step": {
                "seconds": time.seconds,
                "bound_by": time.bound_by.value,
                "tokens": time.tokens,
                "flops": self.flops * self.accumulation,
                "seconds_alone": {part.value: seconds for part, seconds in time.parts.items()},
                "tokens_to_hide": time.tokens_to_hide,
                "nvme_written_nbytes_a_day": time.nvme_written_nbytes_a_day,
                "days_to_endurance": time.days_to_endurance,
                "endurance_assumed": time.endurance_assumed,
                "assumptions": list(time.assumptions),
            },
        }


def estimate(
    model: Any,
    config: Any = None,
    *,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    checkpointing: bool = False,
    machine: Machine = Machine(),  # noqa: B008
    profile: HardwareProfile | str | os.PathLike[str] = ASSUMED,
) -> Estimate:
    """Size a training run before it starts, without weights and without an accelerator.

    model: the name of a known model, a Hugging Face config.json (file, folder or its values), or a module, which may be
    on the meta device. config: the training configuration (path, dict or JSON text). batch: sequences in a micro-batch,
    otherwise the configuration's. sequence: tokens in each, at most 4096 unless said. machine: what a node has, for
    `fits` and "auto". profile: measured rates, or the path of the file that `infinity bench` has written.

    Raises ConfigError for a model, a configuration or a profile that cannot be understood.
    """
    what = described(model)
    resolved = resolve(
        load_config(config), ResolveContext(world_size=ranks, hidden_size=what.hidden_size, model_dtype=what.dtype)
    )
    local = min(ranks, RANKS_PER_NODE) if ranks_per_node is None else ranks_per_node
    if local < 1 or ranks % local:
        raise ConfigError(f"{ranks} ranks cannot be {local} on each node: ranks_per_node must divide the ranks")
    positions = what.positions_max
    if sequence is not None and positions is not None and sequence > positions and what.values is not None:
        raise ConfigError(f"{what.name} takes sequences of at most {positions:,} tokens, not {sequence:,}")
    topology = Topology(dp=ranks, local_size=local)
    work = Workload(
        batch=resolved.micro_batch if batch is None else batch,
        sequence=min(SEQUENCE, positions or SEQUENCE) if sequence is None else sequence,
        checkpointing=checkpointing,
    )
    plan = make_plan(
        spec_of(what, resolved), topology, plan_request(resolved, accelerator=machine.accelerator)
    )
    rates = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
    return Estimate(model=what, config=resolved, plan=plan, work=work, profile=rates, machine=machine)


def spec_of(model: Described, config: ResolvedConfig) -> ModelSpec:
    """The model as the engine would see it under this configuration."""
    return find_units(model.tree(config.compute_dtype), unit_rules(config, model.blocks))


def _plain(table: Table) -> dict[str, dict[str, int]]:
    return {tier.value: {kind.value: nbytes for kind, nbytes in kinds.items()} for tier, kinds in table.items()}


def _activations_as_dict(found: Activations | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"nbytes": found.nbytes, "parts": dict(found.parts), "source": found.source}
