"""One palette and one vocabulary for all pictures: complete, told apart by every reader, and the only one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import infinity
from infinity.base import trace
from infinity.base.palette import ACTIVITIES, KINDS, POOLS, TIERS
from infinity.observability.timeline import Timeline
from infinity.plan.types import Kind, Tier

ROOT = Path(__file__).resolve().parents[1]
PALETTE = "infinity/base/palette.py"
PAGE = "infinity/observability/timeline.html"
FOLDERS = ("infinity", "estimators", "examples", "benchmarks", "docs")

_COLOUR = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b")
# A colour that is written out where something is drawn: by name, or as one of matplotlib's own cycle.
_NAMED = re.compile(r"""\b(?:edge|face|fill|stop)?-?_?colors?\s*[=:]\s*["'](?!var\()""")

# What one picture may show side by side: Adam, and four states of an optimizer that the engine does not know by name.
TOGETHER = ("param", "full", "grad", "full_grad", "activation", "pool", "model")
PICTURES = (
    (*TOGETHER, "remainder", "exp_avg", "exp_avg_sq"), (*TOGETHER, "master", "exp_avg", "exp_inf"),
    (*TOGETHER, "remainder", "square_avg", "momentum_buffer", "grad_avg"),
    (*TOGETHER, "master", "state_1", "state_2", "state_3", "state_4"),
)  # fmt: skip
# How the three dichromacies see linear RGB: Machado, Oliveira and Fernandes (2009), severity 1.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """Linear RGB of a colour of sRGB."""
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    xyz = _XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one: str, other: str) -> float:
    """The least CIE76 difference of two colours over all readers; 2.3 is just noticeable side by side."""
    return min(float(np.linalg.norm(lab(see @ linear(one)) - lab(see @ linear(other)))) for see in VISIONS.values())


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted(float(_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_every_kind_and_tier_has_its_words_and_its_colour():
    assert set(KINDS) == {kind.value for kind in Kind}
    assert set(TIERS) == {tier.value for tier in Tier}
    assert set(ACTIVITIES) == {trace.WAIT, trace.COMPUTE, trace.COPY, trace.ENGINE, trace.OUTSIDE, "flight"}
    looks = [*KINDS.values(), *POOLS.values()]
    assert all(look.label and _COLOUR.fullmatch(look.colour) for look in looks)
    labels = [look.label for look in looks]
    assert len(set(labels)) == len(labels), "one label a kind"
    assert [kind.label for kind in Kind] == [KINDS[kind.value].label for kind in Kind]
    assert infinity.base.palette.KINDS is KINDS, "a program draws with the same"


@pytest.mark.parametrize("names", PICTURES, ids=lambda names: names[-1])
def test_kinds_of_one_picture_are_told_apart_by_every_reader(names):
    colours = {name: (KINDS | POOLS)[name].colour for name in (*names, "pool_used")}
    near = {
        (one, other): round(found, 1)
        for one, other in combinations(colours, 2)
        if (found := difference(colours[one], colours[other])) < 10
    }
    assert not near, near


def grounds() -> tuple[str, str]:
    """What the timeline is drawn on, in light and in dark."""
    light, dark = re.findall(r"--ground: (#\w+)", (ROOT / PAGE).read_text())
    return light, dark


def test_everything_is_seen_on_a_dark_ground():
    _, dark = grounds()
    kinds = {look.label: contrast(look.colour, dark) for look in [*KINDS.values(), *POOLS.values()]}
    assert min(kinds.values()) >= 3, sorted(kinds.items(), key=lambda item: item[1])[:3]
    assert contrast(ACTIVITIES["wait"].dark, dark) == max(contrast(one.dark, dark) for one in ACTIVITIES.values())


def test_waiting_is_the_loudest_and_no_kinds_colour():
    light, dark = grounds()
    assert ACTIVITIES["wait"].light not in {look.colour for look in KINDS.values()}
    for name, activity in ACTIVITIES.items():
        if name != "wait":
            assert contrast(activity.light, light) < contrast(ACTIVITIES["wait"].light, light)
            assert contrast(activity.dark, dark) < contrast(ACTIVITIES["wait"].dark, dark)


def test_the_timelines_page_is_filled_from_the_palette(tmp_path):
    with Timeline(tmp_path / "page.html"):
        pass
    page = (tmp_path / "page.html").read_text()
    words = json.loads(re.search(r"tiers: TIERS\} = (.*);\n", page)[1])
    assert {name: tuple(look) for name, look in words["kinds"].items()} == KINDS | POOLS
    assert [*words["kinds"]] == [*KINDS, *POOLS], "stacked in one order everywhere"
    assert words["activities"] == {name: [one.label, one.note] for name, one in ACTIVITIES.items()}
    assert words["tiers"] == TIERS
    light, dark = page.split("prefers-color-scheme: dark", 1)
    for name, activity in ACTIVITIES.items():
        assert f"--{name}: {activity.light};" in light and f"--{name}: {activity.dark};" in dark
    assert "/*LIGHT*/" not in page and "/*DARK*/" not in page and "/*PALETTE*/" not in page


def written_colours(root: Path) -> Iterator[str]:
    """Colours that are written outside the palette; of the page, those that are no greys."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            name = file.relative_to(root).as_posix()
            if file.suffix not in (".py", ".html") or name == PALETTE:
                continue
            for number, line in enumerate(file.read_text().splitlines(), 1):
                found = [colour for colour in _COLOUR.findall(line) if name != PAGE or not grey(colour)]
                if found or (file.suffix == ".py" and _NAMED.search(line)):
                    yield f"{name}:{number}: {line.strip()}"


def grey(colour: str) -> bool:
    """Whether a colour has next to no hue."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = [int(digits[at : at + 2], 16) for at in (0, 2, 4)]
    return max(channels) - min(channels) <= 24


def test_there_is_no_second_palette():
    assert [*written_colours(ROOT)] == []


@pytest.mark.parametrize("name", ["estimate.svg", "timeline.svg"])
def test_a_picture_of_the_docs_is_drawn_with_the_palette(name):
    text = (ROOT / "docs" / "pictures" / name).read_text()
    activities = {colour for one in ACTIVITIES.values() for colour in (one.light, one.dark)}
    known = activities | {look.colour for look in (KINDS | POOLS).values()}
    found = {colour for colour in _COLOUR.findall(text) if not grey(colour)}
    assert found and found <= known, found - known
    labels = {look.label for look in (KINDS | POOLS).values()}
    shown = {text for text in re.findall(r">([^<>]+)</text>", text) if text in labels or text in KINDS}
    assert len(shown) >= 5 and shown <= labels, shown - labels


PLANTED = {
    "a colour in Python": ("estimators/a.py", 'BLUE = "#0072B2"\n'),
    "a short one": ("infinity/a.py", 'fill = "#07b"\n'),
    "a named one": ("examples/a.py", 'axes.plot(x, y, color="red")\n'),
    "matplotlib's own cycle": ("benchmarks/a.py", 'axes.plot(x, y, color="C0")\n'),
    "one in the page that is no grey": (PAGE, "<style>p { background: #0072b2; }</style>\n"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_colour_is_found(case, tmp_path):
    name, text = PLANTED[case]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len([*written_colours(tmp_path)]) == 1


def test_greys_of_the_page_and_what_is_no_colour_are_not_reported(tmp_path):
    for name, text in {
        PAGE: "p { color: #5d666f; }\n",
        PALETTE: 'X = "#0072B2"\n',
        "docs/a.py": 'see("issue #1234"); draw(color=palette.INK)\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [*written_colours(tmp_path)] == []
