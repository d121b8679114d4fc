"""Whether an engine can go on, and what it says to a verb where it cannot."""

from __future__ import annotations

from infinity.distributed.groups import ProcessGroups
from infinity.distributed.interrupts import HELD
from infinity.errors import StateError
from infinity.memory.store import TieredStore
from infinity.step.optimizer_step import OptimizerStep


class Health:
    """Whether the engine can go on.

    `broken` is the reason why it cannot, in the middle of a step or a load and after one that failed there; "" while it
    can. Weights and states may be of two steps then, and only a load makes them whole. `under_way`: the verb that
    changes something now, or that was cut short while it did ([Note: interrupts] in `interrupts`). `partial`: why the
    gradients that have accumulated are no whole micro-batches; "" where they are. `closed`: everything was returned.
    `handed_over`: the module has the weights.
    """

    def __init__(self, store: TieredStore, step: OptimizerStep, groups: ProcessGroups) -> None:
        self._store, self._step, self._groups = store, step, groups
        self.broken = self.under_way = self.partial = ""
        self.closed = False
        self.handed_over = False

    @property
    def refusal(self) -> str:
        """Why the engine cannot go on, with what to do next; "" while it can."""
        if self.under_way:
            return (
                f"an interrupt (Ctrl-C, or the exception of a signal's handler) has cut {self.under_way} short in the "
                "middle, and the engine's parts may not fit each other any more. Close it, make a new one with "
                "infinity.initialize(), and go on from a checkpoint with engine.resume()"
            )
        return self.broken

    def check(
        self, verb: str, *, broken_is_fine: bool = False, gradients: bool = False, inside: bool | None = None
    ) -> None:
        """Raise what stands against `verb`: StateError in a forked child, for a closed or a broken engine; the error of
        the optimizer step that goes on beside the program; DesyncError when the ranks have lost each other.

        gradients: the verb adds to those that have accumulated, or steps with them. inside: it is called inside another
        verb; None if one that is under way is another.
        """
        inside = HELD.under_way if inside is None else inside
        self._store.check_process(verb)
        if self.closed:
            again = ", and its model has the weights: give the model to initialize() again"
            further = again if self.handed_over else ""
            raise StateError(f"cannot {verb}: this engine was closed{further}")
        if (self.under_way and not inside) or (self.broken and not broken_is_fine):
            raise StateError(f"cannot {verb}: {self.refusal}")
        if gradients and self.partial:
            raise StateError(f"cannot {verb}: {self.partial}")
        self._step.check()
        self._groups.check()

    def begin(self, verb: str) -> None:
        """A verb is about to change something: every verb refuses until `end`."""
        self.under_way = verb

    def end(self) -> None:
        """The verb is whole, or nothing of it is left."""
        self.under_way = ""

    def mark_broken(self, reason: str) -> None:
        """Refuse every further verb but a load with `reason`, until `mark_whole`."""
        self.broken = reason

    def mark_whole(self) -> None:
        """Every value is of one step: the engine can go on."""
        self.broken = ""

    def mark_partial(self, reason: str) -> None:
        """Refuse to add to the gradients, or to step with them, until they are dropped."""
        self.partial = reason

    def drop_gradients(self) -> None:
        """There are no gradients any more."""
        self.partial = ""

    def mark_closed(self) -> None:
        """Refuse every further verb for good."""
        self.closed = True

    def mark_handed_over(self) -> None:
        """Have the refusals say where the weights are."""
        self.handed_over = True
