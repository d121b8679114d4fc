"""What a machine can do, as numbers: measured by `infinity bench` and kept in a JSON file, or assumed and said so.

A profile describes one rank's node: its drives, its memory, what the optimizer and a transformer block reach on it.
Rates are bytes or operations a second; a rate of a link is that of all of the node's ranks together.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infinity.base.untrusted import read_json, reason
from infinity.errors import ConfigError
from infinity.plan.types import DriveRates

# Bytes that a drive is assumed to take in its life for each byte of capacity: 600 TB a TB is what
# makers of consumer drives promise (0.33 drive writes a day for five years); data-centre drives take 1 to 3 a day.
ASSUMED_WRITES_A_BYTE = 600.0


# Bytes or operations a second; seconds; a number of things.
Rate = Annotated[float, Field(gt=0, lt=1e24)]
Duration = Annotated[float, Field(ge=0, lt=1e6)]
Amount = Annotated[int, Field(gt=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Drive(_Record):
    """One drive at the block size and depth that serve it best, through our own queue."""

    folder: str
    # Bytes a second of reads alone, of writes alone, and of both together where half of the bytes are reads.
    read_rate: Rate
    write_rate: Rate
    mixed_rate: Rate
    block_nbytes: Amount
    queue_depth: Amount
    # Whether its file system takes O_DIRECT; rates through the page cache are those of memory for a while.
    direct: bool = True
    file_system: str = ""
    model: str = ""
    capacity_nbytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    # Bytes that the maker promises it can take (TBW); None: not known.
    endurance_nbytes: Amount | None = None


class Compute(_Record):
    """What a language model's parts reach in forward and backward, element-wise work included, in one dtype."""

    # Floating-point operations a second of a transformer block as the number of tokens grows.
    rate: Rate
    # Seconds a parameter of one forward and backward whatever the tokens: reading weights, making gradients.
    parameter_seconds: Duration = 0.0
    # Seconds a logit (token and word of the vocabulary) that the head and its loss take beyond their operations.
    logit_seconds: Duration = 0.0


class HardwareProfile(_Record):
    """One node. See the module's text."""

    version: Literal[1] = 1
    # "measured" by `infinity bench`, or "assumed".
    source: Literal["measured", "assumed"] = "measured"
    host: str = ""
    date: str = ""
    processor: str = ""
    accelerator: str | None = None
    cores: Amount
    memory_nbytes: Amount
    drives: tuple[Drive, ...] = ()
    # Bytes copied a second from CPU memory to CPU memory (each is read once and written once).
    copy_rate: Rate
    # Seconds a parameter, by compute dtype: of an Adam step on the CPU, and of the norm of its gradient.
    adam_seconds: dict[str, Duration]
    norm_seconds: dict[str, Duration]
    # By compute dtype.
    compute: Annotated[dict[str, Compute], Field(min_length=1)]
    # Bytes a second between CPU memory and the accelerator; None where there is none.
    up_rate: Rate | None = None
    down_rate: Rate | None = None
    # Bytes copied a second within the accelerator's memory; None where there is none.
    device_copy_rate: Rate | None = None
    # Bytes a second that a rank sends to others; None: not known.
    network_rate: Rate | None = None
    # Names of the numbers above that were not measured.
    assumptions: tuple[str, ...] = ()

    @property
    def drive_rates(self) -> DriveRates:
        """The rates of all drives together, of assumed ones where there are none."""
        drives = self.drives or ASSUMED.drives
        return DriveRates(
            read=sum(drive.read_rate for drive in drives), write=sum(drive.write_rate for drive in drives),
            mixed=sum(drive.mixed_rate for drive in drives),
        )  # fmt: skip


def assumed(accelerator: bool) -> HardwareProfile:
    """The assumed rates of a machine that was not measured, with an accelerator or without."""
    return ASSUMED if accelerator else ASSUMED_CPU


# A round-numbered workstation: every number is an assumption, and what is predicted with it says so.
ASSUMED = HardwareProfile(
    source="assumed", host="an assumed machine", processor="16 cores, two channels of DDR5",
    accelerator="an accelerator of 100 TFLOP/s in bf16 (half of it reached) on PCIe 4.0 x16",
    cores=16, memory_nbytes=128 << 30,
    drives=(
        Drive(
            folder="", read_rate=6.0e9, write_rate=4.0e9, mixed_rate=5.0e9, block_nbytes=1 << 20, queue_depth=32,
            model="one NVMe drive on PCIe 4.0 x4", capacity_nbytes=2 * 10**12,
        ),
    ),
    copy_rate=25e9,
    adam_seconds={"fp32": 0.5e-9, "bf16": 0.45e-9, "fp16": 0.55e-9},
    norm_seconds={"fp32": 0.08e-9, "bf16": 0.06e-9, "fp16": 0.06e-9},
    compute={
        "fp32": Compute(rate=10e12, parameter_seconds=1e-11, logit_seconds=5e-11),
        "bf16": Compute(rate=50e12, parameter_seconds=5e-12, logit_seconds=4e-11),
        "fp16": Compute(rate=50e12, parameter_seconds=5e-12, logit_seconds=4e-11),
    },
    up_rate=22e9, down_rate=22e9, device_copy_rate=700e9, network_rate=10e9,
    assumptions=("every rate",),
)  # fmt: skip
# The same one, computing on its CPU: 16 cores of 4 GHz and 32 fp32 operations a cycle (AVX2, two fused multiply-adds)
# make 2 TFLOP/s. Without instructions for 16-bit products those are no faster. A parameter's and a logit's extra bytes
# go through memory that is 28 times as slow as the accelerator's.
_CPU = Compute(rate=1e12, parameter_seconds=2.8e-10, logit_seconds=1.4e-9)
ASSUMED_CPU = ASSUMED.model_copy(
    update={
        "processor": "16 cores of 2 TFLOP/s in fp32 together (half of it reached), two channels of DDR5",
        "accelerator": None, "compute": {"fp32": _CPU, "bf16": _CPU, "fp16": _CPU}, "up_rate": None, "down_rate": None,
        "device_copy_rate": None,
    }
)  # fmt: skip


def load_profile(path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile in a file that `infinity bench` has written; ConfigError where it is none."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{os.fspath(path)}: the hardware profile cannot be read: {reason(error)}. Make one with `infinity bench`"
        ) from error
    try:
        return HardwareProfile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{os.fspath(path)}: not a hardware profile: {where + ': ' if where else ''}{first['msg']}. Make one with "
            "`infinity bench`"
        ) from error


def save_profile(profile: HardwareProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile, whole or not at all."""
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(profile.model_dump(), indent=2) + "\n", encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: the profile cannot be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
