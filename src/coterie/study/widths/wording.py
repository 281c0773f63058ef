"""Figures as a page's text and tables have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}%}"


def interval(estimate: Mapping[str, Any], digits: int = 1) -> str:
    """A share with its interval: "61.2% (58.0% to 64.1%)"."""
    if estimate["value"] is None:
        return "-"
    low, high = (percent(end, digits) for end in estimate["interval_95"])
    return f"{percent(estimate['value'], digits)} ({low} to {high})"


def number(estimate: Mapping[str, Any], digits: int = 3) -> str:
    """A number with its interval: "2.31 (1.90 to 2.85)"."""
    if estimate["value"] is None:
        return "-"
    low, high = ("-" if end is None else f"{end:.{digits}g}" for end in estimate["interval_95"])
    return f"{estimate['value']:.{digits}g} ({low} to {high})"


def verdict(estimate: Mapping[str, Any], neutral: float, above: str, below: str, open_: str) -> str:
    """One of three readings: the interval lies above a neutral value, below it, or holds it."""
    low, high = estimate["interval_95"]
    if estimate["value"] is None or low is None or high is None:
        return open_
    if low > neutral:
        return above
    return below if high < neutral else open_
