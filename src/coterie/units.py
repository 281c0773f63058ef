"""Quantities as people write them: "20%", "8GiB", "25GB/s"."""

from __future__ import annotations

import math
import re

from coterie.errors import ConfigError

_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*(?:/s)?)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what} {text!r} is not a number with a unit; write it like {example}")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> int:
    """Bytes in a size such as "8GiB" (2**30), "8GB" (10**9) or "4096".

    Raises:
        ConfigError: when the text is no such size, or is negative.
    """
    number, unit = _split(text, "size", "8GiB, 500MB or 4096")
    scale = _BYTES.get(unit.upper())
    if scale is None or number < 0 or not math.isfinite(number * scale):
        raise ConfigError(f"size {text!r} is not a byte count >= 0; write it like 8GiB, 500MB or 4096")
    return round(number * scale)


def parse_bandwidth(text: str) -> float:
    """Bytes per second in a bandwidth such as "25GB/s".

    Raises:
        ConfigError: when the text is no such bandwidth, or is not positive.
    """
    number, unit = _split(text, "bandwidth", "25GB/s")
    scale = _BYTES.get(unit.removesuffix("/s").upper()) if unit.endswith("/s") else None
    if scale is None or number <= 0 or not math.isfinite(number * scale):
        raise ConfigError(f"bandwidth {text!r} is not a positive rate; write it like 25GB/s")
    return number * scale


def parse_fraction(text: str) -> float:
    """A fraction in [0, 1] written "20%" or "0.2".

    Raises:
        ConfigError: when the text is no such fraction.
    """
    number, unit = _split(text, "fraction", "20% or 0.2")
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= value <= 1:
        raise ConfigError(f"fraction {text!r} is not within 0 and 1; write it like 20% or 0.2")
    return value


def format_bytes(count: float) -> str:
    """A byte count for people, in binary units: 1536 becomes "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
