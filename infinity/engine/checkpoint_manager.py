"""What the engine's checkpoint verbs do: collective from end to end, and alike on every rank.

A save settles what is saved and under which tag on all ranks, and then runs (see `saving`), in the foreground or on a
thread beside the program. A load looks at everything before it overwrites a value (see `loading`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infinity.checkpoint.background import Background, Together
from infinity.checkpoint.deepspeed.checkpoint import find_deepspeed
from infinity.checkpoint.format import MANIFEST, broken, complete, identity_of, latest_tag
from infinity.checkpoint.publish import check_tag
from infinity.checkpoint.ranks import run_on_all_ranks
from infinity.checkpoint.sources import LiveSource, SnapshotSource, snapshot_of
from infinity.checkpoint.state import ClientState, Run
from infinity.engine.loading import Load, LoadOptions
from infinity.engine.runtime import Runtime
from infinity.engine.saving import Save, SaveContents, SaveRequest
from infinity.errors import CheckpointError, ConfigError
from infinity.log import logger


class CheckpointManager:
    """Saves and loads one engine's checkpoints; owns the save that goes on beside the program."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._background = Background(runtime.store, runtime.groups, runtime.device)

    @property
    def failed(self) -> bool:
        """Whether a save beside the program has failed on this rank, and its error was not raised yet."""
        return self._background.pending

    def check(self) -> None:
        """Raise the error of a save that has failed beside the program, once. Does not block."""
        self._background.check()

    def finish(self) -> None:
        """Block until no save goes on; raise the error that it ended with."""
        self._background.finish()

    def close(self, *, at_once: bool) -> None:
        """As `finish`; at_once: give the save up. Its files go, and the checkpoints before it stay."""
        self._background.close(at_once=at_once)

    def save(self, run: Run, request: SaveRequest, client_state: ClientState) -> str:
        """Save as `request` says, and return the tag that all ranks use. See `Engine.save_checkpoint`. Collective."""
        runtime = self._runtime
        runtime.hooks.check_tree()
        captured: list[SaveContents] = []

        def settle() -> dict[str, str]:
            self._background.finish()
            captured.append(self._capture(run, request, client_state))
            return {"tag": request.tag, "directory": str(request.directory.absolute())}

        ask = partial(run_on_all_ranks, runtime.groups, path=request.directory)
        agreed, contents = self._agree(request, ask("what to save", settle)), captured[0]
        if not agreed.behind:
            Save(runtime, agreed, contents, ask).run(LiveSource(runtime.store))
            return agreed.tag
        contents = contents.apart()
        keys = [piece.key for piece in contents.capture.pieces]
        snapshot = snapshot_of(runtime.plan, keys, in_backward=runtime.plan.policy.step_in_backward)
        source = SnapshotSource(runtime.store, snapshot, share=runtime.config.config.checkpoint.bandwidth_share)

        def job(together: Together, moved: Callable[[], None]) -> None:
            Save(runtime, agreed, contents, together, moved).run(source)

        self._background.begin(agreed.folder, snapshot, job)
        return agreed.tag

    def load(self, run: Run, directory: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, Any]:
        """Load a checkpoint; return (its folder, its client state). See `Engine.load_checkpoint`. Collective."""
        self._background.finish()
        return Load(self._runtime, run, options).run(directory, tag)

    def resume(self, run: Run, load_dir: str | os.PathLike[str] | None) -> tuple[str | None, Any]:
        """Load the newest checkpoint that can be loaded. See `Engine.resume`. Collective."""
        chosen = self._runtime.config.config.checkpoint.path if load_dir is None else load_dir
        if chosen is None:
            raise ConfigError("resume() needs a folder: pass one, or set checkpoint.path")
        directory = Path(chosen)

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
            runtime.stepper.finish()
        return SaveContents.of(runtime, run, request, client_state)

    def _agree(self, request: SaveRequest, said: list[dict[str, str]]) -> SaveRequest:
        """Take rank 0's tag and folder; checkpoint.tag_validation says what becomes of other ranks' that differ."""
        first, validation = said[0], self._runtime.config.config.checkpoint.tag_validation
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
