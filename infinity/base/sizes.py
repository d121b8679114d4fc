"""Parsing and formatting of memory amounts: 16777216, "16GB", "1.5GiB", "80%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


@dataclass(frozen=True)
class Share:
    """A share of a total that is known only on the machine that runs."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"a share is above 0% and at most 100%, not {100 * self.fraction:g}%")

    def of(self, total_nbytes: int) -> int:
        """Return this share of `total_nbytes`, rounded down."""
        return int(total_nbytes * self.fraction)

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


def parse_bytes(amount: int | float | str) -> int:
    """Return a whole number of bytes; units such as GB are powers of ten, units such as GiB powers of two.

    Raises:
        ValueError: `amount` is negative, not finite, or in an unknown unit.
    """
    if isinstance(amount, bool):
        raise ValueError(f"{amount} is not an amount of bytes")
    if isinstance(amount, str):
        match = _AMOUNT.fullmatch(amount.strip())
        if match is None or match[2].lower() not in _FACTORS:
            raise ValueError(f"{amount!r} is not an amount of bytes such as 16777216, '16GB' or '1.5GiB'")
        digits, factor = match[1].replace("_", ""), _FACTORS[match[2].lower()]
        # An integer keeps digits above 2**53 exact; a float does not.
        amount = int(digits) * factor if digits.isdigit() else float(digits) * factor
    if not math.isfinite(amount) or amount < 0:
        raise ValueError(f"{amount!r} is not an amount of bytes")
    return round(amount)


def parse_limit(limit: int | float | str | Share) -> int | Share:
    """Return a number of bytes above 0, or a `Share` for a percentage; raise ValueError for anything else."""
    if isinstance(limit, Share):
        return limit
    if isinstance(limit, str) and (match := _PERCENT.fullmatch(limit.strip())):
        return Share(float(match[1]) / 100)
    nbytes = parse_bytes(limit)
    if nbytes == 0:
        raise ValueError("a limit of 0 bytes leaves nothing for the plan")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Return bytes with three significant digits and a decimal unit: 999 B, 1.50 kB, 118 GB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= size:
            value = nbytes / size
            return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f} {unit}"
    return f"{nbytes:.0f} B"
