"""`infinity bench`: measure this machine for at most a minute, and write a hardware profile for configurations and the
estimator.

    infinity bench --drive FOLDER [--drive FOLDER ...] [--seconds 60] [--output profile.json]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from infinity.cli import rates
from infinity.cli.drive_rates import check_drive, measure_drive
from infinity.cli.processor import processor
from infinity.cli.terminal import TaskProgress, format_table, say
from infinity.errors import ConfigError
from infinity.memory.tiers.device import Device
from infinity.ops.adam import set_threads, shutdown_threads
from infinity.ops.cores import allowed_cores, thread_count
from infinity.plan.hardware import ASSUMED, Compute, Drive, HardwareProfile, load_profile, save_profile

DTYPES = ("fp32", "bf16", "fp16")
# Shares of the time limit: drives, a transformer block (in all dtypes), the optimizer (in all dtypes), copies, the
# processor's name. The rest is spare.
_DRIVE_SHARE, _COMPUTE_SHARE, _ADAM_SHARE, _COPY_SHARE, _NAME_SHARE = 0.5, 0.25, 0.06, 0.04, 0.05
# Time of a measurement if earlier ones have used up its share.
_SECONDS_MIN = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument(
        "--drive", action="append", metavar="FOLDER", help="a folder on a drive to measure; again for each drive"
    )
    parser.add_argument("--tbw", action="append", type=float, metavar="TB",
                        help="terabytes that the drive is rated to take, in the order of --drive")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="time limit in all (default: 60)")
    parser.add_argument("--output", default="profile.json", metavar="FILE",
                        help="where the profile goes (default: profile.json)")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Measure, write the profile and print it; return 0.

    Raises:
        ConfigError: an option has an invalid value, a drive cannot be measured, or the output path is not writable.
    """
    if given.seconds < 5:
        raise ConfigError(f"--seconds {given.seconds:g}: at least 5 are needed to measure anything")
    folders = given.drive or []
    if len(given.tbw or []) > len(folders):
        raise ConfigError(f"--tbw is given {len(given.tbw)} times for {len(folders)} drives: give it once a --drive")
    check_output(given.output)
    for folder in folders:
        check_drive(folder)
    began = time.monotonic()
    before = signal.signal(signal.SIGTERM, _terminated)
    progress = TaskProgress()
    try:
        profile = measure(folders, seconds=given.seconds, endurance_tb=given.tbw or [], progress=progress)
    finally:
        progress.end()
        signal.signal(signal.SIGTERM, before)
    taken = time.monotonic() - began
    # Another process may have created a file at this path during the measurement.
    check_output(given.output)
    save_profile(profile, given.output)
    say(show(profile))
    if not folders:
        say("no drive was measured: name a folder on each with --drive")
    say(f'measured in {taken:.1f} s and written to {given.output}: set "hardware_profile" to it in a configuration')
    return 0


def check_output(path: str) -> None:
    """Raise ConfigError if a profile cannot be written to `path`, or would overwrite a file that is not a profile."""
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {Path(path).absolute().parent}")
    if os.path.lexists(path):
        try:
            load_profile(path)
        except ConfigError:
            raise ConfigError(
                f"--output {path}: what is there is no profile and is not overwritten; name another file"
            ) from None


def measure(
    folders: Sequence[str], *, seconds: float, endurance_tb: Sequence[float] = (), progress: TaskProgress | None = None
) -> HardwareProfile:
    """Return a profile of this machine, measured in about `seconds`.

    Arguments:
        folders: a folder on each drive to measure.
        seconds: time limit of all measurements together; each one gets its share of it.
        endurance_tb: rated endurance of the drives in terabytes written, in the order of `folders`; may be shorter.
        progress: prints the current measurement.
    """
    began = time.monotonic()
    progress = progress or TaskProgress()
    progress.task("the processor")
    name = processor()
    device = Device.detect(0)
    cores = allowed_cores()
    set_threads(thread_count(len(cores)), cores)
    dtypes = DTYPES if device.is_accelerator else DTYPES[:2]
    found: dict[str, Compute] = {}
    for index, dtype in enumerate(dtypes):
        progress.task(f"a transformer block in {dtype}")
        # Deadlines count from the start, so that the next dtype gets the time that one leaves.
        ends = began + _NAME_SHARE * seconds + _COMPUTE_SHARE * seconds * (index + 1) / len(dtypes)
        found[dtype] = rates.compute(dtype, device, max(ends - time.monotonic(), _SECONDS_MIN))
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
        # On a slow machine the earlier measurements take longer than their shares.
        left = 0.95 * seconds - (time.monotonic() - began)
        share = min(_DRIVE_SHARE * seconds / len(folders), max(left / (len(folders) - index), _SECONDS_MIN))
        drives.append(measure_drive(folder, seconds=share, endurance_nbytes=endurance, tell=progress.task))
    return HardwareProfile(
        host=socket.gethostname(), date=time.strftime("%Y-%m-%d %H:%M"), processor=name,
        accelerator=str(device.torch) if device.is_accelerator else None, cores=thread_count(len(cores)),
        memory_nbytes=int(psutil.virtual_memory().total), drives=tuple(drives), copy_rate=copied,
        adam_seconds={dtype: step for dtype, (step, _) in steps.items()},
        norm_seconds={dtype: norm for dtype, (_, norm) in steps.items()}, compute=found,
        up_rate=links[0], down_rate=links[1], device_copy_rate=links[2], network_rate=ASSUMED.network_rate,
        assumptions=("network_rate",),
    )  # fmt: skip


def show(profile: HardwareProfile) -> str:
    """Return a profile as tables."""
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
        lines += ["", format_table(rows)]
    dtypes = list(profile.adam_seconds)
    known = [profile.compute.get(dtype) for dtype in dtypes]
    rows = [["", *dtypes]]
    rows.append(["transformer block", *(f"{each.rate / 1e9:,.0f} GFLOP/s" if each else "-" for each in known)])
    fixed = [each or Compute(rate=1) for each in known]
    rows.append(["  and for 1 B parameters", *(_seconds(each.parameter_seconds) for each in fixed)])
    rows.append(["  and for 1 B logits of the head", *(_seconds(each.logit_seconds) for each in fixed)])
    rows.append(["Adam step of 1 B parameters", *(_seconds(profile.adam_seconds[dtype]) for dtype in dtypes)])
    rows.append(["norm of 1 B gradients", *(_seconds(profile.norm_seconds.get(dtype)) for dtype in dtypes)])
    lines += ["", format_table(rows), "", f"copies within CPU memory {_rate(profile.copy_rate)}"]
    if profile.up_rate is not None and profile.down_rate is not None:
        lines.append(f"CPU to accelerator {_rate(profile.up_rate)}, back {_rate(profile.down_rate)}")
    if profile.assumptions:
        network = "" if profile.network_rate is None else f"the network between ranks, {_rate(profile.network_rate)}"
        told = [network if name == "network_rate" and network else name for name in profile.assumptions]
        lines.append(f"assumed, not measured: {', '.join(told)}")
    return "\n".join(lines)


def _seconds(each: float | None) -> str:
    """Return the seconds of a billion elements from those of one; "-" if they are 0 or unknown."""
    return f"{each * 1e9:.2f} s" if each else "-"


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
