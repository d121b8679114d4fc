"""The picture is well-formed, shows every byte to scale, and names what it shows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from estimators.estimate import Estimate, estimate
from estimators.node import Machine
from estimators.picture import picture
from infinity.plan.palette import KINDS, PAPER
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
