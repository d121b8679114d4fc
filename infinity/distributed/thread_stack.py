"""Finding where a thread is in the program's own code, from another thread.

[Note: frames of other threads] No thread reads another one's frames. Reading `sys._current_frames` crashed the process
once in some 1e4 times, because a frame was freed meanwhile (CPython 3.11.7), and faulthandler's dump of all threads
crashed on a thread that was being created. So the thread is sent a signal with faulthandler's handler. In C, that
prints the Python stack of the thread that it interrupts, even inside a library, and system calls are restarted. The
signal is sent seldom, and only to a rank that others wait for in vain.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from types import FrameType
from typing import BinaryIO

import torch

# Real-time signals are free for a program to use; without them no thread is asked.
_SIGNAL: int | None = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else None
# How long a thread may take to answer; one that stays inside the kernel does not answer.
_ANSWER_SECONDS, _LOOK_SECONDS = 0.3, 0.002
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_FOLDERS = (_PACKAGE + os.sep, os.path.dirname(torch.__file__))
_STDLIB = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\n')
_asking = threading.Lock()
# The file that the handler writes to. It stays open for the process's life, because a signal may arrive late.
_answers: list[BinaryIO] = []


def here() -> str:
    """Return file, line and function of this thread's innermost frame outside of infinity, torch and Python itself.

    Empty if there is none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def where(thread_id: int) -> str:
    """Return the same of another living Python thread, by its `threading.get_ident()`; the thread is interrupted.

    Empty also if the thread does not answer within 0.3 s. See [Note: frames of other threads].
    """
    if thread_id == threading.get_ident():
        return here()
    with _asking:
        if not _answers and not _listen():
            return ""
        assert _SIGNAL is not None
        answer = _answers[0].fileno()
        os.ftruncate(answer, 0)
        os.lseek(answer, 0, os.SEEK_SET)
        signal.pthread_kill(thread_id, _SIGNAL)
        return _read(answer)


def innermost(stack: str) -> str:
    """Return the same from faulthandler's text of one thread, the most recent call first."""
    for line in stack.splitlines(keepends=True):
        frame = _FRAME.fullmatch(line)
        if frame and not _is_machinery(frame[1]):
            return f"{frame[1]}:{frame[2]} in {frame[3]}"
    return ""


def _listen() -> bool:
    """Install the handler, once in a process; return False if that is not possible."""
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return False
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    except OSError:
        return False
    faulthandler.register(_SIGNAL, file, all_threads=False)
    _answers.append(file)
    return True


def _read(answer: int) -> str:
    """Wait until the stack is printed as far as the program's own code, or until no more comes; return that place."""
    until, nbytes = time.monotonic() + _ANSWER_SECONDS, 0
    while time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        stack = os.pread(answer, os.fstat(answer).st_size, 0).decode(errors="replace")
        place = innermost(stack)
        if place or (stack and len(stack) == nbytes):
            return place
        nbytes = len(stack)
    return ""


def _is_machinery(path: str) -> bool:
    """Return whether a file is part of infinity, torch or Python itself, so that it says nothing about the program."""
    return path.startswith((*_OWN_FOLDERS, "<frozen")) or (path.startswith(_STDLIB) and "site-packages" not in path)
