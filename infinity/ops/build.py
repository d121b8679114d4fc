"""Loading and building of the native libraries: `load("adam")` returns one, or None if only the fallback can run.

The libraries have a plain C ABI, are loaded by ctypes and take seconds to compile. The first of these sources is used:
C++ sources beside the package (a checkout or an editable install), a library inside the package (a wheel), C++ sources
inside the package. Built libraries lie in a per-user cache, keyed by a hash of sources, flags and compiler. Each one is
built once, even if several ranks load it at the same time.

nvcc builds "kernels", for tensors on a CUDA device. Only code that has such a tensor loads it, so machines without a
CUDA device never build it.

Environment variables, read only here: INFINITY_NATIVE=0 turns native code off, CXX and NVCC name the compilers, nvcc is
searched in CUDA_HOME, PATH and /usr/local/cuda, XDG_CACHE_HOME moves the cache. `python -m infinity.ops.build OUTDIR`
builds into OUTDIR every library for which there is a compiler.
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

NAMES = ("aio", "adam", "kernels")
# The libraries that every machine can run.
HOST_NAMES = ("aio", "adam")

_PACKAGE = Path(__file__).resolve().parents[1]
_CXX_FLAGS = (
    "-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -ffp-contract=off -fno-fast-math -fno-math-errno -Wall -Wextra"
).split()
_CXX_LINK_FLAGS = "-shared -pthread -Wl,-z,defs".split()
# Machine code for the GPU families of 2018 to 2022, and PTX that a driver compiles for later ones. The intrinsics in
# the sources forbid contraction and flushed denormals too.
_NVCC_FLAGS = (
    "-std=c++17 -O3 --fmad=false --ftz=false --prec-div=true --prec-sqrt=true "
    "-gencode arch=compute_75,code=sm_75 -gencode arch=compute_80,code=sm_80 "
    "-gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90 "
    "-Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra"
).split()
_NVCC_LINK_FLAGS = "-shared --cudart static".split()
_BUILD_SECONDS_MAX = 600

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The build of one kind of library."""

    suffix: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    # Folders beside the sources whose headers they include.
    also: tuple[str, ...]
    # The message if there is no compiler.
    missing: str


_CXX = _Recipe(
    ".cpp", tuple(_CXX_FLAGS), tuple(_CXX_LINK_FLAGS), (), "no C++ compiler: install g++ or clang++, or name one in CXX"
)
_NVCC = _Recipe(
    ".cu", tuple(_NVCC_FLAGS), tuple(_NVCC_LINK_FLAGS), ("adam",),
    "no nvcc: install the CUDA toolkit, or name nvcc in NVCC",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library and its origin: "checkout", "wheel" or "cache"."""

    name: str
    path: Path
    origin: str
    compiler: str
    handle: ctypes.CDLL


def load(name: str) -> ctypes.CDLL | None:
    """Return the native library `name`, or None with one warning in the log if it can be neither found nor built."""
    library = _library(name)
    return None if library is None else library.handle


def require(name: str) -> ctypes.CDLL:
    """Return the native library `name`; raise ExtensionError if `load` returns None."""
    handle = load(name)
    if handle is None:
        raise ExtensionError(
            f"the native library {name!r} was asked for but is not available: "
            + ("INFINITY_NATIVE=0 turns it off" if _disabled() else "see the warning logged by `infinity.ops.build`")
        )
    return handle


def native_report(cuda: bool = False) -> dict[str, str]:
    """Return the compiler, the path or "Python fallback" of each library, and the instruction set in use ("simd").

    cuda: include the CUDA kernels, and build them if needed.
    """
    report = {"compiler": _compiler_version(_compiler()) or "none"}
    for name in NAMES if cuda else HOST_NAMES:
        library = _library(name)
        report[name] = "Python fallback" if library is None else f"{library.path} ({library.origin})"
    adam = _library("adam")
    if adam is not None:
        adam.handle.infinity_adam_isa_name.restype = ctypes.c_char_p
        best = adam.handle.infinity_adam_isa_best()
        report["simd"] = adam.handle.infinity_adam_isa_name(best).decode()
    return report


def build_into(directory: str | os.PathLike[str]) -> list[Path]:
    """Compile the libraries into `directory` as lib<name>.so and return their paths.

    The CUDA kernels are left out if there is no nvcc, or if it does not work with the host compiler.

    Raises:
        ExtensionError: a library for the host cannot be built.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    built = []
    for name in NAMES:
        sources = _sources_beside(name) or _folder(_PACKAGE / "_csrc" / name)
        if sources is None:
            raise ExtensionError(f"no sources of the native library {name!r}: expected csrc/{name} beside {_PACKAGE}")
        compiler = _compiler(name)
        path = target / f"lib{name}.so"
        try:
            if compiler is None:
                raise ExtensionError(_recipe(name).missing)
            _compile(name, sources, path, compiler)
        except ExtensionError as error:
            if name in HOST_NAMES:
                raise
            _log.info("%s is left out: %s", name, error)
            continue
        built.append(path)
    return built


def _recipe(name: str) -> _Recipe:
    return _NVCC if name == "kernels" else _CXX


@functools.cache
def _library(name: str) -> Library | None:
    if name not in NAMES:
        raise ValueError(f"no native library {name!r}: there are {', '.join(NAMES)}")
    if _disabled():
        _log.debug("INFINITY_NATIVE=0: %s runs on its Python fallback", name)
        return None
    try:
        beside = _sources_beside(name)
        if beside is not None:
            return _open(name, _cached(name, beside), "checkout", _compiler_version(_compiler(name)))
        prebuilt = _PACKAGE / "_native" / f"lib{name}.so"
        if prebuilt.exists():
            return _open(name, prebuilt, "wheel", "")
        inside = _folder(_PACKAGE / "_csrc" / name)
        if inside is not None:
            return _open(name, _cached(name, inside), "cache", _compiler_version(_compiler(name)))
        raise ExtensionError(f"neither lib{name}.so nor csrc/{name} came with this installation")
    except (ExtensionError, OSError) as error:
        _warn_once(name in HOST_NAMES, " ".join(str(error).split()))
        return None


@functools.cache
def _warn_once(on_host: bool, reason: str) -> None:
    what, remedy = "native libraries are", "a C++17 compiler (g++ or clang++), or a wheel that carries them"
    if not on_host:
        what, remedy = "the CUDA kernels are", "the CUDA toolkit (nvcc), or a wheel that carries them"
    _log.warning("%s off, the slower Python fallbacks give the same results: %s. Install %s.", what, reason, remedy)


def _open(name: str, path: Path, origin: str, compiler: str) -> Library:
    return Library(name=name, path=path, origin=origin, compiler=compiler, handle=ctypes.CDLL(str(path)))


def _disabled() -> bool:
    return os.environ.get("INFINITY_NATIVE", "1") == "0"


def _sources_beside(name: str) -> Path | None:
    return _folder(_PACKAGE.parent / "csrc" / name)


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _compiler(name: str = HOST_NAMES[0]) -> str | None:
    cuda = _recipe(name) is _NVCC
    named = os.environ.get("NVCC" if cuda else "CXX")
    if named:
        return named if shutil.which(shlex.split(named)[0]) else None
    # A toolkit that the user chose comes before the one in PATH.
    home = os.environ.get("CUDA_HOME")
    places = [*([f"{home}/bin/nvcc"] if home else []), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for found in map(shutil.which, places if cuda else ("g++", "clang++", "c++")) if found), None)


@functools.cache
def _compiler_version(compiler: str | None) -> str:
    if compiler is None:
        return ""
    reply = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)
    # nvcc prints its version in a later line, other compilers in the first.
    lines = reply.stdout.splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else "")


def _cached(name: str, sources: Path) -> Path:
    """Return the path of the library built from `sources`; build it unless the cache has it."""
    recipe, compiler = _recipe(name), _compiler(name)
    if compiler is None:
        raise ExtensionError(recipe.missing)
    words = (*recipe.flags, *recipe.link_flags, compiler, _compiler_version(compiler))
    digest = hashlib.sha256(" ".join(words).encode())
    for folder in (sources, *(sources.parent / other for other in recipe.also)):
        for file in sorted(folder.iterdir()):
            if file.is_file() and (folder == sources or file.suffix in (".h", ".inl")):
                digest.update(f"{file.name}\0".encode() + file.read_bytes())
    folder = _cache_folder()
    path = folder / f"lib{name}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        with open(folder / f"{name}.lock", "w") as lock:
            # The ranks of a node start together: the first one builds, the others wait here and find the library.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(name, sources, path, compiler)
    return path


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    # Without a home the tilde stays, which makes a relative path.
    folder = Path(root or os.path.expanduser("~/.cache")) / "infinity" / "native"
    try:
        if not folder.is_absolute():
            raise OSError("no home")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        # Other users can write to the shared temporary folder, so this needs a folder that only this user can write to.
        folder = Path(tempfile.gettempdir()) / f"infinity-native-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ExtensionError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a writable folder") from None
        return folder


def _compile(name: str, sources: Path, target: Path, compiler: str) -> None:
    """Build the source files of `sources` into the shared library `target`, which appears atomically."""
    # A folder beside the target, so that the final move is a rename.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{sources.name}-") as scratch:
        commands = _commands(_recipe(name), sources, Path(scratch), shlex.split(compiler))
        ninja = _ninja()
        if ninja is None:
            for command in commands.values():
                _run(command, sources)
        else:
            (Path(scratch) / "build.ninja").write_text(_ninja_text(commands))
            _run([ninja, "-C", scratch], sources)
        os.replace(Path(scratch) / "library.so", target)


def _commands(recipe: _Recipe, sources: Path, scratch: Path, compiler: list[str]) -> dict[Path, list[str]]:
    """Return output -> command; the link is last."""
    objects = {scratch / f"{file.stem}.o": file for file in sorted(sources.glob(f"*{recipe.suffix}"))}
    commands = {obj: [*compiler, *recipe.flags, "-c", str(file), "-o", str(obj)] for obj, file in objects.items()}
    library = scratch / "library.so"
    commands[library] = [*compiler, *recipe.link_flags, "-o", str(library), *map(str, objects)]
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
