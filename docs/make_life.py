"""Writes docs/pictures/life.svg, the life of a parameter in one step: python docs/make_life.py

Time runs to the right, one column for each move; a lane is a tier. Boxes are bytes while they are there, arrows are
moves.
A test compares the picture with what this script draws.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from infinity.base import palette

PICTURE = Path(__file__).with_name("pictures") / "life.svg"
LEFT, COLUMN, TOP, LANE, HEIGHT = 120, 92, 62, 118, 26
LANES = ("device", "CPU memory", "NVMe")
PHASES = (("forward", 0, 3), ("backward", 3, 6), ("step", 6, 9))
# Kind, text, lane, row within it, first and last moment. Moments are the columns' borders.
BOXES = (
    ("full", "gathered unit", 0, 0, 1.1, 2.7), ("full", "gathered unit", 0, 0, 3.9, 5.7),
    ("full_grad", "gradients", 0, 1, 4.7, 5.9), ("param", "PARAM", 1, 0, 0.5, 2.7), ("param", "PARAM", 1, 0, 3.3, 8.7),
    ("grad", "GRAD", 1, 1, 5.6, 7.9), ("exp_avg", "REMAINDER, moments", 1, 2, 6.4, 8.7),
    ("param", "PARAM", 2, 0, 0.0, 9.0), ("exp_avg", "REMAINDER, exp_avg, exp_avg_sq", 2, 1, 0.0, 9.0),
)  # fmt: skip
# What happens, the function that does it, and the move: moment, from (lane, row) to (lane, row). None: no bytes move.
MOVES = (
    ("fetch", "store.prefetch", 0.6, (2, 0), (1, 0)), ("gather", "Unit.start_gather", 1.3, (1, 0), (0, 0)),
    ("release", "GatheredMemory.release", 2.7, None, None), ("fetch", "store.prefetch", 3.4, (2, 0), (1, 0)),
    ("gather", "Unit.start_gather", 4.1, (1, 0), (0, 0)), ("reduce", "Reducer.submit", 5.7, (0, 1), (1, 1)),
    ("fetch", "step: prefetch", 6.5, (2, 1), (1, 2)), ("step in place", "SubGroupUpdater", 7.5, None, None),
    ("flush", "store.flush", 8.5, (1, 2), (2, 0)),
)  # fmt: skip


def x(moment: float) -> float:
    """The place of a moment."""
    return LEFT + COLUMN * moment


def y(lane: int, row: int) -> float:
    """The upper edge of a box."""
    return TOP + 52 + LANE * lane + (HEIGHT + 6) * row


def drawn() -> str:
    """The picture."""
    width, height = x(9) + 16, TOP + 52 + LANE * len(LANES) - 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'font-family="system-ui, DejaVu Sans, sans-serif" font-size="12" fill="{palette.INK}">',
        f'<rect width="100%" height="100%" fill="{palette.PAPER}"/>',
        "<title>The life of a parameter in one step</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{palette.FAINT}"/></marker></defs>',
    ]
    for name, first, last in PHASES:
        parts.append(_text(name, x((first + last) / 2), 18, weight="bold"))
        parts.append(_line(x(first) + 6, 26, x(last) - 6, 26, palette.FAINT))
    for index, (name, function, *_) in enumerate(MOVES):
        parts.append(_text(f"{index + 1} {name}", x(index + 0.5), 46))
        parts.append(_text(function, x(index + 0.5), 60 + 12 * (index % 2), size=9))
    for lane, name in enumerate(LANES):
        parts.append(_text(name, LEFT - 14, y(lane, 0) + 17, anchor="end", weight="bold"))
        if lane:
            parts.append(_line(16, y(lane, 0) - 14, width - 16, y(lane, 0) - 14, palette.RULE))
    for kind, text, lane, row, first, last in BOXES:
        colour, left, wide = palette.KINDS[kind].colour, x(first), COLUMN * (last - first)
        parts.append(
            f'<rect x="{left:g}" y="{y(lane, row):g}" width="{wide:g}" height="{HEIGHT}" rx="4" fill="{colour}" '
            f'fill-opacity="0.3" stroke="{colour}"/>'
        )
        parts.append(_text(text, left + wide / 2, y(lane, row) + 17))
    for _, _, moment, source, target in MOVES:
        if source is not None and target is not None:
            up = source[0] > target[0]
            begin = y(*source) + (0 if up else HEIGHT)
            end = y(*target) + (HEIGHT if up else 0)
            parts.append(_line(x(moment), begin, x(moment), end, palette.FAINT, tip=True))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(text: str, at: float, height: float, *, anchor: str = "middle", weight: str = "", size: int = 0) -> str:
    style = (f' font-weight="{weight}"' if weight else "") + (f' font-size="{size}"' if size else "")
    return f'<text x="{at:g}" y="{height:g}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _line(left: float, top: float, right: float, bottom: float, colour: str, *, tip: bool = False) -> str:
    end = ' stroke-width="1.5" marker-end="url(#tip)"' if tip else ""
    return f'<line x1="{left:g}" y1="{top:g}" x2="{right:g}" y2="{bottom:g}" stroke="{colour}"{end}/>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
