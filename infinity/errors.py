"""The errors a user can meet, each a sentence that says what, where, the numbers and the next step."""

from __future__ import annotations

from functools import partial


class InfinityError(Exception):
    """Base of every error that infinity raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """The configuration (or an argument of `initialize`) cannot be honoured; the message names the key path and a
    fix.
    """


class CapacityError(InfinityError, ValueError):
    """A plan does not fit the memory or the disk that is there. Raised before anything is allocated or written."""


class TierMemoryError(InfinityError, MemoryError):
    """A tier ran out at run time although the plan fitted.

    Attributes, in bytes where they are numbers: `tier`, `kind` ("gpu", "exp_avg"), `asked`, `used`, `limit` (None where
    the system refused without one), `owners` (the largest holders there, as (name, bytes)).
    """

    def __init__(
        self, message: str, *, tier: str = "", kind: str = "", asked: int = 0, used: int = 0, limit: int | None = None,
        owners: tuple[tuple[str, int], ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.tier = tier
        self.kind = kind
        self.asked = asked
        self.used = used
        self.limit = limit
        self.owners = owners


class StateError(InfinityError, RuntimeError):
    """An illegal move of a partition, or a parameter's data touched while it is partitioned."""


def of_another_process(what: str, owner: int) -> StateError:
    """The error for what a forked child tries with an engine that process `owner` made."""
    return StateError(
        f"cannot {what}: this engine belongs to process {owner}, and a forked child has neither its memory nor its "
        "threads. Take what the child needs out of the engine before the fork (engine.state_dict(), or a copy under "
        "infinity.read()), or start the child with multiprocessing's 'spawn' method"
    )


class DesyncError(StateError):
    """The ranks of a job no longer do the same, or one of them has failed, ended or is late; the message names each
    rank's position.
    """


# The name of the version before.
DivergenceError = DesyncError


class NonFiniteError(InfinityError, ArithmeticError):
    """Too many steps in a row were skipped because of gradients that are not finite. The weights are good."""


class ExtensionError(InfinityError, RuntimeError):
    """A native library could not be built or loaded although it was asked for by name."""


class CheckpointError(InfinityError, RuntimeError):
    """A checkpoint cannot be written, or not be loaded as asked. `path` says which file or folder it is about."""

    def __init__(self, path: object, what: str, advice: str) -> None:
        super().__init__(f"{path}: {what}. {advice}.")
        self.path = str(path)
        self.what = what
        self.advice = advice

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str, str]]:
        return type(self), (self.path, self.what, self.advice)


class TransferError(InfinityError, OSError):
    """A read, write or copy that failed.

    `errno`, `path`, `offset` and `nbytes` (of the request) are attributes, so that a program can act on them.
    """

    def __init__(self, operation: str, *, path: str, offset: int, nbytes: int, errno: int, reason: str) -> None:
        super().__init__(errno, f"{operation} of {nbytes} bytes at offset {offset} of {path} failed: {reason}")
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno
        self.reason = reason

    def __reduce__(self) -> tuple[partial[TransferError], tuple[()]]:
        again = partial(
            type(self), self.operation, path=self.path, offset=self.offset, nbytes=self.nbytes, errno=self.args[0],
            reason=self.reason,
        )  # fmt: skip
        return again, ()

    def __str__(self) -> str:
        return f"{self.args[1]} (errno {self.errno})"
