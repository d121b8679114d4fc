"""An estimate as a picture: for each tier, what lies there in every phase, stacked by kind, under its limit.

Below that, for a pipeline, what each of its ranks does over a step, and the bubble: where a row is grey, the rank
waits. Plain SVG text, so that it opens in a browser and in a README alike. Colours and labels are those of
`infinity.base.palette`; every stack has its total written above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from estimators.estimate import Estimate
from estimators.report import duration, folded, headline, tier_name
from infinity.base.palette import ACTIONS, INK, KINDS, PAPER, RULE
from infinity.base.sizes import format_bytes
from infinity.plan.types import Kind, Tier

_COLOURS = {Kind(name): look.colour for name, look in KINDS.items()}
_WIDTH = 1080
_MARGIN = 24
_TOP = 84
_HEIGHT = 300
_AXIS = 58
_GAP = 20
_LEGEND_ROW = 24
_LEGEND_COLUMNS = 5
# Characters of the title.
_TITLE = 115
# Rows of a pipeline's ranks, their bars, and the width of an action from which its micro-batch is written in it.
_ROW = 22
_BAR = 17
_NUMBERED = 14.0
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class _Panel:
    """One tier's axes: where they lie, and how many bytes they reach up to."""

    left: float
    width: float
    nbytes_max: int

    def y(self, nbytes: float) -> float:
        return _TOP + _HEIGHT - _HEIGHT * nbytes / self.nbytes_max


def picture(found: Estimate) -> str:
    """The SVG of one estimate."""
    columns = found.columns
    tiers = [tier for tier in found.tiers if any(table[tier] for table in columns.values())]
    width = (_WIDTH - 2 * _MARGIN - (len(tiers) - 1) * _GAP) / max(len(tiers), 1)
    kinds = [kind for kind in _COLOURS if any(table[tier].get(kind) for table in columns.values() for tier in tiers)]
    body = []
    for index, tier in enumerate(tiers):
        left = _MARGIN + index * (width + _GAP)
        body += _panel(tier, {name: table[tier] for name, table in columns.items()}, found, left, width)
    whole, homes = headline(found)[:2]
    title, *rest = map(str.strip, folded(whole, _TITLE).splitlines())
    place = "" if found.plan.pipeline is None else f", at place {found.plan.pipeline.index} of the pipeline"
    under = "; ".join([*rest, f"bytes of a rank{place}", homes.rpartition("; ")[0]])
    rows = -(-len(kinds) // _LEGEND_COLUMNS)
    below = _TOP + _HEIGHT + 80 + rows * _LEGEND_ROW
    strip, height = _strip(found, below)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img" {_FONT}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="{PAPER}"/>',
            _text(_MARGIN, 28, title, size=16, weight="bold"),
            _text(_MARGIN, 48, under, size=12),
            *body,
            *_legend([(kind.label, _COLOURS[kind]) for kind in kinds], _TOP + _HEIGHT + 62),
            *strip,
            "</svg>\n",
        ]
    )


def _panel(
    tier: Tier, columns: Mapping[str, Mapping[Kind, int]], found: Estimate, left: float, width: float
) -> list[str]:
    """One tier: title, scale, a stack for each phase, and the limit where it is known and near."""
    limit = found.capacity.of(tier)
    highest = max(sum(kinds.values()) for kinds in columns.values())
    near = limit is not None and limit < 4 * highest
    reach = max(highest, limit if near and limit is not None else 0)
    step = _round_step(reach)
    # Room above the highest for its figure.
    panel = _Panel(left + _AXIS, width - _AXIS, int(step * (reach * 1.08 // step + 1)))
    dashed = "dashed: " if near else ""
    known = "" if limit is None else f" ({dashed}a rank may have {format_bytes(limit)})"
    lines = [_text(left, _TOP - 12, f"{tier_name(found, tier)}{known}", size=13, weight="bold")]
    at = 0
    while at <= panel.nbytes_max:
        y = panel.y(at)
        lines.append(f'<path d="M{panel.left:.1f} {y:.1f}h{panel.width:.1f}" stroke="{RULE}"/>')
        lines.append(_text(panel.left - 6, y + 4, _scale(at), size=11, anchor="end"))
        at += step
    slot = panel.width / len(columns)
    for index, (name, kinds) in enumerate(columns.items()):
        lines += _stack(panel, panel.left + index * slot, slot, name, kinds)
    if near and limit is not None:
        y = panel.y(limit)
        lines.append(
            f'<path d="M{panel.left:.1f} {y:.1f}h{panel.width:.1f}" stroke="{INK}" stroke-width="1.5" '
            'stroke-dasharray="6 4"/>'
        )
    return lines


def _stack(panel: _Panel, left: float, slot: float, name: str, kinds: Mapping[Kind, int]) -> list[str]:
    """One phase: a box for each kind that can be seen, the total above and the name below."""
    lines = []
    middle, below = left + slot / 2, 0
    for kind, colour in _COLOURS.items():
        nbytes = kinds.get(kind, 0)
        height = panel.y(below) - panel.y(below + nbytes)
        if height > 0.05:
            lines.append(
                f'<rect x="{left + 0.14 * slot:.1f}" y="{panel.y(below + nbytes):.1f}" width="{0.72 * slot:.1f}" '
                f'height="{height:.1f}" fill="{colour}" stroke="{PAPER}" stroke-width="0.5">'
                f"<title>{kind.label}: {format_bytes(nbytes)} in {name}</title></rect>"
            )
        below += nbytes
    lines.append(_halo(middle, panel.y(below) - 4, _figure(below), anchor="middle"))
    lines.append(
        f'<text x="{middle:.1f}" y="{_TOP + _HEIGHT + 14}" font-size="11" fill="{INK}" text-anchor="end" '
        f'transform="rotate(-30 {middle:.1f} {_TOP + _HEIGHT + 14})">{escape(name)}</text>'
    )
    return lines


def _strip(found: Estimate, top: float) -> tuple[list[str], float]:
    """A row for each rank of a pipeline with its actions to scale, and where that ends; nothing without a pipeline."""
    part, schedule = found.plan.pipeline, found.schedule
    if part is None or schedule is None:
        return [], top
    split, times = part.split, schedule.times
    left, width = _MARGIN + _AXIS, _WIDTH - 2 * _MARGIN - _AXIS
    scale = width / times.makespan
    title = (
        f"pipeline: {split.pp} ranks, {split.schedule}, {split.micro_batches} micro-batches in "
        f"{duration(times.makespan)}; bubble {100 * times.bubble:.0f} %"
    )
    lines = [_text(_MARGIN, top + 8, title, size=13, weight="bold")]
    kinds: dict[str, str] = {}
    for rank, (actions, spans) in enumerate(zip(split.tables, times.spans, strict=True)):
        y = top + 22 + rank * _ROW
        lines.append(_text(left - 6, y + _BAR - 4, f"place {rank}", size=11, anchor="end"))
        lines.append(f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" fill="{RULE}"/>')
        for action, (begin, end) in zip(actions, spans, strict=True):
            look = ACTIONS[action.kind.value]
            kinds.setdefault(look.label, look.colour)
            lines.append(
                f'<rect x="{left + begin * scale:.2f}" y="{y:.1f}" width="{(end - begin) * scale:.2f}" '
                f'height="{_BAR}" fill="{look.colour}" stroke="{PAPER}" stroke-width="0.5">'
                f"<title>{look.label} of micro-batch {action.micro_batch} in stage {action.stage}: "
                f"{duration(end - begin)}</title></rect>"
            )
            if (end - begin) * scale >= _NUMBERED:
                middle = left + (begin + end) / 2 * scale
                lines.append(_halo(middle, y + _BAR - 4, str(action.micro_batch), anchor="middle"))
    bottom = top + 22 + split.pp * _ROW + 8
    lines += _legend([*kinds.items(), ("waiting", RULE)], bottom)
    return lines, bottom + _LEGEND_ROW + 8


def _legend(kinds: Sequence[tuple[str, str]], top: float) -> list[str]:
    lines = []
    column = (_WIDTH - 2 * _MARGIN) / _LEGEND_COLUMNS
    for index, (label, colour) in enumerate(kinds):
        x = _MARGIN + index % _LEGEND_COLUMNS * column
        y = top + index // _LEGEND_COLUMNS * _LEGEND_ROW
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" fill="{colour}" stroke="{INK}" '
            'stroke-width="0.5"/>'
        )
        lines.append(_text(x + 20, y + 11.5, label, size=12))
    return lines


def _figure(nbytes: int) -> str:
    """A total above its stack: the unit stands at the scale."""
    if nbytes < 1e6:
        return "0"
    value = nbytes / (1e12 if nbytes >= 1e12 else 1e9 if nbytes >= 1e8 else 1e6)
    return f"{value:.3g}" + ("" if nbytes >= 1e8 else "M")


def _scale(nbytes: int) -> str:
    """A round number of bytes at the scale."""
    for size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return str(nbytes)


def _round_step(nbytes: int) -> int:
    """A round number of bytes, of which `nbytes` has about five."""
    unit = 1
    while unit * 10 <= max(nbytes, 1):
        unit *= 10
    return next((part for part in (unit // 5, unit // 2, unit, 2 * unit) if part and nbytes / part <= 6), 2 * unit)


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{INK}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _halo(x: float, y: float, text: str, *, anchor: str) -> str:
    """Small text that stays legible over lines and boxes."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{INK}" stroke="{PAPER}" stroke-width="3" '
        f'paint-order="stroke" text-anchor="{anchor}">{escape(text)}</text>'
    )
