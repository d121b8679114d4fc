"""What every package may use and what knows none of ours: sizes, colours, traces, files that others have written."""

from __future__ import annotations

VERSION = "0.1.0"
