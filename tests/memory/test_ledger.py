"""The books: now, at most, and the report that people read."""

from __future__ import annotations

from infinity.memory.ledger import Ledger, MemoryReport
from infinity.plan.types import Kind, Tier


def test_now_falls_and_the_peak_stays():
    ledger = Ledger()
    for nbytes in (100, 50, -120, 10):
        ledger.add(Tier.CPU, Kind.PARAM, nbytes)
    assert ledger.now[Tier.CPU, Kind.PARAM] == 40
    assert ledger.peak[Tier.CPU, Kind.PARAM] == 150


def test_a_total_is_of_one_tier():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.PARAM, 1)
    ledger.add(Tier.CPU, Kind.POOL, 2)
    ledger.add(Tier.NVME, Kind.PARAM, 4)
    assert [ledger.total(tier) for tier in (Tier.GPU, Tier.CPU, Tier.NVME)] == [0, 3, 4]


def test_the_report_tells_what_is_not_the_engines():
    ledger = Ledger()
    ledger.add(Tier.GPU, Kind.FULL, 3_000_000)
    ledger.add(Tier.CPU, Kind.POOL, 2_000_000)
    ledger.add(Tier.NVME, Kind.STATES, 9_000_000)
    ledger.add(Tier.CPU, Kind.GRAD, 5_000_000)
    ledger.add(Tier.CPU, Kind.GRAD, -5_000_000)
    ledger.pinned_nbytes = 1_500_000
    report = MemoryReport.of(ledger, resident=12_000_000, in_process=(Tier.CPU, Tier.GPU))
    assert report.now == {"gpu": {"full": 3_000_000}, "cpu": {"pool": 2_000_000}, "nvme": {"states": 9_000_000}}
    assert report.peak["cpu"] == {"pool": 2_000_000, "grad": 5_000_000}
    assert report.unaccounted == 7_000_000
    assert MemoryReport.of(ledger, resident=12_000_000, in_process=(Tier.CPU,)).unaccounted == 10_000_000
    lines = str(report).splitlines()
    assert lines[0].split() == ["tier", "kind", "now", "peak"]
    assert ["cpu", "grad", "0.0", "MB", "5.0", "MB"] in [line.split() for line in lines]
    assert lines[-1] == "resident 12.0 MB, of it not the engine's 7.0 MB; pinned 1.5 MB"


def test_reading_the_report_does_not_change_the_books():
    ledger = Ledger()
    ledger.add(Tier.CPU, Kind.POOL, 7)
    report = MemoryReport.of(ledger, resident=10, in_process=(Tier.CPU,))
    ledger.add(Tier.CPU, Kind.POOL, 1)
    assert report.now["cpu"] == {"pool": 7}
