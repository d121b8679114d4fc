"""What the engine's checkpoint verbs do: collective from end to end, and alike on every rank.

A save settles what is saved and under which tag on all ranks, and then runs, in the foreground or on a thread beside
the program. A load looks at everything before it overwrites a value.

One save: from what was captured to a published checkpoint.

    folder claimed -> each rank's files -> manifest -> `latest` -> older checkpoints go

It runs in the foreground or behind the program, with the same functions. A save that fails, on whatever rank, leaves
the checkpoint that was there, and the engine as it was: training can go on.

One load of a checkpoint: collective from end to end, and alike on every rank.

    found -> compared with the model, the optimizer and the sizes of files -> partitions -> whole units, buffers, state

A load that is refused has changed nothing. One that fails once values are being overwritten says so, and the engine
refuses to go on until a load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from infinity.checkpoint.background import Background, Together
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
    FileInfo,
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
from infinity.checkpoint.model_folder import saved_module
from infinity.checkpoint.pieces import (
    buffers_of,
    checkpoint_buffers,
    holdings,
    plan_in_short,
    shares,
    tensors_of,
    tied_names,
)
from infinity.checkpoint.publish import (
    Retention,
    SaveTarget,
    check_tag,
    claimed,
    now,
    prepare,
    publish_checkpoint,
    remove,
    remove_save,
    versions,
    write_client,
)
from infinity.checkpoint.restore import (
    CheckpointSource,
    Filling,
    Match,
    Stored,
    ValueSource,
    fill_partitions,
    match,
    report_mismatch,
)
from infinity.checkpoint.run_state import (
    ClientState,
    Run,
    check_random,
    decode,
    encode_client_state,
    random_state,
    restore_random,
)
from infinity.checkpoint.save import Capture, LiveSource, PartitionSource, SnapshotSource, snapshot_of, write
from infinity.checkpoint.weight_files import INDEX, SINGLE, WeightFolder
from infinity.distributed.consistency import run_on_all_ranks
from infinity.distributed.mailbox import StoreMailbox
from infinity.engine.runtime import Runtime
from infinity.engine.step_records import StepRecords
from infinity.errors import CheckpointError, ConfigError, TransferError
from infinity.log import PhaseProgress, logger
from infinity.memory.drives import transfer_queue
from infinity.memory.partition import DTYPES


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a program asks to be saved.

    latest: DIR/latest names this checkpoint then. frozen: with parameters that are not trained. behind: beside the
    program.
    """

    directory: Path
    tag: str
    latest: bool
    frozen: bool
    behind: bool

    @property
    def folder(self) -> Path:
        return self.directory / self.tag


@dataclass(frozen=True)
class SaveContents:
    """What one rank captured. `manifest`: the manifest's parts about the model and the run; `client_state` as JSON, on
    rank 0 only, and its `tensors` by path.
    """

    capture: Capture
    manifest: dict[str, Any]
    client_state: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, runtime: Runtime, run: Run, request: SaveRequest, client_state: ClientState) -> SaveContents:
        """Look at everything that a checkpoint keeps, and copy none of it. Raise what cannot be saved."""
        groups, module = runtime.groups, runtime.module
        rank = groups.ranks.rank
        manifest = {
            "tensors": tensors_of(runtime.plan, module, frozen=request.frozen),
            "tied": tied_names(module),
            "module": saved_module(module, runtime.whole_shapes),
            "engine": run.to_json(path=request.directory),
        }  # fmt: skip
        # Called on every rank: it may be a collective of the program's.
        own = client_state() if callable(client_state) else client_state
        tensors: dict[str, Tensor] = {}
        encoded = encode_client_state(own, tensors, path=request.directory) if rank == 0 else None
        capture = Capture(
            rank=rank,
            pieces=tuple(shares(runtime.plan, groups.data.index, groups.tensor.index, frozen=request.frozen)),
            buffers=tuple(each for each in buffers_of(module) if runtime.tells_buffer(each[0])),
            rng=random_state(runtime.device),
            singles=run.parameter_scalars(),
        )
        return cls(capture, manifest, encoded, tensors)

    def apart(self) -> SaveContents:
        """Return the same with copies of all tensors that the program goes on to change."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return replace(self, capture=self.capture.apart(), tensors=tensors)


@dataclass(frozen=True)
class Save:
    """One save of this rank."""

    runtime: Runtime
    request: SaveRequest
    contents: SaveContents

    def run(self, source: PartitionSource, ask: Together, mailbox: StoreMailbox | None = None) -> None:
        """Write the partitions that `source` lends, and all the rest, and publish the checkpoint. Collective.

        ask: runs a part on every rank and returns all ranks' values; an error of one is raised by every rank. mailbox:
        as in `write`.
        """
        with ExitStack() as stack:
            target = self._claim(stack, ask)
            infos = self._write(source, target, ask, mailbox)
            self._publish(target, infos, ask)
            if self._first:
                remove([self.request.directory / name for name in target.outdated])

    @property
    def _first(self) -> bool:
        return self.runtime.groups.ranks.rank == 0

    def _claim(self, stack: ExitStack, ask: Together) -> SaveTarget:
        """Take the folder until `stack` is left, and remove what killed saves have left in it."""

        def claim() -> dict[str, Any]:
            if not self._first:
                return {}
            stack.enter_context(claimed(self.request.directory))
            section = self.runtime.config.sections.checkpoint
            retention = Retention(section.keep_last, section.keep_every)
            return asdict(prepare(self.request.directory, self.request.tag, retention, latest=self.request.latest))

        return SaveTarget(**ask("place of a checkpoint", claim)[0])

    def _previous(self, target: SaveTarget) -> tuple[Path, RankIndex] | None:
        """Return an earlier checkpoint's folder and its index of this rank, where that can be read."""
        if target.previous is None:
            return None
        folder, rank = self.request.directory / target.previous, self.contents.capture.rank
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            if rank < len(manifest.ranks):
                return folder, manifest.index(folder, rank)
        return None

    def _write(
        self, source: PartitionSource, target: SaveTarget, ask: Together, mailbox: StoreMailbox | None
    ) -> list[FileInfo]:
        """Write every rank's files, or none; read them back where older checkpoints are to go."""
        folder = self.request.folder
        capture = replace(self.contents.capture, previous=self._previous(target))

        def job() -> dict[str, Any]:
            if not folder.is_dir():
                raise CheckpointError(
                    folder, "rank 0 has made this folder, which is not seen here",
                    "Save into a folder that all nodes share",
                )  # fmt: skip
            with transfer_queue(self.runtime.config) as queue:
                read_back = bool(target.outdated)
                return asdict(
                    write(capture, source, folder, target.id, queue, read_back=read_back, mailbox=mailbox)
                )

        with self._removed_on_failure(target):
            return [FileInfo(**row) for row in ask("files of a checkpoint", job)]

    def _publish(self, target: SaveTarget, infos: list[FileInfo], ask: Together) -> None:
        def job() -> None:
            if self._first:
                client = write_client(self.request.folder, target.id, self.contents.tensors)
                manifest = Manifest(
            id=target.id, tag=self.request.tag, number=target.number, time=now(), versions=versions(),
            plan=plan_in_short(self.runtime.plan), ranks=tuple(infos), client_state=self.contents.client_state,
            client=client, **self.contents.manifest,
        )  # fmt: skip
                publish_checkpoint(
                    self.request.directory, manifest, latest=self.request.latest, checked=bool(target.outdated)
                )

        with self._removed_on_failure(target):
            ask("manifest of a checkpoint", job)

    def _removed_on_failure(self, target: SaveTarget) -> ExitStack:
        """Return a block that removes the save's files when it fails, unless they are a checkpoint already. Only rank 0
        knows that; behind the program another rank may have stopped waiting before.
        """

        def remove_files(kind: object, *_: object) -> None:
            folder = self.request.folder
            if kind is None or not self._first:
                return
            if not ((folder / MANIFEST).exists() and read_manifest(folder).id == target.id):
                remove_save(folder, target.id)

        stack = ExitStack()
        stack.push(remove_files)
        return stack


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
    records: StepRecords | None = None

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
            if self.records is not None:
                self.records.drop()
            self._fill(chosen)
            self._restore(chosen)
        if self.records is not None and self.options == LoadOptions():
            self.records.has_checkpoint(directory, self.to.counters.global_steps)
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
        found = match(tensors_of(self.runtime.plan, self.runtime.module), tied_names(self.runtime.module), saved, tied)
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
            start=runtime.step.rules[0].start, tensor=runtime.groups.tensor.index,
        )  # fmt: skip

        def job() -> None:
            for settle in (runtime.step.reset, runtime.coordinator.next_step, runtime.gradients.reset):
                settle()
            with found.source(runtime) as source:
                fill_partitions(filling, runtime.store, source)
                self._fill_buffers(found, source)

        run_on_all_ranks(runtime.groups, "partitions of a checkpoint", job, path=found.folder)
        runtime.coordinator.memory.refresh(runtime.access.units)

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
            accumulation=config.calls_a_step, path=found.folder,
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
    progress = PhaseProgress(f"loading {folder}", total)
    with transfer_queue(runtime.config) as queue, ExtentReader(folder, manifest, indexes, queue, progress) as reader:
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


class CheckpointManager:
    """Saves and loads one engine's checkpoints; owns the save that goes on beside the program."""

    def __init__(self, runtime: Runtime, records: StepRecords | None = None) -> None:
        self._runtime = runtime
        # Of each step; None without any.
        self.records = records
        self.background = Background(runtime.store, runtime.groups, runtime.device)

    def save(self, run: Run, request: SaveRequest, client_state: ClientState) -> str:
        """Save as `request` says, and return the tag that all ranks use. See `Engine.save_checkpoint`. Collective."""
        runtime = self._runtime
        runtime.attached.hooks.check_tree()
        captured: list[SaveContents] = []

        def settle() -> dict[str, str]:
            self.background.finish()
            captured.append(self._capture(run, request, client_state))
            return {"tag": request.tag, "directory": str(request.directory.absolute())}

        ask = partial(run_on_all_ranks, runtime.groups, path=request.directory)
        agreed, contents = self._agree(request, ask("what to save", settle)), captured[0]
        if not agreed.behind:
            self._write(Save(runtime, agreed, contents), LiveSource(runtime.store), ask)
            return agreed.tag
        contents = contents.apart()
        keys = [piece.key for piece in contents.capture.pieces]
        snapshot = snapshot_of(runtime.plan, keys, in_backward=runtime.plan.policy.step_in_backward)
        source = SnapshotSource(runtime.store, snapshot, share=runtime.config.sections.checkpoint.bandwidth_share)

        self.background.begin(agreed.folder, snapshot, partial(self._write, Save(runtime, agreed, contents), source))
        return agreed.tag

    def _write(
        self, save: Save, source: PartitionSource, ask: Together, mailbox: StoreMailbox | None = None
    ) -> None:
        save.run(source, ask, mailbox)
        if self.records is not None:
            step = int(save.contents.manifest["engine"]["counters"]["global_steps"])
            self.records.has_checkpoint(save.request.directory, step)

    def load(self, run: Run, directory: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, Any]:
        """Load a checkpoint; return (its folder, its client state). See `Engine.load_checkpoint`. Collective."""
        self.background.finish()
        return Load(self._runtime, run, options, self.records).run(directory, tag)

    def resume(self, run: Run, load_dir: str | os.PathLike[str] | None) -> tuple[str | None, Any]:
        """Load the newest checkpoint that can be loaded. See `Engine.resume`. Collective."""
        chosen = self._runtime.config.sections.checkpoint.path if load_dir is None else load_dir
        if chosen is None:
            raise ConfigError("resume() needs a folder: pass one, or set checkpoint.path")
        directory, records = Path(chosen), self.records
        if records is not None:
            ask = partial(run_on_all_ranks, self._runtime.groups, path=directory)
            # Rank 0's word, as that of the checkpoints.
            if ask("whether there is a newer checkpoint", partial(records.is_newest, directory))[0]:
                return records.resume(run)

        def look() -> tuple[list[str], list[tuple[str, str, bool]]]:
            if self._runtime.groups.ranks.rank != 0:
                return [], []
            tags = [folder.name for folder, _ in complete(directory)]
            if not tags:
                with suppress(CheckpointError):
                    tags = [folder.name for folder in (find_deepspeed(directory),) if folder is not None]
            return tags, _unusable(directory, tags)

        groups = self._runtime.groups
        tags, unusable = run_on_all_ranks(groups, "checkpoints to resume from", look, path=directory)[0]
        failures: list[str] = []
        for at, why, was_whole in unusable:
            logger.warning("not resumed from %s: %s", at, why)
            failures += [why] if was_whole else []
        for tag in tags:
            try:
                return self.load(run, directory, tag, LoadOptions())
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

    def _capture(self, run: Run, request: SaveRequest, client_state: ClientState) -> SaveContents:
        """Settle everything that can be wrong before anything is written."""
        runtime = self._runtime
        check_tag(request.tag)
        waiting = [unit.layout.name for unit, arrived in runtime.gradients.arrived.items() if any(arrived)]
        if waiting:
            logger.warning(
                "%s holds step %d without the gradients that have accumulated since (of %s, among others): a run that "
                "resumes from it does not have them. Save behind the engine.step() that applies them to keep all",
                request.folder, run.counters.global_steps, waiting[0],
            )  # fmt: skip
        if not request.behind:
            runtime.step.synchronize()
        return SaveContents.of(runtime, run, request, client_state)

    def _agree(self, request: SaveRequest, said: list[dict[str, str]]) -> SaveRequest:
        """Take rank 0's tag and folder; checkpoint.tag_validation says what becomes of other ranks' that differ."""
        first, validation = said[0], self._runtime.config.sections.checkpoint.tag_validation
        others = [rank for rank, each in enumerate(said) if each != first]
        if others and validation != "Ignore":
            other = said[others[0]]
            text = (
                f"rank 0 saves {first['tag']!r} into {first['directory']}, rank {others[0]} {other['tag']!r} into "
                f"{other['directory']}"
            )
            if validation == "Fail":
                raise CheckpointError(
                    request.directory, text, "Give save_checkpoint the same folder and tag on every rank"
                )
            logger.warning("%s: rank 0's is taken (checkpoint.tag_validation is Warn)", text)
        return replace(request, directory=Path(first["directory"]), tag=first["tag"])


def _unusable(directory: Path, tags: list[str]) -> list[tuple[str, str, bool]]:
    """Return (path, why, whether there was a checkpoint) of each folder without a loadable checkpoint; `tags` are those
    that have one.

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
