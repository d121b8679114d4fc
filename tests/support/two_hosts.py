"""Two hosts on one machine: network namespaces that a pair of virtual interfaces joins, with an address each.

    with Hosts() as hosts:                      `why_no_hosts()` says why a machine has none
        hosts.run(folder, "train", timeout=60)  `infinity run` over a stand-in for ssh; its exit code and output

As a program, a rank of a model that both hosts train: see `main`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

import infinity
from tests.pipeline_matrix import TIGHT, batches, build, configuration, digests

ROOT = Path(__file__).parents[2]
INTERFACE, ADDRESSES, PORT = "veth-inf", ("10.231.7.1", "10.231.7.2"), 29531
# Ranks of a host; steps, and the one behind which it is saved.
RANKS, STEPS, SAVED, COUNT = 2, 3, 2, 4
# Enters the namespace that is named instead of another host.
SSH = '#!/bin/sh\n# ssh -tt host command\nexec ip netns exec "$2" sh -c "$3"\n'


class Hosts:
    """The namespaces, and the processes in them."""

    def __init__(self) -> None:
        self.names = [f"infinity-{os.getpid()}-{letter}" for letter in "ab"]

    def __enter__(self) -> Hosts:
        try:
            first, second = self.names
            for name in self.names:
                _ip("netns", "add", name)
            peer = ("peer", "name", INTERFACE, "netns", second)
            _ip("link", "add", INTERFACE, "netns", first, "type", "veth", *peer)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def kill(self, name: str) -> None:
        """End a host: all of its processes, at once."""
        found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def run(self, folder: Path, verb: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
        """Start the program of this file on both hosts, by `infinity run`."""
        hostfile, stand_in = folder / "hosts", folder / "bin"
        hostfile.write_text("".join(f"{name} slots={RANKS}\n" for name in self.names))
        stand_in.mkdir(exist_ok=True)
        (stand_in / "ssh").write_text(SSH)
        (stand_in / "ssh").chmod(0o755)
        command = [sys.executable, "-m", "infinity", "run", "--hostfile", str(hostfile), "--master_addr", ADDRESSES[0],
                   "--master_port", str(PORT), "-m", "tests.support.two_hosts", verb, str(folder)]  # fmt: skip
        environment = _environment() | {"PATH": f"{stand_in}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
        )

    def start(self, folder: Path, verb: str) -> list[subprocess.Popen[str]]:
        """Start a launcher on each host, which ends with its host alone."""
        launchers = []
        for node, name in enumerate(self.names):
            where = [f"--nnodes={len(self.names)}", f"--node-rank={node}", f"--nproc-per-node={RANKS}",
                     f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *where, "-m",
                       "tests.support.two_hosts", verb, str(folder)]  # fmt: skip
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            launchers.append(subprocess.Popen(command, text=True, env=_environment(), cwd=ROOT, **quiet))
        return launchers


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


def _environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return plain | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@cache
def why_no_hosts() -> str:
    """Why this machine has no namespaces for a test; "" where it has."""
    if shutil.which("ip") is None:
        return "two hosts are network namespaces, and there is no ip (iproute2)"
    try:
        with Hosts():
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or error
        return f"two hosts are network namespaces, which cannot be made here: {str(said).strip()}"


def _engine(folder: Path) -> Any:
    config = configuration(
        str(folder / f"drive{os.environ['RANK']}"), {"pipeline": 2}, count=COUNT, stage=3, param="nvme",
        optimizer="nvme", zero=TIGHT, watchdog_seconds=120.0, cross_memory_attach=False,
    )  # fmt: skip
    return infinity.initialize(model=build("llama", num_hidden_layers=4), config=config)[0]


def main(verb: str, folder: Path) -> None:
    """Train and save ("train"), go on from what was saved ("resume"), or train until the host is gone ("wait"). What
    each rank has, or was told, lies in the folder then.
    """
    torch.set_num_threads(1)
    rank, told = int(os.environ["RANK"]), folder / f"{verb}-rank{os.environ['RANK']}.json"
    losses: list[str] = []
    with _engine(folder) as engine:
        if verb == "resume":
            engine.load_checkpoint(str(folder / "saved"))
        try:
            while engine.global_steps < (10_000 if verb == "wait" else STEPS):
                step = engine.global_steps
                losses.append(float(engine.train_batch(batches(step, engine.data_rank, COUNT))).hex())
                if verb == "train" and engine.global_steps == SAVED:
                    engine.save_checkpoint(str(folder / "saved"))
                if verb == "wait":
                    (folder / f"step-rank{rank}").write_text(str(engine.global_steps))
            told.write_text(json.dumps({"losses": losses, "digests": digests(engine)}))
        except Exception as error:
            told.write_text(json.dumps({"kind": type(error).__name__, "text": str(error), "time": time.time()}))
            raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
