"""Where a thread is, asked from outside, whatever it does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from infinity.distributed.thread_stack import here, innermost, where


def test_this_thread_is_where_it_asks():
    assert here().startswith(f"{__file__}:") and here().endswith("in test_this_thread_is_where_it_asks")
    assert where(threading.get_ident()).endswith("in test_this_thread_is_where_it_asks")


def test_a_thread_that_sleeps_or_waits_in_a_library_is_found_and_goes_on():
    lock, release = threading.Lock(), threading.Event()
    lock.acquire()
    ended: list[str] = []

    def sleeper() -> None:
        began = time.monotonic()
        time.sleep(1.0)
        ended.append("slept" if time.monotonic() - began >= 1.0 else "woken early")

    def waiter() -> None:
        with lock:
            ended.append("waited")

    def reader() -> None:
        release.wait()
        ended.append("read")

    threads = [threading.Thread(target=target) for target in (sleeper, waiter, reader)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for thread, name in zip(threads, ("sleeper", "waiter", "reader"), strict=True):
        assert thread.ident is not None
        for _ in range(3):
            place = where(thread.ident)
            assert place.startswith(f"{__file__}:") and place.endswith(f"in {name}"), place
    lock.release()
    release.set()
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == ["read", "slept", "waited"]


@contextmanager
def _nested(depth: int) -> Iterator[int]:
    with ExitStack() as stack:
        if depth:
            stack.enter_context(_nested(depth - 1))
        yield depth


def test_a_thread_that_is_busy_survives_thousands_of_questions():
    """Frames that come and go, native code, backward's hooks: what killed the process before."""
    busy, stop = nn.Linear(8, 8), threading.Event()
    busy.weight.register_hook(lambda gradient: gradient + sum(_count(5)))
    rounds = [0]

    def work() -> None:
        while not stop.is_set():
            with _nested(8):
                busy(torch.ones(2, 8)).sum().backward()
            rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    places, until = [], time.monotonic() + 3.0
    while time.monotonic() < until:
        places.append(where(thread.ident))
    stop.set()
    thread.join(10)
    assert rounds[0] > 50 and not thread.is_alive()
    assert len(places) > 200 and sum(place.startswith(f"{__file__}:") for place in places) > 0.9 * len(places)


def _count(last: int) -> Iterator[int]:
    if last:
        yield from _count(last - 1)
    yield last


def test_only_whole_lines_of_the_programs_own_code_count():
    ours = where.__code__.co_filename
    stack = f'Stack (most recent call first):\n  File "{ours}", line 3 in f\n  File "{nn.__file__}", line 4 in g\n'
    assert innermost(stack) == ""
    assert innermost(stack + '  File "my/train.py", line 33 in ma') == ""
    assert innermost(stack + '  File "my/train.py", line 33 in main\n') == "my/train.py:33 in main"
    both = '  File "my/odd model.py", line 7 in forward\n  File "my/train.py", line 33 in main\n'
    assert innermost(stack + both) == "my/odd model.py:7 in forward"
