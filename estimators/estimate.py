"""Estimate a training run: the plan of a model that is not built, its bytes by phase, its time and the drive's wear.

    estimate("llama-3.1-8b", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, ranks=8)

The estimate is made from the engine's own `PlanInputs`, with the module tree that transformers would build, so that the
plan is the one that the engine would execute.

A node's memory and drive, given or detected, and how much of them a rank may use.

Some of it is not available to a plan: the accelerator's context and its allocator's gaps, the operating system, and
each process's libraries. Reports state how much is set aside wherever they show a limit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from estimators.activations import activations, may_tile_loss
from estimators.compute import (
    attention_columns,
    exchanged_nbytes,
    local_values,
    seen_keys,
    stage_operations,
    step_flops,
    tensor_axis_of_values,
)
from estimators.model import Described, Lora, described
from estimators.phases import Phase, at_rest, bytes_by_phase
from estimators.step_time import PipelineStepTime, RankWork, StageOperations, StepTime, predict, predict_pipeline
from estimators.traffic import Link, Traffic, traffic
from estimators.trees import completed, known
from infinity.config import Config, ResolveContext, ResolvedConfig, load_config, resolve, unfilled
from infinity.config.conflicts import pipeline_sizes, tensor_sizes
from infinity.config.resolve import changed
from infinity.config.section import replaced
from infinity.config.sparse_attention import SparseAttention
from infinity.errors import ConfigError
from infinity.plan.activations import (
    Activations,
    OffloadedCheckpoints,
    StageActivations,
    in_stages,
    sent_nbytes,
    stage_activations,
)
from infinity.plan.capacity import ACCELERATOR, Capacity, free_cpu_nbytes, within
from infinity.plan.hardware import HardwareProfile, assumed, load_profile
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan, make_plan
from infinity.plan.sequence_axis import check_parts, sent_numel
from infinity.plan.spec import ModuleNode
from infinity.plan.stages import StageCut, cut_model, find_blocks
from infinity.plan.tensor_axis import TensorAxis, tensor_axis_of
from infinity.plan.types import DTYPE_NBYTES, Kind, Tier, Topology

# Share of an accelerator's memory that its allocator loses between blocks.
GAPS = ACCELERATOR.free_gaps
# Set aside on an accelerator beside its allocator's gaps (`GAPS`): its context.
CONTEXT_NBYTES = 10**9
# Set aside in CPU memory for the node, and for each process (interpreter, torch, libraries).
SYSTEM_NBYTES = 2 * 10**9
PROCESS_NBYTES = 10**9
# Set aside on a drive: file systems slow down when they are full.
DRIVE_SHARE = 0.03


@dataclass(frozen=True)
class Machine:
    """One node: bytes of each rank's accelerator, of CPU memory and of the drive; None if unknown or absent.

    `accelerator` is False if ranks compute on the CPU; then CPU memory is the only memory.
    """

    gpu_nbytes: int | None = None
    cpu_nbytes: int | None = None
    nvme_nbytes: int | None = None
    accelerator: bool = True

    @classmethod
    def here(cls, folder: Path, *, accelerator: bool = True) -> Machine:
        """Detect this machine: memory that is free within control group limits, and free space on `folder`'s drive."""
        gpu = _accelerator_nbytes() if accelerator else None
        while not folder.exists():
            folder = folder.absolute().parent
        return cls(gpu, free_cpu_nbytes(), shutil.disk_usage(folder).free, accelerator=gpu is not None)

    def capacity(self, ranks_per_node: int) -> Capacity:
        """Return a rank's share: its accelerator, and an equal part of what the node has left."""
        cpu, nvme = self.cpu_nbytes, self.nvme_nbytes
        gpu = None if self.gpu_nbytes is None else max(int(self.gpu_nbytes * (1 - GAPS)) - CONTEXT_NBYTES, 0)
        own = None if cpu is None else max((cpu - SYSTEM_NBYTES) // ranks_per_node - PROCESS_NBYTES, 0)
        drive = None if nvme is None else int(nvme * (1 - DRIVE_SHARE)) // ranks_per_node
        return Capacity(gpu=gpu, cpu=own, nvme=drive) if self.accelerator else Capacity(process=own, nvme=drive)

    @property
    def known(self) -> bool:
        """Whether any size is known."""
        return (self.gpu_nbytes, self.cpu_nbytes, self.nvme_nbytes) != (None, None, None)


def _accelerator_nbytes() -> int | None:
    """Return the bytes of the smallest accelerator that nvidia-smi lists; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return min(int(line) for line in reply.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


# Tokens of a sequence by default, if the model takes so many.
SEQUENCE = 4096
RANKS_PER_NODE = 8
# `infinity.Init` holds so much of a model that is being built; the rest is in its tiers already.
INIT_NBYTES = 256 * 10**6

# Micro-batches of other sizes have the same plan: a search asks for each of them many times.
_make_plan = lru_cache(maxsize=32)(make_plan)

_ASKED = {
    "parallel.tensor": "ranks of the tensor axis", "parallel.pipeline": "ranks of the pipeline axis",
    "sequence_parallel_size": "ranks to a sequence",
}  # fmt: skip

Table = Mapping[Tier, Mapping[Kind, int]]


@dataclass(frozen=True)
class Workload:
    """What a rank computes on in one micro-batch."""

    batch: int
    sequence: int
    # Whether layers' activations are computed again in backward, and those of every how many layers.
    checkpointing: bool
    every: int = 1
    # Whether the logits of a few tokens at a time are there, not all of them; and what MLPs make inside, too.
    tiled_loss: bool = False
    tiled_mlps: bool = False
    # Ranks that share each sequence.
    parts: int = 1
    sparse: SparseAttention | None = None

    @classmethod
    def of(
        cls, model: Described, batch: int, sequence: int | None, *, checkpointing: bool, tiled_loss: bool,
        tiled_mlps: bool = False,
    ) -> Workload:  # fmt: skip
        """By default with sequences of `SEQUENCE` tokens, or of the most that the model takes.

        Raises ConfigError if the model takes only shorter sequences than given.
        """
        most = model.positions_max
        if sequence is not None and most is not None and sequence > most:
            raise ConfigError(f"{model.name} takes sequences of at most {most:,} tokens, not {sequence:,}")
        length = min(SEQUENCE, most or SEQUENCE) if sequence is None else sequence
        return cls(batch, length, checkpointing, tiled_loss=tiled_loss or tiled_mlps, tiled_mlps=tiled_mlps)

    def under(self, config: ResolvedConfig) -> Workload:
        """With layers computed again, sequences shared and sparse attention, where the configuration says so."""
        every = config.sections.activation_checkpointing.every
        again = self.checkpointing or every > 0
        return replace(
            self, checkpointing=again, every=max(every, 1), parts=config.sequence,
            sparse=config.sections.sparse_attention,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of this rank: where sequences are shared, its part, filled up."""
        return self.batch * -(-self.sequence // self.parts)


@dataclass(frozen=True)
class Estimate:
    """What a training run holds and does. Bytes are those of one rank. Values are computed on demand."""

    model: Described
    config: ResolvedConfig
    plan: Plan
    work: Workload
    profile: HardwareProfile
    machine: Machine
    # What the tensor axis makes of the model.
    axis: TensorAxis = field(default_factory=TensorAxis)
    # The plans of all places on the pipeline axis; `plan` is of the one whose memory is the scarcest.
    plans: tuple[Plan, ...] = ()

    @cached_property
    def activations(self) -> Activations | None:
        """What autograd keeps; None for a module of which no hyper-parameters are known. In a pipeline, of all that is
        in flight on this rank.
        """
        found, part = self.of_micro_batch, self.plan.pipeline
        if found is None or part is None:
            return found
        return in_stages(found, part.place)

    @cached_property
    def of_micro_batch(self) -> Activations | None:
        """Activations of one micro-batch in the whole model."""
        return activations_of(self.model, self.config.compute_dtype, self.work, self.machine, self.axis)

    @cached_property
    def held(self) -> StageActivations | None:
        """What of a pipeline's activations the rank holds on its device along its table; None without a pipeline."""
        found, part = self.of_micro_batch, self.plan.pipeline
        if found is None or found.blocks is None or part is None:
            return None
        away = not Tier.named(self.config.checkpoint_tier).on_device
        blocks = found.blocks.with_inputs_elsewhere() if away else found.blocks
        return stage_activations(blocks, part.place)

    @cached_property
    def stages(self) -> tuple[Estimate, ...]:
        """The same run at each place of the pipeline axis; itself without one."""
        return tuple(replace(self, plan=plan, plans=()) for plan in self.plans) or (self,)

    def scarcest(self) -> Estimate:
        """The same run at the place of the pipeline axis whose memory is the scarcest."""
        if not self.plans:
            return self
        return replace(self, plan=max(self.stages, key=_scarcity).plan)

    @cached_property
    def activations_otherwise(self) -> Activations | None:
        """The same with checkpointing the other way."""
        return self.with_checkpointing(not self.work.checkpointing).activations

    @cached_property
    def at_rest(self) -> Table:
        """Bytes between two steps."""
        return at_rest(self.plan)

    @cached_property
    def phases(self) -> Mapping[Phase, Table]:
        """Bytes at each phase's busiest moment, activations included."""
        used = self.activations.nbytes if self.activations is not None else 0
        return bytes_by_phase(
            self.plan, used, model_dtype=self.config.compute_dtype, model_nbytes_max=INIT_NBYTES,
            offloaded=self.offloaded, moments=self.held.moments if self.held is not None else (),
        )  # fmt: skip

    @cached_property
    def offloaded(self) -> OffloadedCheckpoints | None:
        """What of the activations lies on another tier between forward and backward."""
        found, tier = self.activations, Tier.named(self.config.checkpoint_tier)
        if tier.on_device or found is None or not found.inputs:
            return None
        buffers = self.config.sections.activation_checkpointing.offload.buffer_count if tier.on_drive else 0
        return OffloadedCheckpoints(tier, found.inputs, found.input_nbytes, buffers)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that are apart: where ranks compute on the CPU, the device's memory is the CPU's."""
        return tuple(tier for tier in Tier if self.machine.accelerator or not tier.on_device)

    def shown(self, table: Table) -> Table:
        """A table by the tiers that are apart; what is one memory is counted once, as the CPU's."""
        if self.machine.accelerator:
            return table
        near, far = table[Tier.GPU], table[Tier.CPU]
        memory = {kind: near.get(kind, 0) + far.get(kind, 0) for kind in Kind if kind in near or kind in far}
        return {**{tier: table[tier] for tier in self.tiers}, Tier.CPU: memory}

    @cached_property
    def columns(self) -> Mapping[str, Table]:
        """The tables that people are shown, by name: at rest, and of each phase."""
        tables = {"at rest": self.at_rest, **{phase.value: table for phase, table in self.phases.items()}}
        return {name: self.shown(table) for name, table in tables.items()}

    def homes(self, *kinds: Kind) -> dict[Tier, float]:
        """The tiers of these kinds between two steps, with their shares; tiers below a hundredth are left out."""
        table = self.columns["at rest"]
        held = {tier: sum(table[tier].get(kind, 0) for kind in kinds) for tier in self.tiers}
        total = sum(held.values())
        return {tier: nbytes / total for tier, nbytes in held.items() if nbytes and nbytes >= total / 100}

    def peak(self, tier: Tier) -> int:
        """The most bytes that any phase holds on one of `tiers`, and no less than what the plan reserves there."""
        reserved, *held = (self.shown(table) for table in (self.plan.bytes_by_tier(), *self.phases.values()))
        return max(sum(table.get(tier, {}).values()) for table in (reserved, *held))

    @property
    def capacity(self) -> Capacity:
        """What a rank may have of the machine that was given."""
        return self.machine.capacity(self.plan.topology.local_size)

    @cached_property
    def excess(self) -> Mapping[Tier, int]:
        """Bytes by which each tier is too small, as far as anything is known of it: for the peak on the machine, and
        for the plan within the configuration's own limits. What is one memory counts as the CPU's.
        """
        plan = {tier: sum(kinds.values()) for tier, kinds in self.plan.bytes_by_tier().items()}
        if self.offloaded is not None:
            # The engine books them under the same limit.
            plan[self.offloaded.tier] += self.offloaded.nbytes
        allowed = _capacity(self.config, self.machine, self.plan.topology.local_size)
        needed = [(tier, self.peak(tier), self.capacity.of(tier)) for tier in self.tiers]
        needed += [(Tier.GPU, plan[Tier.GPU], allowed.gpu), (Tier.CPU, plan[Tier.CPU], allowed.cpu)]
        needed += [(Tier.CPU, plan[Tier.GPU] + plan[Tier.CPU], allowed.process)]
        needed += [(Tier.NVME, plan[Tier.NVME], allowed.nvme)]
        found: dict[Tier, int] = {}
        for tier, nbytes, limit in needed:
            if limit is not None and nbytes > limit:
                found[tier] = max(found.get(tier, 0), nbytes - limit)
        return found

    @property
    def fits(self) -> bool:
        """Whether every tier has what the run will take, as far as anything is known of it."""
        return not self.excess

    @cached_property
    def tree(self) -> ModuleNode:
        """The whole model, before the tensor axis divides it."""
        return self.model.tree(self.config.compute_dtype)

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return self.plan.numel if self._whole else self.tree.numel

    @property
    def _whole(self) -> bool:
        """Whether each rank has a part of every parameter of the model."""
        return self.axis.size == 1 and self.plan.pipeline is None

    @cached_property
    def trained_numel(self) -> int:
        """Elements of the whole model that the optimizer steps."""
        if not self._whole:
            return sum(spec.numel for spec in self.tree.all_params().values() if spec.trainable)
        return sum(slot.numel for layout in self.plan.layouts if layout.trainable for slot in layout.slots)

    @cached_property
    def exchanged_nbytes(self) -> int:
        """Bytes that a rank sends to the others of its tensor group, or of its sequence, in one micro-batch."""
        recomputed = 1 / self.work.every if self.work.checkpointing else 0.0
        if self.work.parts > 1:
            return round(self.attention_nbytes * (2 + recomputed))
        if self.axis.size == 1:
            return 0
        return exchanged_nbytes(
            self.axis, self.tree, tokens=self.work.tokens, width=DTYPE_NBYTES[self.config.compute_dtype],
            recomputed=recomputed, runs=self._runs,
        )  # fmt: skip

    @cached_property
    def attention_nbytes(self) -> int:
        """Bytes that attention of all layers sends to the other ranks of a sequence in one direction of a micro-batch;
        0 for an unknown architecture.
        """
        values, parts = complete_values(self.model) or {}, self.work.parts
        columns = attention_columns(values, parts)
        return sent_numel(columns, tokens=self.work.tokens, size=parts) * DTYPE_NBYTES[self.config.compute_dtype]

    @property
    def lora(self) -> dict[str, Any] | None:
        """The adapters as plain data; None where all is trained."""
        found = self.model.lora
        return None if found is None else {"rank": found.rank, "targets": sorted(self.model.adapted_layers or ())}

    @property
    def accumulation(self) -> int:
        return self.config.accumulation

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes a step by link."""
        return traffic(
            self.plan, accumulation=self.accumulation, offloaded=self.offloaded,
            exchanged_nbytes=self.exchanged_nbytes, passed_nbytes=self.passed_nbytes,
        )  # fmt: skip

    @cached_property
    def passed_nbytes(self) -> int:
        """Bytes that a rank sends to other stages in a step."""
        found, part = self.of_micro_batch, self.plan.pipeline
        if found is None or found.blocks is None or part is None:
            return 0
        return sent_nbytes(found.blocks, part.place)

    @cached_property
    def time(self) -> StepTime:
        """A step on the machine that the profile describes, and what bounds it."""
        return self._predicted(briefly=False) if self.plan.pipeline is None else self._schedule(briefly=False).step

    @cached_property
    def outline(self) -> StepTime:
        """The same in a fraction of the time, without what would have to change to make it faster."""
        return self._predicted(briefly=True) if self.schedule is None else self.schedule.step

    @cached_property
    def schedule(self) -> PipelineStepTime | None:
        """When the ranks of a pipeline compute what; None without one."""
        return None if self.plan.pipeline is None else self._schedule(briefly=True)

    def _schedule(self, *, briefly: bool) -> PipelineStepTime:
        found = self.of_micro_batch
        operations = self._operations
        work = [
            RankWork([operations[stage] for stage in each.plan.pipeline.stages], each.exchanged_nbytes, each._away)
            for each in self.stages if each.plan.pipeline is not None
        ]  # fmt: skip
        return predict_pipeline(
            self.plans, self.rates, tokens=self.work.tokens, work=work,
            boundary_nbytes=found.blocks.boundary_nbytes if found is not None and found.blocks is not None else 0,
            briefly=briefly,
        )  # fmt: skip

    @property
    def _away(self) -> OffloadedCheckpoints | None:
        """What of one micro-batch's activations lies on another tier."""
        away, held = self.offloaded, self.held
        return away if away is None or held is None else replace(away, count=-(-away.count // max(held.in_flight, 1)))

    def _runs(self, path: str) -> bool:
        """Whether the rank runs the module at a path."""
        part = self.plan.pipeline
        if part is None:
            return True
        stages = part.split.cut.stages_at(path)
        return len(stages) > 1 or stages[0] % part.split.pp == part.index

    @cached_property
    def _operations(self) -> tuple[StageOperations, ...]:
        """Operations of one micro-batch in each stage of the model."""
        part = self.plan.pipeline
        assert part is not None
        return stage_operations(
            self._local_tree, self._local_values, part.split.cut, tokens=self.work.tokens,
            keys=self.seen_keys, checkpointing=self.work.checkpointing, every=self.work.every,
            tiled_loss=self.work.tiled_loss, tiled_mlps=self.work.tiled_mlps,
        )  # fmt: skip

    @cached_property
    def _local_tree(self) -> ModuleNode:
        """What the tensor axis leaves of the model."""
        return self.axis.divide(self.tree)

    @property
    def _local_values(self) -> dict[str, Any]:
        """The values of the config.json as a rank computes with them; nothing for another architecture."""
        values = complete_values(self.model) or {}
        return local_values(values, self.axis) if values and self.axis.size > 1 else values

    @property
    def rates(self) -> HardwareProfile:
        """The profile as this run sees it: a loss in tiles goes over its logits twice."""
        if not self.work.tiled_loss:
            return self.profile
        twice = {
            dtype: rate.model_copy(update={"logit_seconds": 2 * rate.logit_seconds})
            for dtype, rate in self.profile.compute.items()
        }
        return self.profile.model_copy(update={"compute": twice})

    def _predicted(self, *, briefly: bool) -> StepTime:
        return predict(
            self.plan, self.rates, tokens=self.work.tokens, flops=self.flops, accumulation=self.accumulation,
            briefly=briefly, offloaded=self.offloaded, exchanged_nbytes=self.exchanged_nbytes,
        )  # fmt: skip

    @cached_property
    def seen_keys(self) -> float:
        """How many keys a query is multiplied with on average."""
        return seen_keys(self._local_values, self.work.sequence, self.work.sparse)

    @cached_property
    def flops(self) -> float:
        """Operations of one micro-batch's forward and backward on one rank."""
        if self.plan.pipeline is not None:
            return sum(self._operations[stage].total for stage in self.plan.pipeline.stages)
        return step_flops(
            self._local_tree, self._local_values, tokens=self.work.tokens, keys=self.seen_keys,
            checkpointing=self.work.checkpointing, every=self.work.every, tiled_loss=self.work.tiled_loss,
            tiled_mlps=self.work.tiled_mlps,
        )  # fmt: skip

    def _pipeline_as_dict(self) -> dict[str, Any]:
        """The stages and what each place on the pipeline axis holds; nothing without one."""
        part, schedule = self.plan.pipeline, self.schedule
        if part is None or schedule is None:
            return {}
        places = [
            {
                "stages": [list(part.split.cut.blocks_of(stage)) for stage in own.plan.pipeline.stages],
                "parameters": own.plan.numel, "fingerprint": own.plan.fingerprint(),
                "in_flight": None if own.held is None else own.held.in_flight,
                "activations_nbytes": None if own.activations is None else own.activations.nbytes,
                "nbytes_peak": {tier.value: own.peak(tier) for tier in own.tiers}, "sent_nbytes": own.passed_nbytes,
                "idle_seconds": idle,
            }
            for own, idle in zip(self.stages, schedule.times.idle, strict=True) if own.plan.pipeline is not None
        ]  # fmt: skip
        return {
            "pipeline": {
                "size": part.split.pp, "schedule": part.split.schedule, "virtual_stages": part.split.virtual,
                "micro_batches": part.split.micro_batches, "bubble": schedule.times.bubble, "shown": part.index,
                "places": places,
            }
        }  # fmt: skip

    def _tensor_as_dict(self) -> dict[str, Any]:
        """The axes and what the tensor axis costs; nothing where there is one axis."""
        topology = self.plan.topology
        if topology.sp > 1:
            sent = self.exchanged_nbytes * self.accumulation
            return {"data": topology.replicas, "sequence_ranks": topology.sp, "sequence_sent_nbytes": sent}
        if topology.tp == 1:
            return {"data": topology.dp} if topology.pp > 1 else {}
        return {
            "data": topology.dp,
            "tensor": topology.tp,
            "parameters_of_a_rank": self.plan.numel,
            "tensor_sent_nbytes": self.exchanged_nbytes * self.accumulation,
            "remarks": list(self.axis.remarks),
        }

    def of_node(self, phase: Phase) -> dict[Tier, int]:
        """Totals of all of a node's ranks in one phase."""
        ranks = self.plan.topology.local_size
        return {tier: ranks * sum(kinds.values()) for tier, kinds in self.phases[phase].items()}

    def under(self, config: Any) -> Estimate:
        """The same run under a configuration that differs in `activation_checkpointing` only: the plan is the same."""
        topology = self.plan.topology
        axes = {"parallel.tensor": topology.tp, "parallel.pipeline": topology.pp, "sequence_parallel_size": topology.sp}
        resolved = _resolved(self.model, _with_sizes(config, axes), topology.world_size, topology.local_size)
        return replace(self, config=resolved, work=self.work.under(resolved)).scarcest()

    def with_checkpointing(self, checkpointing: bool) -> Estimate:
        """The same run with layers computed again in backward, or not: the plan is the same."""
        return replace(self, work=replace(self.work, checkpointing=checkpointing)).scarcest()

    def with_tiles(self, loss: bool, mlps: bool = False) -> Estimate:
        """The same run with the loss in tiles, and the MLPs, or with all that they make: the plan is the same."""
        return replace(self, work=replace(self.work, tiled_loss=loss or mlps, tiled_mlps=mlps)).scarcest()

    @cached_property
    def turned_on(self) -> Mapping[str, int]:
        """What is done to hold less of activations, from cheap to dear, by name: bytes that the device would hold
        at its peak without that one.
        """
        work, without = self.work, dict[str, Estimate]()
        if work.checkpointing:
            without["layers computed again in backward"] = self.with_checkpointing(False)
        if work.tiled_loss:
            without["the loss in tiles"] = replace(self, work=replace(work, tiled_loss=False)).scarcest()
        if work.tiled_mlps:
            without["the MLPs in tiles"] = self.with_tiles(True)
        if self.offloaded is not None:
            kept = changed(self.config, {"activation_checkpointing.offload.device": "none"}).sections
            without[f"their inputs on {self.offloaded.tier.value} until backward"] = self.under(kept)
        if work.parts > 1:
            whole = replace(self, work=replace(work, parts=1))
            without[f"each sequence shared by {work.parts} ranks"] = whole
        return {name: other.peak(self.tiers[0]) for name, other in without.items()}

    @property
    def may_tile_loss(self) -> bool:
        """Whether the loss may be computed in tiles, as far as the model is known."""
        values = complete_values(self.model)
        return values is not None and may_tile_loss(values)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for programs."""
        time, plan = self.time, self.plan
        return {
            "model": self.model.name,
            "parameters": self.numel,
            "trained_parameters": self.trained_numel,
            "lora": self.lora,
            "quantized": self.model.quantized,
            "ranks": plan.topology.world_size,
            "ranks_per_node": plan.topology.local_size,
            **self._tensor_as_dict(),
            **self._pipeline_as_dict(),
            "stage": plan.request.stage,
            "dtype": plan.request.compute_dtype,
            "units": len(plan.layouts),
            "sub_groups": len(plan.sub_groups),
            "fingerprint": plan.fingerprint(),
            "batch": self.work.batch,
            "sequence": self.work.sequence,
            "accumulation": self.accumulation,
            "checkpointing": self.work.checkpointing,
            "tiled_loss": self.work.tiled_loss,
            "tiled_mlps": self.work.tiled_mlps,
            "keys_of_a_query": self.seen_keys,
            "nbytes": _plain(plan.bytes_by_tier()),
            "nbytes_at_rest": _plain(self.at_rest),
            "nbytes_by_phase": {phase.value: _plain(table) for phase, table in self.phases.items()},
            "nbytes_of_node": {
                phase.value: {tier.value: nbytes for tier, nbytes in self.of_node(phase).items()}
                for phase in self.phases
            },
            "activations": _activations_as_dict(self.activations),
            "turned_on": dict(self.turned_on),
            "activations_otherwise": _activations_as_dict(self.activations_otherwise),
            "gathered_nbytes_max": plan.schedule.peak_nbytes,
            "nvme_file_nbytes": plan.nvme_nbytes,
            "nbytes_peak": {tier.value: self.peak(tier) for tier in self.tiers},
            "limits": {tier.value: self.capacity.of(tier) if tier in self.tiers else None for tier in Tier},
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
    tp: int | None = None,
    pp: int | None = None,
    sp: int | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    micro_batches: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    checkpointing: bool = False,
    tiled_loss: bool = False,
    tiled_mlps: bool = False,
    machine: Machine = Machine(),
    profile: HardwareProfile | str | os.PathLike[str] | None = None,
    lora: int | None = None,
    lora_targets: str | Sequence[str] | None = None,
) -> Estimate:
    """Size a training run before it starts, without weights and without an accelerator.

    model: the name of a known model, a Hugging Face config.json (file, folder or its values), or a module, which may be
    on the meta device. config: the training configuration (path, dict or JSON text). tp: ranks of the tensor axis, of
    `ranks` in all; otherwise the configuration's parallel.tensor. pp, schedule, virtual_stages: the same of the
    pipeline axis, its schedule, and the stages of each of its ranks; sp: ranks that share each sequence
    (sequence_parallel_size); micro_batches: of a step (gradient_accumulation_steps). batch: sequences in a micro-batch,
    otherwise the configuration's. sequence: tokens in each, at most 4096 unless said. tiled_loss: the program calls
    `infinity.tile_sequence(model, mlps=False)`; tiled_mlps: it calls `infinity.tile_sequence(model)`, which tiles the
    loss as well. machine: what a node has, for `fits` and "auto". profile: measured rates, or the path of the file that
    `infinity bench` has written; otherwise assumed ones. lora: the rank of peft's adapters, which then are all that is
    trained; lora_targets: names of the layers that get them, with commas between them or as a sequence, or
    "all-linear"; otherwise peft's default.

    Raises ConfigError for a model, a configuration or a profile that cannot be understood, and for a profile of ranks
    that compute elsewhere than the machine's.
    """
    what = described(model)
    if lora is not None:
        what = what.with_adapters(Lora.of(lora, lora_targets))
    elif lora_targets is not None:
        raise ConfigError("lora_targets names layers for adapters: give their rank as lora, too, such as 16")
    local = min(ranks, RANKS_PER_NODE) if ranks_per_node is None else ranks_per_node
    if local < 1 or ranks % local:
        raise ConfigError(f"{ranks} ranks cannot be {local} on each node: ranks_per_node must divide the ranks")
    sizes = {
        "parallel.tensor": tp, "parallel.pipeline": pp, "parallel.schedule": schedule,
        "parallel.virtual_stages": virtual_stages, "gradient_accumulation_steps": micro_batches,
        "sequence_parallel_size": sp,
    }  # fmt: skip
    resolved = _resolved(what, _with_sizes(config, sizes), ranks, local)
    size = resolved.micro_batch if batch is None else batch
    work = Workload.of(
        what, size, sequence, checkpointing=checkpointing, tiled_loss=tiled_loss, tiled_mlps=tiled_mlps
    ).under(resolved)
    return _estimated(what, resolved, work, machine, _rates(profile, machine))


def _estimated(
    model: Described, config: ResolvedConfig, work: Workload, machine: Machine, rates: HardwareProfile
) -> Estimate:
    """Make the plan of each place on the pipeline axis."""
    if config.sequence > 1 and model.values is not None:
        check_parts(model.name, complete_values(model) or model.values, config.sequence)
    root = model.tree(config.compute_dtype)
    parallel = config.sections.parallel
    axis = _planned_axis(model, root, size=config.tensor, sequence=parallel.sequence, given=parallel.plan)
    node = axis.divide(root)
    asked = PlanInputs(
        node=node, config=config, topology=Topology.of(config), accelerator=machine.accelerator,
        capacity=_capacity(config, machine, config.local_size), blocks=model.blocks, cut=_cut(model, node, config),
    )  # fmt: skip

    # Those of the whole model, which all stages have their part of.
    units = asked.units
    split = asked.part_of(units).split if asked.cut is not None else None

    def made(index: int) -> Estimate:
        inputs = replace(asked, index=index)
        found = Estimate(
            model=model, config=config, plan=inputs.plan(units=units, split=split, make=_make_plan), work=work,
            profile=rates, machine=machine, axis=axis,
        )  # fmt: skip
        if found.fits or found.activations is None:
            return found
        # Beside its activations it may fit with its bounds lowered, as the engine would.
        room = _capacity(config, machine, config.local_size, found.activations.nbytes)
        fitted = replace(found, plan=replace(inputs, capacity=room).plan(units=units, split=split, make=_make_plan))
        return fitted if fitted.fits else found

    if asked.cut is None:
        return made(0)
    each = [made(index) for index in range(config.pipeline)]
    return replace(max(each, key=_scarcity), plans=tuple(found.plan for found in each))


def _scarcity(found: Estimate) -> tuple[bool, float, int]:
    """How scarce the memory of a place on the pipeline axis is: whether it is too small, its share that is held, and
    bytes.
    """
    held = [(found.peak(tier), found.capacity.of(tier)) for tier in found.tiers]
    share = max((peak / max(limit, 1) for peak, limit in held if limit is not None), default=0.0)
    return not found.fits, share, sum(peak for peak, _ in held)


def _cut(model: Described, node: ModuleNode, config: ResolvedConfig) -> StageCut | None:
    """The stages of a pipeline, as a run cuts them; None without one. node: what a tensor axis leaves of the model."""
    if config.pipeline == 1:
        return None
    section = config.sections.parallel
    stages, counts = config.pipeline * section.virtual_stages, section.stages or None
    layered = getattr(model.module, "stage_counts", None)
    after = None
    if layered is not None:
        after, counts = (), counts or layered(stages)
    return cut_model(node, find_blocks(node, model.blocks), stages, after=after, counts=counts)


def tensor_axis(model: Described, root: ModuleNode, size: int) -> TensorAxis:
    """What a tensor axis of `size` ranks makes of a model by its own plan; ConfigError where it cannot be."""
    return _planned_axis(model, root, size=size, sequence=False, given=None)


def _planned_axis(
    model: Described, root: ModuleNode, *, size: int, sequence: bool, given: Mapping[str, str] | None
) -> TensorAxis:
    if size == 1:
        return TensorAxis()
    if model.lora is not None:
        raise ConfigError(
            f"adapters are not divided over {size} ranks: the weights lie below the layers that a model's plan names. "
            "Leave the adapters out, or set parallel.tensor = 1"
        )
    if model.module is not None:
        return tensor_axis_of(model.module, root, size=size, sequence=sequence, given=given)
    assert model.values is not None
    return tensor_axis_of_values(root, completed(model.values), size=size, sequence=sequence, given=given)


def _with_sizes(config: Any, sizes: Mapping[str, int | str | None]) -> Config:
    """The configuration with these values by path; ConfigError where it names others."""
    loaded = load_config(config)
    axes: dict[str, Mapping[str, int]] = {
        "parallel.tensor": tensor_sizes(loaded), "parallel.pipeline": pipeline_sizes(loaded),
        "sequence_parallel_size": {}
        if loaded.sequence_parallel_size == 1
        else {"sequence_parallel_size": loaded.sequence_parallel_size},
    }  # fmt: skip
    for path, value in sizes.items():
        given = {path: attrgetter(path)(loaded)} if path in loaded.provenance.given else {}
        named = axes.get(path, given)
        # One rank along an axis is none: nothing has to be said of it.
        if value is None or set(named.values()) == {value} or (path in axes and value == 1 and not named):
            continue
        if named:
            key, other = next(iter(named.items()))
            asked = f"{value} {_ASKED[path]}" if path in axes else f"{path} = {value}"
            raise ConfigError(
                f"{key} is {other}, and {asked} {'are' if path in axes else 'is'} asked for: keep one of the two"
            )
        source = replace(loaded.provenance, given={**loaded.provenance.given, path: value})
        loaded = replaced(loaded, path, value).from_source(source)
    return loaded


def _resolved(model: Described, config: Any, ranks: int, local: int) -> ResolvedConfig:
    # A rate or a number of steps that the program fills in does not change any size.
    context = ResolveContext(
        world_size=ranks, local_size=local, hidden_size=model.hidden_size, model_dtype=model.dtype,
        no_auto=unfilled(), program=False,
    )  # fmt: skip
    return resolve(load_config(config), context)


def _rates(profile: HardwareProfile | str | os.PathLike[str] | None, machine: Machine) -> HardwareProfile:
    """A profile of ranks that compute where the machine's do; ConfigError where they do not."""
    if profile is None:
        return assumed(machine.accelerator)
    rates = profile if isinstance(profile, HardwareProfile) else load_profile(profile)
    if machine.accelerator and rates.accelerator is None:
        raise ConfigError(
            f"the profile of {rates.host or 'this machine'} was measured without an accelerator, and the ranks are to "
            "compute on one: give --no-gpu, or a profile that `infinity bench` has measured beside an accelerator"
        )
    if not machine.accelerator and rates.accelerator is not None:
        raise ConfigError(
            f"the profile of {rates.host or 'this machine'} has rates of {rates.accelerator}, and the ranks are to "
            "compute on the CPU: leave it out, or give one that `infinity bench` has measured without an accelerator"
        )
    return rates


def activations_of(
    model: Described, dtype: str, work: Workload, machine: Machine, axis: TensorAxis = TensorAxis()  # noqa: B008
) -> Activations | None:
    """Bytes of a micro-batch's activations; None where the architecture is not known."""
    values = complete_values(model)
    if values is None:
        return None
    return activations(
        local_values(values, axis) if axis.size > 1 else values, batch=work.batch, sequence=work.sequence,
        compute_dtype=dtype, checkpointing=work.checkpointing, every=work.every, accelerator=machine.accelerator,
        adapted=model.adapted_layers, rank=0 if model.lora is None else model.lora.rank, tiled_loss=work.tiled_loss,
        tiled_mlps=work.tiled_mlps, sequence_ranks=axis.size if axis.sequence else 1, parts=work.parts,
    )  # fmt: skip


def complete_values(model: Described) -> dict[str, Any] | None:
    """The values of the config.json, completed; None where its architecture is not known."""
    known_type = model.values is not None and model.values.get("model_type") in known()
    return completed(model.values) if known_type and model.values is not None else None


def _capacity(config: ResolvedConfig, machine: Machine, ranks: int, activation_nbytes: int = 0) -> Capacity:
    """The machine's part of a rank within the configuration's limits, as the engine has it, with so much set aside for
    activations on the device.
    """
    return within(
        config.sections.memory, machine.capacity(ranks), ranks=ranks, accelerator=machine.accelerator,
        by_budget="auto" in (config.param_tier, config.optimizer_tier), reserved={Tier.GPU: activation_nbytes},
    )  # fmt: skip


def _plain(table: Table) -> dict[str, dict[str, int]]:
    return {tier.value: {kind.value: nbytes for kind, nbytes in kinds.items()} for tier, kinds in table.items()}


def _activations_as_dict(found: Activations | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"nbytes": found.nbytes, "parts": dict(found.parts), "source": found.source}
