"""The batch sizes: train_batch_size = micro-batch x accumulation x ranks. Any consistent subset determines the rest."""

from __future__ import annotations

from dataclasses import dataclass

_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three batch sizes in samples, where `total` = `micro` x `accumulation` x ranks."""

    total: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class _Ranks:
    """The number of ranks as an error message shows it, with a hint if the number is only assumed."""

    count: int
    detected: bool
    divided: str = ""

    def __str__(self) -> str:
        if self.divided:
            return f"{self.count} data-parallel rank{'s' if self.count > 1 else ''} ({self.divided})"
        return f"{self.count} rank{'s' if self.count > 1 else ''} {'detected' if self.detected else 'assumed'}"

    @property
    def hint(self) -> str:
        return "" if self.detected else "; say with --ranks N how many there will be"


class Unsolvable(ValueError):
    """Report batch sizes that contradict each other; the message names the nearest valid sizes."""


def solve_batch(
    *, total: int | None, micro: int | None, accumulation: int | None, ranks: int, detected: bool = True,
    divided: str = "",
) -> Batch:  # fmt: skip
    """Return all three sizes, derived from those that are not None; a size that nothing determines is 1.

    Arguments:
        total: samples of one optimizer step over all ranks.
        micro: samples of one forward on one rank.
        accumulation: backward passes of one optimizer step.
        ranks: data-parallel ranks.
        detected: True if `ranks` was detected, False if a command assumes it to check a file.
        divided: of which quotient `ranks` is the value, in words, where other axes have a share of the job's ranks.

    Raises:
        Unsolvable: the given sizes contradict each other or `ranks`.
    """
    counted = _Ranks(ranks, detected, divided)
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * ranks, micro, accumulation)
    if micro is None:
        # As in DeepSpeed, only an explicit key turns accumulation on.
        accumulation = accumulation or 1
        micro = _share(total, accumulation * ranks, f"{_STEPS} {accumulation}", counted)
    elif accumulation is None:
        accumulation = _share(total, micro * ranks, f"{_MICRO} {micro}", counted)
    if micro * accumulation * ranks != total:
        raise Unsolvable(_contradiction(total, micro, accumulation, counted))
    return Batch(total, micro, accumulation)


def _share(total: int, divisor: int, given: str, ranks: _Ranks) -> int:
    if total % divisor == 0:
        return total // divisor
    below, above = total // divisor * divisor, (total // divisor + 1) * divisor
    nearest = f"{below} or {above}" if below else str(above)
    raise Unsolvable(
        f"{_TOTAL} {total} cannot be divided by {given} x {ranks} = {divisor}: the "
        f"nearest {_TOTAL} is {nearest}{ranks.hint}"
    )


def _contradiction(total: int, micro: int, accumulation: int, ranks: _Ranks) -> str:
    product = micro * accumulation * ranks.count
    choices = [f"{_TOTAL} {product}"]
    for key, others in ((_STEPS, micro * ranks.count), (_MICRO, accumulation * ranks.count)):
        if total % others == 0:
            choices.append(f"{key} {total // others}")
    return (
        f"{_TOTAL} {total} is not {_MICRO} {micro} x {_STEPS} {accumulation} x {ranks} = {product}: "
        f"nearest valid choices are {' or '.join(choices)}, or leave one of the three keys out{ranks.hint}"
    )
