"""One partition of this rank and its state machine: what memory holds, what the drive holds, and who leases it.

| state    | memory holds | the drive holds      | leases                       | left by                   |
|----------|--------------|----------------------|------------------------------|---------------------------|
| ABSENT   | nothing      | nothing trusted      | none                         | materialize, restore      |
| RESIDENT | the value    | the same, if any     | many readers or one writer   | write, drop, discard      |
| DIRTY    | the value    | an older one, or none| many readers or one writer   | flush, discard            |
| WRITING  | the value    | being written        | readers only                 | complete, error           |
| SPILLED  | nothing      | the value            | none                         | fetch, discard            |
| READING  | being filled | the value            | none (callers wait)          | complete, error           |
| FAILED   | untrusted    | untrusted            | readers that began before    | discard, then materialize |

A move that starts a transfer takes a function that submits it, and calls it only if the move is legal. A transfer that
fails because it is late is still in flight: the state stays, and the buffer is not free.

[Note: slots] A partition that a step in backward may change has two extents on its drive. While the value in memory, or
in the second extent, is *pending*, the first extent holds the committed value and is not written. `commit` exchanges
the extents' roles; `forget` returns to the committed value, wherever the pending one is. At most one version is
pending, and a version becomes pending only if the committed one is on the drive. Of a partition whose home is CPU
memory the committed value is copied to a buffer of the undo pool before (`undo`), and `forget` copies it back.

[Note: records] With `checkpoint.every_step` a record names, of each partition that is saved, the extent with its value
after a step. That extent is not written: the first change after a record goes to the other extent, and further ones of
the same step, too. So a process that is killed leaves the values of its latest record whole, whatever it was writing. A
partition whose home is memory has extents as well; only a record writes them. One that is not trained has one extent,
and cannot be changed once a record names it.

[Note: zero tails] Moments begin as zero, and most of a model's states are moments. So a value may be zero from some
byte on (`prefix_nbytes`). The tail behind that byte is neither written nor read until a writer fills it; in memory it
is zeroed when the buffer is first lent. A value that is zero from its first byte on takes no transfer at all.

A partition whose home is addressable is ABSENT or RESIDENT only. Invariants, in `check`: (1) a value that exists is in
at least one place; (3) no drop, flush or discard under a writer, no drop or discard under readers; (4) READING or
WRITING exactly when a transfer is set; (5) SPILLED has no buffer. The store holds (2), one buffer one partition, and
(6), the ledger equals the sum over partitions. An illegal move raises `StateError` with partition, rank, state and
move.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.errors import StateError
from infinity.plan.types import EXTENT_ALIGNMENT, TORCH_NAMES, Extent, Key, Kind, PartitionSpec, align_up

# torch's dtypes by the plan's names.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, theirs) for name, theirs in TORCH_NAMES.items()}


class State(Enum):
    """See the table at the top."""

    ABSENT = "absent"
    RESIDENT = "resident"
    DIRTY = "dirty"
    WRITING = "writing"
    SPILLED = "spilled"
    READING = "reading"
    FAILED = "failed"


_MEMORY_MOVES = {(State.ABSENT, State.RESIDENT), (State.RESIDENT, State.ABSENT)}
_NVME_MOVES = {
    (State.ABSENT, State.DIRTY), (State.ABSENT, State.SPILLED),
    (State.RESIDENT, State.DIRTY), (State.RESIDENT, State.SPILLED), (State.RESIDENT, State.ABSENT),
    (State.DIRTY, State.WRITING), (State.DIRTY, State.ABSENT), (State.DIRTY, State.SPILLED),
    (State.WRITING, State.RESIDENT), (State.WRITING, State.FAILED),
    (State.SPILLED, State.READING), (State.SPILLED, State.ABSENT),
    (State.READING, State.RESIDENT), (State.READING, State.FAILED),
    (State.FAILED, State.ABSENT), (State.FAILED, State.SPILLED),
}  # fmt: skip
# A failed partition may have given its buffer back.
_HAS_BUFFER = {State.RESIDENT, State.DIRTY, State.WRITING, State.READING}


class Partition:
    """One slice, every move of which it checks. `buffer` is uint8, [spec.nbytes], while memory holds the value."""

    __slots__ = (
        "_prefixes", "_turned", "_views", "buffer", "on_drive", "pending", "rank", "readers", "recorded", "spec",
        "state", "transfer", "undo", "unset", "writer",
    )  # fmt: skip

    def __init__(self, spec: PartitionSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        # Asked several times at each use.
        self.on_drive = spec.home.on_drive
        self.state = State.ABSENT
        self.buffer: Tensor | None = None
        self.transfer: Transfer | None = None
        self.readers = 0
        self.writer = False
        # Whether the value may still be forgotten, and whether the spare extent has the committed value.
        self.pending = self._turned = False
        # The slot that a record names; None without one. See [Note: records].
        self.recorded: int | None = None
        # The committed value of one in CPU memory whose pending value `buffer` holds.
        self.undo: Tensor | None = None
        # The byte from which on the value is zero, by extent; where memory has a newer value, of that one.
        self._prefixes = [spec.nbytes, spec.nbytes]
        # Whether those zeros are still missing in memory.
        self.unset = False
        # Made at the first use of a buffer.
        self._views: dict[Kind, Tensor] = {}

    @property
    def key(self) -> Key:
        return self.spec.key

    @property
    def arena_nbytes(self) -> int:
        """Bytes that its buffer takes of an arena: none at a GPU or CPU home."""
        return self.spec.nbytes if self.on_drive else 0

    @property
    def extent(self) -> Extent | None:
        """The place on the drive that holds the value, or will: see [Note: slots]."""
        return self.spec.spare if self.slot else self.spec.extent

    @property
    def slot(self) -> int:
        """Which of its extents that is: 1 for the spare one."""
        return int(self._turned is not self.pending)

    @property
    def changed(self) -> bool:
        """Whether its value is not the one that a record names."""
        return self.slot != self.recorded

    @property
    def prefix_nbytes(self) -> int:
        """Bytes of the extent before the zeros. See [Note: zero tails]."""
        return self._prefixes[self.slot]

    @property
    def leased(self) -> bool:
        return self.writer or self.readers > 0

    @property
    def absent(self) -> bool:
        """Whether it needs a buffer before it can be used."""
        return self.state in (State.ABSENT, State.SPILLED)

    def view(self, kind: Kind) -> Tensor:
        """The flat typed array of one kind: shape [numel], dtype as planned. Valid while a lease is held."""
        view = self._views.get(kind)
        if view is not None:
            return view
        if self.buffer is None:
            raise self.error(f"view {kind.value}")
        for section in self.spec.sections:
            if section.kind is kind:
                part = self.buffer[section.offset : section.offset + section.nbytes]
                view = self._views[kind] = part.view(DTYPES[section.dtype])
                return view
        raise KeyError(f"{self.key} holds no {kind.value}")

    def materialize(self, buffer: Tensor, *, prefix_nbytes: int | None = None, same: bool = False) -> None:
        """Give an absent partition a buffer whose content is its new value, or the first `prefix_nbytes` bytes of it;
        the rest of the value is zero, whatever the buffer holds there. same: it is the value that it had.
        """
        # RESIDENT -> DIRTY is legal, too, but only for a writer.
        self._forbid(self.state is not State.ABSENT, "materialize")
        if not same:
            self._leave_recorded("materialize")
        self._move(State.DIRTY if self.on_drive else State.RESIDENT, "materialize")
        self.buffer = buffer
        self._set_prefix(prefix_nbytes)

    def fill(self) -> None:
        """Zero the tail in memory, before the buffer is lent. See [Note: zero tails]."""
        if self.unset:
            assert self.buffer is not None
            self.buffer[self.prefix_nbytes :].zero_()
            self.unset = False

    def _set_prefix(self, nbytes: int | None) -> None:
        nbytes = self.spec.nbytes if nbytes is None else align_up(nbytes, EXTENT_ALIGNMENT)
        self._prefixes[self.slot] = nbytes
        self.unset = nbytes < self.spec.nbytes

    def record(self) -> None:
        """A record names the value as it is now."""
        self.recorded = self.slot

    def restore(self, slot: int, prefix_nbytes: int) -> None:
        """Take the value that a record of an earlier process names: it lies in an extent, whose first bytes these are,
        and memory has it already where that is its home.
        """
        self._forbid(self.leased or (self.on_drive and self.state is not State.ABSENT), "restore")
        self._turned = bool(slot)
        self._prefixes[slot] = prefix_nbytes
        if self.on_drive:
            self._move(State.SPILLED, "restore")
        self.record()

    def forget_record(self) -> None:
        """No record names a value any more."""
        self.recorded = None

    def _leave_recorded(self, move: str) -> None:
        """Before the value changes: see [Note: records]."""
        if self.recorded == self.slot:
            self._forbid(self.spec.spare is None or self.pending, f"{move} what a record names")
            self._turned = not self._turned

    def begin_fetch(self, buffer: Tensor, submit: Callable[[], Transfer]) -> None:
        """Fill `buffer` from the drive. Nothing has changed if `submit` raises."""
        self._allow(State.READING, "fetch")
        self.transfer = submit()
        self.buffer = buffer
        self.unset = self.prefix_nbytes < self.spec.nbytes
        self._move(State.READING, "fetch")

    def begin_flush(self, submit: Callable[[], Transfer]) -> None:
        """Write the buffer to the drive. Nothing has changed if `submit` raises."""
        self._forbid(self.writer or not self.changed, "flush")
        self._allow(State.WRITING, "flush")
        self.transfer = submit()
        self._move(State.WRITING, "flush")

    def complete(self) -> None:
        """Wait for the transfer and raise its error; then the partition is FAILED, unless the transfer is only late."""
        if self.transfer is None:
            raise self.error("complete")
        try:
            self.transfer.wait()
        except BaseException as error:
            self.arrive(error)
            raise
        self.arrive()

    def arrive(self, error: BaseException | None = None) -> None:
        """End the transfer, whose wait has returned or raised `error`. A late transfer stays in flight."""
        if self.transfer is None:
            raise self.error("complete")
        if error is None:
            self.transfer = None
            self._move(State.RESIDENT, "complete")
        elif self.transfer.done():
            self.transfer = None
            self._move(State.FAILED, "fail")

    def drop(self) -> Tensor:
        """Free a clean buffer and return it; the value stays on the drive."""
        # From other states a partition becomes SPILLED by `forget` and `restore` only.
        self._forbid(self.leased or self.state is not State.RESIDENT, "drop")
        self._move(State.SPILLED, "drop")
        return self._take_buffer()

    def discard(self) -> Tensor | None:
        """Lose the value; return the buffer, if there was one."""
        self._forbid(self.leased or self.pending, "discard")
        if self.state is State.ABSENT:
            return None
        self._move(State.ABSENT, "discard")
        return self._take_buffer() if self.buffer is not None else None

    def surrender(self) -> Tensor | None:
        """Free the buffer of a failed partition that has no lease; return it, if there was one."""
        if self.state is not State.FAILED or self.leased or self.buffer is None:
            return None
        return self._take_buffer()

    def begin_read(self) -> None:
        """Add a reader."""
        if self.state not in (State.RESIDENT, State.DIRTY, State.WRITING) or self.writer:
            raise self.error("read")
        self.readers += 1

    def end_read(self) -> None:
        """Remove a reader."""
        self.readers -= 1

    def begin_write(self, *, pending: bool = False, undo: Tensor | None = None, starts: bool = False) -> None:
        """Let one writer change the value.

        pending: the new value may be forgotten; the one before it must be on the drive, or else in `undo`. starts: the
        writer fills the bytes that `materialize` was told, and none behind them.
        """
        if self.state not in (State.RESIDENT, State.DIRTY) or self.leased:
            raise self.error("write")
        if pending and not self.pending:
            kept = self.spec.spare is not None if self.on_drive else undo is not None
            self._forbid(not kept or self.state is not State.RESIDENT, "write a pending version")
            self.pending, self.undo = True, undo
        self._forbid(self.pending and not pending, "write over a pending version")
        self._forbid(self.unset and not starts, "write")
        self._leave_recorded("write")
        if not starts:
            self._set_prefix(None)
        if self.on_drive and self.state is State.RESIDENT:
            self._move(State.DIRTY, "write")
        self.writer = True

    def end_write(self) -> None:
        """End the writer's lease."""
        self.writer = False

    def commit(self) -> Tensor | None:
        """Make the pending value the committed one, also under leases; return the buffer that had the old one."""
        self._turned, self.pending = self._turned is not self.pending, False
        undo, self.undo = self.undo, None
        return undo

    def forget(self) -> Tensor | None:
        """Go back to the committed value; return the buffer that is free now, if there was one: of the pending value,
        or that of the undo pool.
        """
        self._forbid(self.leased or self.transfer is not None, "forget a pending version")
        if not self.pending:
            return None
        self.pending = False
        if not self.on_drive:
            undo, self.undo = self.undo, None
            assert self.buffer is not None and undo is not None
            self.buffer.copy_(undo)
            return undo
        if self.state is not State.SPILLED:
            self._move(State.SPILLED, "forget")
        return self._take_buffer() if self.buffer is not None else None

    def check(self) -> None:
        """Raise StateError if an invariant of the table does not hold."""
        broken = [
            (self.buffer is not None) != (self.state in _HAS_BUFFER) and self.state is not State.FAILED,
            (self.transfer is not None) != (self.state in (State.READING, State.WRITING)),
            self.writer and self.readers > 0,
            self.leased and self.state in (State.ABSENT, State.SPILLED, State.READING),
            self.writer and self.state in (State.WRITING, State.FAILED),
            not self.on_drive and self.state not in (State.ABSENT, State.RESIDENT),
            self.readers < 0,
            self.pending and ((self.spec.spare is None and self.undo is None) or self.state is State.ABSENT),
            self.undo is not None and not self.pending,
            self.unset and (self.buffer is None or self.readers > 0),
            self.state in (State.DIRTY, State.WRITING) and not self.changed,
        ]
        if any(broken):
            raise self.error(f"pass invariant {broken.index(True) + 1}")

    def error(self, move: str) -> StateError:
        """The error for a move that this state does not allow."""
        lease = "a writer" if self.writer else f"{self.readers} readers"
        return StateError(f"cannot {move}: {self.key}, rank {self.rank}, is {self.state.value} with {lease}")

    def _move(self, to: State, move: str) -> None:
        self._allow(to, move)
        self.state = to

    def _allow(self, to: State, move: str) -> None:
        if (self.state, to) not in (_NVME_MOVES if self.on_drive else _MEMORY_MOVES):
            raise self.error(move)

    def _forbid(self, condition: bool, move: str) -> None:
        if condition:
            raise self.error(move)

    def _take_buffer(self) -> Tensor:
        buffer, self.buffer = self.buffer, None
        self.unset = False
        self._views.clear()
        if buffer is None:
            raise self.error("give up a buffer")
        return buffer
