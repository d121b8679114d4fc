"""Where a thread is in the program's own code, asked by another thread.

[Note: frames of other threads] No thread touches another one's frames. A frame from `sys._current_frames` was seen to
be freed under the reader's hands (CPython 3.11.7: once in some 1e4 looks the process died of it), and faulthandler's
dump of all threads to stumble over a thread that is just being made. So the thread is sent a signal, whose handler is
faulthandler's: in C, it prints the Python stack of the thread that it interrupts, which may as well wait inside a
library, and system calls go on. It is sent to a rank that others wait for in vain, and then seldom.
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

# Real-time signals are nobody else's; where there are none, nobody is asked.
_SIGNAL: int | None = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else None
# How long a thread may take to answer. One that is inside the kernel for longer does not.
_ANSWER_SECONDS, _LOOK_SECONDS = 0.3, 0.002
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OWN_FOLDERS = (_PACKAGE + os.sep, os.path.dirname(torch.__file__))
_STDLIB = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)\n')
_asking = threading.Lock()
# What the handler writes to. Open for the process's life: a signal may arrive late, and has to find its handler.
_answers: list[BinaryIO] = []


def here() -> str:
    """File, line and function of the innermost frame of this thread that is neither ours, nor torch's or Python's own;
    empty where there is none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def where(thread_id: int) -> str:
    """The same of another living thread of Python's (`threading.get_ident()`), which is interrupted for it; empty also
    where it does not answer within 0.3 s. See [Note: frames of other threads].
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
    """The same in what faulthandler prints of one thread, the most recent call first."""
    for line in stack.splitlines(keepends=True):
        frame = _FRAME.fullmatch(line)
        if frame and not _is_machinery(frame[1]):
            return f"{frame[1]}:{frame[2]} in {frame[3]}"
    return ""


def _listen() -> bool:
    """Install the handler, once in a process; False where that cannot be."""
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
    """Wait until the stack is printed: until the program's own code is in it, or no more comes."""
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
    """Whether a file is ours, torch's or Python's own, and so says nothing about the program."""
    return path.startswith((*_OWN_FOLDERS, "<frozen")) or (path.startswith(_STDLIB) and "site-packages" not in path)
