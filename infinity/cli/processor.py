"""The processor's name."""

from __future__ import annotations

import platform

import cpuinfo


def processor() -> str:
    """Return the processor's model name, or its architecture if it has none. Takes about a second."""
    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())
