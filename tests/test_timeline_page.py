"""The timeline's page is read on a telephone as on a desk: nothing overflows, labels are whole words, buttons work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.base import trace
from infinity.observability.timeline import Timeline

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "infinity" / "observability" / "timeline.html").read_text(encoding="utf-8")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MODULES = [f"model.layers.{layer}.mlp.up_proj" for layer in range(12)]

# The page lies in a frame of its own width, since a browser's window has a least one; what the probe in the page
# measures once it is drawn is left where the browser prints it.
FRAME = """<!doctype html>
<script>addEventListener("message", (event) => {
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = event.data;
  document.body.appendChild(out);
});</script>
<iframe src="probed.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
"""
PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const wide = document.documentElement.clientWidth, box = (node) => node.getBoundingClientRect();
  const texts = [...document.querySelectorAll("svg text")];
  const overlaps = [...document.querySelectorAll("#chart text.in, #chart text.in-wait")].filter((node) =>
    ![...document.querySelectorAll("#chart rect")].some((rect) => rect.tip &&
      box(rect).left <= box(node).left && box(node).right <= Math.min(box(rect).right, wide) + 1 &&
      box(rect).top <= box(node).top + 4 && box(node).bottom <= box(rect).bottom + 4));
  const whole = () => JSON.stringify(view), before = whole();
  const moves = {};
  for (const name of ["closer", "back", "on", "further", "all"]) { byId(name).click(); moves[name] = whole(); }
  const fire = (type, pointerId, x, node) => node.dispatchEvent(new PointerEvent(type,
    {pointerId, clientX: LEFT + x, clientY: box(chart).top + 40, bubbles: true}));
  for (const [pointer, x] of [[1, 100], [2, 150]]) fire("pointerdown", pointer, x, chart);
  fire("pointermove", 2, 200, chart);
  moves.apart = whole();
  for (const pointer of [1, 2]) fire("pointerup", pointer, 100, chart);
  fire("pointerdown", 3, 100, chart);
  fire("pointermove", 3, 60, chart);
  moves.dragged = whole();
  fire("pointerup", 3, 60, chart);
  byId("all").click();
  fire("pointerdown", 4, 60, [...document.querySelectorAll("#chart rect")].find((rect) => rect.tip));
  fire("pointerup", 4, 60, chart);
  const found = {
    tip: tip.style.visibility === "visible" && tip.textContent, tipped: [box(tip).left, box(tip).right],
    wide, overflow: document.documentElement.scrollWidth - wide, overlaps: overlaps.map((node) => node.textContent),
    outside: texts.filter((node) => box(node).left < -1 || box(node).right > wide + 1).map((node) => node.textContent),
    inside: texts.filter((node) => /^in/.test(node.getAttribute("class") || "")).map((node) => node.textContent),
    buttons: [...document.querySelectorAll("button")].map((node) => [box(node).width, box(node).height]),
    table: byId("lanes").scrollWidth - byId("tables").clientWidth, plot: box(chart).width - LEFT - RIGHT, before, moves,
  };
  parent.postMessage(JSON.stringify(found), "*");
}, 50));
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of lane, long names and memory on every tier."""
    path = tmp_path_factory.mktemp("page") / "step.html"
    with Timeline(path):
        for tier, kinds in {
            "gpu": ("full", "full_grad", "activation"),
            "cpu": ("grad", "pool", "master"),
            "nvme": ("param", "remainder", "exp_avg", "exp_avg_sq"),
        }.items():
            for kind in kinds:
                trace.level(tier, kind, 10**9)
        trace.level("pools", "fetches", 4 * 10**8)
        for phase in ("forward", "backward", "step"):
            with trace.span(trace.PHASE, phase):
                for module in MODULES:
                    trace.begin_async(f"modules, {phase}", module)
                    trace.begin_async("NVMe reads", f"parameters of {module}", 10**7)
                    with trace.span(trace.WAIT, "copy from the device"):
                        time.sleep(0.002)
                    with trace.span(trace.COPY, "copy", module, 10**7):
                        time.sleep(0.001)
                    trace.end_async("NVMe reads", f"parameters of {module}")
                    trace.end_async(f"modules, {phase}", module)
    return path


def measured(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What the page says of itself in a window of so many pixels."""
    text = page.read_text(encoding="utf-8").replace("</html>", PROBE + "</html>")
    (folder / "probed.html").write_text(text, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
            "--hide-scrollbars", "--window-size=1400,1000", "--virtual-time-budget=2000", "--dump-dom",
            (folder / "frame.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_overflows_and_labels_are_whole_words(page: Path, tmp_path: Path, width: int) -> None:
    found = measured(page, width, tmp_path)
    assert found["wide"] == width
    assert found["overflow"] <= 0 and found["outside"] == [] and found["table"] <= 0, found
    assert found["overlaps"] == [], "no label leaves its bar"
    words = {*re.split(r"[ .]", " ".join(MODULES)), "parameters", "of", "forward", "backward", "step", "copy", "from",
             "the", "device", "waiting:", "computing", "copying", "engine", "outside", "(root)"}  # fmt: skip
    for label in found["inside"]:
        if not re.fullmatch(r"\d+\.\d %", label):
            assert set(re.split(r"[ .]", label.strip("…"))) <= words, label
    assert {"forward", "backward"} <= set(found["inside"])
    assert found["plot"] >= 0.85 * width, "the lanes have the room"
    least = 44 if width < 640 else 30
    assert len(found["buttons"]) == 5 and all(wide >= least - 0.5 for wide, _ in found["buttons"])
    moves = {name: json.loads(view) for name, view in found["moves"].items()}
    begin, end = json.loads(found["before"])
    assert begin < moves["closer"][0] < moves["closer"][1] < end
    assert moves["back"][0] < moves["closer"][0] and moves["on"] == pytest.approx(moves["closer"])
    assert moves["all"] == [begin, end]
    apart, dragged = moves["apart"], moves["dragged"]
    assert apart[1] - apart[0] == pytest.approx((end - begin) / 2), "two fingers zoom"
    assert dragged[0] > apart[0] and dragged[1] - dragged[0] == pytest.approx(apart[1] - apart[0]), "one moves"
    assert found["tip"] and 0 <= found["tipped"][0] < found["tipped"][1] <= width, "a touch shows the figures"


def test_the_page_is_made_for_any_width() -> None:
    """What a browser checks above, as far as the text tells it."""
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in PAGE
    narrow = int(re.search(r"NARROW = (\d+)", PAGE)[1])
    assert PAGE.count(f"(max-width: {narrow - 1}px)") == 2, "the style and the drawing change at one width"
    style = PAGE[PAGE.index("<style>") : PAGE.index("</style>")]
    assert "#tables { overflow-x: auto;" in style and '<div id="tables"><table' in PAGE
    # A width that a telephone does not have is an upper bound, and yields to the window.
    for rule in re.findall(r"[\w-]*width: [^;{)]*\d{3,}px", style):
        assert "min(" in rule or rule == f"max-width: {narrow - 1}px", rule
    buttons = re.findall(r'<button id="(\w+)"', PAGE)
    actions = PAGE[PAGE.index("const ACTIONS = {") : PAGE.index("for (const name in ACTIONS)")]
    assert len(buttons) == 5 and all(f"{name}: ()" in actions for name in buttons)
    assert "touch-action: pan-y" in style and "touch-action: none" not in style, "a finger scrolls the page"
