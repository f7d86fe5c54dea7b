"""Sizes and durations as people write them, and limits that rounding must not improve."""

from __future__ import annotations

import pytest

from gati.errors import GatiError
from gati.units import at_least, at_most, format_bytes, parse_bytes, parse_duration, percent


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MiB", 256 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1048576", 1048576),
        (4096, 4096),
        (" 8 kib ", 8192),
        ("2g", 2 * 2**30),
        ("10b", 10),
        (".5k", 512),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "12 parsecs", "1e6", "nan", "1..5k"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(GatiError, match="is not a size; write for example 256MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0.1b", 0])
def test_less_than_a_byte_is_refused(text):
    with pytest.raises(GatiError, match="less than one byte"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("90s", 90),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("2", 2),
        (3, 3),
        ("1 min", 60),
        ("250us", 0.00025),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", "is not a duration; write"), ("0s", "is not above zero"), ("10 MiB", "is not a duration")],
)
def test_what_is_no_duration_is_refused(text, message):
    with pytest.raises(GatiError, match=message):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (2**42, "4.0 TiB")],
)
def test_sizes_are_printed_in_the_largest_unit(size, text):
    assert format_bytes(size) == text


def test_shares_are_percentages() -> None:
    assert (percent(0.9444), percent(0.9444, 2), percent(1.0, 0)) == ("94.4 %", "94.44 %", "100 %")


@pytest.mark.parametrize(
    ("share", "least", "most"),
    [
        (0.98996, "98.99", "99.00"),
        (0.00304, "0.30", "0.31"),
        (0.29, "29.00", "29.00"),  # 100 * 0.29 is below 29
        (1e-7, "0.00", "0.01"),
        (0.99999, "99.99", "100.00"),
        (0.0, "0.00", "0.00"),
        (1.0, "100.00", "100.00"),
    ],
)
def test_a_limit_is_never_rounded_to_a_better_one(share: float, least: str, most: str) -> None:
    assert (at_least(share), at_most(share)) == (least, most)
    assert at_least(share, 1) <= least
