"""train_batch_size = micro-batch x accumulation x ranks: any consistent part of it determines the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three batch sizes, settled: `total` = `micro` x `accumulation` x ranks."""

    total: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class _Counted:
    """The ranks in a complaint: how many, where that is known from, and what to do if it is not so."""

    count: int
    detected: bool

    def __str__(self) -> str:
        return f"{self.count} rank{'s' if self.count > 1 else ''} {'detected' if self.detected else 'assumed'}"

    @property
    def way_out(self) -> str:
        return "" if self.detected else "; say with --ranks N how many there will be"


class Unsolvable(ValueError):
    """The sizes contradict each other; the text names the nearest that do not."""


def solve_batch(
    *, total: int | None, micro: int | None, accumulation: int | None, ranks: int, detected: bool = True
) -> Batch:
    """The sizes that were given, and those that follow from them; what nothing determines is 1.

    detected: whether there are so many ranks, or only a command that looks at a file assumes them.
    """
    counted = _Counted(ranks, detected)
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        # Accumulating is only done on request, as in DeepSpeed.
        accumulation = accumulation or 1
        micro = _share(total, accumulation * ranks, f"{_STEPS} {accumulation}", counted)
    elif accumulation is None:
        accumulation = _share(total, micro * ranks, f"{_MICRO} {micro}", counted)
    if micro * accumulation * ranks != total:
        raise Unsolvable(_contradiction(total, micro, accumulation, counted))
    return Batch(total, micro, accumulation)


def _share(total: int, divisor: int, given: str, ranks: _Counted) -> int:
    if total % divisor == 0:
        return total // divisor
    below, above = total // divisor * divisor, (total // divisor + 1) * divisor
    nearest = f"{below} or {above}" if below else str(above)
    raise Unsolvable(
        f"{_TOTAL} {total} cannot be divided by {given} x {ranks} = {divisor}: the "
        f"nearest {_TOTAL} is {nearest}{ranks.way_out}"
    )


def _contradiction(total: int, micro: int, accumulation: int, ranks: _Counted) -> str:
    a_pass, a_step = micro * ranks.count, accumulation * ranks.count
    product = micro * a_step
    ways = chain(
        [f"{_TOTAL} {product}"],
        [f"{_STEPS} {total // a_pass}"] if total % a_pass == 0 else [],
        [f"{_MICRO} {total // a_step}"] if total % a_step == 0 else [],
    )
    return (
        f"{_TOTAL} {total} is not {_MICRO} {micro} x {_STEPS} {accumulation} x {ranks} = {product}: "
        f"nearest valid choices are {' or '.join(ways)}, or leave one of the three keys out{ranks.way_out}"
    )
