"""Quantities as people write them."""

from __future__ import annotations

import pytest

from coterie.errors import ConfigError
from coterie.units import format_bytes, parse_bandwidth, parse_bytes, parse_fraction


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8GiB", 8 * 2**30), ("8 gib", 8 * 2**30), ("8GB", 8 * 10**9), ("500MB", 500_000_000), ("1.5 KiB", 1536),
        ("4096", 4096), ("0", 0), ("1e3B", 1000), (" 2TB ", 2 * 10**12), (".5kB", 500), ("+1", 1),
    ],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 XB", "-1", "1e999", "1e300TB", "nan", "inf", "8GB/s", "20%", "1,5GB", "8GiBB", "1 2"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 8GiB, 500MB or 4096"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "value"), [("25GB/s", 25e9), ("1.5 gib/s", 1.5 * 2**30), ("7/s", 7.0)])
def test_bandwidths(text: str, value: float) -> None:
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("text", ["25GB", "0GB/s", "-1GB/s", "GB/s", "25Gbit/s", "1e999B/s", "1e300TB/s", "20%"])
def test_no_bandwidths(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 25GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "value"), [("20%", 0.2), ("0.2", 0.2), ("0", 0), ("100 %", 1), ("1", 1), ("1e-2", 0.01)]
)
def test_fractions(text: str, value: float) -> None:
    assert parse_fraction(text) == value


@pytest.mark.parametrize("text", ["20", "101%", "-0.1", "0.2B", "half", "", "nan", "1e999"])
def test_no_fractions(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write it like 20% or 0\.2"):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (5 * 2**42, "20.0 TiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
