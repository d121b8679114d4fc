"""Build the back end once: `library()` returns the path of the shared library, or raises Unavailable with the reason.

It lies in a folder of the user's cache, keyed by the sources, torch's version and the interpreter's. Processes that ask
at the same time build it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SOURCES = Path(__file__).resolve().parent / "csrc"
_FLAGS = "-std=c++20 -O1 -fPIC -pthread -Wall -Wno-unused-parameter".split()


class Unavailable(RuntimeError):
    """Report why this machine cannot build the simulated accelerator."""


def library() -> Path:
    """Return the built library; build it unless the cache has it."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"no C++ compiler ({compiler[0]}): the simulated accelerator is not built")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise Unavailable("no Python.h: the simulated accelerator is not built")
    words = [torch.__version__, sys.version, *compiler, *_FLAGS]
    digest = hashlib.sha256(" ".join(words).encode())
    for file in sorted(_SOURCES.iterdir()):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    folder = _cache()
    target = folder / f"simulated-{digest.hexdigest()[:20]}.so"
    if not target.exists():
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, target)
    return target


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = root / "infinity" / "simulated-accelerator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"no cache for the simulated accelerator: {error}") from error
    return folder


def _compile(compiler: list[str], target: Path) -> None:
    from torch.utils import cpp_extension

    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = [*_FLAGS, *(f"-isystem{path}" for path in include)]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {file: Path(scratch) / f"{file.stem}.o" for file in sorted(_SOURCES.glob("*.cpp"))}
        commands = [[*compiler, *flags, "-c", str(file), "-o", str(made)] for file, made in objects.items()]
        with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, commands))
        paths = [word for path in cpp_extension.library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
        built = Path(scratch) / "library.so"
        link = ["-shared", "-pthread", "-o", str(built), *map(str, objects.values())]
        _run([*compiler, *link, *paths, "-ltorch_cpu", "-ltorch", "-lc10"])
        built.replace(target)


def _run(command: list[str]) -> None:
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{reply.stderr[-4000:]}")
