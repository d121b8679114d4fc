"""What `engine.load_checkpoint` does, in its order: collective from end to end, and alike on every rank.

    found -> compared with the model, the optimizer and the sizes of files -> partitions -> whole units, buffers, state

A load that is refused has changed nothing. One that fails once values are being overwritten says so, and the engine
refuses to go on until a load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from infinity.checkpoint.codec import decode
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import (
    BUFFER,
    MANIFEST,
    PARAM,
    Manifest,
    RankIndex,
    TensorInfo,
    broken,
    check_files,
    complete,
    find,
    identity_of,
    latest_tag,
    read_manifest,
)
from infinity.checkpoint.matching import Match, match, report_mismatch
from infinity.checkpoint.pieces import holdings
from infinity.checkpoint.ranks import run_on_all_ranks
from infinity.checkpoint.restore import CheckpointSource, Filling, ValueSource, fill_partitions
from infinity.checkpoint.state import Trainee, check_random, check_run, restore_random, restore_run
from infinity.checkpoint.stored import Stored
from infinity.engine.runtime import Runtime
from infinity.engine.saving import buffers_of, queue_of, tied_of
from infinity.engine.step import Boundary
from infinity.errors import CheckpointError, ConfigError, TransferError
from infinity.log import PhaseProgress, logger
from infinity.memory.partition import DTYPES
from infinity.observability.observer import Observer
from infinity.zero.weight_files import INDEX, SINGLE, WeightFolder


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a program asks to be loaded."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False


@dataclass
class Found:
    """A checkpoint, or a folder of weights, that suits the model. `manifest` and `indexes` are the checkpoint's."""

    folder: Path
    match: Match
    manifest: Manifest | None = None
    indexes: list[RankIndex] | None = None
    client_state: Any = None


def load_checkpoint(
    trainee: Trainee, parts: Runtime, boundary: Boundary, observer: Observer, directory: str | Path, tag: object = None,
    wanted: Wanted | None = None,
) -> tuple[str | None, Any]:  # fmt: skip
    """See `Engine.load_checkpoint`."""
    found: list[Found | None] = []
    wanted = wanted or Wanted()
    path = Path(directory)

    def examine() -> str | None:
        found.append(_find(trainee, parts, boundary, path, None if tag is None else str(tag), wanted))
        return None if found[0] is None else str(found[0].manifest.id if found[0].manifest else found[0].folder)

    seen = run_on_all_ranks(parts.groups, "what to load", examine, path=path)
    if len(set(seen)) > 1:
        others = next(rank for rank, each in enumerate(seen) if each != seen[0])
        raise CheckpointError(
            path, f"rank 0 sees {seen[0] or 'no checkpoint'} here, rank {others} {seen[others] or 'none'}",
            "Put it on a drive that all nodes share",
        )  # fmt: skip
    chosen = found[0]
    if chosen is None:
        return None, {}
    with _overwriting(observer, chosen.folder):
        _take_over(trainee, parts, chosen, wanted)
        _restore(trainee, parts, boundary, chosen, wanted)
    logger.info("loaded %s", chosen.folder)
    return str(chosen.folder), chosen.client_state if chosen.manifest is not None else {}


def resume(
    load: Callable[[Path, str], tuple[str | None, Any]], parts: Runtime, load_dir: str | os.PathLike[str] | None
) -> tuple[str | None, Any]:
    """See `Engine.resume`. `load` loads a tag of a folder; it raises alike on all ranks."""
    chosen = parts.config.config.checkpoint.path if load_dir is None else load_dir
    if chosen is None:
        raise ConfigError("resume() needs a folder: pass one, or set checkpoint.path")
    directory = Path(chosen)

    def look() -> tuple[list[str], list[tuple[str, str, bool]]]:
        if parts.groups.ranks.rank != 0:
            return [], []
        tags = [folder.name for folder, _ in complete(directory)]
        return tags, _unusable(directory, tags)

    tags, unusable = run_on_all_ranks(parts.groups, "checkpoints to resume from", look, path=directory)[0]
    failures: list[str] = []
    for at, why, was_whole in unusable:
        logger.warning("not resumed from %s: %s", at, why)
        failures += [why] if was_whole else []
    for tag in tags:
        try:
            return load(directory, tag)
        except CheckpointError as error:
            logger.warning("not resumed from %s: %s", directory / tag, error)
            failures.append(str(error))
    if failures:
        raise CheckpointError(
            directory, f"none of its {len(failures)} checkpoints can be loaded, one because {failures[-1]}",
            "Mend what the message says, or begin in another folder",
        )  # fmt: skip
    logger.info("there is no checkpoint to resume from in %s: the run begins", directory)
    return None, {}


def _unusable(directory: Path, tags: list[str]) -> list[tuple[str, str, bool]]:
    """(path, why, whether there was a checkpoint) of what is no checkpoint or none any more; `tags` are those that are.

    Other programs keep a manifest.json, too, but no files of our names beside it. A save writes `latest` when its
    checkpoint is complete: what that names was one.
    """
    named, found = None, []
    try:
        named = latest_tag(directory)
    except CheckpointError as error:
        found.append((error.path, str(error), True))
    for at, why in broken(directory):
        ours = any(identity_of(name) is not None for name in os.listdir(at))
        found.append((str(at), why, at.name == named or (ours and (at / MANIFEST).exists())))
    known = [*tags, *(Path(path).name for path, _, _ in found)]
    if named is not None and named not in known:
        found.append((str(directory / named), f"`latest` names {named}, and there is nothing of it", True))
    return found


def _find(
    trainee: Trainee, parts: Runtime, boundary: Boundary, directory: Path, tag: str | None, wanted: Wanted
) -> Found | None:
    """The checkpoint, looked at as far as can be without reading its tensors; None where there is none."""
    folder = find(directory, tag)
    if folder is None:
        holds_weights = any((directory / name).is_file() for name in (INDEX, SINGLE))
        if tag is None and latest_tag(directory) is None and holds_weights:
            return _find_weights(parts, directory, wanted)
        _say_none(directory, tag)
        return None
    manifest = read_manifest(folder)
    indexes = check_files(folder, manifest)
    if not wanted.module_only:
        check_run(
            trainee, boundary, manifest.engine, [index.singles for index in indexes],
            optimizer=wanted.optimizer and _has_states(manifest), scheduler=wanted.scheduler, path=folder,
        )  # fmt: skip
        rank = parts.groups.ranks.rank
        if rank < len(indexes):
            check_random(indexes[rank].rng, parts.device, path=folder)
    found = match(_tensors(parts), tied_of(parts.module), manifest.tensors, manifest.tied)
    report_mismatch(found, folder, strict=wanted.strict)
    with ExtentReader(folder, manifest, indexes) as reader:
        reader.check_covered(manifest.tensors)
    return Found(folder, found, manifest, indexes, _client_state(folder, manifest))


def _client_state(folder: Path, manifest: Manifest) -> Any:
    """What the program gave. Its tensors are read by the safetensors library, which trusts no header either."""
    try:
        tensors = load(manifest.client.read(folder)) if manifest.client is not None else {}
        return decode(manifest.client_state, tensors)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            folder, f"its client_state cannot be read ({error})",
            "Load another checkpoint, or load_module_only=True for the weights alone",
        ) from error  # fmt: skip


def _find_weights(parts: Runtime, folder: Path, wanted: Wanted) -> Found:
    """A folder of safetensors files."""
    weights = WeightFolder(folder)
    try:
        found = match(_tensors(parts), tied_of(parts.module), Stored(weights.tensors).tensors, {})
        report_mismatch(found, folder, strict=wanted.strict)
    finally:
        weights.close()
    return Found(folder, found)


def _say_none(directory: Path, tag: str | None) -> None:
    """CheckpointError where something was named that is not there; otherwise a warning."""
    named = latest_tag(directory) if tag is None else tag
    there = ", ".join(path.name for path, _ in complete(directory)[:5])
    if named is not None:
        what = "`latest` names it, but there is" if tag is None else "there is"
        raise CheckpointError(
            directory / named, f"{what} no complete checkpoint",
            f"Pass one of the tags that are there: {there}" if there else "Load from another folder",
        )  # fmt: skip
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(directory, "it is a file", "Name the folder that save_checkpoint() was given")
    # Other programs keep a manifest.json, too.
    if (directory / MANIFEST).is_file() and any(identity_of(name) is not None for name in os.listdir(directory)):
        raise CheckpointError(
            directory, "it is a checkpoint itself", f"Load from {directory.parent} with tag={directory.name!r}"
        )
    more = f"; there are {there}" if there else ""
    logger.warning("nothing loaded: there is no `latest`, and no tag was given, in %s%s", directory, more)


def _has_states(manifest: Manifest) -> bool:
    return any(info.trainable for info in manifest.tensors.values())


def _tensors(parts: Runtime) -> dict[str, TensorInfo]:
    """What the model has."""
    tensors = {
        slot.name: TensorInfo(slot.shape, layout.dtype, layout.trainable, (PARAM,))
        for layout in parts.plan.layouts
        for slot in layout.slots
    }
    for name, dtype, buffer in buffers_of(parts.module):
        tensors[name] = TensorInfo(tuple(buffer.shape), dtype, trainable=False, kinds=(BUFFER,))
    return tensors


@contextmanager
def _overwriting(observer: Observer, folder: Path) -> Iterator[None]:
    """Values of the engine are being replaced: it is unusable unless the block comes to its end."""
    observer.broken = f"loading {folder} failed after values had been overwritten, and no load has succeeded since"
    try:
        yield
    except (CheckpointError, TransferError) as error:
        raise CheckpointError(
            folder, f"loading failed after values of this engine had been overwritten: {error}",
            "Call load_checkpoint() with another checkpoint before anything else",
        ) from error  # fmt: skip
    observer.broken = ""


def _take_over(trainee: Trainee, parts: Runtime, found: Found, wanted: Wanted) -> None:
    """Partitions on every rank, then what is whole on the device."""
    filling = Filling(
        plan=parts.plan, index=parts.groups.data.index, names=found.match.source,
        moments=found.manifest is not None and wanted.optimizer and not wanted.module_only,
        start=parts.stepper.start,
    )  # fmt: skip

    def job() -> None:
        for settle in (parts.stepper.reset, parts.coordinator.next_step, parts.gradients.reset):
            settle()
        with _source(found, parts) as source:
            fill_partitions(filling, parts.store, source)
            _fill_buffers(parts, found, source)

    run_on_all_ranks(parts.groups, "partitions of a checkpoint", job, path=found.folder)
    for unit in parts.units:
        if unit.placed.whole:
            unit.refresh()


@contextmanager
def _source(found: Found, parts: Runtime) -> Iterator[ValueSource]:
    with ExitStack() as stack:
        if found.manifest is None:
            weights = WeightFolder(found.folder)
            stack.callback(weights.close)
            yield Stored(weights.tensors)
            return
        assert found.indexes is not None
        queue = stack.enter_context(queue_of(parts))
        total = sum(piece.nbytes for piece in holdings(parts.plan, parts.groups.data.index))
        progress = PhaseProgress(f"loading {found.folder}", total)
        yield CheckpointSource(
            stack.enter_context(ExtentReader(found.folder, found.manifest, found.indexes, queue, progress.advance))
        )


def _fill_buffers(parts: Runtime, found: Found, source: ValueSource) -> None:
    for name, _, buffer in buffers_of(parts.module):
        saved = found.match.source[name]
        if saved is None or not buffer.numel():
            continue
        info = source.tensors[saved]
        values = torch.empty(buffer.numel(), dtype=DTYPES[info.dtype], device="cpu")
        source.read(saved, BUFFER if BUFFER in info.kinds else PARAM, 0, buffer.numel(), values)
        with torch.no_grad():
            buffer.copy_(values.view(info.shape))


def _restore(trainee: Trainee, parts: Runtime, boundary: Boundary, found: Found, wanted: Wanted) -> None:
    manifest, indexes = found.manifest, found.indexes
    if manifest is None or indexes is None or wanted.module_only:
        return
    managed = parts.config.config.managed_gradient_accumulation
    restore_run(
        trainee, parts.stepper, boundary, manifest.engine, [index.singles for index in indexes], found.match.source,
        optimizer=wanted.optimizer and _has_states(manifest), scheduler=wanted.scheduler,
        accumulation=parts.config.accumulation if managed else 1, path=found.folder,
    )  # fmt: skip
    rank = parts.groups.ranks.rank
    if rank < len(indexes):
        restore_random(indexes[rank].rng, parts.device)
