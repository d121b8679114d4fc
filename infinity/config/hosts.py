"""Machines and devices of a run: what a hostfile names, and what `--include` and `--exclude` leave of it."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.base.untrusted import read_metadata, reason, shortened
from infinity.errors import ConfigError

# More devices than this are a slip of the finger, of which no list is made.
SLOTS_MAX = 65_536

# Machine -> the numbers of its devices.
Hosts = dict[str, list[int]]


def read_hosts(path: Path) -> Hosts:
    """Read a hostfile: one machine a line, "name slots=8". ConfigError, with the line, for anything else."""
    try:
        lines = read_metadata(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hostfile {path}: cannot be read: {reason(error)}") from error
    hosts: Hosts = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = re.fullmatch(r"([\w.:@-]+)\s+slots=(\d{1,18})", words)
        if found is None or found[1].startswith("-"):
            raise ConfigError(f'{path}, line {number}: {shortened(line)} is not "name slots=8"')
        if not 0 < int(found[2]) <= SLOTS_MAX:
            raise ConfigError(f"{path}, line {number}: {found[2]} slots: a machine has 1 to {SLOTS_MAX:,} devices")
        if found[1] in hosts:
            raise ConfigError(f"{path}, line {number}: {found[1]} stands twice")
        hosts[found[1]] = list(range(int(found[2])))
    if not hosts:
        raise ConfigError(f'{path} names no machine: one a line, "name slots=8"')
    return hosts


def chosen_hosts(hosts: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """Return what is left of machines and devices; {} if nothing is. include, exclude: such as "a@b:0,2"; at most one.

    ConfigError for a machine or a device that is not there.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude: keep one of the two")
    if include:
        wanted = _parsed(include, hosts, "--include")
        return {host: wanted[host] for host in hosts if host in wanted}
    without = _parsed(exclude, hosts, "--exclude") if exclude else {}
    left = {host: [slot for slot in slots if slot not in without.get(host, ())] for host, slots in hosts.items()}
    return {host: slots for host, slots in left.items() if slots}


def _parsed(text: str, hosts: Hosts, option: str) -> Hosts:
    """Return the machines and devices that "a@b:0,2" names; a machine without a list has all its devices."""
    found: Hosts = {}
    for part in text.split("@"):
        host, colon, listed = part.partition(":")
        if host not in hosts:
            raise ConfigError(f"{option} {text}: no machine {host!r}; there is {', '.join(hosts)}")
        if colon and not re.fullmatch(r"\d+(,\d+)*", listed):
            raise ConfigError(f'{option} {text}: {listed!r} is not a list of devices such as "0,2"')
        slots = {int(slot) for slot in listed.split(",")} if colon else {*hosts[host]}
        if beyond := slots - {*hosts[host]}:
            known = f"{min(hosts[host])} to {max(hosts[host])}"
            raise ConfigError(f"{option} {text}: {host} has devices {known}, not {min(beyond)}")
        # A machine may be named more than once.
        found[host] = sorted({*found.get(host, ()), *slots})
    return found
