"""Puts CONTRIBUTING.md, which lies at the top of the tree, among the pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page `contributing.md`; its links to docs/ become links between pages."""
    text = re.sub(r"\]\(docs/", "](", SOURCE.read_text(encoding="utf-8"))
    files.append(File.generated(config, "contributing.md", content=text))
    return files
