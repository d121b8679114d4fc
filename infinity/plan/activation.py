"""What a pass over a model needs beside parameters and their gradients: one type for estimates and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device of one micro-batch's forward and backward, gradients of parameters left out.

    nbytes: at the busiest moment; saved_nbytes: what lies between forward and backward. parts: what the busiest moment
    is made of, by name. source: where the numbers are from, with a reason where it is not the first choice.
    """

    nbytes: int
    parts: Mapping[str, int]
    source: str
    saved_nbytes: int = 0
