"""Writes docs/pictures/timeline.svg from a timeline's page, as a browser draws it.

    python benchmarks/timeline.py --batch 4 --positions 256 --keep step.html
    python docs/make_timeline.py step.html

Needs a Chromium; --browser says which program it is. The picture has the page's own colours, in light and in dark.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("pictures") / "timeline.svg"
WIDTH, MARGIN, GAP = 1160, 12, 8
_SVG = re.compile(r'<svg id="(?:shares|chart)"[^>]*viewBox="0 0 \S+ (?P<height>\S+)"[^>]*>(?P<body>.*?)</svg>', re.S)
_NUMBER = re.compile(r"\d+\.\d{3,}")


def drawn(page: Path, browser: str) -> str:
    """The page's elements once its script has run in a window of the picture's width."""
    # The page keeps a margin of 20 pixels on either side.
    with tempfile.TemporaryDirectory() as folder:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder}", f"--window-size={WIDTH + 40},1000", "--virtual-time-budget=2000",
            "--dump-dom", page.resolve().as_uri(),
        ]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def picture(document: str) -> str:
    """One SVG of the two that the drawn page has: the shares above, lanes and memory below."""
    style = document[document.index(":root") : document.index("* { box-sizing")]
    rules = re.findall(r"^svg ([.\w][^{]*\{[^}]*\})", document, re.M)
    parts, top = [], MARGIN
    for found in _SVG.finditer(document):
        parts.append(f'<g transform="translate({MARGIN} {top})">{_NUMBER.sub(_rounded, found["body"])}</g>')
        top += round(float(found["height"])) + GAP
    width, height = WIDTH + 2 * MARGIN, top - GAP + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="system-ui, DejaVu Sans, sans-serif" font-size="11">',
            f"<style>{style}{chr(10).join(rules)}</style>",
            '<rect width="100%" height="100%" fill="var(--ground)"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page that engine.timeline() has written")
    parser.add_argument("--browser", default="chromium")
    given = parser.parse_args()
    PICTURE.write_text(picture(drawn(given.page, given.browser)), encoding="utf-8")
