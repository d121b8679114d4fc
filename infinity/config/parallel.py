"""The sections about the axes of ranks: infinity's own, and DeepSpeed's names of the same sizes."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import Absent, Also, Differs, NoEffect, Refused, Section
from infinity.config.values import Count, Counts, Dtype, Flag, Natural, Schedule, Styles, SumAt, Text

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
