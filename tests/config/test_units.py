"""Amounts of bytes, as written and as shown."""

from __future__ import annotations

import pytest

from infinity.base.sizes import Share, format_bytes, parse_bytes, parse_limit


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (16777216, 16777216),
        ("16777216", 16777216),
        ("9007199254740993", 9007199254740993),
        ("16GB", 16 * 10**9),
        ("16 gb", 16 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("64 MiB", 2**26),
        ("10k", 10**4),
        ("2TiB", 2**41),
        ("5e8", 5 * 10**8),
        (5e8, 5 * 10**8),
        ("1_000B", 1000),
    ],
)
def test_amounts_are_read_as_written(written: int | float | str, nbytes: int) -> None:
    assert parse_bytes(written) == nbytes


@pytest.mark.parametrize("written", ["", "GB", "16 XB", "-1", -1, True, "1.2.3GB", float("nan"), float("inf"), "80%"])
def test_what_is_no_amount_is_refused(written: int | float | str) -> None:
    with pytest.raises(ValueError, match="not an amount of bytes"):
        parse_bytes(written)


def test_a_share_waits_for_the_machine() -> None:
    share = parse_limit("80%")
    assert share == Share(0.8)
    assert isinstance(share, Share)
    assert share.of(1000) == 800
    assert str(share) == "80%"
    assert parse_limit(share) is share


@pytest.mark.parametrize("written", ["0%", "101%", "0", 0, "0GB"])
def test_a_limit_leaves_something_to_plan_with(written: int | str) -> None:
    with pytest.raises(ValueError, match=r"share|leaves nothing"):
        parse_limit(written)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (118_200_000_000, "118 GB"), (10**16, "10,000 TB")],
)
def test_amounts_are_shown_short(nbytes: int, shown: str) -> None:
    assert format_bytes(nbytes) == shown
