"""The end of a process whose watchdog's thread is inside the store at that moment."""

from __future__ import annotations

import subprocess
import sys

SLOW_STORE = """
from contextlib import suppress
from datetime import timedelta
import time
from torch.distributed import TCPStore
from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.flight_record import Channels
from infinity.distributed.watchdog import Watchdog, guard
from infinity.plan.types import Topology

class Slow:
    # A report takes two seconds in the store's C++, where the interpreter's lock is not held.
    def __init__(self, store):
        self._store, self.set_timeout, self.set = store, store.set_timeout, store.set
        self.check, self.get, self.compare_set = store.check, store.get, store.compare_set

    def add(self, key, by):
        with suppress(RuntimeError):
            self._store.wait(["never"], timedelta(seconds=2))
        return self._store.add(key, by)

store = Slow(TCPStore("127.0.0.1", 0, 1, True))
watchdog = Watchdog(store, AxisPlace("world", 1, 2), [], Channels(Topology(dp=2), ()), seconds=60)
guard(watchdog)
time.sleep(0.2)
print("the program is over", flush=True)
"""


def test_a_process_waits_for_a_thread_that_is_inside_the_store():
    """Otherwise the interpreter's end aborts it: "terminate called without an active exception"."""
    command = [sys.executable, "-c", SLOW_STORE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "the program is over\n"), ended.stderr
