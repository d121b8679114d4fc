"""The whole configuration: DeepSpeed's top-level keys under their own names, and a few of infinity's.

Each key is honoured, without effect or refused (see `section`). docs/configuration.md is generated from the
modules of this package.

In front of it are its sections about the axes of ranks, the machine (NVMe access, memory limits, fused layers, the
recorded timeline of a step), monitors, activation checkpointing and checkpoints; those about ZeRO, the optimizer,
schedules and precision are in `zero` and `training`. `Conventions` say how a configuration is read where DeepSpeed and
infinity differ: infinity's way, or DeepSpeed's for its programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from infinity.config.section import (
    Absent,
    Also,
    Check,
    Count,
    Counts,
    Differs,
    Drives,
    Dtype,
    EveryStep,
    Flag,
    FlagOrAuto,
    FractionAboveZero,
    HomeDevice,
    Interval,
    Limit,
    Location,
    LogLevel,
    Natural,
    NoAuto,
    NoEffect,
    Picture,
    Place,
    Positive,
    ReduceOp,
    Refused,
    Schedule,
    Seconds,
    Section,
    Shares,
    SignalNames,
    Styles,
    SumAt,
    TagValidation,
    Text,
    Texts,
    Weight,
    mark,
    reply_of,
    section_leaves,
)
from infinity.config.sparse_attention import SparseAttention
from infinity.config.training import Amp, AnyOptimizer, Bf16, DataTypes, Fp16, Scheduler, TorchAutocast
from infinity.config.zero import ZeroOptimization

_SAME_SIZE = Differs("it is another name of parallel.tensor")
_SAME_STAGES = Differs("it is another name of parallel.pipeline")
_WHOLE_BOUNDARY = NoEffect("what goes from stage to stage is sent whole")
_OWN_PLAN = Refused("shards follow the model's own plan", "Remove the key, and write parallel.plan where it has none")


class ParallelSection(Section):
    """Ours. Axes of ranks. The data axis has what they leave: ranks / (pipeline x tensor)."""

    pipeline: Count = 1
    """Ours. Ranks among which the model's blocks are divided in their order (pipeline parallelism). A step runs
    `gradient_accumulation_steps` micro-batches through them, with `engine.train_batch`."""
    schedule: Schedule = "1f1b"
    """Ours. Order of the micro-batches' forwards and backwards on a pipeline. All give the same weights."""
    virtual_stages: Count = 1
    """Ours. Stages of each rank of the pipeline, for the schedules "interleaved" and "zero_bubble"."""
    stages: Counts = ()
    """Ours. Blocks of each stage, in order; default: balanced by the elements that computation goes through."""
    tensor: Count = 1
    """Ours. Ranks among which each layer is divided (tensor parallelism). It must divide the ranks of a node."""
    sequence: Flag = False
    """Ours. Divide what lies between the divided layers along the sequence, too; needs `tensor` of at least 2."""
    plan: Styles = None
    """Ours. Styles of modules by the pattern of their path, such as {"layers.*.mlp.up_proj": "colwise"}, over those of
    the model's own plan."""
    reduce: SumAt = "micro_batch"
    """Ours. When stages 2 and 3 sum gradients over the data axis: behind each "micro_batch", or once a "step", for
    which whole gradients stay on the device meanwhile, as at stages 0 and 1. It is another order of sums."""


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: Annotated[Count | None, _SAME_STAGES] = None
    """Number of stages."""
    partition: Annotated[Text, NoEffect("PipelineModule takes partition_method, other models are balanced")] = "best"
    """Rule that divides layers among stages."""
    seed_layers: Annotated[Flag, NoEffect("PipelineModule takes seed_layers")] = False
    """Seed every layer."""
    activation_checkpoint_interval: Annotated[
        Natural, NoEffect("activation_checkpointing.every says which blocks are computed again")
    ] = 0
    """Layers between checkpoints."""
    pipe_partitioned: Annotated[Flag, _WHOLE_BOUNDARY] = True
    """Partition activations between stages."""
    grad_partitioned: Annotated[Flag, _WHOLE_BOUNDARY] = True
    """Partition gradients between stages."""
    use_reentrant: Annotated[Flag, NoEffect("checkpoints are not reentrant, with the same result")] = True
    """Use reentrant activation checkpoints."""


class TensorGroupSection(Section):
    """The group of ranks that divide layers."""

    tp_size: Annotated[Count, _SAME_SIZE] = 1
    """Ranks among which each layer is divided."""
    tp_grain_size: Annotated[Count, NoEffect("widths are divided equally, heads as a whole")] = 1
    """Multiple to which shards are cut."""


class TensorParallelSection(Section):
    """Tensor parallelism under DeepSpeed's names."""

    enabled: Flag = True
    """Ours. False: the sizes of this section do not count."""
    autotp_size: Annotated[Natural, _SAME_SIZE] = 0
    """Ranks among which each layer is divided; 0: one."""
    tp: Annotated[TensorGroupSection, Also(("tensor_parallel",))] = TensorGroupSection()
    dtype: Annotated[Dtype | None, NoEffect("bf16 and fp16 choose the type")] = None
    """Type of the weights."""
    tp_overlap_comm: Annotated[Flag, NoEffect("each layer waits for its sums, with the same result")] = False
    """Overlap sums with the computation."""
    vocab_parallel_lm_head: Annotated[Flag, NoEffect("the model's plan says whether the head is divided")] = False
    """Divide the head along the vocabulary."""
    vocab_parallel_ce_backend: Annotated[Text | None, NoEffect("there is one implementation of the loss")] = None
    """Implementation of the loss over a divided vocabulary."""
    injection_policy_tuple: Annotated[None, _OWN_PLAN, Absent(switch=None)] = None
    """Layers whose outputs are summed."""
    partition_config: Annotated[None, _OWN_PLAN, Absent(switch=None)] = None
    """Patterns of divided layers."""
    preset_model: Annotated[Text | None, NoEffect("the model's own plan is used")] = None
    """Name of built-in patterns."""
    keep_module_on_host: Annotated[Flag, NoEffect("the tiers decide where weights lie")] = False
    """Keep the module in CPU memory while it is divided."""
    replace_with_kernel_inject: Annotated[
        Flag, NoEffect("kernels of inference are not for training"), Also(("kernel_inject",))
    ] = False
    """Replace layers by kernels of inference."""


_ASYNCHRONOUS = NoEffect("requests are always submitted in batches, and no thread waits for a single one")


_HINT = Differs("it is a hint: no value makes a run fail")


class Aio(Section):
    """Settings of NVMe I/O. DeepSpeed's keys are hints: no value of them makes a run fail."""

    block_size: Annotated[Count | None, _HINT] = None
    """Bytes of one request to the drive; absent: 1 MiB."""
    queue_depth: Annotated[Count, _HINT] = 8
    """Requests in flight of each I/O thread."""
    intra_op_parallelism: Annotated[Count | None, _HINT, Also(("thread_count",))] = None
    """I/O threads; absent: chosen from the machine."""
    checksum: Check = "sampled"
    """Ours. Store a CRC-32C of every write to NVMe and compare it at every read. "sampled" covers one 64-byte line of
    each 4096-byte page and detects lost, misplaced and stale writes; true covers every byte, to search for a drive that
    flips bits."""
    drive_weights: Shares = ()
    """Ours. Share of the bytes for each folder of a list in nvme_path; absent: measured."""
    single_submit: Annotated[Flag, _ASYNCHRONOUS] = False
    """Submit requests one at a time."""
    overlap_events: Annotated[Flag, _ASYNCHRONOUS] = True
    """Submit and complete at the same time."""
    use_gds: Annotated[
        Flag,
        Refused(
            "GPUDirect Storage is not used",
            "Remove the key: bytes go through pinned CPU memory",
            ignored="bytes go through pinned CPU memory, with the same result",
        ),
    ] = False
    """Move bytes between the drive and the accelerator directly."""


class TierLimit(Section):
    """The limit of one tier."""

    max_bytes: Limit = None
    """Hard limit of the engine's bytes on this tier: bytes, "16GB", "1.5GiB", or a share of the free bytes such as
    "80%". Absent or "auto": what the machine has. The limit of the accelerator holds for each rank; the ranks of a node
    share those of CPU memory and NVMe. Without an accelerator, cpu limits all memory of the engine, and gpu, if given,
    also limits the part that holds gathered parameters, gradients and activations."""


class ActivationReserve(Section):
    """Memory that the plan reserves for a micro-batch's activations before the first batch is seen."""

    max_bytes: Limit = None
    """Peak bytes of activations on the device: bytes, "2GB", or a share of the free bytes there. Absent or "auto":
    what a batch tells: one of `sequence_length` or of the training data at the start, else the first one."""
    sequence_length: Count | None = None
    """Tokens of each sequence of the micro-batch that is measured at the start, of a model that takes `input_ids`."""


class Memory(Section):
    """Ours. Hard limits: a plan that does not fit is refused before anything is allocated."""

    gpu: TierLimit = TierLimit()
    cpu: TierLimit = TierLimit()
    nvme: TierLimit = TierLimit()
    activations: ActivationReserve = ActivationReserve()


class Kernels(Section):
    """Ours. Fused layers of other packages (docs/internals_kernels.md)."""

    liger: FlagOrAuto = False
    """Train the transformers models that Liger-Kernel knows with its norms, rotary embeddings, MLPs and losses without
    logits, on a CUDA device; the extra infinity-engine[liger] installs it. true refuses to train where that is
    impossible, "auto" trains without. Losses and gradients differ from those of the plain layers by rounding; with
    labels, the output of a training forward has no logits."""


class TimelineSection(Section):
    """Ours. A timeline of one optimizer step: waits, transfers and memory use (docs/timeline.md)."""

    path: Picture | None = None
    """File to write: a page (".html") or a Chrome trace (".json"); ranks above 0 add their number. Absent: none."""
    step: Count = 4
    """The optimizer step to record, counted from 1. The first steps are slower than the others."""


class _Folder(Section):
    enabled: Flag = False
    """Turn the monitor on."""
    output_path: Place = ""
    """Folder of all runs; empty: the working folder."""
    job_name: Text = "DeepSpeedJobName"
    """Folder of this run inside output_path."""


class TensorBoard(_Folder):
    """Metrics of each optimizer step as TensorBoard events; needs the package tensorboard (docs/monitoring.md)."""


class CsvMonitor(_Folder):
    """Metrics of each optimizer step, appended to one CSV file for each metric (docs/monitoring.md)."""


class Wandb(Section):
    """Metrics of each optimizer step, sent to Weights & Biases; needs the package wandb (docs/monitoring.md)."""

    enabled: Flag = False
    """Turn the monitor on."""
    group: Text | None = None
    """Group that this run belongs to."""
    team: Text | None = None
    """Team or user that owns the project."""
    project: Text = "deepspeed"
    """Project that the run belongs to."""


class OffloadCheckpoints(Section):
    """Ours. Where the inputs of recomputed blocks are kept between forward and backward. Applies to the model's own
    calls of torch.utils.checkpoint too."""

    device: Annotated[HomeDevice, NoAuto('choose "none", "cpu" or "nvme"')] = "none"
    """Ours. The accelerator ("none"), CPU memory or NVMe."""
    nvme_path: Annotated[Drives | None, NoAuto("name a folder on the drive")] = None
    """Ours. Folder on the drive, or a list of folders on several drives; absent: the path of offload_optimizer or
    offload_param."""
    buffer_count: Count = 4
    """Ours. Staging buffers in CPU memory between the accelerator and NVMe, each of the size of the largest input.
    Their number bounds the transfers in flight."""
    pin_memory: Flag = True
    """Ours. Page-lock the CPU memory."""


class ActivationCheckpointing(Section):
    """Recomputation of activations in backward instead of keeping them."""

    every: Natural = 0
    """Ours. Recompute every N-th of the model's repeated blocks in backward, starting with the first: 1 is all blocks,
    2 every second, 0 none."""
    keep_ops: Texts = ()
    """Ours. Operators, by torch's names, whose results are kept in recomputed blocks: with ["aten.mm"] backward does
    not repeat the matrix products."""
    offload: OffloadCheckpoints = OffloadCheckpoints()
    cpu_checkpointing: Annotated[
        Flag, Differs("it also moves the inputs of the model's own calls of torch.utils.checkpoint")
    ] = False
    """Older form of offload with device cpu."""
    partition_activations: Annotated[
        Flag, NoEffect("each rank of a tensor group keeps its checkpoints whole, or offloads them")
    ] = False
    """Partition saved activations."""
    contiguous_memory_optimization: Annotated[
        Flag, NoEffect("offloaded checkpoints use large buffers already, and other checkpoints are not copied")
    ] = False
    """Save them in one buffer."""
    number_checkpoints: Annotated[
        Natural | None, NoEffect("the space for checkpoints grows in the first step, and is then reused")
    ] = None
    """Number of checkpoints."""
    synchronize_checkpoint_boundary: Annotated[
        Flag, NoEffect("events order the copies, so the device is never synchronised for them")
    ] = False
    """Synchronise at every checkpoint."""
    profile: Annotated[Flag, NoEffect("engine.timeline() shows each block's forward, recomputation and backward")] = (
        False
    )
    """Time every checkpoint."""


@dataclass(frozen=True)
class Conventions:
    """The differences in meaning between two readers of the same configuration.

    foreign_keys: "refuse" raises ConfigError for a key that infinity does not have; "warn" logs it once and goes on.
    default_optimizer: whether a configuration and a program that name no optimizer mean AdamW, or if False none: such
        an engine runs its model and does not train it. `"optimizer": null` says the same in any configuration.
    parameter_attributes: whether parameters have DeepSpeed's attributes (`ds_id`, `ds_status`, ...) at stage 3, which
        make a program import deepspeed.
    init_dtype: the dtype of parameters made under `infinity.Init`: "own", what the constructor gives them, or
        "trained", the one that the configuration trains in, in which they are initialized and loaded.
    owned_model: what becomes of an engine that is open when its model is given to another: "refuse" raises ConfigError,
        "hand over" closes it and leaves the weights in the model, for a program that closes no engine.
    batch_of: whose samples `train_batch_size` counts beside a tensor or a pipeline axis: "data ranks", or "any", by
        which micro-batch x accumulation x all ranks is right, too, if all three are given: clients fill it in so.
    """

    foreign_keys: Literal["refuse", "warn"] = "refuse"
    default_optimizer: bool = True
    parameter_attributes: bool = False
    init_dtype: Literal["own", "trained"] = "own"
    owned_model: Literal["refuse", "hand over"] = "refuse"
    batch_of: Literal["data ranks", "any"] = "data ranks"


# infinity's own reading, and the default everywhere.
STRICT = Conventions()
# For programs written for DeepSpeed, whose clients add keys of their own and pass models without an optimizer.
DEEPSPEED = Conventions(
    foreign_keys="warn", default_optimizer=False, parameter_attributes=True, init_dtype="trained",
    owned_model="hand over", batch_of="any",
)  # fmt: skip

_OWN_SAVING = NoEffect("infinity writes checkpoints itself; see the checkpoint section")
_COMET = Refused("there is no monitor for Comet", "Remove the section, and enable tensorboard, csv_monitor or wandb")
_CHANGES_MODEL = Refused(
    "infinity never changes the model or its data", "Remove the section and do this in the program"
)
_NO_EXPERTS = Refused(
    "the parallel axes are data, tensor and pipeline", "Remove the key; stage 3 with offload fits large models"
)


def _absent(*keys: str) -> Absent:
    return Absent(keys=("enabled", *keys))


class ParallelWrite(Section):
    """Which ranks write at the same time."""

    pipeline_stage: Annotated[Flag, NoEffect("all ranks always write their own parts at the same time")] = False
    """Pipeline stages write in parallel."""


class Checkpoint(Section):
    """Settings of writing, keeping and loading checkpoints."""

    tag_validation: Annotated[TagValidation, Differs("ranks that disagree use rank 0's tag")] = "Warn"
    """What to do if ranks disagree about folder or tag: "Fail" raises, "Warn" and "Ignore" use rank 0's."""
    keep_last: Natural = 0
    """Ours. Number of latest checkpoints to keep in a folder. Older ones are removed once a new one is complete and has
    been read back. 0 keeps all."""
    keep_every: Natural = 0
    """Ours. Keep every N-th checkpoint for good, beside the latest ones. 0 keeps none."""
    load_universal: Annotated[Flag, NoEffect("every checkpoint loads with any number of ranks, stage and tiers")] = (
        False
    )
    """Load the universal format."""
    use_node_local_storage: Annotated[
        Flag,
        Refused("every rank reads files of all ranks", "Remove the key and save into a folder that all nodes share"),
    ] = False
    """Every node writes to its own storage."""
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: Annotated[Flag, NoEffect("bytes go to the drive without serialisation")] = True
    """Serialise with torch."""
    writer: Annotated[
        None,
        NoEffect("there is only one writer"),
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
    asynchronous: Annotated[Flag, Also(("async",))] = False
    """Ours. save_checkpoint returns once the state is captured, and a thread writes it during training. A step waits
    before it changes a state that is not written yet. A checkpoint is valid once all of it is on the drive."""
    bandwidth_share: FractionAboveZero = 1.0
    """Ours. Share of the time in which an asynchronous save moves bytes while the training loop does not wait for it;
    the rest of the time leaves the drive to the swap files."""
    path: Location | None = None
    """Ours. Location of the checkpoints that the engine writes by itself (on_signal, and when max_skipped_steps is
    reached), and the default folder of resume()."""
    every_step: EveryStep = "off"
    """Ours. What a run that dies in any moment loses at most one step to: "process", a killed process; "power", the
    machine, too, because each step is flushed to the drive. Each step is written beside the one before it, with a small
    record, so that resume() goes on from the swap files. "off" removes them with the process."""
    on_signal: SignalNames = ()
    """Ours. Signals, such as ["SIGTERM", "SIGUSR1"], after which the engine finishes the running step, saves a
    checkpoint in `path` and ends the program with status 0."""


@dataclass(frozen=True)
class Provenance:
    """The source of a configuration; only "auto" keys and conventions affect whether two configurations are equal."""

    # Path of the file, for messages.
    origin: str = field(default="configuration", compare=False)
    # Dotted path -> value as written, for keys that the user wrote.
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # Dotted paths of the keys that are "auto"; until `resolve` their fields hold the default.
    autos: frozenset[str] = frozenset()
    # How the source was read.
    conventions: Conventions = STRICT
    # Dotted path -> a sentence, for each key that was left out because infinity does not have it.
    foreign: Mapping[str, str] = field(default_factory=dict, compare=False)


class Config(Section):
    """A checked configuration; `resolve` gives the keys that are "auto" their values."""

    train_batch_size: Count | None = None
    """Samples in one optimizer step over all ranks. Missing batch keys follow from the given ones."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Samples in one forward on one rank."""
    gradient_accumulation_steps: Count | None = None
    """Backward passes in one optimizer step."""
    managed_gradient_accumulation: Flag = True
    """The engine counts the micro-batches of a step; false: the program decides when to step."""
    gradient_clipping: Weight = 1.0
    """Bound of the global gradient norm. Absent: 1.0; 0 turns clipping off."""
    gradient_clipping_value: Weight = 0.0
    """Ours. Bound of each element of the gradient, averaged over ranks and micro-batches; 0 turns it off. Applied after
    gradient_clipping."""
    steps_per_print: Annotated[Interval, Differs("the line is infinity's own")] = None
    """Optimizer steps between two progress lines. Absent, 0 or "inf": no lines."""
    gradient_allreduce_op: ReduceOp = "mean"
    """How gradients of all ranks are combined."""
    communication_data_type: Dtype | None = None
    """Type in which gradients are sent between ranks and summed; absent: the model's type."""
    dataloader_drop_last: Flag = False
    """Leave out the last, smaller batch."""
    dataloader_num_workers: Natural = 0
    """Ours. Worker processes of each rank that read and collate batches for the loader that initialize() makes from
    training_data; 0: the program does it."""
    dataloader_prefetch_factor: Count | None = None
    """Ours. Batches that each worker process prepares ahead; absent: 2."""
    dataloader_persistent_workers: Flag = False
    """Ours. Keep the worker processes between epochs."""
    dataloader_pin_memory: Flag = False
    """Ours. Collate into pinned memory, so that copies to the accelerator do not block the program; no effect without
    an accelerator."""
    log_level: Annotated[LogLevel | None, Differs("it sets the level of infinity's own lines")] = None
    """Level of infinity's log lines."""
    data_parallel_size: Count | None = None
    """Checked against the number of data-parallel ranks."""
    overlap: Flag = True
    """Ours. Overlap prefetches, flushes and gradient transfers with the computation; false gives the same bits without
    overlap."""
    speculative_step: Flag | None = None
    """Ours. Step a sub-group whose states and parameters are on NVMe during backward, once its gradients are complete,
    although the step waits for the norm (clipping, check_grad_overflow, fp16): on the guess that the norm is below the
    limit and finite. The results go to a second place on the drive and take effect in step(), or are thrown away and
    stepped again: the bits are those of a step that waits. Absent or "auto": beside an accelerator, where the drive has
    the room; after a wrong guess it rests for some steps, each time for longer. true: also without an accelerator and
    without rests, and for what lies in CPU memory, where old values then take at most half of what is free."""
    check_grad_overflow: Flag = True
    """Ours, for fp32 and bf16. Skip a step that has non-finite gradients, at every stage. False leaves out only the
    non-finite elements. Without clipping, false also steps a sub-group whose states and parameters are on NVMe during
    backward, once its gradients are complete; the results go to a second place on the drive and take effect in
    step()."""
    max_skipped_steps: Natural = 50
    """Ours. Consecutive steps skipped for non-finite gradients after which step() raises; 0: never. The search for the
    first loss scale in fp16 does not count."""
    watchdog_seconds: Seconds = 600.0
    """Ours. Time limit of one I/O request and of one wait for other ranks; after it every rank raises and names the
    waiting ranks and operations. Ranks that diverge, fail or exit are detected within seconds at any value."""
    cross_memory_attach: Flag = True
    """Ours. Without an accelerator, ranks of one host read each other's partitions and gradients from memory if the
    kernel permits it (process_vm_readv); false sends them through sockets. Both give the same bits; sockets take three
    times the processor time."""
    hardware_profile: Location | None = None
    """Ours. A profile written by `infinity bench`; block size, queue depth and shares of the drives come from it unless
    aio sets them. Absent: they are chosen or measured at the start."""

    optimizer: Annotated[AnyOptimizer | None, Field(discriminator="type")] = None
    """What steps the model; absent: AdamW. Ours: null for none, if the program passes none either: the engine runs the
    model, and holds its weights only."""
    scheduler: Annotated[Scheduler | None, Field(discriminator="type")] = None
    fp16: Fp16 = Fp16()
    bf16: Annotated[Bf16, Also(("bfloat16",))] = Bf16()
    data_types: DataTypes = DataTypes()
    torch_autocast: TorchAutocast = TorchAutocast()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    memory: Memory = Memory()
    kernels: Kernels = Kernels()
    timeline: TimelineSection = TimelineSection()
    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    checkpoint: Checkpoint = Checkpoint()
    parallel: ParallelSection = ParallelSection()
    pipeline: Pipeline = Pipeline()
    tensor_parallel: TensorParallelSection = TensorParallelSection()

    amp: Amp = None
    """Mixed precision of apex."""
    wall_clock_breakdown: Annotated[Flag, Differs("the phases are infinity's own")] = False
    """Print the times of a step's phases after the first step and with every progress line. engine.step_times() returns
    them on every rank (docs/monitoring.md)."""
    memory_breakdown: Annotated[Flag, Differs("the table is infinity's own")] = False
    """Print the use of memory after the first step and with every progress line."""
    dump_state: Annotated[Flag, NoEffect("print the resolved configuration's explain() instead")] = False
    """Print the engine's state at the start."""
    disable_python_gc: Annotated[Flag, NoEffect("Python's garbage collector is left to the program")] = False
    """Collect garbage only at fixed points of a step."""
    disable_allgather: Annotated[Flag, NoEffect("a unit is gathered by one collective that the plan chooses")] = False
    """Broadcast instead of gathering."""
    sparse_gradients: Annotated[Flag, NoEffect("gradients are sent dense, with the same result")] = False
    """Send embedding gradients as sparse tensors."""
    graph_harvesting: Annotated[Flag, NoEffect("optimizer steps are not captured as CUDA graphs")] = False
    """Capture the optimizer in a CUDA graph."""
    prescale_gradients: Annotated[Flag, NoEffect("only gradient_allreduce_op decides the reduction")] = False
    """Divide before the reduction."""
    gradient_predivide_factor: Annotated[Positive, NoEffect("it only matters to prescale_gradients")] = 1.0
    """Divisor before the reduction."""
    zero_allow_untested_optimizer: Annotated[Flag, NoEffect("every elementwise optimizer is accepted")] = False
    """Accept any optimizer."""
    zero_force_ds_cpu_optimizer: Annotated[Flag, NoEffect("every elementwise optimizer is accepted")] = True
    """Require DeepSpeed's CPU optimizer."""
    vocabulary_size: Annotated[Natural | None, NoEffect("nothing depends on it")] = None
    """Size of the vocabulary, for throughput figures."""
    timers: Annotated[None, NoEffect("see wall_clock_breakdown and engine.step_times()"), Absent(switch=None)] = None
    """Throughput timers."""
    seq_parallel_communication_data_type: Annotated[
        Dtype, NoEffect("ranks of a sequence exchange what attention computes with, in its own type")
    ] = "fp32"
    """Type in which sequence-parallel ranks communicate."""
    sequence_parallel_size: Count = 1
    """Ranks that share each sequence: each has consecutive tokens of it, and in attention some heads of all tokens."""
    expert_parallel: Annotated[None, _NO_EXPERTS, Absent()] = None
    """Expert parallelism."""
    use_data_before_expert_parallelism: Annotated[
        Flag, replace(_NO_EXPERTS, ignored="without an expert axis there is no order of axes")
    ] = False
    """Order of the data and expert axes."""
    flops_profiler: Annotated[
        None,
        NoEffect("torch.profiler counts operations; wall_clock_breakdown and timeline show times"),
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
        Refused("infinity does not change batch sizes", "Set the batch keys for the number of ranks"),
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
    """Curriculum learning."""
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
    sparse_attention: SparseAttention | None = None
    weight_quantization: Annotated[None, _CHANGES_MODEL, Absent(absent=True)] = None
    """Quantised weights."""
    hybrid_engine: Annotated[
        None, Refused("there is no generation engine", "Remove the section and call the module's generate()"), Absent()
    ] = None
    """Training and generation in one engine."""
    compile: Annotated[
        None,
        Refused(
            "its graph passes are DeepSpeed's own",
            "Remove the section and call engine.compile()",
            ignored="engine.compile() compiles with torch's own passes, with the same result",
        ),
        Absent(
            switch="deepcompile",
            keys=(
                "deepcompile",
                "autoep_non_moe",
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
        None, Refused("there is no tuner", "Remove the section; the plan computes buffer sizes"), Absent()
    ] = None
    """Search for a configuration."""

    _provenance: Provenance = PrivateAttr(default=Provenance())

    @property
    def provenance(self) -> Provenance:
        return self._provenance

    def from_source(self, provenance: Provenance) -> Config:
        """Return an equal configuration with another provenance."""
        return self.model_copy()._note_source(provenance)

    def _note_source(self, provenance: Provenance) -> Config:
        self._provenance = provenance
        return self

    def report(self) -> list[str]:
        """Return one line for each key that the user set and that has no effect whatever the other keys are."""
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
