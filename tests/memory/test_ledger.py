"""The books: now, at most, limits, and the report that people read."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from infinity.errors import TierMemoryError
from infinity.memory.ledger import Ledger, MemoryRefused, PoolUse, is_refusal
from infinity.observability.memory_report import MemoryReport, Process
from infinity.plan.plan import Capacity
from infinity.plan.types import Kind, Tier

BOTH = (Tier.CPU, Tier.GPU)


def report_of(
    ledger: Ledger, resident: int, in_process: tuple[Tier, ...] = BOTH, mapped: int = 0, **more: object
) -> MemoryReport:
    return MemoryReport.of(ledger, Process(resident=resident, mapped=mapped, in_process=in_process), **more)


def test_now_falls_and_the_peak_stays():
    ledger = Ledger()
    for nbytes in (100, 50, -120, 10):
        ledger.add(Tier.CPU, Kind.PARAM, nbytes)
    assert ledger.now[Tier.CPU, Kind.PARAM] == 40
    assert ledger.peak[Tier.CPU, Kind.PARAM] == 150


def test_a_tiers_peak_is_not_the_sum_of_its_kinds_peaks():
    ledger = Ledger()
    for kind, nbytes in ((Kind.PARAM, 100), (Kind.PARAM, -100), (Kind.GRAD, 70), (Kind.PARAM, 10)):
        ledger.add(Tier.CPU, kind, nbytes)
    assert ledger.most == {Tier.CPU: 100}


def test_a_total_is_of_one_tier():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.PARAM, 1)
    ledger.add(Tier.CPU, Kind.POOL, 2)
    ledger.add(Tier.NVME, Kind.PARAM, 4)
    assert [ledger.total(tier) for tier in (Tier.GPU, Tier.CPU, Tier.NVME)] == [0, 3, 4]


def test_a_limit_is_kept_to_the_byte():
    """What does not fit is not even tried, and nothing is booked; the numbers are attributes."""
    ledger = Ledger(limits=Capacity(cpu=5_000_000))
    ledger.add(Tier.CPU, Kind.EXP_AVG, 3_000_000)
    ledger.add(Tier.CPU, Kind.GRAD, 1_000_000)
    before = dict(ledger.now)
    with pytest.raises(TierMemoryError) as caught, ledger.taking(Tier.CPU, {Kind.PARAM: 1_000_001}, "unit 7"):
        pytest.fail("there is no room")
    error = caught.value
    assert (error.tier, error.kind, error.asked, error.used, error.limit) == (
        "cpu", "param", 1_000_001, 4_000_000, 5_000_000,
    )  # fmt: skip
    assert error.owners == (("exp_avg", 3_000_000), ("grad", 1_000_000))
    sentence, *table = str(error).splitlines()
    assert sentence.startswith("no room on cpu for unit 7: asked 1.0 MB, used 4.0 MB, limit 5.0 MB.")
    assert "memory.cpu.max_bytes" in sentence, "the next step"
    assert [line.split() for line in table[1:]] == [["exp_avg", "3.0", "MB"], ["grad", "1.0", "MB"]]
    assert ledger.now == before
    with ledger.taking(Tier.CPU, {Kind.PARAM: 1_000_000}, "unit 7"):
        pass
    ledger.add(Tier.CPU, Kind.PARAM, 1_000_000, limited=False)
    assert ledger.total(Tier.CPU) == 5_000_000 and ledger.room(Tier.CPU) == 0, "set aside before there were limits"
    assert ledger.room(Tier.GPU) is None, "nobody asked for a limit there"


@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError("none left"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_of_the_system_is_one_error_and_everybodys(refusal):
    ledger = Ledger()
    with pytest.raises(MemoryRefused) as caught, ledger.taking(Tier.GPU, {Kind.FULL: 10}, "unit 3"):
        raise refusal
    error = caught.value
    for kind in (TierMemoryError, MemoryError, torch.OutOfMemoryError, RuntimeError):
        assert isinstance(error, kind)
    assert error.__cause__ is refusal
    assert str(refusal) in str(error)
    assert (error.tier, error.asked, error.limit) == ("gpu", 10, None)
    assert not any(ledger.now.values())


def test_other_errors_pass_through_and_nothing_is_booked():
    ledger = Ledger()
    for error in (OSError(errno.EIO, "broken"), RuntimeError("a shape does not fit"), KeyError("x")):
        assert not is_refusal(error)
        with pytest.raises(type(error)) as caught, ledger.taking(Tier.CPU, {Kind.PARAM: 10}, "unit 1"):
            raise error
        assert caught.value is error
    assert not any(ledger.now.values())


def test_the_report_tells_what_is_not_the_engines():
    ledger = Ledger(baseline_nbytes=4_000_000, limits=Capacity(cpu=64_000_000))
    ledger.add(Tier.GPU, Kind.FULL, 3_000_000)
    ledger.add(Tier.CPU, Kind.POOL, 2_000_000)
    ledger.add(Tier.NVME, Kind.STATES, 9_000_000)
    ledger.add(Tier.CPU, Kind.GRAD, 5_000_000)
    ledger.add(Tier.CPU, Kind.GRAD, -5_000_000)
    ledger.pinned_nbytes = 1_500_000
    pools = {"states": PoolUse(reserved=2_000_000, used=500_000, most=1_000_000)}
    report = report_of(ledger, 12_000_000, pools=pools)
    assert report.now == {"gpu": {"full": 3_000_000}, "cpu": {"pool": 2_000_000}, "nvme": {"states": 9_000_000}}
    assert report.peak["cpu"] == {"pool": 2_000_000, "grad": 5_000_000}
    assert report.most == {"gpu": 3_000_000, "cpu": 7_000_000, "nvme": 9_000_000}
    assert report.unaccounted == 3_000_000
    assert report_of(ledger, 12_000_000, mapped=2_500_000).unaccounted == 500_000, "code is nobody's"
    assert report_of(ledger, 12_000_000, (Tier.CPU,)).unaccounted == 6_000_000, "a device has memory of its own"
    lines = str(report).splitlines()
    assert lines[0].split() == ["tier", "kind", "now", "peak", "limit"]
    assert ["cpu", "grad", "0.0", "MB", "5.0", "MB"] in [line.split() for line in lines]
    assert "cpu in all 2.0 MB 7.0 MB 64.0 MB".split() in [line.split() for line in lines]
    assert "pool states: 0.5 MB in use, 1.0 MB at most, 2.0 MB reserved" in lines
    assert lines[-2:] == [
        "resident 12.0 MB: 0.0 MB files and code, 4.0 MB before the engine, 3.0 MB not accounted for; pinned 1.5 MB",
        "predicted for the process 0.0 MB, without activations, which the first micro-batch tells",
    ]
    ledger.activation_nbytes, ledger.activations = 2_000_000, "8 x 128, measured"
    assert str(report_of(ledger, 12_000_000)).endswith("2.0 MB of activations (8 x 128, measured) in it")


def test_on_a_device_the_rest_is_activations():
    ledger = Ledger()
    ledger.add(Tier.GPU, Kind.FULL, 3_000_000)
    process = Process(resident=10, mapped=0, in_process=(Tier.CPU,), device=8_000_000, reserved=9_000_000)
    report = MemoryReport.of(ledger, process)
    assert report.activations == 5_000_000
    assert "on the device beside that 5.0 MB" in str(report) and "keeps 9.0 MB for all of it" in str(report)


def test_a_report_is_plain_data():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.GRAD, 5)
    by_unit = {"cpu": {"grad": {"head": 5}}}
    told = report_of(ledger, 10, by_unit=by_unit, pools={"param": PoolUse(4, 2, 3)}).as_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["by_unit"], told["pools"]["param"]["most"]) == (by_unit, 3)


def test_units_are_printed_largest_first_and_the_rest_together():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.GRAD, 1)
    by_unit = {"cpu": {"grad": {f"layer {index}": index * 1_000_000 for index in range(1, 14)}}}
    lines = str(report_of(ledger, 10, by_unit=by_unit)).splitlines()
    assert lines[-11] == "cpu   layer 13: 13.0 MB (grad 13.0 MB)"
    assert lines[-1] == "cpu   3 more units: 6.0 MB"


def test_a_long_name_of_a_tier_stands_apart_from_the_unit():
    by_unit = {"gpu": {"param": {f"layer {index}": index * 1_000_000 for index in range(1, 12)}}}
    lines = str(report_of(Ledger(), 10, by_unit=by_unit)).splitlines()
    assert lines[-11] == "device (cpu) layer 11: 11.0 MB (param 11.0 MB)"
    assert lines[-1] == "device (cpu) 1 more units: 1.0 MB"


def test_reading_the_report_does_not_change_the_books():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.POOL, 7)
    report = report_of(ledger, 10)
    ledger.add(Tier.CPU, Kind.POOL, 1)
    assert report.now["cpu"] == {"pool": 7}
