"""`infinity run`: start a script, or another launcher, on this machine's devices; with DeepSpeed's names if asked.

    infinity run train.py --lr 1e-4                     one process a device of this machine
    infinity run --nproc 2 train.py                     two processes
    infinity run --as-deepspeed train.py                `import deepspeed` in these processes gives infinity's names
    infinity run --as-deepspeed accelerate launch ...   a command that starts the processes itself
    infinity run --hostfile hosts train.py              one launcher a machine, over ssh
    infinity run --no_ssh --num_nodes 2 --node_rank 0 --master_addr HOST train.py    this machine's part of two

Processes are started by torchrun. With --as-deepspeed a script is given --local_rank=N as its first argument, as
DeepSpeed's launcher does it (--no_local_rank leaves it out), and the commands `deepspeed` and
`python -m deepspeed.launcher.runner` are this one. An installed DeepSpeed is not touched: other programs find it as
before. Exit code: that of the command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.cli.terminal import say
from infinity.config.hosts import SLOTS_MAX, Hosts, chosen_hosts, read_hosts
from infinity.errors import ConfigError
from infinity.memory.tiers.device import count_devices

# Holds a package `deepspeed` that forwards to infinity's names, and its metadata.
AS_DEEPSPEED = Path(__file__).parents[1] / "integrations" / "as_deepspeed"
# What starts the command `deepspeed` of that folder.
_PYTHON = "INFINITY_PYTHON"
_OWN_LAUNCHERS = (
    "start one launcher on each machine, such as `srun --ntasks-per-node=1 infinity run --no_ssh --node_rank "
    "$SLURM_NODEID --num_nodes N --master_addr HOST train.py`"
)
# Options of DeepSpeed's launcher that have no meaning here: how many words follow, and what to do instead.
_REFUSED: dict[str, tuple[int, str]] = {
    "--launcher_args": (1, f"machines are started by ssh alone: {_OWN_LAUNCHERS}"),
    "--bind_core_list": (1, "each rank takes its share of the process's cores: start it under `taskset -c LIST`"),
    "--autotuning": (1, "there is no tuner: `infinity estimate MODEL --fit` finds a configuration"),
    "--elastic_training": (0, "the number of ranks stays: a checkpoint loads with any number of them"),
    "--min_elastic_nodes": (1, "the number of ranks stays: a checkpoint loads with any number of them"),
    "--max_elastic_nodes": (1, "the number of ranks stays: a checkpoint loads with any number of them"),
    "--save_pid": (0, "the launcher's processes are torchrun's: see `ps`"),
}
_LOCAL = ("localhost", "127.0.0.1")
# Seconds between two looks at launchers on other machines.
_LOOK_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument("--as-deepspeed", action="store_true", help="let `import deepspeed` find infinity's names")
    parser.add_argument("--nproc", "--num_gpus", "--num_accelerators", type=int, metavar="N",
                        help="processes on each machine (default: one a device, or one)")  # fmt: skip
    parser.add_argument("--hostfile", "-H", metavar="FILE", help='machines, one a line: "name slots=8"')
    parser.add_argument("--num_nodes", type=int, metavar="N", help="use the first N machines of the file")
    parser.add_argument("--include", "-i", default="", metavar="WHICH",
                        help='devices to use, such as "localhost:0,1" or "a@b:2,3"')  # fmt: skip
    parser.add_argument("--exclude", "-e", default="", metavar="WHICH", help="devices to leave out, in the same form")
    parser.add_argument("--master_addr", "--master-addr", default="", metavar="HOST",
                        help="where ranks meet (default: the first machine)")  # fmt: skip
    parser.add_argument("--master_port", "--master-port", type=int, metavar="PORT",
                        help="(default: a free one; 29500 with several machines)")  # fmt: skip
    parser.add_argument("--no_ssh", action="store_true",
                        help="start this machine's processes alone; needs --node_rank and --master_addr")  # fmt: skip
    parser.add_argument("--node_rank", "--node-rank", type=int, metavar="I", help="this machine's number, from 0")
    parser.add_argument("--launcher", default="pdsh", metavar="NAME", help="pdsh or ssh: both are ssh here")
    parser.add_argument("--ssh_port", type=int, metavar="PORT", help="of the machines' ssh")
    parser.add_argument("--bind_cores_to_rank", action="store_true", help="accepted: the engine does so anyway")
    parser.add_argument("--force_multi", action="store_true", help="accepted: one machine of a hostfile is one, too")
    parser.add_argument("--enable_each_rank_log", metavar="FOLDER", help="write each rank's output into files there")
    for option, (words, _) in _REFUSED.items():
        given: dict[str, Any] = {"nargs": words} if words else {"action": "store_true"}
        parser.add_argument(option, help=argparse.SUPPRESS, **given)
    parser.add_argument("--no_python", action="store_true", help="SCRIPT is a program, not a file of Python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--module", "-m", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...",
                        help="what to start, and its arguments")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Start the command and return its exit code. On one machine this process becomes the launcher.

    Raises:
        ConfigError: there is nothing to start, or the machines or devices are not as the options say.
    """
    if not given.command:
        raise ConfigError("name a script to start: infinity run [options] train.py [its arguments]")
    _check(given)
    added = _environment(given)
    name = given.command[0]
    if not (given.module or given.no_python or Path(name).is_file()) and shutil.which(name):
        # Another launcher: it starts the processes.
        return _become([name, *given.command[1:]], added)
    if not (given.module or given.no_python or Path(name).is_file()):
        raise ConfigError(f"{name}: there is no such file, nor a command of that name")
    if given.no_ssh:
        return _one_of_several(given, added)
    hosts = _hosts(given)
    if len(hosts) == 1 and next(iter(hosts)) in _LOCAL:
        slots = next(iter(hosts.values()))
        if given.include or given.exclude:
            added["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        where = ["--standalone"] if given.master_port is None else ["--nnodes=1", f"--master-port={given.master_port}"]
        return _become(_torchrun(given, where, len(slots)), added)
    return _everywhere(given, hosts, added)


def _check(given: argparse.Namespace) -> None:
    """Raise ConfigError for options of DeepSpeed's launcher that have no meaning here."""
    for option, (_, instead) in _REFUSED.items():
        if getattr(given, option[2:]):
            raise ConfigError(f"{option}: {instead}")
    if given.launcher.lower() not in ("pdsh", "ssh"):
        raise ConfigError(f"--launcher {given.launcher}: machines are started by ssh alone: {_OWN_LAUNCHERS}")
    if given.node_rank is not None and not given.no_ssh:
        raise ConfigError(
            "--node_rank: over ssh this command numbers the machines itself. Add --no_ssh and start it on each of them"
        )
    if given.bind_cores_to_rank:
        say("--bind_cores_to_rank: an engine binds each rank to its share of the cores anyway")


def _environment(given: argparse.Namespace) -> dict[str, str]:
    if not given.as_deepspeed:
        return {}
    folders = {"PYTHONPATH": AS_DEEPSPEED, "PATH": AS_DEEPSPEED / "bin"}
    added = {_PYTHON: sys.executable}
    for name, folder in folders.items():
        before = os.environ.get(name)
        # A command inside a run finds them there already.
        first = [] if before and str(folder) in before.split(os.pathsep) else [str(folder)]
        added[name] = os.pathsep.join([*first, *([before] if before else [])])
    return added


def _one_of_several(given: argparse.Namespace, added: Mapping[str, str]) -> int:
    """Start this machine's processes of a run over several machines, as --node_rank says."""
    nodes = given.num_nodes if given.hostfile is None else len(_hosts(given))
    if nodes is None or given.node_rank is None or not given.master_addr:
        raise ConfigError("--no_ssh needs --node_rank, --master_addr, and --num_nodes or --hostfile")
    if not 0 <= given.node_rank < nodes:
        raise ConfigError(f"--node_rank {given.node_rank}: there are machines 0 to {nodes - 1}")
    where = [f"--nnodes={nodes}", f"--node-rank={given.node_rank}", f"--master-addr={given.master_addr}",
             f"--master-port={given.master_port or 29500}"]  # fmt: skip
    if given.hostfile is not None:
        count = len(list(_hosts(given).values())[given.node_rank])
    else:
        count = given.nproc or max(count_devices(), 1)
    return _become(_torchrun(given, where, count), added)


def _become(command: Sequence[str], added: Mapping[str, str]) -> int:
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), {**os.environ, **added})
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from error


def _torchrun(given: argparse.Namespace, where: Sequence[str], count: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={count}"]
    if given.enable_each_rank_log is not None:
        launch += [f"--log-dir={given.enable_each_rank_log}", "--redirects=3"]
    if given.no_python:
        return [*launch, "--no-python", *given.command]
    if given.no_local_rank or not given.as_deepspeed:
        return [*launch, *(["--module"] if given.module else []), *given.command]
    # torchrun has no such argument, so a shell makes it of the rank's variable.
    name, *words = given.command
    python = shlex.join([sys.executable, *(["-m"] if given.module else []), name])
    return [*launch, "--no-python", "sh", "-c", f'exec {python} --local_rank="$LOCAL_RANK" "$@"', name, *words]


def _hosts(given: argparse.Namespace) -> Hosts:
    """Return each machine with the devices to use there."""
    if given.nproc is not None and not 0 < given.nproc <= SLOTS_MAX:
        raise ConfigError(f"--nproc {given.nproc}: a machine has 1 to {SLOTS_MAX:,} processes")
    if given.hostfile is not None:
        hosts = read_hosts(Path(given.hostfile))
        if given.num_nodes is not None:
            if not 0 < given.num_nodes <= len(hosts):
                raise ConfigError(f"--num_nodes {given.num_nodes}: {given.hostfile} names {len(hosts)} machine(s)")
            hosts = dict(list(hosts.items())[: given.num_nodes])
    else:
        hosts = {"localhost": list(range(max(count_devices(), given.nproc or 1)))}
    hosts = chosen_hosts(hosts, given.include, given.exclude)
    if not hosts:
        raise ConfigError(f"--exclude {given.exclude}: leaves no device")
    if given.nproc is not None:
        few = [host for host, slots in hosts.items() if len(slots) < given.nproc]
        if few:
            raise ConfigError(f"--nproc {given.nproc}: {few[0]} has {len(hosts[few[0]])} device(s) to use")
        hosts = {host: slots[: given.nproc] for host, slots in hosts.items()}
    return hosts


def _everywhere(given: argparse.Namespace, hosts: Hosts, added: Mapping[str, str]) -> int:
    """Start one launcher a machine over ssh, wait, and return the first exit code that is not 0."""
    counts = {len(slots) for slots in hosts.values()}
    if len(counts) > 1:
        raise ConfigError(f"machines with {sorted(counts)} devices: each needs the same number; use --nproc")
    address, port = given.master_addr or next(iter(hosts)), given.master_port or 29500
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank, (host, slots) in enumerate(hosts.items()):
            where = [f"--nnodes={len(hosts)}", f"--node-rank={rank}", f"--master-addr={address}",
                     f"--master-port={port}"]  # fmt: skip
            variables = dict(added)
            if given.include or given.exclude:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
            # The paths of this machine are not those of another, but for the folder of the names.
            words = ["env", *(f"{key}={value}" for key, value in variables.items() if key != "PATH")]
            remote = shlex.join([*words, *_torchrun(given, where, len(slots))])
            say(f"{host}: {remote}")
            ssh = ["ssh", *(["-p", str(given.ssh_port)] if given.ssh_port else []), "-tt", host]
            running.append(subprocess.Popen([*ssh, f"cd {shlex.quote(os.getcwd())} && {remote}"],
                                            stdin=subprocess.DEVNULL))  # fmt: skip
        return _wait(running)
    except OSError as error:
        raise ConfigError(f"ssh cannot be started: {error.strerror}") from error
    finally:
        for each in running:
            # With a terminal on the other side, what runs there ends with its ssh.
            each.terminate()


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [each.poll() for each in running]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(_LOOK_SECONDS)
