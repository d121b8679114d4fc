"""`infinity doctor`: what it sees is what is there, and each advice comes for its cause and for no other."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cpuinfo
import pytest

from benchmarks.support import machine
from infinity.cli.doctor import (
    EXTRAS,
    REQUIRED,
    Facts,
    FolderFacts,
    Package,
    examine,
    look_at_packages,
    recommend,
    show,
)
from infinity.cli.engine_facts import processor
from infinity.cli.main import main
from infinity.memory.folder import FolderInfo, look
from infinity.ops import build
from tests.support import bare

ROOT = Path(__file__).resolve().parents[2]
GOOD_PLACE = FolderInfo(
    path=Path("drive"), device=1, file_system="ext4", free_nbytes=10**12, capacity_nbytes=2 * 10**12, model="a drive",
    writable=True,
)  # fmt: skip
WORKS = (Package("torch", "2.13"), Package("transformers", "5.24", extra="hf"))
GOOD = Facts(
    python="3.11", packages=WORKS, accelerator="cuda:0", compiler="g++ 12", adam="libadam.so (checkout)",
    aio="libaio.so (checkout)", simd="avx512", backend="io_uring",
    backends=dict.fromkeys(("io_uring", "libaio", "threads", "python"), ""), io_uring_disabled=False,
    processor="a processor", cores=16,
    quota_cores=None, threads=16, torch_threads=16, memory_nbytes=10**11, free_nbytes=9 * 10**10, memlock_nbytes=None,
    huge_pages="madvise", folders=(FolderFacts("drive", True, GOOD_PLACE, direct=True),),
)  # fmt: skip


def with_folder(**changes: object) -> dict[str, object]:
    own = {name: changes.pop(name) for name in ("direct", "trouble", "named") if name in changes}
    folder = replace(GOOD.folders[0], place=replace(GOOD_PLACE, **changes), **own)
    return {"folders": (folder,)}


# Cause -> (what differs from a good machine, words of the advice, whether it stops a run).
ADVICE = {
    "packages that are missing": (
        {"packages": (Package("torch", "", "No module named 'torch'"), Package("ninja", "", "no ninja"))},
        "pip install torch ninja", True,
    ),
    "a package that fails": (
        {"packages": (Package("numpy", "2.4", "libblas.so: cannot open"),)}, "--force-reinstall numpy", True,
    ),
    "an extra that fails": (
        {"packages": (Package("transformers", "4.1", "needs transformers 5", "hf"),)}, "'infinity-engine[hf]'", False,
    ),
    "no compiler": (
        {"compiler": "", "adam": "Python fallback", "aio": "Python fallback"}, "Install g++ or clang++", False,
    ),
    "a compiler that fails": ({"adam": "Python fallback"}, "infinity.ops.build", False),
    "io_uring blocked": ({"backends": {"io_uring": "EPERM"}, "backend": "libaio"}, "seccomp", False),
    "io_uring switched off": (
        {"backends": {"io_uring": "EPERM"}, "backend": "libaio", "io_uring_disabled": True}, "sysctl", False,
    ),
    "too many threads": ({"threads": 2, "quota_cores": 1.5}, "OMP_NUM_THREADS=2", False),
    "no large pages": ({"huge_pages": "never"}, "madvise", False),
    "a folder in memory": (with_folder(file_system="tmpfs"), "on a drive as nvme_path", True),
    "a folder on a network": (with_folder(file_system="nfs4"), "a local drive", False),
    "no O_DIRECT": (with_folder(direct=False, file_system="overlay"), "ext4 or xfs", False),
    "no permission": (with_folder(trouble="permission denied"), "another folder", True),
    "little room": (with_folder(free_nbytes=10**9), "infinity estimate", False),
}  # fmt: skip


def test_a_good_machine_gets_no_advice():
    assert recommend(GOOD) == []


@pytest.mark.parametrize("cause", ADVICE)
def test_each_cause_has_its_remedy(cause):
    changes, words, stops = ADVICE[cause]
    (advice,) = recommend(replace(GOOD, **changes))
    assert words in advice.remedy
    assert advice.stops is stops


def test_an_extra_that_is_not_installed_is_shown_and_not_complained_about():
    facts = replace(GOOD, packages=(*WORKS, Package("wandb", "", "not installed", "wandb")))
    assert recommend(facts) == []
    assert "hf (transformers 5.24); not installed: wandb" in show(facts)


@pytest.mark.parametrize(
    ("package", "accelerator", "words"),
    [
        (Package("liger-kernel", "", "not installed", "liger"), "cuda:0",
         'kernels.liger "auto" does nothing here: liger-kernel is not installed '
         "(pip install 'infinity-engine[liger]')"),
        (Package("liger-kernel", "0.8.5", "No module named 'triton'", "liger"), "cuda:0",
         "kernels.liger \"auto\" does nothing here: liger-kernel 0.8.5 cannot be imported: No module named 'triton'"),
        (Package("liger-kernel", "0.8.5", extra="liger"), "",
         'kernels.liger "auto" does nothing here: there is no CUDA device'),
        (Package("liger-kernel", "", "not installed", "liger"), "",
         'kernels.liger "auto" does nothing here: there is no CUDA device, and liger-kernel is not installed '
         "(pip install 'infinity-engine[liger]')"),
        (Package("liger-kernel", "0.8.5", extra="liger"), "cuda:0",
         '0.8.5, used by models that it knows if kernels.liger is true or "auto"'),
    ],
)  # fmt: skip
def test_one_line_says_what_liger_does_here(package: Package, accelerator: str, words: str) -> None:
    facts = replace(GOOD, packages=(*WORKS, package), accelerator=accelerator)
    (line,) = [line for line in show(facts).splitlines() if line.startswith("Liger-Kernel")]
    assert line.removeprefix("Liger-Kernel").strip() == words
    assert "Liger" not in show(GOOD), "where a required package is missing, extras are not looked at"


def test_it_vouches_for_what_is_declared_and_imports_it():
    assert {*REQUIRED} == {requirement.name for requirement in bare.declared()}
    extras = bare.project()["optional-dependencies"]
    assert {*EXTRAS} == extras.keys() - {"clients", "dev", "docs", "examples"}
    for extra, (name, _) in EXTRAS.items():
        assert extras[extra][0].startswith(name)
    found = {package.name: package for package in look_at_packages()}
    assert all(found[name].version and not found[name].trouble for name in REQUIRED)
    assert {*REQUIRED.values()} <= {*sys.modules}


@pytest.mark.parametrize("missing", [["safetensors"], ["torch"], ["torch", "numpy", "psutil", "pydantic"]])
def test_it_works_without_a_package_and_says_what_to_install(missing, tmp_path):
    """Without torch it ended with a traceback, without safetensors nothing to improve was found."""
    (tmp_path / "ds.json").write_text("{}")
    options = [word for name in missing for word in ("--without", name)]
    command = [sys.executable, "-m", "tests.support.bare", *options, str(ROOT / "infinity" / "__main__.py"), "doctor"]
    reply = subprocess.run([*command, "--config", str(tmp_path / "ds.json")], capture_output=True, text=True, cwd=ROOT,
                           timeout=60, check=False)  # fmt: skip
    assert (reply.returncode, reply.stderr) == (1, "")
    be, needs = ("is", "it") if len(missing) == 1 else ("are", "them")
    assert reply.stdout.splitlines()[-1] == (
        f"PROBLEM: {' and '.join(missing)} {be} not installed, and every run needs {needs}. "
        f"Run pip install {' '.join(missing)}."
    )
    assert ("was not looked at: No module named 'pydantic'" in reply.stdout) == ("pydantic" in missing)
    assert "compiler" in reply.stdout and "O_DIRECT" in reply.stdout


def test_a_folder_that_nobody_means_to_use_is_shown_and_not_complained_about():
    facts = replace(GOOD, **with_folder(file_system="tmpfs", named=False))
    assert recommend(facts) == []
    assert "tmpfs" in show(facts)


def test_a_limit_on_locked_memory_does_not_concern_what_a_driver_pins():
    assert recommend(replace(GOOD, memlock_nbytes=1 << 16)) == []


def test_what_stops_a_run_comes_first():
    facts = replace(GOOD, huge_pages="never", **with_folder(file_system="tmpfs"))
    assert [advice.stops for advice in recommend(facts)] == [True, False]


def test_it_sees_this_machine(tmp_path):
    facts = examine([str(tmp_path)], named=[str(tmp_path)])
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.backends[facts.backend] == ""
    assert 0 < facts.free_nbytes <= facts.memory_nbytes
    (folder,) = facts.folders
    assert folder.place.free_nbytes > 0
    assert not folder.trouble
    assert not list(tmp_path.iterdir())


def test_the_processor_has_the_name_that_its_maker_gave_it(monkeypatch):
    """Read by hand it was `model name` of /proc/cpuinfo, which an ARM processor does not have."""
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: {"brand_raw": "Neoverse-V2"})
    assert processor() == machine.describe().split("cores of ")[1].split(",")[0] == "Neoverse-V2"
    monkeypatch.setattr(cpuinfo, "get_cpu_info", dict)
    assert processor() == platform.machine()
    assert "Neoverse-V2" in show(replace(GOOD, processor="Neoverse-V2"))


def test_a_file_for_several_ranks_is_looked_at_for_its_folders(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "drive")}},
    }))  # fmt: skip
    main(["doctor", "--config", str(config)])
    assert str(tmp_path / "drive") in capsys.readouterr().out


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path):
    there, later = look(tmp_path), look(tmp_path / "a" / "b")
    assert later.path == there.path
    assert (later.device, later.file_system) == (there.device, there.file_system)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    folder = tmp_path / "mnt"
    folder.mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = {"/": "ext4", folder: "xfs", "/x": "nfs"}
    lines = [f"1 0 0:1 / {mount} rw - {kind} none rw" for mount, kind in mounts.items()]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    assert look(folder, tmp_path).file_system == "xfs"
    assert look("/", tmp_path).file_system == "ext4"


# What the kernel says of a device: its folder in sysfs, the drive's files there, words of the doctor.
FLUSHES = {
    "a partition of a drive with a cache": ("pci0/nvme0n1/nvme0n1p1", ("write back", "1"), "empties (write back, FUA)"),
    "a drive without": ("pci0/sda", ("write through", "0"), "no volatile cache (write through), so that"),
    "a virtual machine's": ("pci0/virtio1/block/vda", ("write back", "0"), "cannot be known, because the device is"),
    "a volume": ("virtual/block/dm-0", ("write back", "1"), "is virtual (write back, FUA)"),
    "one without a word": ("pci0/mmc0", None, "because the kernel says nothing of a cache"),
    "none": (None, None, "because the kernel says nothing of a cache"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLUSHES)
def test_it_says_whether_a_flush_reaches_the_drive(case, tmp_path):
    place, drive, words = FLUSHES[case]
    device = tmp_path.stat().st_dev
    named = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    named.parent.mkdir(parents=True)
    if place is not None:
        block = tmp_path / "sys/devices" / place
        block.mkdir(parents=True)
        named.symlink_to(f"../../devices/{place}")
    if drive is not None:
        queue = (block.parent if block.name.endswith("p1") else block) / "queue"
        queue.mkdir()
        for name, word in zip(("write_cache", "fua"), drive, strict=True):
            (queue / name).write_text(f"{word}\n")
    facts = FolderFacts("drive", True, look(tmp_path, tmp_path), direct=True, flush_seconds=0.00125)
    line = show(replace(GOOD, folders=(facts,))).splitlines()[-1]
    assert line.startswith("drive: a flush behind 4 kB takes 1.2 ms; ") and words in line
    assert 'every_step "power" flushes' in line
    assert "flush" not in show(GOOD), "where none was timed"


def test_it_times_flushes_where_values_are_to_be_offloaded(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(os.pread(descriptor, 1 << 20, 0)))
    named, other = examine([str(tmp_path), "."], named=[str(tmp_path)]).folders
    assert 0 < named.flush_seconds < 1 and other.flush_seconds is None
    assert len({*flushed}) == 9 and {*map(len, flushed)} == {4096}, "a block that has changed before each"


def test_native_code_that_is_switched_off_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("INFINITY_NATIVE", "0")
    build._library.cache_clear()
    code = main(["doctor", "--folder", str(tmp_path)])
    build._library.cache_clear()
    shown = capsys.readouterr().out
    assert code == 0 and "Python fallback" in shown
    assert "INFINITY_NATIVE=0 turns native code off" in shown
