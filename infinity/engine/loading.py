"""One load of a checkpoint: collective from end to end, and alike on every rank.

    found -> compared with the model, the optimizer and the sizes of files -> partitions -> whole units, buffers, state

A load that is refused has changed nothing. One that fails once values are being overwritten says so, and the engine
refuses to go on until a load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
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
    """A checkpoint, or a folder of weights, that suits the model. `manifest` and `indexes` are the checkpoint's."""

    folder: Path
    match: Match
    manifest: Manifest | None = None
    indexes: Sequence[RankIndex] = ()
    client_state: Any = field(default_factory=dict)

    @property
    def has_states(self) -> bool:
        """Whether an optimizer had anything to step."""
        return self.manifest is not None and any(info.trainable for info in self.manifest.tensors.values())


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
            return None if found[0] is None else str(found[0].manifest.id if found[0].manifest else found[0].folder)

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
        if folder is None:
            holds_weights = any((directory / name).is_file() for name in (INDEX, SINGLE))
            if tag is None and latest_tag(directory) is None and holds_weights:
                with closing(WeightFolder(directory)) as weights:
                    return Found(directory, self._match(directory, Stored(weights.tensors).tensors, {}))
            _say_none(directory, tag)
            return None
        manifest = read_manifest(folder)
        indexes = check_files(folder, manifest)
        found = Found(folder, Match(), manifest, indexes)
        if not self.options.module_only:
            self.to.check(
                manifest.engine, [index.singles for index in indexes], scheduler=self.options.scheduler,
                optimizer=self.options.optimizer and found.has_states, path=folder,
            )  # fmt: skip
            rank = self.runtime.groups.ranks.rank
            if rank < len(indexes):
                check_random(indexes[rank].rng, self.runtime.device, path=folder)
        matched = self._match(folder, manifest.tensors, manifest.tied)
        with ExtentReader(folder, manifest, indexes) as reader:
            reader.check_covered(manifest.tensors)
        return replace(found, match=matched, client_state=_client_state(folder, manifest))

    def _match(self, folder: Path, saved: Mapping[str, TensorInfo], tied: Mapping[str, str]) -> Match:
        found = match(tensors_of(self.runtime), tied_names(self.runtime.module), saved, tied)
        report_mismatch(found, folder, strict=self.options.strict)
        return found

    @contextmanager
    def _overwriting(self, folder: Path) -> Iterator[None]:
        """Replace values of the engine in the block; it is broken unless the block comes to its end."""
        health = self.runtime.health
        health.mark_broken(
            f"loading {folder} failed after values had been overwritten, and no load has succeeded since"
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
            moments=found.manifest is not None and options.optimizer and not options.module_only,
            start=runtime.stepper.rule.start,
        )  # fmt: skip

        def job() -> None:
            for settle in (runtime.stepper.reset, runtime.coordinator.next_step, runtime.gradients.reset):
                settle()
            with self._source(found) as source:
                fill_partitions(filling, runtime.store, source)
                self._fill_buffers(found, source)

        run_on_all_ranks(runtime.groups, "partitions of a checkpoint", job, path=found.folder)
        runtime.coordinator.memory.refresh(runtime.units)

    @contextmanager
    def _source(self, found: Found) -> Iterator[ValueSource]:
        runtime = self.runtime
        with ExitStack() as stack:
            if found.manifest is None:
                yield Stored(stack.enter_context(closing(WeightFolder(found.folder))).tensors)
                return
            queue = stack.enter_context(checkpoint_queue(runtime))
            total = sum(piece.nbytes for piece in holdings(runtime.plan, runtime.groups.data.index))
            tell = PhaseProgress(f"loading {found.folder}", total).advance
            reader = ExtentReader(found.folder, found.manifest, found.indexes, queue, tell)
            yield CheckpointSource(stack.enter_context(reader))

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
        if found.manifest is None or self.options.module_only:
            return
        config, rank = self.runtime.config, self.runtime.groups.ranks.rank
        self.to.restore(
            found.manifest.engine, [index.singles for index in found.indexes], found.match.source,
            optimizer=self.options.optimizer and found.has_states, scheduler=self.options.scheduler,
            accumulation=config.accumulation if config.config.managed_gradient_accumulation else 1, path=found.folder,
        )  # fmt: skip
        if rank < len(found.indexes):
            restore_random(found.indexes[rank].rng, self.runtime.device)


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
    more = f"; there are {there}" if there else ""
    logger.warning("nothing loaded: there is no `latest`, and no tag was given, in %s%s", directory, more)
