"""The sections about the machine: NVMe access, memory limits, fused layers, and the recorded timeline of a step."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import Also, Differs, NoEffect, Refused, Section
from infinity.config.values import Check, Count, Flag, FlagOrAuto, Limit, Picture, Shares

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
