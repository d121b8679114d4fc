"""A function in a forked child of this process, as a data loader's worker is one."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def in_child(act: Callable[[], Any], *, seconds: float = 20.0) -> Any:
    """Call `act` in a forked child, which ends by `os._exit`; return its value or raise its exception here.

    Raises AssertionError if the child ends otherwise or does not answer within `seconds`.
    """
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        # Python warns about a fork of a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _answer(act, sending)
    os.close(sending)
    try:
        text = b""
        while select.select([receiving], [], [], seconds)[0]:
            part = os.read(receiving, 1 << 16)
            if not part:
                break
            text += part
        else:
            raise AssertionError(f"the child hangs; it has said {text!r}")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(receiving)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}; it has said {text!r}"
    worked, value = pickle.loads(text)
    if not worked:
        raise value
    return value


def _answer(act: Callable[[], Any], sending: int) -> None:
    try:
        said = (True, act())
    except BaseException as error:
        said = (False, error)
    try:
        os.write(sending, pickle.dumps(said))
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)
