"""`deepspeed.launcher.runner`: what programs that start others ask it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from infinity.config.hosts import Hosts, chosen_hosts, read_hosts
from infinity.log import logger

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = os.path.join(os.sep, "job", "hostfile")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line of DeepSpeed's launcher: `infinity run --as-deepspeed`, in place of this process.

    args: its words; default: those of this process.
    """
    words = sys.argv[1:] if args is None else list(args)
    os.execv(sys.executable, [sys.executable, "-m", "infinity", "run", "--as-deepspeed", *words])


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> dict[str, int] | None:
    """Return the number of devices of each machine that a hostfile names; None, with a warning, if there is no file."""
    if not Path(hostfile_path).is_file():
        logger.warning("no hostfile %s: this machine alone is used", hostfile_path)
        return None
    return {host: len(slots) for host, slots in read_hosts(Path(hostfile_path)).items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Hosts:  # fmt: skip
    """Return the devices of each machine that `--include` or `--exclude` leaves, in the form "a@b:0,2"."""
    return chosen_hosts({host: list(slots) for host, slots in host_info.items()}, include_str, exclude_str)


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Hosts:
    """Do the same for machines with their numbers of devices."""
    return parse_resource_filter({host: range(count) for host, count in resource_pool.items()}, inclusion, exclusion)
