"""A record behind each step, and the run that goes on from one (`checkpoint.every_step`).

    step() returns -> captured -> [behind the program] values on the drive -> record -> its extents are not written

[Note: fence] No value of step n + 1 is written before the record of step n is there on every rank, for it goes where
the value of step n - 1 lies. On one rank the thread that steps writes the record in its turn. Of several ranks each has
written its own before it enters the exchange of the norm, so that behind the exchange all have; none of them steps in
backward.

What the program changes between two steps (a parameter, a state, a load) goes beside the record's values, too, so that
the record stays true meanwhile. Before the next step writes, the values as they are then get a record of their own,
with the same counters, random states and place in the data: the step that is lost then begins anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.base.sizes import format_bytes
from infinity.checkpoint.format import complete
from infinity.checkpoint.model_folder import saved_module
from infinity.checkpoint.pieces import checkpoint_buffers, plan_in_short, shares, tensors_of, tied_names
from infinity.checkpoint.records import (
    KilledRun,
    RunFile,
    SavedPartition,
    StepRecord,
    killed_runs,
    left_behind,
    newest,
    remove_records,
    remove_run,
    write_record,
    write_run,
)
from infinity.checkpoint.run_state import (
    ClientState,
    Run,
    check_random,
    decode,
    encode,
    encode_client_state,
    random_state,
    restore_random,
)
from infinity.config.resolve import ResolvedConfig
from infinity.distributed.consistency import run_on_all_ranks
from infinity.distributed.groups import ProcessGroups
from infinity.engine.runtime import Runtime
from infinity.errors import CheckpointError, ConfigError
from infinity.log import logger
from infinity.memory.store import Left
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan
from infinity.plan.types import Kind

# What a rank finds of one run: its id, of how many ranks it is, and the step of each record by version.
_Row = tuple[str, int, dict[str, int]]
# The swap files that a run of the same `checkpoint.path` has left of this rank and that are not gone on from, and its
# step; 0 where the ranks were killed between their first records, so that no step is there.
PassedOver = tuple[tuple[Path, ...], int]


@dataclass(frozen=True)
class Adopted:
    """What a killed run has left that this one goes on from: of this rank, at a step that every rank has."""

    killed: KilledRun
    record: StepRecord

    @property
    def path(self) -> Path:
        """Its first swap file."""
        return self.killed.path

    @property
    def left(self) -> Left:
        """What a store is opened with."""
        return Left(self.killed.run.files, self.killed.run.weights, self.record.places)

    def plan_again(self, inputs: PlanInputs) -> Plan:
        """Make the run's plan again. CheckpointError where it is not of this model, configuration and version."""
        advice = (
            f"Give the run what it had, or make a checkpoint of its files with `infinity ckpt from-swap "
            f"{self.path.parent} {self.killed.run.path}` and remove them: {self.removal}"
        )
        try:
            plan = inputs.plan_again(self.killed.run.made)
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(self.path, f"its plan cannot be made again: {error}", advice) from error
        specs = tuple(SavedPartition.of(spec) for spec in plan.partitions if spec.key.kind is not Kind.GRAD)
        same = plan.fingerprint() == self.killed.run.plan["fingerprint"] and specs == self.killed.run.partitions
        if not same or plan.nvme_nbytes != self.killed.nbytes:
            raise CheckpointError(
                self.path, "it holds the values of another plan: of another model, or another version of infinity",
                advice,
            )  # fmt: skip
        return plan

    @property
    def removal(self) -> str:
        """The command that removes it."""
        return f"`infinity ckpt killed {self.path.parent} --remove {self.killed.run.run}`"

    def in_words(self) -> str:
        """What it is, for messages."""
        return f"the swap files of the run that was killed hold step {self.record.step}"


def find_run(config: ResolvedConfig, groups: ProcessGroups) -> tuple[Adopted | None, list[PassedOver]]:
    """Return what this rank goes on from; None where no run of this `checkpoint.path` was killed, or none that had made
    a step. Beside it what is passed over. Collective. CheckpointError where what is left cannot be gone on from, on
    every rank alike.
    """
    folders = config.nvme_path
    if config.sections.checkpoint.every_step == "off" or folders is None:
        return None, []
    path, rank = _known_by(config), groups.ranks.rank
    mine: dict[str, KilledRun] = {}

    def job() -> list[_Row]:
        mine.update((each.run.run, each) for each in killed_runs(Path(folders[0]), path=path, rank=rank))
        return [
            (run, int(each.run.plan["world_size"]), {str(at): record.step for at, record in each.records.items()})
            for run, each in mine.items()
        ]

    rows: list[list[_Row]] = run_on_all_ranks(groups, "runs that were killed", job, path=folders[0])
    chosen, steps = _choose(rows, groups.world.size, path, Path(folders[0]))
    passed = [(killed.run.files, steps[run]) for run, killed in mine.items() if chosen is None or run != chosen[0]]
    if chosen is None:
        return None, passed
    run, version = chosen
    killed = mine[run]
    killed.only(version)
    adopted = Adopted(killed, killed.records[version])
    logger.info("%s: call engine.resume()", adopted.in_words())
    return adopted, passed


def _known_by(config: ResolvedConfig) -> str:
    """Return what a run is known by when it starts again."""
    return str(Path(str(config.sections.checkpoint.path)).absolute())


def _choose(
    rows: Sequence[Sequence[_Row]], world: int, path: str, folder: Path
) -> tuple[tuple[str, int] | None, dict[str, int]]:
    """Return the run, and the version of its records, that every rank goes on from; and of every run the latest step
    that a rank has of it, 0 where no step is one of all ranks.
    """
    found: dict[str, dict[int, dict[int, int]]] = {}
    for rank, row in enumerate(rows):
        for run, size, steps in row:
            if size != world:
                raise CheckpointError(
                    folder,
                    f"rank {rank} finds swap files here of a run of {path} with {size} ranks; now there are {world}",
                    f"Make a checkpoint of them with `infinity ckpt from-swap {folder} {path}`, which any number of "
                    f"ranks can load, and remove them with `infinity ckpt killed {folder} --remove {run}`; or start as "
                    "many ranks as then",
                )  # fmt: skip
            found.setdefault(run, {})[rank] = {int(version): step for version, step in steps.items()}
    best: tuple[int, str, int] | None = None
    latest: dict[str, int] = {}
    for run, ranks in found.items():
        version = newest([ranks.get(rank, {}) for rank in range(world)])
        if version is not None:
            best = max(best or (-1, "", 0), (next(iter(ranks.values()))[version], run, version))
        elif any(at > 1 for steps in ranks.values() for at in steps):
            without = next((rank for rank in range(world) if rank not in ranks), None)
            what = "the ranks' records are not of one step" if without is None else f"rank {without} has none of it"
            raise CheckpointError(
                folder, f"swap files here are of a run of {path} that was killed, but {what}",
                "Bring back what is missing, or go on from the newest checkpoint: `infinity ckpt killed "
                f"{folder} --remove {run}` removes the swap files",
            )  # fmt: skip
        latest[run] = max(step for steps in ranks.values() for step in steps.values()) if version is not None else 0
    return None if best is None else best[1:], latest


class StepRecords:
    """Writes the records of one rank's steps. made: what the plan was made of. adopted: what it goes on from. passed:
    what it does not, and is removed once it is overtaken.

    [Note: overtaken] The files of a run that was passed over go once a checkpoint of `checkpoint.path`, which this
    engine has loaded in whole or saved, is of a later step, and every rank has a record of its own. Those of ranks that
    were killed between their first records need no checkpoint, because no start could go on from them.
    """

    def __init__(
        self, runtime: Runtime, made: Mapping[str, Any], adopted: Adopted | None, passed: Sequence[PassedOver] = ()
    ) -> None:
        self._runtime = runtime
        self._made = made
        self.adopted = adopted
        self._flushes = runtime.config.sections.checkpoint.every_step == "power"
        self._path = _known_by(runtime.config)
        drawn = run_on_all_ranks(runtime.groups, "id of the run", partial(secrets.token_hex, 6), path=self._path)
        self._id = drawn[0] if adopted is None else adopted.killed.run.run
        self._version = 0 if adopted is None else adopted.record.version
        # Of the latest step, without the places of its values; None before the first.
        self._latest: StepRecord | None = None
        # Whether `.run` is there, and with it the state of a run that outlasts the process.
        self._kept = adopted is not None
        # Whether it was gone on from.
        self._taken = adopted is None
        # See [Note: overtaken]: what is still there, the step of the latest checkpoint, and that of the first record.
        self._passed = list(passed)
        self._checkpoint_step = 0
        self._first_step: int | None = None
        # The swap files of a run that is over.
        self._over: tuple[Path, ...] = ()
        if adopted is not None:
            runtime.health.mark_broken(
                f"{adopted.in_words()}, and this engine has taken them over. Call engine.resume() to go on from there, "
                "or engine.load_checkpoint() to go on from a checkpoint; to begin anew, close the engine and remove "
                f"them with {adopted.removal}"
            )

    # Behind each step.

    def note(self, run: Run, client_state: ClientState) -> None:
        """A step has returned, or a load: have the state that a run would go on from recorded behind the program."""
        self._latest = self._capture(run, client_state)
        self._begin(self._latest)

    def renew(self) -> None:
        """The program has changed values since the latest record: have them recorded before the next step writes."""
        if self._latest is not None:
            # What it has stepped in backward is of the values before.
            self._runtime.step.forget_early()
            self._begin(self._latest)

    @property
    def outdated(self) -> bool:
        """Whether the program has changed values since the latest record was begun."""
        return self._latest is not None and self._runtime.store.access.touched

    @property
    def dropped(self) -> bool:
        """Whether values were replaced, and nothing records what they are now."""
        return self._taken and self._latest is None

    def _begin(self, state: StepRecord) -> None:
        self._version += 1
        self._runtime.store.access.begin_record()
        self._runtime.step.then(self._write, replace(state, version=self._version))

    def _write(self, state: StepRecord) -> None:
        """In the thread that steps, once it has stepped everything: see [Note: fence]."""
        store, rule = self._runtime.store, self._runtime.step.rules
        try:
            store.write_down()
            path = store.swap_files.path
            if self._flushes:
                store.sync()
            if not self._kept:
                write_run(self._run_file())
                store.swap_files.keep(True)
                self._kept = True
            scalars = rule.parameter_scalars(state.engine["optimizer"]["steps"])
            singles = {name: encode(values) for name, values in scalars.items()}
            record = replace(state, places=tuple(store.places()), singles=singles)
            write_record(path, record, sync=self._flushes)
            store.record()
        finally:
            store.access.end_record()
        if self._passed:
            self._remove_overtaken(state.step)

    def _remove_overtaken(self, step: int) -> None:
        """Behind a record: see [Note: overtaken]. No rank records a step before all have recorded the one before."""
        if self._first_step is None:
            self._first_step = step
        if step == self._first_step:
            return
        for each in [*self._passed]:
            files, of_step = each
            if of_step and of_step >= self._checkpoint_step:
                continue
            self._passed.remove(each)
            try:
                if nbytes := remove_run(files):
                    logger.info("removed %s (%s), overtaken by this run", files[0], format_bytes(nbytes))
            except OSError as error:
                logger.warning("%s is overtaken by this run and cannot be removed: %s", files[0], error)

    def _capture(self, run: Run, client_state: ClientState) -> StepRecord:
        runtime = self._runtime
        own = client_state() if callable(client_state) else client_state
        inner: dict[str, Tensor] = {}
        encoded = encode_client_state(own, inner, path=self._path)
        buffers = checkpoint_buffers(runtime.module)
        tensors = {f"client/{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in inner.items()}
        tensors |= {f"buffer/{name}": each.detach().cpu().clone().contiguous() for name, each in buffers.items()}
        return StepRecord(
            self._id, runtime.groups.ranks.rank, 0, (), run.to_json(path=self._path), random_state(runtime.device), {},
            encoded, tuple(filter(runtime.tells_buffer, buffers)), tensors,
        )  # fmt: skip

    def _run_file(self) -> RunFile:
        runtime, groups = self._runtime, self._runtime.groups
        module, plan, tier = runtime.module, runtime.plan, runtime.store.swap_files
        return RunFile(
            self._id, self._path, groups.ranks.rank, tuple(path.absolute() for path in tier.nbytes_by_path),
            tier.weights, tier.nbytes, runtime.config.sections.aio.checksum == "sampled", plan_in_short(plan),
            self._made,
            tuple(SavedPartition.of(each.spec) for each in runtime.store.saved),
            tuple(shares(plan, groups.data.index, groups.tensor.index)), tensors_of(plan, module),
            tied_names(module), saved_module(module, runtime.whole_shapes),
        )  # fmt: skip

    def has_checkpoint(self, directory: Path, step: int) -> None:
        """A checkpoint behind a step was saved or loaded in whole."""
        if str(directory.absolute()) == self._path:
            self._checkpoint_step = max(self._checkpoint_step, step)

    # Going on.

    def is_newest(self, directory: Path) -> bool:
        """Whether what was taken over, and not gone on from yet, is not older than every checkpoint in a folder."""
        if self._taken or self.adopted is None:
            return False
        steps = (int(manifest.engine["counters"]["global_steps"]) for _, manifest in complete(directory))
        return self.adopted.record.step >= max(steps, default=-1)

    def resume(self, run: Run) -> tuple[str, Any]:
        """Give the run the state behind the step whose values the engine has. Returns what `Engine.resume` does."""
        assert self.adopted is not None
        runtime, record, path = self._runtime, self.adopted.record, self.adopted.path
        run.check(record.engine, [record.singles], optimizer=True, scheduler=True, path=path)
        check_random(record.rng, runtime.device, path=path)
        client = decode(record.client_state, record.client_tensors())
        buffers, own = record.buffers(), checkpoint_buffers(runtime.module)
        unlike = [name for name, each in own.items() if name not in buffers or buffers[name].shape != each.shape]
        if unlike:
            raise CheckpointError(path, f"its record has no buffer {unlike[0]} of this model", "Give the run its model")
        with torch.no_grad():
            for name, each in own.items():
                each.copy_(buffers[name])
        run.restore(
            record.engine, [record.singles], {name: name for name in runtime.step.steps}, optimizer=True,
            scheduler=True, accumulation=runtime.config.calls_a_step, path=path,
        )  # fmt: skip
        restore_random(record.rng, runtime.device)
        self._latest, self._taken = record, True
        runtime.health.mark_whole()
        logger.info("going on from step %d, which %s holds", record.step, path)
        return str(path), client

    def drop(self) -> None:
        """All values are about to be replaced: no record is true any more."""
        self._runtime.step.synchronize()
        if self._kept:
            remove_records(self._runtime.store.swap_files.nbytes_by_path)
            self._runtime.store.forget_records()
        self._latest, self._kept, self._taken, self._first_step = None, False, True, None

    def finish(self) -> None:
        """The run is over: its files go with the engine. Those that were not gone on from stay."""
        if self._kept and self._taken:
            self._over = tuple(self._runtime.store.swap_files.nbytes_by_path)
            self._runtime.store.swap_files.keep(False)

    def clean_up(self) -> None:
        """Remove what is left beside files that have gone, once nothing is written any more."""
        remove_records(self._over)


def records_of(
    runtime: Runtime, inputs: PlanInputs, adopted: Adopted | None, passed: Sequence[PassedOver]
) -> StepRecords | None:
    """Return what records the steps of a run; None where its plan has no room for records. Name what killed runs have
    left that this one has not taken over. Collective.
    """
    recorded = runtime.plan.request.recorded
    made = StepRecords(runtime, inputs.made(runtime.plan), adopted, passed) if recorded else None
    # What is gone on from has been taken by all ranks by now.
    for folder in dict.fromkeys(runtime.config.nvme_path or ()) if runtime.groups.ranks.rank == 0 else ():
        if left := left_behind(Path(folder)):
            logger.info(
                "%s has swap files of killed runs (%d, %s), which this run does not use: `infinity ckpt killed %s` "
                "says of which, and removes one's with --remove",
                folder, len(left), format_bytes(sum(left.values())), folder,
            )  # fmt: skip
    return made
