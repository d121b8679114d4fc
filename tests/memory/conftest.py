"""Stores over a simulated tier and over real files, with arenas as tight as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from infinity.memory.ledger import Ledger
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.ops.aio import Queue
from infinity.plan.plan import Pools
from infinity.plan.types import Extent, Key, Kind, PartitionSpec, Tier, align_up, pack_sections
from tests.support.simulated_tier import SimulatedTier

PAGE = 4096


def param(index: int, pages: int, home: Tier = Tier.NVME) -> PartitionSpec:
    """A PARAM partition of nearly `pages` pages; its extent comes with `placed`."""
    sections = pack_sections([(Kind.PARAM, "uint8", max(pages * PAGE - 11, 0))])
    return PartitionSpec(key=Key(Kind.PARAM, index), sections=sections, home=home)


def states(index: int, pages: int, home: Tier = Tier.NVME) -> PartitionSpec:
    """A STATES partition of `pages` pages."""
    numel = pages * PAGE // 4 - 32
    sections = pack_sections([(Kind.EXP_AVG, "int16", numel), (Kind.EXP_AVG_SQ, "int16", numel)])
    return PartitionSpec(key=Key(Kind.STATES, index), sections=sections, home=home)


def placed(specs: Sequence[PartitionSpec], *, twice: bool = False) -> list[PartitionSpec]:
    """The same specifications with extents one behind the other; `twice`: each with a spare one."""
    at, made = 0, []
    for spec in specs:
        extents: list[Extent | None] = [None, None]
        for which in range(1 + twice) if spec.home is Tier.NVME and spec.nbytes else ():
            extents[which], at = Extent(at, spec.nbytes), at + spec.nbytes
        extent, spare = extents
        made.append(PartitionSpec(key=spec.key, sections=spec.sections, home=spec.home, extent=extent, spare=spare))
    return made


@dataclass
class Bench:
    """A store with what it stands on."""

    store: TieredStore
    ledger: Ledger
    tier: SimulatedTier | NvmeTier
    specs: list[PartitionSpec]

    def fill(self, key: Key, value: int) -> None:
        """Replace a partition's whole value."""
        with self.store.write(key, fresh=True) as (partition,):
            partition.buffer.fill_(value)

    def content(self, key: Key) -> torch.Tensor:
        """A copy of a partition's buffer."""
        with self.store.read(key) as (partition,):
            return partition.buffer.clone()

    def spill(self, *keys: Key) -> None:
        """Write partitions back and free their buffers."""
        self.store.flush(*keys)
        self.store.settle()
        self.store.drop(*keys)


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[MakeBench]:
    """`bench(specs, param_pages=4, states_pages=4, real=False, overlap=True, **of the simulated tier)`."""
    made: list[Bench] = []

    def make(
        specs: Sequence[PartitionSpec], *, param_pages: int = 4, states_pages: int = 4, real: bool = False,
        overlap: bool = True, twice: bool = False, **simulated: object,
    ) -> Bench:  # fmt: skip
        specs = placed(specs, twice=twice)
        nbytes = (1 + twice) * sum(spec.nbytes for spec in specs if spec.home is Tier.NVME)
        ledger, device = Ledger(), Device(torch.device("cpu"))
        tier: SimulatedTier | NvmeTier
        if real:
            tier = NvmeTier(tmp_path, nbytes=nbytes, rank=0, queue=Queue(threads=2, block_nbytes=PAGE))
        else:
            tier = SimulatedTier(nbytes, **simulated)
        store = TieredStore(
            specs, device=device, host=HostMemory(device, pin=True, ledger=ledger), ledger=ledger,
            backends={Tier.NVME: tier},
            pools=Pools(
                param_nbytes=param_pages * PAGE, states_nbytes=states_pages * PAGE,
                undo_nbytes=twice * sum(align_up(spec.nbytes, PAGE) for spec in specs if spec.home is Tier.CPU),
            ),
            overlap=overlap,
        )  # fmt: skip
        made.append(Bench(store, ledger, tier, specs))
        return made[-1]

    yield make
    for each in made:
        each.store.close()
