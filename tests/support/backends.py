"""The I/O back ends that work on this machine."""

from __future__ import annotations

import pytest

from infinity.errors import ExtensionError
from infinity.ops.aio import BACKENDS, Queue


def works(backend: str) -> bool:
    """Return whether a queue can be opened on a back end."""
    try:
        Queue(backend).close()
    except ExtensionError:
        return False
    return True


WORKING = [backend for backend in BACKENDS if works(backend)]
every_backend = pytest.mark.parametrize("backend", WORKING)
every_native_backend = pytest.mark.parametrize("backend", [backend for backend in WORKING if backend != "python"])
