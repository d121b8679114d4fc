"""`infinity bench`: measure this machine for a minute at most, and write the profile that configurations and the
estimator use.

    infinity bench --drive FOLDER [--drive FOLDER ...] [--seconds 60] [--output profile.json]
"""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from infinity.command import rates
from infinity.command.drive_rates import measure_drive
from infinity.command.processor import processor
from infinity.command.terminal import Progress, say, table
from infinity.errors import ConfigError
from infinity.memory.device import Device
from infinity.ops.adam import set_threads, shutdown_threads
from infinity.ops.cores import allowed_cores, thread_count
from infinity.plan.hardware import ASSUMED, Compute, Drive, HardwareProfile, save_profile

DTYPES = ("fp32", "bf16", "fp16")
# Shares of the time: drives, a transformer block (by dtype), the optimizer (by dtype), copies; the rest is spare.
_DRIVE_SHARE, _COMPUTE_SHARE, _ADAM_SHARE, _COPY_SHARE = 0.5, 0.25, 0.06, 0.04


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--drive", action="append", metavar="FOLDER", help="a folder on a drive to measure; again for each drive"
    )
    parser.add_argument("--tbw", action="append", type=float, metavar="TB",
                        help="terabytes that the drive is rated to take, in the order of --drive")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="time limit in all (default: 60)")
    parser.add_argument("--output", default="profile.json", metavar="FILE",
                        help="where the profile goes (default: profile.json)")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Measure, write the profile, print it."""
    if given.seconds < 5:
        raise ConfigError(f"--seconds {given.seconds:g}: at least 5 are needed to measure anything")
    folders = given.drive or []
    if len(given.tbw or []) > len(folders):
        raise ConfigError(f"--tbw is given {len(given.tbw)} times for {len(folders)} drives: give it once a --drive")
    if not Path(given.output).absolute().parent.is_dir():
        raise ConfigError(f"--output {given.output}: there is no folder {Path(given.output).absolute().parent}")
    before = signal.signal(signal.SIGTERM, _terminated)
    progress = Progress()
    try:
        profile = measure(folders, seconds=given.seconds, endurance_tb=given.tbw or [], progress=progress)
    finally:
        progress.end()
        signal.signal(signal.SIGTERM, before)
    save_profile(profile, given.output)
    say(show(profile))
    if not folders:
        say("no drive was measured: name a folder on each with --drive")
    say(f'written to {given.output}: name it as "hardware_profile" in a configuration')
    return 0


def measure(
    folders: Sequence[str], *, seconds: float, endurance_tb: Sequence[float] = (), progress: Progress | None = None
) -> HardwareProfile:
    """A profile of this machine, made in about `seconds` at most."""
    began = time.monotonic()
    progress = progress or Progress()
    device = Device.detect(0)
    cores = allowed_cores()
    set_threads(thread_count(len(cores)), cores)
    dtypes = DTYPES if device.is_accelerator else DTYPES[:2]
    found: dict[str, Compute] = {}
    for dtype in dtypes:
        progress.task(f"a transformer block in {dtype}")
        found[dtype] = rates.compute(dtype, device, _COMPUTE_SHARE * seconds / len(dtypes))
    steps: dict[str, tuple[float, float]] = {}
    for dtype in DTYPES:
        progress.task(f"the optimizer in {dtype}")
        steps[dtype] = rates.adam_seconds(dtype, _ADAM_SHARE * seconds / len(DTYPES))
    progress.task("copies")
    copied = rates.copy_rate(_COPY_SHARE * seconds / 2)
    links = rates.link_rates(device, _COPY_SHARE * seconds / 2) if device.is_accelerator else (None,) * 3
    shutdown_threads()
    drives: list[Drive] = []
    for index, folder in enumerate(folders):
        endurance = int(endurance_tb[index] * 1e12) if index < len(endurance_tb) else None
        # On a slow machine what came before took longer than its share.
        left = 0.95 * seconds - (time.monotonic() - began)
        share = min(_DRIVE_SHARE * seconds / len(folders), max(left / (len(folders) - index), 1.0))
        drives.append(measure_drive(folder, seconds=share, endurance_nbytes=endurance, tell=progress.task))
    return HardwareProfile(
        host=socket.gethostname(), date=time.strftime("%Y-%m-%d %H:%M"), processor=processor(),
        accelerator=str(device.torch) if device.is_accelerator else None, cores=thread_count(len(cores)),
        memory_nbytes=int(psutil.virtual_memory().total), drives=tuple(drives), copy_rate=copied,
        adam_seconds={dtype: step for dtype, (step, _) in steps.items()},
        norm_seconds={dtype: norm for dtype, (_, norm) in steps.items()}, compute=found,
        up_rate=links[0], down_rate=links[1], device_copy_rate=links[2], network_rate=ASSUMED.network_rate,
        assumptions=("network_rate",),
    )  # fmt: skip


def show(profile: HardwareProfile) -> str:
    """A profile as tables."""
    lines = [
        f"{profile.host}, {profile.date}: {profile.cores} cores of {profile.processor}, "
        f"{profile.memory_nbytes / 1e9:.1f} GB; accelerator: {profile.accelerator or 'none'}"
    ]
    if profile.drives:
        rows = [["drive", "read", "write", "both at once", "block", "in flight", "O_DIRECT"]]
        rows += [
            [drive.folder, _rate(drive.read_rate), _rate(drive.write_rate), _rate(drive.mixed_rate),
             f"{drive.block_nbytes >> 10} KiB", str(drive.queue_depth), "yes" if drive.direct else "no"]
            for drive in profile.drives
        ]  # fmt: skip
        lines += ["", table(rows)]
    rows = [["", *profile.adam_seconds]]
    rows.append(["Adam, ns a parameter", *(f"{value * 1e9:.3f}" for value in profile.adam_seconds.values())])
    rows.append(["norm, ns a parameter", *(f"{value * 1e9:.3f}" for value in profile.norm_seconds.values())])
    known = [profile.compute.get(dtype) for dtype in profile.adam_seconds]
    rows.append(["transformer block, GFLOP/s", *(f"{each.rate / 1e9:.0f}" if each else "" for each in known)])
    rows.append(
        ["and ns a parameter and pass", *(f"{each.parameter_seconds * 1e9:.2f}" if each else "" for each in known)]
    )
    rows.append(["and ns a logit of the head", *(f"{each.logit_seconds * 1e9:.2f}" if each else "" for each in known)])
    lines += ["", table(rows), "", f"copies within CPU memory {_rate(profile.copy_rate)}"]
    if profile.up_rate is not None and profile.down_rate is not None:
        lines.append(f"CPU to accelerator {_rate(profile.up_rate)}, back {_rate(profile.down_rate)}")
    if profile.assumptions:
        lines.append(f"assumed, not measured: {', '.join(profile.assumptions)}")
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
