"""What was asked of the runtime, as ratios of systems in one run; printed beside the figures, never used to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOSSY = ("value 1.5%", "value 1.5% + cached", "value 1.5% + cached in 8 bits")
_OVER_MOE = {"10%": 3.0, "20%": 3.0, "30%": 2.5}
_BYTES = {"10%": 0.35, "20%": 0.17, "30%": 0.09}
_LOSSLESS_OVER_MOE, _OVER_FULL, _OF_BOUND = 1.25, {"10%": 3.0}, 0.85


def asked_of(row: Mapping[str, Any], coarse: bool) -> dict[str, float]:
    """Targets of a row by what they are of; those for lossy systems are for coarse experts (Mixtral's kind) alone.

    Args:
        row: with its budget and system.
        coarse: whether experts are few and large.
    """
    asked = {"share_of_bound": _OF_BOUND}
    if row["system"].startswith("lossless"):
        asked["over_moe_offload"] = _LOSSLESS_OVER_MOE
    if coarse and row["system"] in _LOSSY:
        for name, table in (("over_moe_offload", _OVER_MOE), ("over_full", _OVER_FULL), ("bytes_share", _BYTES)):
            if row["budget"] in table:
                asked[name] = table[row["budget"]]
    return asked
