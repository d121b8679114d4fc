"""A node's memory and drive, given or detected, and how much of them a rank may use.

Some of it is not available to a plan: the accelerator's context and its allocator's gaps, the operating system, and
each process's libraries. Reports state how much is set aside wherever they show a limit.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from infinity.plan.allocator import ACCELERATOR
from infinity.plan.capacity import Capacity
from infinity.plan.free_memory import free_cpu_nbytes

# Share of an accelerator's memory that its allocator loses between blocks.
GAPS = ACCELERATOR.free_gaps
# Set aside on an accelerator beside its allocator's gaps (`GAPS`): its context.
CONTEXT_NBYTES = 10**9
# Set aside in CPU memory for the node, and for each process (interpreter, torch, libraries).
SYSTEM_NBYTES = 2 * 10**9
PROCESS_NBYTES = 10**9
# Set aside on a drive: file systems slow down when they are full.
DRIVE_SHARE = 0.03


@dataclass(frozen=True)
class Machine:
    """One node: bytes of each rank's accelerator, of CPU memory and of the drive; None if unknown or absent.

    `accelerator` is False if ranks compute on the CPU; then CPU memory is the only memory.
    """

    gpu_nbytes: int | None = None
    cpu_nbytes: int | None = None
    nvme_nbytes: int | None = None
    accelerator: bool = True

    @classmethod
    def here(cls, folder: Path, *, accelerator: bool = True) -> Machine:
        """Detect this machine: memory that is free within control group limits, and free space on `folder`'s drive."""
        gpu = _accelerator_nbytes() if accelerator else None
        while not folder.exists():
            folder = folder.absolute().parent
        return cls(gpu, free_cpu_nbytes(), shutil.disk_usage(folder).free, accelerator=gpu is not None)

    def capacity(self, ranks_per_node: int) -> Capacity:
        """Return a rank's share: its accelerator, and an equal part of what the node has left."""
        cpu, nvme = self.cpu_nbytes, self.nvme_nbytes
        gpu = None if self.gpu_nbytes is None else max(int(self.gpu_nbytes * (1 - GAPS)) - CONTEXT_NBYTES, 0)
        own = None if cpu is None else max((cpu - SYSTEM_NBYTES) // ranks_per_node - PROCESS_NBYTES, 0)
        drive = None if nvme is None else int(nvme * (1 - DRIVE_SHARE)) // ranks_per_node
        return Capacity(gpu=gpu, cpu=own, nvme=drive) if self.accelerator else Capacity(process=own, nvme=drive)

    @property
    def known(self) -> bool:
        """Whether any size is known."""
        return (self.gpu_nbytes, self.cpu_nbytes, self.nvme_nbytes) != (None, None, None)


def _accelerator_nbytes() -> int | None:
    """Return the bytes of the smallest accelerator that nvidia-smi lists; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return min(int(line) for line in reply.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
