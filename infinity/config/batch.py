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


class Unsolvable(ValueError):
    """The sizes contradict each other; the text names the nearest that do not."""


def solve_batch(*, total: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Batch:
    """The sizes that were given, and those that follow from them; what nothing determines is 1."""
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        # Accumulating is only done on request, as in DeepSpeed.
        accumulation = accumulation or 1
        micro = _share(total, accumulation * ranks, f"{_STEPS} {accumulation}", ranks)
    elif accumulation is None:
        accumulation = _share(total, micro * ranks, f"{_MICRO} {micro}", ranks)
    if micro * accumulation * ranks != total:
        raise Unsolvable(_contradiction(total, micro, accumulation, ranks))
    return Batch(total, micro, accumulation)


def _share(total: int, divisor: int, given: str, ranks: int) -> int:
    if total % divisor == 0:
        return total // divisor
    below, above = total // divisor * divisor, (total // divisor + 1) * divisor
    nearest = f"{below} or {above}" if below else str(above)
    raise Unsolvable(
        f"{_TOTAL} {total} cannot be divided by {given} x {_ranks(ranks)} = {divisor}: the "
        f"nearest {_TOTAL} is {nearest}"
    )


def _contradiction(total: int, micro: int, accumulation: int, ranks: int) -> str:
    product = micro * accumulation * ranks
    ways = chain(
        [f"{_TOTAL} {product}"],
        [f"{_STEPS} {total // (micro * ranks)}"] if total % (micro * ranks) == 0 else [],
        [f"{_MICRO} {total // (accumulation * ranks)}"] if total % (accumulation * ranks) == 0 else [],
    )
    return (
        f"{_TOTAL} {total} is not {_MICRO} {micro} x {_STEPS} {accumulation} x {_ranks(ranks)} = {product}: "
        f"nearest valid choices are {' or '.join(ways)}, or leave one of the three keys out"
    )


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''} detected"
