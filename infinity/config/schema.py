"""The whole configuration: DeepSpeed's top-level keys under their own names, and a few of ours.

A key has one of three answers (see `section.Answer`). docs/configuration.md is made from this file and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from infinity.config.checkpointing import ActivationCheckpointing
from infinity.config.machine import Aio, Memory, TimelineSection
from infinity.config.monitoring import CsvMonitor, TensorBoard, Wandb
from infinity.config.optimizer import AnyOptimizer
from infinity.config.section import HONOURED, Absent, Also, NoEffect, Refused, Section, mark, reply_of, section_leaves
from infinity.config.training import Amp, Bf16, DataTypes, Fp16, Scheduler, TorchAutocast
from infinity.config.values import (
    Count,
    Dtype,
    Flag,
    FractionAboveZero,
    LogLevel,
    Natural,
    Positive,
    ReduceOp,
    SignalNames,
    TagValidation,
    Text,
    Weight,
)
from infinity.config.zero import ZeroOptimization

_OWN_SAVING = NoEffect("checkpoints are written by infinity itself; see the checkpoint section")
_NO_PIPELINE = NoEffect("there is no pipeline parallelism yet")
_COMET = Refused("there is no monitor for Comet", "Remove the section, and enable tensorboard, csv_monitor or wandb")
_CHANGES_MODEL = Refused(
    "infinity never changes the model or its data", "Remove the section and do this in the program"
)
_NO_PARALLEL = Refused(
    "the only parallel axis for now is data", "Remove the key; stage 3 with offload fits large models"
)

_NO_MORE_THAN_ONE = Refused(_NO_PARALLEL.why, _NO_PARALLEL.instead, accepted=(1,))


def _absent(*keys: str) -> Absent:
    return Absent(keys=("enabled", *keys))


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: Annotated[Count | None, _NO_MORE_THAN_ONE] = None
    """Number of stages."""
    partition: Annotated[Text, _NO_PIPELINE] = "best"
    """How layers are divided."""
    seed_layers: Annotated[Flag, _NO_PIPELINE] = False
    """Seed every layer."""
    activation_checkpoint_interval: Annotated[Natural, _NO_PIPELINE] = 0
    """Layers between checkpoints."""
    pipe_partitioned: Annotated[Flag, _NO_PIPELINE] = True
    """Partition activations between stages."""
    grad_partitioned: Annotated[Flag, _NO_PIPELINE] = True
    """Partition gradients between stages."""
    use_reentrant: Annotated[Flag, _NO_PIPELINE] = True
    """Reentrant checkpoints."""


class ParallelWrite(Section):
    """Which ranks write at once."""

    pipeline_stage: Annotated[Flag, NoEffect("every rank always writes its own share beside the others")] = False
    """Pipeline stages write in parallel."""


class Checkpoint(Section):
    """How checkpoints are written and read."""

    tag_validation: Annotated[TagValidation, HONOURED] = "Warn"
    """What to do when ranks disagree about folder or tag: rank 0's is taken, unless this is "Fail"."""
    keep_last: Annotated[Natural, HONOURED] = 0
    """Ours. So many of the latest checkpoints of a folder stay; older ones are removed when a new one is complete and
    has been read back. 0 keeps all."""
    keep_every: Annotated[Natural, HONOURED] = 0
    """Ours. Beside them every so many-th checkpoint stays for good. 0 keeps none."""
    load_universal: Annotated[Flag, NoEffect("every checkpoint loads with any number of ranks, stage and tiers")] = (
        False
    )
    """Load the universal format."""
    use_node_local_storage: Annotated[
        Flag,
        Refused(
            "a rank reads what any other has written", "Remove the key and save into a folder that all nodes share"
        ),
    ] = False
    """Every node writes to its own storage."""
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: Annotated[Flag, NoEffect("nothing is serialised: bytes go straight to the drive")] = True
    """Serialise with torch."""
    writer: Annotated[
        None,
        NoEffect("there is one writer, as fast as the drive"),
        Absent(
            switch=None,
            keys=(
                "type",
                "decoupled",
                "io_buffer_size",
                "io_buffer_double",
                "show_statistics",
                "data_parallel",
                "io_multiplier",
            ),
        ),
    ] = None
    """Choice of the writer."""
    asynchronous: Annotated[Flag, HONOURED, Also(("async",))] = False
    """Ours. save_checkpoint returns once the state is captured, and a thread writes it while training goes on: a step
    waits for what it is about to change and is not written yet. A checkpoint counts once all of it is on the drive."""
    bandwidth_share: Annotated[FractionAboveZero, HONOURED] = 1.0
    """Ours. Share of the time in which an asynchronous save moves bytes while nobody waits for it; the rest leaves the
    drive to the swap files."""
    path: Annotated[Text | None, HONOURED] = None
    """Ours. Folder of the checkpoints that the engine writes by itself (on_signal, and when max_skipped_steps is
    reached), and where resume() looks when it is given none."""
    on_signal: Annotated[SignalNames, HONOURED] = ()
    """Ours. Signals, such as ["SIGTERM", "SIGUSR1"], upon which the running step is finished, a checkpoint is saved in
    `path`, and the program ends with status 0."""


@dataclass(frozen=True)
class Provenance:
    """Where a configuration came from; two configurations that say the same are equal, wherever they came from."""

    origin: str = field(default="configuration", compare=False)
    # Dotted paths that the user wrote, with the values as written.
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # Dotted paths of the keys that are "auto"; until `resolve` their fields hold the default.
    autos: frozenset[str] = frozenset()


class Config(Section):
    """A checked configuration. Keys that the user set to "auto" are settled by `resolve`."""

    train_batch_size: Annotated[Count | None, HONOURED] = None
    """Samples in one optimizer step over all ranks. Any of the three batch keys follow from the others."""
    train_micro_batch_size_per_gpu: Annotated[Count | None, HONOURED] = None
    """Samples in one forward on one rank."""
    gradient_accumulation_steps: Annotated[Count | None, HONOURED] = None
    """Backward passes in one optimizer step."""
    managed_gradient_accumulation: Annotated[Flag, HONOURED] = True
    """The engine counts the accumulation; false leaves the boundary to the program."""
    gradient_clipping: Annotated[Weight, HONOURED] = 1.0
    """Bound of the global gradient norm. Absent means 1.0; 0 turns clipping off."""
    gradient_clipping_value: Annotated[Weight, HONOURED] = 0.0
    """Ours. Bound of each element of the gradient, averaged over ranks and micro-batches; 0 turns it off. The norm
    comes first: what gradient_clipping leaves is bounded element by element."""
    steps_per_print: Annotated[Natural | None, HONOURED] = None
    """Optimizer steps between two progress lines."""
    gradient_allreduce_op: Annotated[ReduceOp, HONOURED] = "mean"
    """How gradients of several ranks are combined."""
    communication_data_type: Annotated[Dtype | None, HONOURED] = None
    """Type in which gradients travel between ranks, and are summed; the model's when absent."""
    dataloader_drop_last: Annotated[Flag, HONOURED] = False
    """Leave out the last, smaller batch."""
    dataloader_num_workers: Annotated[Natural, HONOURED] = 0
    """Ours. Processes of each rank that read and collate batches for the loader that initialize() makes of its
    training_data; 0 does it in the program."""
    dataloader_prefetch_factor: Annotated[Count | None, HONOURED] = None
    """Ours. Batches that each of these processes has ready; 2 when absent."""
    dataloader_persistent_workers: Annotated[Flag, HONOURED] = False
    """Ours. Keep these processes from one epoch to the next."""
    dataloader_pin_memory: Annotated[Flag, HONOURED] = False
    """Ours. Collate into pinned memory, from which copies to the accelerator do not stop the program; without one it
    changes nothing."""
    log_level: Annotated[LogLevel | None, HONOURED] = None
    """Level of infinity's log lines."""
    data_parallel_size: Annotated[Count | None, HONOURED] = None
    """Checked against the number of ranks."""
    overlap: Annotated[Flag, HONOURED] = True
    """Ours. Prefetch, flush and move gradients beside the computation; false gives the same bits without overlap."""
    check_grad_overflow: Annotated[Flag, HONOURED] = True
    """Ours, for fp32 and bf16. Skip a step whose gradients are not finite, at every stage. False leaves out only the
    elements that are not; without clipping, a sub-group whose states and parameters are on NVMe is then stepped during
    backward, as soon as its gradients are complete, into a second place on the drive: until step() nothing shows."""
    max_skipped_steps: Annotated[Natural, HONOURED] = 50
    """Ours. Steps skipped in a row, because a gradient is not finite, after which step() raises; 0 never does. In fp16
    the search for the first loss scale does not count."""
    watchdog_seconds: Annotated[Positive, HONOURED] = 600.0
    """Ours. Time limit of one I/O request, and of one wait for the other ranks, after which every rank raises and says
    who waited for what. Ranks that do different things, fail or end are found within seconds whatever it is."""
    cross_memory_attach: Annotated[Flag, HONOURED] = True
    """Ours. Ranks of one host without an accelerator read each other's partitions and gradients from memory where the
    kernel permits it (process_vm_readv); false sends them through sockets. The same bits, in a third of the processor
    time."""
    hardware_profile: Annotated[Text | None, HONOURED] = None
    """Ours. A profile that `infinity bench` has written: block size, depth and shares of the drives are taken from it
    where aio does not say them, instead of being chosen or measured at the start."""

    optimizer: Annotated[AnyOptimizer | None, Field(discriminator="type")] = None
    scheduler: Annotated[Scheduler | None, Field(discriminator="type")] = None
    fp16: Fp16 = Fp16()
    bf16: Annotated[Bf16, Also(("bfloat16",))] = Bf16()
    data_types: DataTypes = DataTypes()
    torch_autocast: TorchAutocast = TorchAutocast()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    memory: Memory = Memory()
    timeline: TimelineSection = TimelineSection()
    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    checkpoint: Checkpoint = Checkpoint()
    pipeline: Pipeline = Pipeline()

    amp: Amp = None
    """Mixed precision of apex."""
    wall_clock_breakdown: Annotated[Flag, HONOURED] = False
    """Print where the time of a step goes: after the first step, and whenever steps_per_print prints. As data on every
    rank: engine.step_times() (docs/monitoring.md)."""
    memory_breakdown: Annotated[Flag, HONOURED] = False
    """Print where memory goes: after the first step, and whenever steps_per_print prints."""
    dump_state: Annotated[Flag, NoEffect("print the resolved configuration's explain() instead")] = False
    """Print the engine's state at the start."""
    disable_allgather: Annotated[Flag, NoEffect("a unit is gathered by one collective that the plan chooses")] = False
    """Broadcast instead of gathering."""
    sparse_gradients: Annotated[Flag, NoEffect("gradients travel dense, with the same result")] = False
    """Send embedding gradients as sparse tensors."""
    graph_harvesting: Annotated[Flag, NoEffect("optimizer steps are not captured as CUDA graphs")] = False
    """Capture the optimizer in a CUDA graph."""
    prescale_gradients: Annotated[Flag, NoEffect("gradients are combined in one way; see gradient_allreduce_op")] = (
        False
    )
    """Divide before the reduction."""
    gradient_predivide_factor: Annotated[Positive, NoEffect("it only matters to prescale_gradients")] = 1.0
    """Divisor before the reduction."""
    zero_allow_untested_optimizer: Annotated[Flag, NoEffect("an optimizer is judged by what it needs")] = False
    """Accept any optimizer."""
    zero_force_ds_cpu_optimizer: Annotated[Flag, NoEffect("an optimizer is judged by what it needs")] = True
    """Insist on the CPU optimizer."""
    vocabulary_size: Annotated[Natural | None, NoEffect("nothing depends on it")] = None
    """Size of the vocabulary, for throughput figures."""
    timers: Annotated[None, NoEffect("see wall_clock_breakdown and engine.step_times()"), Absent(switch=None)] = None
    """Throughput timers."""
    seq_parallel_communication_data_type: Annotated[Dtype, NoEffect("there is no sequence parallelism yet")] = "fp32"
    """Type in which sequence-parallel ranks talk."""
    sequence_parallel_size: Annotated[Count, _NO_PARALLEL] = 1
    """Ranks that share a sequence."""
    tensor_parallel: Annotated[None, _NO_MORE_THAN_ONE, Absent(switch="autotp_size")] = None
    """Tensor parallelism."""
    expert_parallel: Annotated[None, _NO_PARALLEL, Absent()] = None
    """Expert parallelism."""
    use_data_before_expert_parallelism: Annotated[Flag, _NO_PARALLEL] = False
    """Order of the data and expert axes."""
    flops_profiler: Annotated[
        None,
        NoEffect("torch.profiler counts operations; where time goes is in wall_clock_breakdown and timeline"),
        _absent("recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file"),
    ] = None
    """Profile of floating-point operations."""
    comms_logger: Annotated[
        None,
        NoEffect("the section timeline shows every collective"),
        _absent("verbose", "prof_all", "debug", "prof_ops"),
    ] = None
    """Log of collectives."""
    comet: Annotated[
        None,
        _COMET,
        _absent(
            "samples_log_interval",
            "project",
            "workspace",
            "api_key",
            "experiment_name",
            "experiment_key",
            "online",
            "mode",
        ),
    ] = None
    """Comet monitor."""
    elasticity: Annotated[
        None,
        Refused("batch sizes do not change by themselves", "Set the batch keys for the ranks you have"),
        _absent(
            "max_train_batch_size",
            "micro_batch_sizes",
            "min_gpus",
            "max_gpus",
            "min_time",
            "version",
            "prefer_larger_batch",
            "ignore_non_elastic_batch_info",
            "num_gpus_per_node",
            "model_parallel_size",
        ),
    ] = None
    """Batch sizes for a changing number of ranks."""
    curriculum_learning: Annotated[None, _CHANGES_MODEL, Absent()] = None
    """Growing difficulty."""
    data_efficiency: Annotated[None, _CHANGES_MODEL, Absent()] = None
    """Sampling and routing of data."""
    progressive_layer_drop: Annotated[None, _CHANGES_MODEL, _absent("theta", "gamma")] = None
    """Dropping layers."""
    eigenvalue: Annotated[None, _CHANGES_MODEL, Absent()] = None
    """Curvature for quantisation."""
    quantize_training: Annotated[None, _CHANGES_MODEL, Absent()] = None
    """Quantised training."""
    compression_training: Annotated[None, _CHANGES_MODEL, Absent(switch=None)] = None
    """Compression during training."""
    sparse_attention: Annotated[None, _CHANGES_MODEL, Absent(switch=None)] = None
    """Sparse attention."""
    weight_quantization: Annotated[None, _CHANGES_MODEL, Absent()] = None
    """Quantised weights."""
    hybrid_engine: Annotated[
        None, Refused("there is no generation engine", "Remove the section and call the module's generate()"), Absent()
    ] = None
    """Training and generation in one engine."""
    compile: Annotated[
        None,
        Refused("its graph passes are DeepSpeed's own", "Remove the section and call engine.compile()"),
        Absent(
            switch="deepcompile",
            keys=(
                "deepcompile",
                "free_activation",
                "free_activation_threshold",
                "offload_activation",
                "offload_activation_pin_memory",
                "offload_opt_states",
                "double_buffer",
                "symmetric_memory",
                "debug_log",
                "offload_parameters",
                "sync_before_reduce",
                "sync_after_reduce",
                "sync_before_allgather",
                "sync_after_allgather",
                "keep_int_input_tensors",
                "keep_all_input_tensors",
                "passes",
            ),
        ),
    ] = None
    """Compiled training."""
    nebula: Annotated[None, _OWN_SAVING, Absent()] = None
    """Checkpoints through Nebula."""
    datastates_ckpt: Annotated[None, _OWN_SAVING, Absent(switch=None)] = None
    """Checkpoints through DataStates."""
    autotuning: Annotated[
        None, Refused("there is no tuner", "Remove the section; the plan sizes buffers by itself"), Absent()
    ] = None
    """Search for a configuration."""

    _provenance: Provenance = PrivateAttr(default=Provenance())

    @property
    def provenance(self) -> Provenance:
        return self._provenance

    def from_source(self, provenance: Provenance) -> Config:
        """The same configuration, knowing where it came from."""
        known = self.model_copy()
        known._provenance = provenance
        return known

    def report(self) -> list[str]:
        """One line for each key that the user set and that has no effect here."""
        given = self._provenance.given
        lines = []
        for leaf in section_leaves(self):
            if leaf.path not in given or not leaf.in_use:
                continue
            reply = reply_of(leaf.field)
            if not isinstance(reply, NoEffect):
                continue
            if mark(leaf.field, Absent):
                lines.append(f"{leaf.path}: no effect here: {reply.why}")
            elif not leaf.is_default:
                lines.append(f"{leaf.path} = {given[leaf.path]!r}: no effect here: {reply.why}")
        return lines
