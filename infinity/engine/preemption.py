"""What an engine does about checkpoints by itself: it saves when it is told to end and when it gives up, and says when
a save behind the program has failed.

All of that happens at the end of a step, on every rank at the same one: which step that is the ranks have agreed on in
the exchange that every step has anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from infinity.checkpoint.background import Background
from infinity.engine.signals import Signals
from infinity.engine.step import StepVerdict
from infinity.errors import InfinityError
from infinity.log import logger


class Saving(Protocol):
    """What is needed of an engine."""

    global_steps: int

    def save_checkpoint(self, save_dir: str, tag: object = None, *, asynchronous: bool | None = None) -> str: ...

    def close(self) -> None: ...


class PreemptionHandler:
    """One engine's. `path`: where it saves; None saves nothing. `signals`: upon which it ends."""

    def __init__(self, path: str | None, signals: Sequence[str], background: Background, *, alone: bool) -> None:
        self._path = path
        self._signals = Signals(signals)
        self._background = background
        self._alone = alone

    def says(self) -> tuple[bool, bool]:
        """What this rank tells the others at every step: it was told to end; a save of its own has failed."""
        return bool(self._signals.received), self._background.pending

    def check(self) -> None:
        """Raise what has gone wrong behind the program, where no other rank has to raise it at the same place."""
        if self._alone:
            self._background.check()

    def after_step(self, engine: Saving, verdict: StepVerdict) -> None:
        """End the process with status 0 behind a checkpoint, when a rank was told to; raise what a save behind the
        program has failed with. Collective.
        """
        # With other ranks, what came since they agreed has to wait for the next step.
        ending, failed = self.says() if self._alone else verdict.heard
        if failed:
            # Every rank's thread comes to the same end, a moment sooner or later.
            self._background.finish()
        if not ending:
            return
        assert self._path is not None, "the configuration names a folder with the signals"
        tag = engine.save_checkpoint(self._path, asynchronous=False)
        told = self._signals.received or "a signal on another rank"
        logger.warning("%s: step %d is saved as %s in %s; the program ends", told, engine.global_steps, tag, self._path)
        engine.close()
        raise SystemExit(0)

    def abort_with_save(self, engine: Saving, error: Callable[[str], InfinityError]) -> None:
        """Save the last good step and raise `error`, which is told what became of that. Collective."""
        if self._path is None:
            raise error("Name a folder in checkpoint.path to have them saved when this happens.")
        try:
            tag = engine.save_checkpoint(
                self._path, f"global_step{engine.global_steps}-emergency", asynchronous=False
            )
        except Exception as failure:
            raise error(f"They could not be saved: {failure}") from failure
        raise error(f"They are saved as {tag} in {self._path}.")

    def close(self) -> None:
        """Listen to no signal any more."""
        self._signals.close()
