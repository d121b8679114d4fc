"""When a program that saves at even distances saves next: the step before leaves checksums of what it writes."""

from __future__ import annotations


class Rhythm:
    """One engine's saves behind the program, counted in steps. A wrong guess costs a few hundredths of one step."""

    def __init__(self) -> None:
        self._steps = 0
        # Of the latest save, and from the one before it.
        self._latest = self._distance = 0

    def stepped(self) -> None:
        """A step is taken."""
        self._steps += 1

    def saved(self) -> None:
        """The program saves what the latest step has left."""
        self._latest, self._distance = self._steps, self._steps - self._latest

    @property
    def save_is_next(self) -> bool:
        """Whether a save is expected behind the next step."""
        return self._distance > 0 and self._steps + 1 == self._latest + self._distance
