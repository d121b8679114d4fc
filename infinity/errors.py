"""infinity's exceptions. Each message says what happened, where, with which numbers, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial


def listed(names: Sequence[str], most: int) -> str:
    """Return the first `most` names for a message, with the number of further ones."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


class InfinityError(Exception):
    """Base class of infinity's exceptions."""


class ConfigError(InfinityError, ValueError):
    """Report an invalid configuration or argument of `initialize`; the message names the key and a fix."""


class UnknownNameError(ConfigError, AttributeError):
    """Report a name of DeepSpeed, or of an engine, that infinity does not have; `hasattr` takes it for absence."""


class CapacityError(InfinityError, ValueError):
    """Report a plan that exceeds the memory or disk space; raised before anything is allocated or written."""


class TierMemoryError(InfinityError, MemoryError):
    """Report a tier that ran out of memory at run time although the plan fitted.

    Attributes:
        tier: name of the tier, such as "gpu".
        kind: kind of the bytes, such as "exp_avg".
        asked, used: bytes of the failed request, and bytes in use on the tier.
        limit: bytes that the tier may hold; None if the system refused below any limit.
        owners: the largest holders on the tier as (name, bytes).
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
    """Report an illegal state transition of a partition, or use of a parameter's data while it is partitioned."""


def of_another_process(what: str, owner: int) -> StateError:
    """Return the error for a forked child that uses an engine of process `owner`; `what` is the attempted action."""
    return StateError(
        f"cannot {what}: this engine belongs to process {owner}, and a forked child has neither its memory nor its "
        "threads. Take what the child needs out of the engine before the fork (engine.state_dict(), or a copy under "
        "infinity.read()), or start the child with multiprocessing's 'spawn' method"
    )


class DesyncError(StateError):
    """Report ranks that execute different operations, or a rank that failed, ended or is late.

    The message names each rank's position.
    """


# The earlier name, kept for one version.
DivergenceError = DesyncError


class NonFiniteError(InfinityError, ArithmeticError):
    """Report too many consecutive steps skipped for non-finite gradients; the weights are still valid."""


class ExtensionError(InfinityError, RuntimeError):
    """Report a native library that was requested explicitly but cannot be built or loaded."""


class CheckpointError(InfinityError, RuntimeError):
    """Report a checkpoint that cannot be written, or cannot be loaded as requested.

    Attributes:
        path: the file or folder.
        what: what is wrong with it.
        advice: what to do next.
    """

    def __init__(self, path: object, what: str, advice: str) -> None:
        super().__init__(f"{path}: {what}. {advice}.")
        self.path = str(path)
        self.what = what
        self.advice = advice

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, str, str]]:
        return type(self), (self.path, self.what, self.advice)


class TransferError(InfinityError, OSError):
    """Report a failed read, write or copy.

    The attributes `operation`, `path`, `offset`, `nbytes`, `errno` and `reason` describe the request and its failure.
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
