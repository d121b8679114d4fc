"""`import infinity` is inert: it costs little, loads little and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

ROOT = Path(__file__).resolve().parents[1]
IMPORT_SECONDS_MAX = 0.060

PROBE = """
import json, os, sys, threading, time
before = set(sys.modules)
descriptors = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
began = time.perf_counter()
import infinity
seconds = time.perf_counter() - began
mapped = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
    "descriptors": len(os.listdir("/proc/self/fd")) - len(descriptors) if descriptors else 0,
    "native": "libaio.so" in mapped or "libadam" in mapped,
}))
"""


def probe(folder: Path) -> tuple[dict, str]:
    """What a fresh interpreter saw while it imported infinity, started in `folder`; and its standard error."""
    reply = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROBE}"],
        capture_output=True, text=True, check=True, cwd=folder, timeout=60,
    )  # fmt: skip
    return json.loads(reply.stdout), reply.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return probe(tmp_path_factory.mktemp("cwd"))


def test_import_loads_no_heavy_package(seen):
    loaded = {name.partition(".")[0] for name in seen[0]["modules"]}
    assert loaded & {"torch", "numpy", "pydantic", "transformers", "psutil", "ctypes", "logging"} == set()
    assert not seen[0]["native"]


def test_import_says_nothing_and_starts_nothing(seen):
    observed, errors = seen
    assert errors == ""
    assert observed["threads"] == 1
    assert observed["descriptors"] == 0


def test_import_creates_no_file(tmp_path):
    probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_import_is_quick(tmp_path):
    # The best of several: the machine is shared, the cost of the import is not.
    assert min(probe(tmp_path)[0]["seconds"] for _ in range(5)) < IMPORT_SECONDS_MAX


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = infinity.initialise


def test_public_names_are_listed_and_load():
    assert set(infinity.__all__) <= set(dir(infinity))
    for name in infinity.__all__:
        assert getattr(infinity, name) is not None
    assert infinity.zero.Init is infinity.Init
    assert infinity.zero.GatheredParameters is infinity.GatheredParameters
