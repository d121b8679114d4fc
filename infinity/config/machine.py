"""The sections about the machine: how its drive is used, how much of it, and what a step does with it."""

from __future__ import annotations

from typing import Annotated

from infinity.config.section import HONOURED, Also, NoEffect, Refused, Section
from infinity.config.values import Check, Count, Flag, Limit, Picture, Shares

_ASYNCHRONOUS = NoEffect("requests are always submitted in batches and never waited for one by one")


class Aio(Section):
    """How NVMe is read and written. DeepSpeed's keys are hints: none of them can make a run fail."""

    block_size: Annotated[Count | None, HONOURED] = None
    """Bytes of one request to the drive; 1 MiB when absent."""
    queue_depth: Annotated[Count, HONOURED] = 8
    """Requests in flight for one I/O thread."""
    intra_op_parallelism: Annotated[Count | None, HONOURED, Also(("thread_count",))] = None
    """I/O threads; chosen from the machine when absent."""
    checksum: Annotated[Check, HONOURED] = "sampled"
    """Ours. Keep a CRC-32C of what is written to NVMe, and compare at every read: "sampled", of one line of 64 bytes of
    each page of 4096, which finds bytes that were lost, belong elsewhere or are older; true, of every byte, to search
    for a drive that flips bits."""
    drive_weights: Annotated[Shares, HONOURED] = ()
    """Ours. Shares of the bytes for each folder of a list in nvme_path; measured when absent."""
    single_submit: Annotated[Flag, _ASYNCHRONOUS] = False
    """Submit requests one at a time."""
    overlap_events: Annotated[Flag, _ASYNCHRONOUS] = True
    """Submit and complete at the same time."""
    use_gds: Annotated[
        Flag, Refused("GPUDirect Storage is not used", "Remove the key: bytes go through pinned CPU memory")
    ] = False
    """Move bytes between the drive and the accelerator directly."""


class TierLimit(Section):
    """The cap of one tier."""

    max_bytes: Annotated[Limit, HONOURED] = None
    """Hard cap of what the engine holds here: bytes, "16GB", "1.5GiB", or a share of what is free such as "80%".
    Absent or "auto": what the machine has. Of the accelerator it is each rank's; of CPU memory and NVMe the ranks of a
    node share it. Without an accelerator cpu bounds all that the engine holds in memory; gpu, where given, is then a
    bound of its own for what computes."""


class ActivationReserve(Section):
    """What is set aside for a micro-batch's activations, beside the plan, before there is a batch."""

    max_bytes: Annotated[Limit, HONOURED] = None
    """Bytes of them on the device at their busiest: bytes, "2GB", or a share of what is free there. Absent or "auto":
    measured on the model's shapes, where it is a causal language model of transformers, and 64 MiB otherwise."""
    sequence_length: Annotated[Count | None, HONOURED] = None
    """Tokens of a sequence, for what is measured. Absent: 128, or what the model takes if that is less."""


class Memory(Section):
    """Ours. Hard caps: a plan that does not fit is refused before anything is allocated."""

    gpu: TierLimit = TierLimit()
    cpu: TierLimit = TierLimit()
    nvme: TierLimit = TierLimit()
    activations: ActivationReserve = ActivationReserve()


class TimelineSection(Section):
    """Ours. A picture of one optimizer step: where it waited, what moved, what memory held (docs/timeline.md)."""

    path: Annotated[Picture | None, HONOURED] = None
    """File to write: a page (".html") or a Chrome trace (".json"); ranks above 0 put theirs beside it. Absent: none."""
    step: Annotated[Count, HONOURED] = 4
    """The optimizer step to record, counted from 1. The first ones warm up."""
