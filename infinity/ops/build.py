"""Find or build the native libraries: `load("adam")` returns one, or None where only the plain twin can run.

The libraries are plain C ABI, loaded by ctypes, and take seconds to compile. In order: sources beside the package (a
checkout or an editable install) are built and win over anything built before; a library inside the package (a wheel)
is used as it is; sources inside the package are built. What is built lies in a per-user cache, keyed by a hash of
sources, flags and compiler, and is made once however many ranks ask at the same time.

Environment (read only here): INFINITY_NATIVE=0 turns native code off, CXX names the compiler, XDG_CACHE_HOME moves
the cache. `python -m infinity.ops.build OUTDIR` builds every library into OUTDIR.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ExtensionError

NAMES = ("aio", "adam")

_PACKAGE = Path(__file__).resolve().parents[1]
_FLAGS = (
    "-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -ffp-contract=off -fno-fast-math -fno-math-errno -Wall -Wextra"
).split()
_LINK_FLAGS = "-shared -pthread -Wl,-z,defs".split()
_BUILD_SECONDS_MAX = 600

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class Library:
    """One loaded library and where it came from. `origin` is "checkout", "wheel" or "cache"."""

    name: str
    path: Path
    origin: str
    compiler: str
    handle: ctypes.CDLL


def load(name: str) -> ctypes.CDLL | None:
    """The native library `name`, or None (said once, by the logger) where it can be neither found nor built."""
    library = _library(name)
    return None if library is None else library.handle


def require(name: str) -> ctypes.CDLL:
    """The native library `name`; ExtensionError where `load` returns None. For callers that asked for native code."""
    handle = load(name)
    if handle is None:
        raise ExtensionError(
            f"the native library {name!r} was asked for but is not available: "
            + ("INFINITY_NATIVE=0 turns it off" if _disabled() else "see the warning logged by `infinity.ops.build`")
        )
    return handle


def describe() -> dict[str, str]:
    """What runs: per library its path, or the words "plain twin", and the compiler and instruction set in use."""
    report = {"compiler": _compiler_version(_compiler()) or "none"}
    for name in NAMES:
        library = _library(name)
        report[name] = "plain twin" if library is None else f"{library.path} ({library.origin})"
    adam = _library("adam")
    if adam is not None:
        adam.handle.infinity_adam_isa_name.restype = ctypes.c_char_p
        best = adam.handle.infinity_adam_isa_best()
        report["simd"] = adam.handle.infinity_adam_isa_name(best).decode()
    return report


def build_into(directory: str | os.PathLike[str]) -> list[Path]:
    """Compile every library into `directory` as lib<name>.so and return the paths; ExtensionError where one fails."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    built = []
    for name in NAMES:
        sources = _sources_beside(name) or _sources_inside(name)
        if sources is None:
            raise ExtensionError(f"no sources of the native library {name!r}: expected csrc/{name} beside {_PACKAGE}")
        compiler = _compiler()
        if compiler is None:
            raise ExtensionError("no C++ compiler: install g++ or clang++, or name one in CXX")
        path = target / f"lib{name}.so"
        _compile(sources, path, compiler)
        built.append(path)
    return built


@functools.cache
def _library(name: str) -> Library | None:
    if name not in NAMES:
        raise ValueError(f"no native library {name!r}: there are {', '.join(NAMES)}")
    if _disabled():
        _log.debug("INFINITY_NATIVE=0: %s runs on its plain twin", name)
        return None
    try:
        beside = _sources_beside(name)
        if beside is not None:
            return _open(name, _cached(name, beside), "checkout", _compiler_version(_compiler()))
        prebuilt = _PACKAGE / "_native" / f"lib{name}.so"
        if prebuilt.exists():
            return _open(name, prebuilt, "wheel", "")
        inside = _sources_inside(name)
        if inside is not None:
            return _open(name, _cached(name, inside), "cache", _compiler_version(_compiler()))
        raise ExtensionError(f"neither lib{name}.so nor csrc/{name} came with this installation")
    except (ExtensionError, OSError) as error:
        _warn_once(str(error))
        return None


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning(
        "native libraries are off, the slower plain twins give the same results: %s. "
        "Install a C++17 compiler (g++ or clang++), or a wheel that carries them.",
        " ".join(reason.split()),
    )


def _open(name: str, path: Path, origin: str, compiler: str) -> Library:
    return Library(name=name, path=path, origin=origin, compiler=compiler, handle=ctypes.CDLL(str(path)))


def _disabled() -> bool:
    return os.environ.get("INFINITY_NATIVE", "1") == "0"


def _sources_beside(name: str) -> Path | None:
    folder = _PACKAGE.parent / "csrc" / name
    return folder if folder.is_dir() else None


def _sources_inside(name: str) -> Path | None:
    folder = _PACKAGE / "_csrc" / name
    return folder if folder.is_dir() else None


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    if named:
        return named if shutil.which(shlex.split(named)[0]) else None
    return next((found for found in map(shutil.which, ("g++", "clang++", "c++")) if found), None)


@functools.cache
def _compiler_version(compiler: str | None) -> str:
    if compiler is None:
        return ""
    reply = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)
    return reply.stdout.partition("\n")[0]


def _cached(name: str, sources: Path) -> Path:
    """Path of the library built from `sources`, built now unless the cache has it. Raises ExtensionError."""
    compiler = _compiler()
    if compiler is None:
        raise ExtensionError("no C++ compiler was found")
    digest = hashlib.sha256(" ".join((*_FLAGS, *_LINK_FLAGS, compiler, _compiler_version(compiler))).encode())
    for file in sorted(sources.iterdir()):
        if file.is_file():
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    folder = _cache_folder()
    path = folder / f"lib{name}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        with open(folder / f"{name}.lock", "w") as lock:
            # Ranks of one node start together: the first builds, the others wait here and find the library.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(sources, path, compiler)
    return path


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    # Where there is no home the tilde stays, as a relative path that must not be used.
    folder = Path(root or os.path.expanduser("~/.cache")) / "infinity" / "native"
    try:
        if not folder.is_absolute():
            raise OSError("no home")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        # A shared temp dir is open to others: a folder of this user that only this user can write.
        folder = Path(tempfile.gettempdir()) / f"infinity-native-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ExtensionError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a writable folder") from None
        return folder


def _compile(sources: Path, target: Path, compiler: str) -> None:
    """Build every .cpp of `sources` into the shared library `target`, which appears whole or not at all."""
    # Beside the target, so that the final move is a rename and no half-written library is ever seen.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{sources.name}-") as scratch:
        commands = _commands(sources, Path(scratch), shlex.split(compiler))
        ninja = _ninja()
        if ninja is None:
            for command in commands.values():
                _run(command, sources)
        else:
            (Path(scratch) / "build.ninja").write_text(_ninja_text(commands))
            _run([ninja, "-C", scratch], sources)
        os.replace(Path(scratch) / "library.so", target)


def _commands(sources: Path, scratch: Path, compiler: list[str]) -> dict[Path, list[str]]:
    """Output -> command, the link last."""
    objects = {scratch / f"{file.stem}.o": file for file in sorted(sources.glob("*.cpp"))}
    commands = {obj: [*compiler, *_FLAGS, "-c", str(file), "-o", str(obj)] for obj, file in objects.items()}
    library = scratch / "library.so"
    commands[library] = [*compiler, *_LINK_FLAGS, "-o", str(library), *map(str, objects)]
    return commands


def _ninja_text(commands: dict[Path, list[str]]) -> str:
    *objects, library = commands
    lines = ["rule run\n  command = $words"]
    for output, command in commands.items():
        inputs = " ".join(_ninja_path(obj) for obj in objects) if output == library else ""
        words = shlex.join(command).replace("$", "$$")
        lines.append(f"build {_ninja_path(output)}: run {inputs}\n  words = {words}")
    return "\n".join(lines) + "\n"


def _ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja() -> str | None:
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        packaged = Path(ninja.BIN_DIR) / "ninja"
        if packaged.exists():
            return str(packaged)
    return shutil.which("ninja")


def _run(command: list[str], sources: Path) -> None:
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExtensionError(f"building {sources} failed: {error}") from error
    if reply.returncode != 0:
        tail = (reply.stdout + reply.stderr).strip()[-2000:]
        raise ExtensionError(f"building {sources} failed: {shlex.join(command)} said: {tail}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m infinity.ops.build OUTDIR")
    for library_path in build_into(sys.argv[1]):
        print(library_path)
