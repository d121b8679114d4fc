"""The processor's name."""

from __future__ import annotations

import platform

import cpuinfo


def processor() -> str:
    """What the processor calls itself, or its architecture where it has no name. Takes about a second."""
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())
