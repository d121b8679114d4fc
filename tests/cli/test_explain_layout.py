"""`infinity config explain` draws a block-sparse layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.cli.main import main


def explained(folder: Path, capsys: pytest.CaptureFixture[str], section: dict[str, object]) -> list[str]:
    file = folder / "config.json"
    file.write_text(json.dumps({"sparse_attention": section}))
    assert main(["config", "explain", str(file), "--only", "sparse_attention"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_layout_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(tmp_path, capsys, {"mode": "bslongformer", "block": 64})
    at = lines.index('sparse_attention "bslongformer", all heads, 2,048 tokens:')
    drawn = [line.strip() for line in lines[at + 1 :]]
    assert len(drawn) == 32 and {len(line) for line in drawn} == {32}
    assert drawn[0] == "#" * 32 and drawn[5] == "#...###" + "." * 25


def test_heads_of_their_own_are_drawn_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"mode": "fixed", "different_layout_per_head": True, "num_different_global_patterns": 2}
    lines = explained(tmp_path, capsys, {**section, "num_random_blocks": 3})
    heads = [lines.index(f'sparse_attention "fixed", head {head}, 512 tokens:') for head in (0, 1)]
    assert [lines[at + 9].strip()[:8] for at in heads] == ["...#...#", "..#...#."]
    assert "sparse_attention.num_random_blocks = 3  (file; no effect here)" in lines
