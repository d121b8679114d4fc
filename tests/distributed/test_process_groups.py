"""Who a rank is: from an open group, from the launcher's environment, or alone; and groups that are closed again."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.distributed import collectives
from infinity.distributed import groups as groups_module
from infinity.distributed.groups import ProcessGroups, Ranks, detect
from infinity.errors import ConfigError
from infinity.plan.types import Topology

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_this_is_the_only_rank():
    assert detect() == Ranks(rank=0, world_size=1, local_rank=0, local_size=1)


def test_the_environment_of_a_launcher_is_read(monkeypatch):
    launched(
        monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="localhost",
        MASTER_PORT="1",
    )  # fmt: skip
    assert detect() == Ranks(rank=5, world_size=8, local_rank=1, local_size=4)


def test_one_rank_needs_no_address(monkeypatch):
    launched(monkeypatch, RANK="0", WORLD_SIZE="1")
    assert detect().world_size == 1


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR is"),
        ({"MASTER_ADDR": "x"}, "MASTER_PORT is"),
    ],
)
def test_an_address_that_is_missing_is_named(monkeypatch, values, missing):
    launched(monkeypatch, RANK="0", WORLD_SIZE="2", **values)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing}.*torchrun"):
        detect()


def test_one_rank_opens_no_group():
    groups = ProcessGroups(Ranks(), timeout_seconds=5)
    assert groups.data.process_group is groups.reduction.process_group is groups.world.process_group is None
    assert not dist.is_initialized()
    assert collectives.exchange([1.0, 2.0], groups.world) == [[1.0, 2.0]]
    groups.close()
    groups.close()


def talk(rank: int, world_size: int) -> dict[str, object]:
    """Every collective once, in process groups of its own."""
    groups = ProcessGroups(detect(), timeout_seconds=60)
    full, own = torch.zeros(6), torch.full((3,), float(rank + 1))
    gathering = collectives.all_gather(full, own, groups.data)
    gathering.wait()
    reduction = collectives.reduce_scatter(torch.arange(6.0) * (rank + 1), group=groups.reduction)
    reduction.wait()
    ((_, reduced),) = reduction.sums()
    summed = torch.full((2,), float(rank + 1))
    collectives.all_reduce(summed, groups.reduction).wait()
    sent = torch.full((2,), float(rank + 1))
    collectives.broadcast(sent, groups.world, source=1)
    precise = collectives.exchange([2.0**53 + rank, float(rank)], groups.world)
    # Waited for twice: the second is over at once.
    gathering.wait()
    done = gathering.done()
    groups.close()
    groups.close()
    return {
        "gathered": full.tolist(), "reduced": reduced.tolist(), "summed": summed.tolist(), "sent": sent.tolist(),
        "exchanged": precise, "done": done, "open": dist.is_initialized(), "ranks": groups.ranks,
    }  # fmt: skip


def reduced(rank: int, world_size: int, dtype: torch.dtype, numel: int) -> list[bool]:
    """Reductions with a workspace and without one, taken by pieces and left in place, also in another dtype: whether
    this rank's slice is the sum in fp64, rounded once.
    """
    groups = ProcessGroups(detect(), timeout_seconds=60)
    # Small whole numbers: every order of adding them up is exact in every dtype.
    everyone = [
        torch.randint(-20, 20, (numel,), generator=torch.Generator().manual_seed(each)).to(dtype)
        for each in range(world_size)
    ]
    own = numel // world_size
    right = sum(each.double() for each in everyone)[rank * own :][:own].to(dtype)
    found = []
    room = torch.full((numel - own,), 7.0, dtype=dtype)
    for workspace, kept, by_pieces in ((None, dtype, True), (room, dtype, False), (room, torch.float32, False)):
        full, slice_of_sum = everyone[rank].clone(), torch.zeros(own, dtype=kept)
        reduction = collectives.reduce_scatter(full, group=groups.reduction, workspace=workspace)
        reduction.wait()
        reduction.wait()
        if by_pieces:
            for begin, piece in reduction.sums():
                slice_of_sum[begin:][: piece.numel()] = piece
        else:
            reduction.leave_in(slice_of_sum)
        found += [torch.equal(slice_of_sum, right.to(kept)), torch.equal(full, everyone[rank]), reduction.done()]
    groups.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions_of_many_pieces_are_exact_and_leave_gradients_alone(rank_pools, ranks, dtype):
    for numel in (48 * ranks, ranks * 200_000):
        for found in rank_pools[ranks].run(reduced, dtype, numel):
            assert all(found), (numel, found)


def test_sums_of_16_bits_are_rounded_once():
    rows = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    (rounded_once,) = collectives._add_up(rows)
    assert rounded_once == 260, "259, to the nearest of bf16; one after the other they would all be lost"


def summed_in_order(rank: int, world_size: int, dtype: torch.dtype) -> list[bool]:
    """Whether sums of some sizes have the bits of a sum in the order of ranks."""
    groups, found = ProcessGroups(detect(), timeout_seconds=60), []
    for shape in ((1,), (7, 3), (211, 401)):
        everyone = [
            torch.randn(shape, generator=torch.Generator().manual_seed(each)).to(dtype) for each in range(world_size)
        ]
        total = everyone[0].to(torch.float32, copy=True)
        for each in everyone[1:]:
            total += each.float()
        found.append(torch.equal(collectives.sum_in_order(everyone[rank], groups.data), total.to(dtype)))
    groups.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_order_have_the_same_bits_everywhere_and_are_rounded_once(rank_pools, ranks, dtype):
    assert all(all(found) for found in rank_pools[ranks].run(summed_in_order, dtype))


def test_collectives_do_what_they_say(rank_pools):
    for rank, heard in enumerate(rank_pools[2].run(talk)):
        assert heard["gathered"] == [1, 1, 1, 2, 2, 2]
        assert heard["reduced"] == [[0, 3, 6], [9, 12, 15]][rank]
        assert heard["summed"] == [3, 3] and heard["sent"] == [2, 2]
        assert heard["exchanged"] == [[2.0**53, 0.0], [2.0**53, 1.0]]
        assert heard["done"] is True and heard["open"] is True, "the next engine finds the group open"
        assert heard["ranks"] == Ranks(rank=rank, world_size=2, local_rank=rank, local_size=2)


def gloo_threads() -> int:
    names = (Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


def closed_twice(rank: int, world_size: int) -> tuple[list[int], int]:
    """Threads of gloo behind each of two engines' groups, while all of these are referred to."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    # On a machine with much to do, a thread of the program's own group has its name late.
    time.sleep(0.3)
    before, kept, found = gloo_threads(), [], []
    for _ in range(2):
        groups = ProcessGroups(detect(), timeout_seconds=60)
        collectives.all_reduce(torch.ones(2), groups.reduction).wait()
        kept.append(groups)
        groups.close()
        # A thread that ends stands in the list for a moment.
        given_up = time.monotonic() + 5
        while gloo_threads() > before and time.monotonic() < given_up:
            time.sleep(0.01)
        found.append(gloo_threads() - before)
    return found, len(kept)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
def test_threads_of_closed_groups_are_gone_while_their_engine_is_referred_to(rank_pools):
    assert rank_pools[2].run(closed_twice) == [([0, 0], 2)] * 2


def both_orders(rank: int, world_size: int) -> list[float]:
    """Gathers and reductions have groups of their own: ranks may submit them in different orders."""
    groups = ProcessGroups(detect(), timeout_seconds=60)
    full, summed = torch.zeros(2), torch.tensor([float(rank)])
    submit = [
        lambda: collectives.all_gather(full, torch.tensor([float(rank)]), groups.data),
        lambda: collectives.all_reduce(summed, groups.reduction),
    ]
    for transfer in [act() for act in (submit if rank == 0 else submit[::-1])]:
        transfer.wait()
    groups.close()
    return [*full.tolist(), *summed.tolist()]


def test_gathers_and_reductions_have_no_mutual_order(rank_pools):
    assert rank_pools[2].run(both_orders) == [[0, 1, 1], [0, 1, 1]]


def over_two_axes(rank: int, world_size: int) -> list[dict[str, object]]:
    """Each group's place, its members' ranks as told in it, and its sum of ranks; in groups opened twice in a row."""
    found = []
    for _ in range(2):
        groups = ProcessGroups(detect(), Topology(dp=2, tp=2, local_size=4), timeout_seconds=60)
        heard = {}
        for name, group in {
            "data": groups.data, "reduction": groups.reduction, "tensor": groups.tensor, "world": groups.world
        }.items():  # fmt: skip
            summed = torch.tensor([10.0**rank])
            collectives.all_reduce(summed, group).wait()
            told = collectives.exchange([float(rank)], group)
            heard[name] = (group.index, group.members, summed.item(), [int(number) for (number,) in told])
        sent = torch.tensor([float(rank)])
        collectives.broadcast(sent, groups.data, source=1)
        heard["from the second of the data axis"] = sent.item()
        groups.close()
        found.append(heard)
    return found


def test_each_rank_has_the_groups_of_its_axes(rank_pools):
    for rank, found in enumerate(rank_pools[4].run(over_two_axes)):
        across, along = rank % 2, 2 * (rank // 2)
        data = (rank // 2, (across, across + 2), 10.0**across + 10.0 ** (across + 2), [across, across + 2])
        tensor = (across, (along, along + 1), 10.0**along + 10.0 ** (along + 1), [along, along + 1])
        assert found[0] == found[1] == {
            "data": data, "reduction": data, "tensor": tensor, "world": (rank, (0, 1, 2, 3), 1111.0, [0, 1, 2, 3]),
            "from the second of the data axis": across + 2.0,
        }  # fmt: skip


CELLS = (Topology(pp=4), Topology(pp=2, tp=2), Topology(dp=2, pp=2), Topology(dp=4), Topology(dp=2, tp=2))


def over_a_pipeline(rank: int, world_size: int) -> list[dict[str, object]]:
    """By topology: each group's members and index, and its sum of ranks, None where it has no process group; whether
    the stage's group is that of all ranks, and the back ends of control groups.
    """
    found = []
    for topology in CELLS:
        groups = ProcessGroups(detect(), topology, timeout_seconds=60)
        heard: dict[str, object] = {}
        for name in ("data", "reduction", "tensor", "stage", "pipeline", "pipeline_forward", "pipeline_backward"):
            group = getattr(groups, name)
            summed = torch.tensor([10.0**rank])
            if group.process_group is not None:
                collectives.all_reduce(summed, group).wait()
            heard[name] = group.members, group.index, summed.item() if group.process_group is not None else None
        heard["one"] = groups.stage is groups.world
        collectives.exchange([1.0], groups.world)
        groups.close()
        found.append(heard)
    return found


def test_each_rank_has_the_groups_of_its_pipeline_and_of_its_stage(rank_pools):
    for rank, found in enumerate(rank_pools[4].run(over_a_pipeline)):
        for topology, heard in zip(CELLS, found, strict=True):
            here = topology.coordinate(rank)
            others = [other for other in range(4) if topology.coordinate(other).pp == here.pp]
            expected = {
                **dict.fromkeys(("data", "reduction"), topology.axis_members(rank, "dp")),
                "tensor": topology.axis_members(rank, "tp"), "stage": tuple(others),
                **dict.fromkeys(
                    ("pipeline", "pipeline_forward", "pipeline_backward"), topology.axis_members(rank, "pp")
                ),
            }  # fmt: skip
            assert heard.pop("one") is (topology.pp == 1)
            assert heard == {
                name: (
                    members, members.index(rank), sum(10.0**member for member in members) if len(members) > 1 else None
                )
                for name, members in expected.items()
            }, topology  # fmt: skip


def test_without_a_pipeline_its_groups_are_this_rank_and_the_stage_is_the_world():
    groups = ProcessGroups(Ranks(), timeout_seconds=5)
    assert groups.stage is groups.world
    for group in (groups.pipeline, groups.pipeline_forward, groups.pipeline_backward):
        assert (group.size, group.process_group) == (1, None)
    groups.close()


def inside_of_the_programs_group(rank: int, world_size: int) -> tuple[Ranks, bool]:
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    ranks = detect()
    ProcessGroups(ranks, timeout_seconds=60).close()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    return ranks, dist.is_initialized()


def test_a_group_of_the_program_is_used_and_left_open(rank_pools):
    for rank, (ranks, still_open) in enumerate(rank_pools[2].run(inside_of_the_programs_group)):
        assert (ranks.rank, ranks.world_size) == (rank, 2) and still_open


def test_a_group_of_one_that_the_program_opened_is_enough():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        groups = ProcessGroups(detect(), timeout_seconds=60)
        assert groups.ranks == Ranks() and groups.world.process_group is None
        groups.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_ranks_that_start_again_do_not_read_what_those_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store is the same for each of its restarts."""
    kept = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(kept, 0, 2)]))
    ranks, found = Ranks(rank=0, world_size=2), []
    for restart in ("0", "1", "1"):
        monkeypatch.setattr(groups_module, "_met", [])
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        store = groups_module.job_store(ranks, 5)
        found.append(store.check(["address"]))
        store.set("address", "here")
    assert found == [False, False, True]
