"""One load of a checkpoint: collective from end to end, and alike on every rank.

    found -> compared with the model, the optimizer and the sizes of files -> partitions -> whole units, buffers, state

A load that is refused has changed nothing. One that fails once values are being overwritten says so, and the engine
refuses to go on until a load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from infinity.checkpoint.codec import decode
from infinity.checkpoint.deepspeed.checkpoint import (
    DeepSpeedSource,
    find_deepspeed,
    holds_deepspeed,
    read_deepspeed,
    verify_deepspeed,
)
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import (
    BUFFER,
    MANIFEST,
    PARAM,
    Manifest,
    RankIndex,
    TensorInfo,
    check_files,
    complete,
    find,
    identity_of,
    latest_tag,
    read_manifest,
)
from infinity.checkpoint.matching import Match, match, report_mismatch
from infinity.checkpoint.module_tensors import checkpoint_buffers, tied_names
from infinity.checkpoint.pieces import holdings
from infinity.checkpoint.ranks import run_on_all_ranks
from infinity.checkpoint.restore import CheckpointSource, Filling, ValueSource, fill_partitions
from infinity.checkpoint.state import Run, check_random, restore_random
from infinity.checkpoint.stored import Stored
from infinity.engine.runtime import Runtime
from infinity.engine.saving import checkpoint_queue, tensors_of
from infinity.errors import CheckpointError, TransferError
from infinity.log import PhaseProgress, logger
from infinity.memory.partition import DTYPES
from infinity.zero.weight_files import INDEX, SINGLE, WeightFolder


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a program asks to be loaded.

    strict: tensors that are missing or too many are an error. optimizer, scheduler: take their states. module_only:
    weights and buffers alone.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False


@dataclass(frozen=True)
class Found:
    """A checkpoint, ours or DeepSpeed's, or a folder of weights, that suits the model.

    state: of the run; None for weights alone. has_states: an optimizer had something to step. singles, rng: of every
    rank that saved; no rng where ranks stand elsewhere. identity: the same on ranks that see the same files. source:
    opens the values.
    """

    folder: Path
    match: Match
    identity: str
    source: Callable[[Runtime], AbstractContextManager[ValueSource]]
    state: Mapping[str, Any] | None = None
    has_states: bool = False
    singles: Sequence[Mapping[str, Any]] = ()
    rng: Sequence[Mapping[str, Any]] = ()
    client_state: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """One load of this rank."""

    runtime: Runtime
    to: Run
    options: LoadOptions

    def run(self, directory: Path, tag: str | None) -> tuple[str | None, Any]:
        """See `Engine.load_checkpoint`. Collective."""
        found: list[Found | None] = []

        def examine() -> str | None:
            found.append(self._find(directory, tag))
            return None if found[0] is None else found[0].identity

        seen = run_on_all_ranks(self.runtime.groups, "what to load", examine, path=directory)
        if len(set(seen)) > 1:
            others = next(rank for rank, each in enumerate(seen) if each != seen[0])
            raise CheckpointError(
                directory, f"rank 0 sees {seen[0] or 'no checkpoint'} here, rank {others} {seen[others] or 'none'}",
                "Put it on a drive that all nodes share",
            )  # fmt: skip
        chosen = found[0]
        if chosen is None:
            return None, {}
        with self._overwriting(chosen.folder):
            self._fill(chosen)
            self._restore(chosen)
        logger.info("loaded %s", chosen.folder)
        return str(chosen.folder), chosen.client_state

    def _find(self, directory: Path, tag: str | None) -> Found | None:
        """Return the checkpoint, looked at as far as can be without reading its tensors; None where there is none."""
        folder = find(directory, tag)
        if folder is not None:
            return self._look(folder)
        theirs = find_deepspeed(directory, tag)
        if theirs is not None:
            return self._look_at_deepspeed(theirs)
        holds_weights = any((directory / name).is_file() for name in (INDEX, SINGLE))
        if tag is None and latest_tag(directory) is None and holds_weights:
            with closing(WeightFolder(directory)) as weights:
                matched = self._match(directory, Stored(weights.tensors).tensors, {})
            return Found(directory, matched, str(directory), partial(_weights, directory))
        _say_none(directory, tag)
        return None

    def _look(self, folder: Path) -> Found:
        manifest = read_manifest(folder)
        indexes = check_files(folder, manifest)
        has_states = any(info.trainable for info in manifest.tensors.values())
        singles = [index.singles for index in indexes]
        rng = [index.rng for index in indexes] if self._keeps_places(manifest) else []
        self._check_run(folder, manifest.engine, singles, rng, has_states=has_states)
        matched = self._match(folder, manifest.tensors, manifest.tied)
        with ExtentReader(folder, manifest, indexes) as reader:
            reader.check_covered(manifest.tensors)
        return Found(
            folder, matched, manifest.id, partial(_extents, folder, manifest, indexes), manifest.engine, has_states,
            singles, rng, _client_state(folder, manifest),
        )  # fmt: skip

    def _keeps_places(self, manifest: Manifest) -> bool:
        """Whether a rank stands where the one of its number stood at the save, and takes its random states. Along the
        data axis alone that holds for every rank that there was.
        """
        topology = self.runtime.plan.topology
        saved, own = manifest.axes, (topology.pp, topology.dp, topology.tp)
        along_data = saved[0] == own[0] == 1 and saved[2] == own[2] == 1
        return saved == own or along_data

    def _look_at_deepspeed(self, folder: Path) -> Found:
        theirs = read_deepspeed(folder)
        self._check_run(folder, theirs.engine, (), (), has_states=True)
        matched = self._match(folder, theirs.tensors, theirs.tied)
        ranks = self.runtime.groups.ranks
        for _ in verify_deepspeed(theirs, ranks.rank, ranks.world_size):
            pass
        logger.info("%s was saved by DeepSpeed %s", folder, theirs.facts["version"])
        return Found(
            folder, matched, theirs.identity, lambda runtime: nullcontext(DeepSpeedSource(theirs.layout)),
            theirs.engine, has_states=True, client_state=theirs.client_state,
        )  # fmt: skip

    def _check_run(
        self, folder: Path, state: Mapping[str, Any], singles: Sequence[Mapping[str, Any]],
        rng: Sequence[Mapping[str, Any]], *, has_states: bool,
    ) -> None:  # fmt: skip
        if self.options.module_only:
            return
        self.to.check(
            state, singles, scheduler=self.options.scheduler, optimizer=self.options.optimizer and has_states,
            path=folder,
        )  # fmt: skip
        rank = self.runtime.groups.ranks.rank
        if rank < len(rng):
            check_random(rng[rank], self.runtime.device, path=folder)

    def _match(self, folder: Path, saved: Mapping[str, TensorInfo], tied: Mapping[str, str]) -> Match:
        found = match(tensors_of(self.runtime), tied_names(self.runtime.module), saved, tied)
        report_mismatch(found, folder, strict=self.options.strict)
        return found

    @contextmanager
    def _overwriting(self, folder: Path) -> Iterator[None]:
        """Replace values of the engine in the block; it is broken unless the block comes to its end."""
        health = self.runtime.health
        health.mark_broken(
            f"loading {folder} failed after values had been overwritten, and no load has succeeded since. Call "
            "engine.load_checkpoint() with another checkpoint, or engine.resume()"
        )
        try:
            yield
        except (CheckpointError, TransferError) as error:
            raise CheckpointError(
                folder, f"loading failed after values of this engine had been overwritten: {error}",
                "Call load_checkpoint() with another checkpoint before anything else",
            ) from error  # fmt: skip
        health.mark_whole()

    def _fill(self, found: Found) -> None:
        """Fill the partitions on every rank, then what is whole on the device, and the buffers. Collective."""
        runtime, options = self.runtime, self.options
        filling = Filling(
            plan=runtime.plan, index=runtime.groups.data.index, names=found.match.source,
            moments=found.has_states and options.optimizer and not options.module_only,
            start=runtime.stepper.rule.start, tensor=runtime.groups.tensor.index,
        )  # fmt: skip

        def job() -> None:
            for settle in (runtime.stepper.reset, runtime.coordinator.next_step, runtime.gradients.reset):
                settle()
            with found.source(runtime) as source:
                fill_partitions(filling, runtime.store, source)
                self._fill_buffers(found, source)

        run_on_all_ranks(runtime.groups, "partitions of a checkpoint", job, path=found.folder)
        runtime.coordinator.memory.refresh(runtime.units)

    def _fill_buffers(self, found: Found, source: ValueSource) -> None:
        for name, buffer in checkpoint_buffers(self.runtime.module).items():
            saved = found.match.source[name]
            if saved is None or not buffer.numel():
                continue
            info = source.tensors[saved]
            values = torch.empty(buffer.numel(), dtype=DTYPES[info.dtype], device="cpu")
            source.read(saved, BUFFER if BUFFER in info.kinds else PARAM, 0, buffer.numel(), values)
            with torch.no_grad():
                buffer.copy_(values.view(info.shape))

    def _restore(self, found: Found) -> None:
        """Give the run its counters, schedules and random states back."""
        if found.state is None or self.options.module_only:
            return
        config, rank = self.runtime.config, self.runtime.groups.ranks.rank
        self.to.restore(
            found.state, found.singles, found.match.source,
            optimizer=self.options.optimizer and found.has_states, scheduler=self.options.scheduler,
            accumulation=config.accumulation if config.config.managed_gradient_accumulation else 1, path=found.folder,
        )  # fmt: skip
        if rank < len(found.rng):
            restore_random(found.rng[rank], self.runtime.device)


@contextmanager
def _weights(folder: Path, runtime: Runtime) -> Iterator[ValueSource]:
    with closing(WeightFolder(folder)) as weights:
        yield Stored(weights.tensors)


@contextmanager
def _extents(
    folder: Path, manifest: Manifest, indexes: Sequence[RankIndex], runtime: Runtime
) -> Iterator[ValueSource]:
    groups = runtime.groups
    total = sum(piece.nbytes for piece in holdings(runtime.plan, groups.data.index, groups.tensor.index))
    tell = PhaseProgress(f"loading {folder}", total).advance
    with checkpoint_queue(runtime) as queue, ExtentReader(folder, manifest, indexes, queue, tell) as reader:
        yield CheckpointSource(reader)


def _client_state(folder: Path, manifest: Manifest) -> Any:
    """Return the client state. The safetensors library reads its tensors, and checks their header."""
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


def _say_none(directory: Path, tag: str | None) -> None:
    """Raise CheckpointError where a named checkpoint is missing; otherwise warn that there is none."""
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
    # Other programs write a manifest.json, too.
    if (directory / MANIFEST).is_file() and any(identity_of(name) is not None for name in os.listdir(directory)):
        raise CheckpointError(
            directory, "it is a checkpoint itself", f"Load from {directory.parent} with tag={directory.name!r}"
        )
    if holds_deepspeed(directory):
        raise CheckpointError(
            directory, "it is a checkpoint of DeepSpeed's itself",
            f"Load from {directory.parent} with tag={directory.name!r}",
        )  # fmt: skip
    more = f"; there are {there}" if there else ""
    logger.warning("nothing loaded: there is no `latest`, and no tag was given, in %s%s", directory, more)
