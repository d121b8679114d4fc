"""`infinity doctor`: report what is installed, built and selected on this machine, and recommend improvements.

    infinity doctor [--folder FOLDER ...] [--config FILE]

The command imports every package that it reports. It examines the folders of --folder, the nvme_path of --config and
the working folder. The exit code is 1 if a finding prevents a run.

The doctor's facts as a value: versions, packages, libraries, back ends, limits and folders.

Imports only the standard library. It loads `engine_facts`, which needs torch, if all required packages work.

The required and optional packages of infinity, each imported to check that it works.

Imports only the standard library. tests/cli/test_doctor compares the tables with pyproject.toml.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import resource
import statistics
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from infinity.cli.terminal import format_table, say
from infinity.errors import InfinityError
from infinity.memory.folder import IN_MEMORY, FolderInfo, look
from infinity.ops import build
from infinity.ops.cores import allowed_cores, quota_cores, thread_count
from infinity.ops.file import File

# Distribution -> its module.
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic", "safetensors": "safetensors",
    "ninja": "ninja", "py-cpuinfo": "cpuinfo",
}  # fmt: skip
# Extra -> (its distribution, the module whose import uses it).
EXTRAS = {
    "hf": ("transformers", "infinity.integrations.huggingface"),
    "tensorboard": ("tensorboard", "torch.utils.tensorboard"),
    "wandb": ("wandb", "wandb"),
    "liger": ("liger-kernel", "liger_kernel.transformers"),
}  # fmt: skip
# The modules behind `infinity.initialize`, the checkpoint commands and the estimator.
_OURS = ("infinity.engine.initialize", "infinity.cli.ckpt", "estimators.cli")


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution."""

    name: str
    # Empty if it is not installed.
    version: str
    # Why it cannot be used; empty if it works.
    trouble: str = ""
    # The extra that installs it; empty if every run needs it.
    extra: str = ""


def look_at_packages() -> Iterator[Package]:
    """Yield the required packages; if all of them work, also broken modules of infinity and the packages of extras."""
    needed = [_package(name, module) for name, module in REQUIRED.items()]
    yield from needed
    if any(package.trouble for package in needed):
        return
    for module in _OURS:
        trouble = _import_trouble(module)
        if trouble:
            yield Package("infinity-engine", _version("infinity-engine"), f"{module}: {trouble}")
    for extra, (name, module) in EXTRAS.items():
        yield _package(name, module, extra)


def _package(name: str, module: str, extra: str = "") -> Package:
    version = _version(name)
    if not version and extra:
        return Package(name, "", "not installed", extra)
    return Package(name, version, _import_trouble(module), extra)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _import_trouble(module: str) -> str:
    """Return why a module cannot be imported, or an empty string."""
    try:
        importlib.import_module(module)
    # A broken package may raise any exception.
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return said[0]
    return ""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """One folder. `named`: the user named it for offloading; `trouble`: why no file can be created there;
    `flush_seconds`: what a flush takes behind a small write, None where it was not measured.
    """

    folder: str
    named: bool
    place: FolderInfo
    direct: bool
    trouble: str = ""
    flush_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine as a run would find it. Facts that need torch are empty or 0 if a required package is missing."""

    python: str
    packages: tuple[Package, ...]
    accelerator: str
    compiler: str
    # Path and origin of each native library, or "Python fallback".
    adam: str
    aio: str
    simd: str
    # The back end that a queue selects.
    backend: str
    # Back end -> why it does not work; empty if it works.
    backends: dict[str, str]
    io_uring_disabled: bool
    processor: str
    cores: int
    quota_cores: float | None
    threads: int
    torch_threads: int
    memory_nbytes: int
    free_nbytes: int
    # None if unlimited.
    memlock_nbytes: int | None
    huge_pages: str
    folders: tuple[FolderFacts, ...] = ()


def examine(folders: Iterable[str], named: Collection[str] = ()) -> Facts:
    """Return the facts of this machine and `folders`; `named` are the folders that the user named for offloading."""
    packages = tuple(look_at_packages())
    works = not any(package.trouble for package in packages if not package.extra)
    # Imported here because it needs torch, which may be missing.
    seen = importlib.import_module("infinity.cli.engine_facts").see() if works else None
    built = build.native_report(cuda=seen is not None and seen.is_accelerator)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cores = len(allowed_cores())
    return Facts(
        python=platform.python_version(), packages=packages, accelerator=seen.accelerator if seen else "",
        compiler="" if built["compiler"] == "none" else built["compiler"], adam=built["adam"], aio=built["aio"],
        simd=built.get("simd", "reference"), backend=seen.backend if seen else "",
        backends=seen.backends if seen else {},
        io_uring_disabled=_first_word("/proc/sys/kernel/io_uring_disabled") not in ("", "0"),
        processor=seen.processor if seen else "", cores=cores, quota_cores=quota_cores(),
        threads=thread_count(cores), torch_threads=seen.torch_threads if seen else 0,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_nbytes=seen.free_nbytes if seen else 0,
        memlock_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        huge_pages=_selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        folders=tuple(_folder(folder, folder in named) for folder in folders),
    )  # fmt: skip


def _folder(folder: str, named: bool) -> FolderFacts:
    """Return the facts of a folder; try it with a file of one block that is unlinked at once."""
    place = look(folder)
    path = place.path / f".infinity-doctor-{uuid.uuid4().hex}"
    try:
        file = File.create(path, 4096)
    except InfinityError as error:
        reason = os.strerror(getattr(error, "errno", 0)) if getattr(error, "errno", None) else str(error)
        return FolderFacts(folder, named, place, direct=False, trouble=reason.lower())
    finally:
        path.unlink(missing_ok=True)
    with file:
        seconds = _flush_seconds(file.descriptors.buffered) if named else None
        return FolderFacts(folder, named, place, direct=file.direct, flush_seconds=seconds)


def _flush_seconds(descriptor: int) -> float | None:
    """Return the median time of a few flushes, each behind a write of a block; None where the file system has none."""
    found = []
    for _ in range(_FLUSHES):
        try:
            os.pwrite(descriptor, os.urandom(4096), 0)
            began = time.perf_counter()
            os.fdatasync(descriptor)
        except OSError:
            return None
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _first_word(path: str) -> str:
    try:
        return Path(path).read_text().split()[0]
    except (OSError, IndexError):
        return ""


def _selected(path: str) -> str:
    """Return the selected word of a kernel setting, which stands in brackets."""
    try:
        text = Path(path).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


# File systems that store their bytes on another machine.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre", "virtiofs")
# How many flushes are timed.
_FLUSHES = 9
# With less free space, states on NVMe hardly fit.
_FREE_NBYTES_MIN = 10 * 10**9


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or possible improvement, and its remedy; `stops` if it prevents a run."""

    what: str
    remedy: str
    stops: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("--folder", action="append", metavar="FOLDER",
                        help="a folder for offloading; again for each drive")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="a configuration whose nvme_path is examined")


def run(given: argparse.Namespace) -> int:
    """Print the facts and findings; return 1 if a finding prevents a run, else 0."""
    folders = list(given.folder or [])
    left_out = ""
    if given.config:
        try:
            # Imported here because it needs pydantic, which may be missing.
            config = importlib.import_module("infinity.config")
        except ImportError as error:
            left_out = f"{given.config} was not looked at: {error}"
        else:
            folders += config.drives(config.load_config(given.config))
    facts = examine(dict.fromkeys([*folders, "."]), named=set(folders))
    say(show(facts))
    if left_out:
        say(f"\n{left_out}")
    found = recommend(facts)
    say()
    for finding in found:
        say(f"{'PROBLEM' if finding.stops else 'better'}: {finding.what}. {finding.remedy}.")
    if not found:
        say("nothing to improve was found")
    return 1 if any(finding.stops for finding in found) else 0


def show(facts: Facts) -> str:
    """Return the facts as two tables: the machine and its folders."""
    packages = [_named(each) for each in facts.packages if not each.extra and not each.trouble]
    backends = "; ".join(f"{name} {trouble or 'works'}" for name, trouble in facts.backends.items())
    rows = [
        ["Python", facts.python], ["packages", ", ".join(packages)], ["extras", _extra_words(facts)],
        ["accelerator", facts.accelerator or ("none" if facts.backend else "")], ["compiler", facts.compiler or "none"],
        ["Liger-Kernel", _liger_words(facts)],
        ["optimizer", f"{facts.adam}; {facts.simd}"],
        ["I/O back end", f"{facts.backend}; {backends}" if facts.backend else ""],
        ["processor", facts.processor], ["cores", _core_words(facts)], ["memory", _memory_words(facts)],
        ["locked memory", "unlimited" if facts.memlock_nbytes is None else f"{facts.memlock_nbytes / 1e6:.1f} MB"],
        ["large pages", facts.huge_pages or "not known"],
    ]  # fmt: skip
    # Facts that need a missing package are empty.
    rows = [[name, words] for name, words in rows if words]
    lines = [format_table(rows, right=False)]
    if facts.folders:
        drives = [["folder", "file system", "drive", "free", "O_DIRECT"]]
        drives += [
            [each.folder, each.place.file_system, each.place.model or "-", f"{each.place.free_nbytes / 1e9:.1f} GB",
             each.trouble or ("yes" if each.direct else "no")]
            for each in facts.folders
        ]  # fmt: skip
        lines += ["", format_table(drives, right=False)]
    flushes = [_flush_words(each) for each in facts.folders if each.flush_seconds is not None]
    return "\n".join([*lines, *([""] if flushes else []), *flushes])


def recommend(facts: Facts) -> list[Finding]:
    """Return all findings; those that prevent a run come first."""
    topics = (_about_packages, _about_folders, _about_native, _about_io, _about_machine)
    found = [finding for about in topics for finding in about(facts)]
    return sorted(found, key=lambda finding: not finding.stops)


def _about_packages(facts: Facts) -> list[Finding]:
    found = []
    missing = [each.name for each in facts.packages if not each.extra and not each.version and each.trouble]
    if missing:
        found.append(
            Finding(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and every run "
                    f"needs {'it' if len(missing) == 1 else 'them'}", f"Run pip install {' '.join(missing)}", True)
        )  # fmt: skip
    for package in facts.packages:
        if package.version and package.trouble:
            again = f"--force-reinstall {package.name}"
            if package.extra:
                again = f"--upgrade 'infinity-engine[{package.extra}]'"
            found.append(
                Finding(f"{_named(package)} is installed and cannot be imported: {package.trouble}",
                       f"Run pip install {again}", not package.extra)
            )  # fmt: skip
    return found


def _about_folders(facts: Facts) -> list[Finding]:
    found = []
    for each in facts.folders:
        folder, place = each.folder, each.place
        if each.trouble and each.named:
            found.append(
                Finding(f"{folder} cannot be used: {each.trouble}", "Choose another folder, or change its owner", True)
            )
        elif place.file_system in IN_MEMORY and each.named:
            found.append(
                Finding(f"{folder} lies in memory ({place.file_system}), so that offloading to it saves none",
                       "Choose a folder on a drive as nvme_path", True)
            )  # fmt: skip
        elif place.file_system in _REMOTE and each.named:
            found.append(
                Finding(f"{folder} is on another machine ({place.file_system}), whose network is the limit",
                       "Choose a folder on a local drive as nvme_path")
            )  # fmt: skip
        elif not each.direct and each.named:
            found.append(
                Finding(f"the file system of {folder} ({place.file_system}) does not take O_DIRECT, so that the page "
                       "cache costs memory and time", "Choose a folder on ext4 or xfs; in a container, mount one")
            )  # fmt: skip
        if each.named and not each.trouble and place.free_nbytes < _FREE_NBYTES_MIN:
            found.append(
                Finding(f"{folder} has {place.free_nbytes / 1e9:.1f} GB free, and a model's states take 12 bytes a "
                       "parameter", "Free some space: `infinity estimate` says how much a run needs")
            )  # fmt: skip
    return found


def _about_native(facts: Facts) -> list[Finding]:
    missing = [name for name, path in (("the optimizer", facts.adam), ("I/O", facts.aio)) if path == "Python fallback"]
    if not missing:
        return []
    words = f"{' and '.join(missing)} run on the slower Python fallbacks"
    if "I/O" in missing:
        words += " (I/O makes one transfer at a time, without priorities)"
    if not facts.compiler:
        return [
            Finding(f"{words}, because there is no C++ compiler",
                   "Install g++ or clang++, or a wheel that carries the libraries")
        ]  # fmt: skip
    return [
        Finding(f"{words} although there is a compiler ({facts.compiler})",
               "`python -m infinity.ops.build build` shows why; INFINITY_NATIVE=0 turns native code off")
    ]  # fmt: skip


def _about_io(facts: Facts) -> list[Finding]:
    reason = facts.backends.get("io_uring")
    if facts.aio == "Python fallback" or not reason:
        return []
    remedy = (
        "In a container, allow it: docker run --security-opt seccomp=FILE, with the io_uring system calls in FILE"
        if not facts.io_uring_disabled
        else "As root: sysctl kernel.io_uring_disabled=0"
    )
    return [Finding(f"io_uring does not work here ({reason}); {facts.backend} serves instead", remedy)]


def _about_machine(facts: Facts) -> list[Finding]:
    found = []
    if facts.torch_threads > facts.threads:
        found.append(
            Finding(f"torch uses {facts.torch_threads} threads where {facts.threads} cores may be used, so that they "
                   "wait for each other", f"Set OMP_NUM_THREADS={facts.threads}")
        )  # fmt: skip
    if facts.huge_pages == "never":
        found.append(
            Finding("the kernel gives no large pages, so that touching memory costs more",
                   "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
        )  # fmt: skip
    return found


def _named(package: Package) -> str:
    return f"{package.name} {package.version}".strip()


def _extra_words(facts: Facts) -> str:
    there = [f"{each.extra} ({_named(each)})" for each in facts.packages if each.extra and not each.trouble]
    missing = [each.extra for each in facts.packages if each.extra and not each.version]
    words = [", ".join(there), f"not installed: {', '.join(missing)}" if missing else ""]
    return "; ".join(filter(None, words))


def _liger_words(facts: Facts) -> str:
    """Return what `"kernels": {"liger": "auto"}` does here; empty if the extras were not looked at."""
    package = next((each for each in facts.packages if each.extra == "liger"), None)
    if package is None:
        return ""
    reasons = [] if facts.accelerator.startswith("cuda") else ["there is no CUDA device"]
    if not package.version:
        reasons.append("liger-kernel is not installed (pip install 'infinity-engine[liger]')")
    elif package.trouble:
        reasons.append(f"{_named(package)} cannot be imported: {package.trouble}")
    if reasons:
        return f'kernels.liger "auto" does nothing here: {", and ".join(reasons)}'
    return f'{package.version}, used by models that it knows if kernels.liger is true or "auto"'


def _flush_words(each: FolderFacts) -> str:
    """Return whether a flush reaches the drive, as far as the kernel says, and what `every_step` "power" needs."""
    place = each.place
    cache = f"{place.write_cache}{', FUA' if place.fua else ''}"
    power = 'checkpoint.every_step "power" flushes values and record of each step'
    if place.virtual:
        said = f"whether it reaches a drive cannot be known, because the device is virtual ({cache or 'cache unknown'})"
        power += ": it outlasts a loss of power only if what is beneath passes flushes on"
    elif place.write_cache == "write back":
        said = f"the drive has a volatile cache, which a flush empties ({cache})"
        power += " and needs a drive that obeys: less than 0.05 ms speaks for a protected cache, or for one that stays"
    elif place.write_cache == "write through":
        said = f"the drive has no volatile cache ({cache}), so that what is written outlasts a loss of power"
        power += ", which suffices"
    else:
        said = "whether it reaches a drive cannot be known, because the kernel says nothing of a cache"
        power += ": it outlasts a loss of power only if the file system passes flushes on"
    return f"{each.folder}: a flush behind 4 kB takes {1e3 * (each.flush_seconds or 0):.2g} ms; {said}. {power}."


def _core_words(facts: Facts) -> str:
    quota = "" if facts.quota_cores is None else f", a quota of {facts.quota_cores:g}"
    torch = f", {facts.torch_threads} for torch" if facts.torch_threads else ""
    return f"{facts.cores} allowed{quota}: {facts.threads} threads for the optimizer{torch}"


def _memory_words(facts: Facts) -> str:
    free = f"{facts.free_nbytes / 1e9:.1f} GB of " if facts.free_nbytes else ""
    return f"{free}{facts.memory_nbytes / 1e9:.1f} GB{' free within the limits' if free else ''}"
