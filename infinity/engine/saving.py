"""What `engine.save_checkpoint` does, in its order: collective from end to end, and alike on every rank.

    tag and state agreed -> each rank's files -> manifest -> `latest` -> older checkpoints go

A save that fails, on whatever rank, leaves the checkpoint that was there, and the engine as it was: training can go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.background import Background, Together
from infinity.checkpoint.describe import describe_model
from infinity.checkpoint.format import (
    BUFFER,
    MANIFEST,
    FileInfo,
    Manifest,
    RankIndex,
    TensorInfo,
    read_manifest,
)
from infinity.checkpoint.pieces import shares, tensor_kinds
from infinity.checkpoint.publish import (
    Retention,
    SaveTarget,
    check_tag,
    claimed,
    prepare,
    publish_checkpoint,
    remove,
    remove_save,
    write_client,
)
from infinity.checkpoint.ranks import run_on_all_ranks
from infinity.checkpoint.save import Capture, write
from infinity.checkpoint.sources import LiveSource, PartitionSource, SnapshotSource, snapshot_of
from infinity.checkpoint.state import Trainee, random_state, run_state, singles_of, spelled
from infinity.engine.runtime import Runtime
from infinity.engine.step import Boundary
from infinity.errors import CheckpointError, StateError
from infinity.log import logger
from infinity.memory.partition import DTYPES
from infinity.memory.queue_options import queue_options
from infinity.ops.aio import Queue
from infinity.plan.spec import dtype_name


@dataclass
class SaveRequest:
    """What a program asks to be saved, and how."""

    directory: Path
    tag: str
    latest: bool
    frozen: bool
    behind: bool
    client_state: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # The part of the manifest that is about the run.
    run: dict[str, Any] = field(default_factory=dict)
    # And those about the model.
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.directory / self.tag


def save(
    trainee: Trainee, parts: Runtime, boundary: Boundary, background: Background, directory: str | Path,
    tag: object = None, client_state: Mapping[str, Any] | None = None, *, latest: bool = True,
    exclude_frozen: bool = False, behind: bool = False,
) -> str:  # fmt: skip
    """See `Engine.save_checkpoint`. `behind`: return when the state is captured, and leave the rest to `background`."""
    parts.hooks.check_tree()
    order = SaveRequest(Path(directory), "", latest, not exclude_frozen, behind)
    asked = f"global_step{trainee.global_steps}" if tag is None else str(tag)
    ask = partial(run_on_all_ranks, parts.groups, path=order.directory)

    def settle() -> dict[str, str]:
        background.finish()
        said = _order(order, trainee, parts, boundary, asked, client_state)
        captured.append(capture_of(order, parts))
        return said

    captured: list[Capture] = []
    said = ask("what to save", settle)
    order.tag, order.directory = _agreed_tag(said, parts, order.directory), Path(said[0]["directory"])
    if not order.behind:
        _carry_out(order, parts, captured[0], LiveSource(parts.store), ask)
        return order.tag
    capture = captured[0].apart()
    order.tensors = {name: tensor.clone() for name, tensor in order.tensors.items()}
    snapshot = snapshot_of(parts.plan, [piece.key for piece in capture.pieces], in_backward=boundary.early)
    source = SnapshotSource(parts.store, snapshot, share=parts.config.config.checkpoint.bandwidth_share)
    background.begin(order.folder, snapshot, partial(_carry_out, order, parts, capture, source))
    return order.tag


def _carry_out(
    order: SaveRequest, parts: Runtime, capture: Capture, source: PartitionSource, ask: Together,
    moved: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """From the capture to the checkpoint. `ask`: how all ranks are asked; what one raises every rank raises. `moved`:
    called while this rank writes.
    """
    with ExitStack() as stack:
        place = _claim(order, parts, stack, ask)
        capture = replace(capture, previous=_previous(order.directory, place, capture.rank))
        infos = _write(order, parts, place, capture, source, ask, moved)
        _publish(order, parts, place, infos, ask)
        if capture.rank == 0:
            remove([order.directory / name for name in place.outdated])


def queue_of(parts: Runtime) -> Queue:
    """A queue of its own for a save or a load, as the configuration says how drives are used."""
    options = queue_options(parts.config, ())
    return Queue(
        depth=options.depth, threads=options.threads, timeout_s=options.timeout_seconds,
        block_nbytes=options.block_nbytes,
    )  # fmt: skip


def capture_of(order: SaveRequest, parts: Runtime) -> Capture:
    """What this rank writes."""
    rank = parts.groups.ranks.rank
    return Capture(
        rank=rank,
        pieces=tuple(shares(parts.plan, parts.groups.data.index, frozen=order.frozen)),
        buffers=buffers_of(parts.module) if rank == 0 else (),
        rng=random_state(parts.device),
        singles=singles_of(parts.stepper),
    )


def buffers_of(module: nn.Module) -> tuple[tuple[str, str, Tensor], ...]:
    """(name, dtype, values) of each buffer that a state dict has."""
    persistent = module.state_dict(keep_vars=True).keys()
    found = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
    for name, buffer in found:
        if buffer.dtype not in DTYPES.values():
            raise CheckpointError(
                name, f"a buffer of dtype {buffer.dtype} cannot be kept in a checkpoint",
                "Register it with persistent=False, or keep its real and imaginary parts",
            )  # fmt: skip
    return tuple((name, dtype_name(buffer.dtype), buffer) for name, buffer in found)


def manifest_of(
    order: SaveRequest, parts: Runtime, place: SaveTarget, infos: list[FileInfo], client: FileInfo | None
) -> Manifest:
    """The manifest of what has been written."""
    plan = parts.plan
    return Manifest(
        id=place.id, tag=order.tag, number=place.number, time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={
            "infinity": infinity.__version__, "torch": str(torch.__version__), "python": sys.version.split()[0],
        },
        plan={
            "fingerprint": plan.fingerprint(), "stage": plan.request.stage, "world_size": plan.topology.dp,
            "compute_dtype": plan.request.compute_dtype,
        },
        ranks=tuple(infos), engine=order.run, client_state=order.client_state, client=client, **order.model,
    )  # fmt: skip


def tied_of(module: nn.Module) -> dict[str, str]:
    """Other names of parameters, each with the first."""
    first = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if first[id(param)] != name}


def _order(
    order: SaveRequest, trainee: Trainee, parts: Runtime, boundary: Boundary, tag: str,
    client_state: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Settle everything that can be wrong before anything is written; returns what ranks must agree on."""
    check_tag(tag)
    waiting = [
        unit.layout.name for unit, arrived in parts.gradients.arrived.items() if any(arrived)
    ]
    if waiting:
        raise StateError(
            f"cannot save: gradients have accumulated (of {waiting[0]}; micro-step {trainee.micro_steps}, "
            f"{parts.config.accumulation} make a step) and are not part of a checkpoint. Save behind the engine.step() "
            "that applies them, or call engine.zero_grad() first"
        )
    if not order.behind:
        parts.stepper.finish()
    order.model = {
        "tensors": _tensors(order, parts), "tied": tied_of(parts.module), "module": _module(parts.module),
    }
    order.run = run_state(trainee, parts.stepper, boundary, path=order.directory)
    own = trainee.client_state if client_state is None else client_state
    # Asked on every rank: it may be a collective of the program's.
    own = own() if callable(own) else own
    if parts.groups.ranks.rank == 0:
        order.client_state = spelled(dict(own or {}), order.tensors, path=order.directory)
    return {"tag": tag, "directory": str(order.directory.absolute())}


def _agreed_tag(said: list[dict[str, str]], parts: Runtime, directory: Path) -> str:
    """Rank 0's; what other ranks may say is the configuration's business."""
    first, validation = said[0], parts.config.config.checkpoint.tag_validation
    others = [rank for rank, each in enumerate(said) if each != first]
    if others and validation != "Ignore":
        other = said[others[0]]
        text = (
            f"rank 0 saves {first['tag']!r} into {first['directory']}, rank {others[0]} {other['tag']!r} into "
            f"{other['directory']}"
        )
        if validation == "Fail":
            raise CheckpointError(directory, text, "Give save_checkpoint the same folder and tag on every rank")
        logger.warning("%s: rank 0's is taken (checkpoint.tag_validation is Warn)", text)
    return first["tag"]


def _claim(order: SaveRequest, parts: Runtime, stack: ExitStack, ask: Together) -> SaveTarget:
    """Take the folder, and remove what killed saves have left there."""

    def claim() -> dict[str, Any]:
        if parts.groups.ranks.rank != 0:
            return {}
        stack.enter_context(claimed(order.directory))
        section = parts.config.config.checkpoint
        retention = Retention(section.keep_last, section.keep_every)
        return asdict(prepare(order.directory, order.tag, retention, latest=order.latest))

    return SaveTarget(**ask("place of a checkpoint", claim)[0])


def _previous(directory: Path, place: SaveTarget, rank: int) -> tuple[Path, RankIndex] | None:
    """An earlier checkpoint's index of this rank, where it can be read."""
    if place.previous is None:
        return None
    folder = directory / place.previous
    with suppress(CheckpointError):
        manifest = read_manifest(folder)
        if rank < len(manifest.ranks):
            return folder, manifest.index(folder, rank)
    return None


def _write(
    order: SaveRequest, parts: Runtime, place: SaveTarget, capture: Capture, source: PartitionSource, ask: Together,
    moved: Callable[[], None],
) -> list[FileInfo]:  # fmt: skip
    """Every rank's files, or none; read back and verified where older checkpoints are to go."""

    def job() -> dict[str, Any]:
        if not order.folder.is_dir():
            raise CheckpointError(
                order.folder, "rank 0 has made this folder, which is not seen here",
                "Save into a folder that all nodes share",
            )  # fmt: skip
        with queue_of(parts) as queue:
            read_back = bool(place.outdated)
            return asdict(write(capture, source, order.folder, place.id, queue, read_back=read_back, moved=moved))

    try:
        return [FileInfo(**row) for row in ask("files of a checkpoint", job)]
    except BaseException:
        _remove(order, parts, place)
        raise


def _remove(order: SaveRequest, parts: Runtime, place: SaveTarget) -> None:
    """Undo a save that has failed, unless it is a checkpoint already. Only rank 0 knows that; behind the program
    another rank may have stopped waiting before.
    """
    manifest = order.folder / MANIFEST
    if parts.groups.ranks.rank == 0 and not (manifest.exists() and read_manifest(order.folder).id == place.id):
        remove_save(order.folder, place.id)


def _publish(order: SaveRequest, parts: Runtime, place: SaveTarget, infos: list[FileInfo], ask: Together) -> None:
    def job() -> None:
        if parts.groups.ranks.rank == 0:
            client = write_client(order.folder, place.id, order.tensors)
            manifest = manifest_of(order, parts, place, infos, client)
            publish_checkpoint(order.directory, manifest, latest=order.latest, checked=bool(place.outdated))

    try:
        ask("manifest of a checkpoint", job)
    except BaseException:
        _remove(order, parts, place)
        raise


def _tensors(order: SaveRequest, parts: Runtime) -> dict[str, TensorInfo]:
    kinds = tensor_kinds(parts.plan)
    tensors = {
        slot.name: TensorInfo(
            shape=slot.shape, dtype=layout.dtype, trainable=layout.trainable,
            kinds=kinds[slot.name] if layout.trainable or order.frozen else (),
        )
        for layout in parts.plan.layouts
        for slot in layout.slots
    }  # fmt: skip
    for name, dtype, buffer in buffers_of(parts.module):
        tensors[name] = TensorInfo(tuple(buffer.shape), dtype, trainable=False, kinds=(BUFFER,))
    return tensors


def _module(module: nn.Module) -> dict[str, Any]:
    """What the model is, for readers that have none of its code."""
    kind = type(module)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "export": describe_model(module).to_json()}
