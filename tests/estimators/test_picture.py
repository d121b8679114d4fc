"""The picture is well-formed, shows every byte to scale, and names what it shows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from estimators.estimate import Estimate, Machine, estimate
from estimators.picture import picture
from infinity.base.palette import ACTIONS, KINDS, PAPER, RULE
from infinity.plan.types import Tier

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found() -> Estimate:
    nvme = {"device": "nvme", "nvme_path": "nvme"}
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": nvme}
    return estimate(
        "llama-3.2-1b", {"bf16": {"enabled": True}, "zero_optimization": zero}, ranks=2,
        machine=Machine(8 * 10**9, 24 * 10**9, 100 * 10**9),
    )  # fmt: skip


def test_boxes_are_to_scale(found):
    root = ElementTree.fromstring(picture(found))
    heights: dict[str, float] = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text is not None:
            heights[title.text] = float(box.attrib["height"])
    parts = {name: height for name, height in heights.items() if name.endswith("in at rest")}
    exp_avg = next(height for name, height in parts.items() if name.startswith("exp_avg:"))
    remainders = next(height for name, height in parts.items() if name.startswith("master remainders:"))
    assert exp_avg == pytest.approx(2 * remainders, rel=0.01)


def test_everything_is_named_and_no_other_colour_is_used(found):
    text = picture(found)
    shown = {kind for table in found.phases.values() for kinds in table.values() for kind, n in kinds.items() if n}
    for kind in shown:
        assert f">{kind.label}</text>" in text
    for phase in found.phases:
        assert f">{phase.value}</text>" in text
    assert text.count("a rank may have") == 3
    boxes = re.findall(r'<rect [^>]*fill="(#\w+)"', text)
    assert set(boxes) == {PAPER, *(KINDS[kind.value].colour for kind in shown)}


def test_nothing_lies_outside(found):
    root = ElementTree.fromstring(picture(found))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y = (float(box.attrib.get(name, 0)) for name in ("x", "y"))
        assert 0 <= x <= x + float(box.attrib["width"]) <= width
        assert 0 <= y <= y + float(box.attrib["height"]) <= height


def test_a_model_without_accelerator_has_no_empty_panel():
    alone = estimate("gpt2", {"zero_optimization": {"stage": 0}})
    assert alone.phases
    text = picture(alone)
    assert ">NVMe</text>" not in text
    assert sum(sum(table[Tier.NVME].values()) for table in alone.phases.values()) == 0


def test_a_pipeline_has_a_row_for_each_rank_with_its_actions_to_scale():
    pipeline = estimate(
        "llama-3.2-1b", {"bf16": {"enabled": True}}, ranks=4, pp=4, micro_batches=4, schedule="zero_bubble"
    )
    assert pipeline.schedule is not None
    text, times = picture(pipeline), pipeline.schedule.times
    root = ElementTree.fromstring(text)
    bars: dict[str, list[tuple[float, float, float]]] = {look.colour: [] for look in ACTIONS.values()}
    rows = []
    for box in root.iter(f"{SVG}rect"):
        x, y, width = (float(box.attrib.get(name, 0)) for name in ("x", "y", "width"))
        title = box.find(f"{SVG}title")
        if title is not None and title.text is not None and "micro-batch" in title.text:
            bars[box.attrib["fill"]].append((x, y, width))
        elif box.attrib["fill"] == RULE and float(box.attrib["height"]) > 14:
            rows.append((x, y, width))
    assert len(rows) == 4 and {len(found) for found in bars.values()} == {16}
    for (x, y, width), spans in zip(rows, times.spans, strict=True):
        own = [bar for found in bars.values() for bar in found if bar[1] == y]
        busy = sum(end - begin for begin, end in spans) / times.makespan
        assert sum(bar[2] for bar in own) == pytest.approx(width * busy, rel=0.01)
        assert all(x - 0.1 <= bar[0] and bar[0] + bar[2] <= x + width + 0.1 for bar in own)
    assert f"bubble {100 * times.bubble:.0f} %" in text
    assert all(f">{name}</text>" in text for name in ("forward", "backward, inputs", "backward, weights", "waiting"))
