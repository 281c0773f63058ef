"""Which vLLM the plugin knows, by minor version. Imports nothing of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping

from coterie.errors import BackendUnavailable

ADAPTERS: Mapping[tuple[int, int], str] = {(0, 32): "coterie.vllm_plugin.adapters.v0_32"}
"""The module for each minor version; each has been run against a vLLM of that version."""


def supported() -> str:
    """The range of versions, as pip writes it."""
    first, last = min(ADAPTERS), max(ADAPTERS)
    return f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def adapter_name(version: str) -> str:
    """The adapter module for a version of vLLM.

    Raises:
        BackendUnavailable: when there is none.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    name = ADAPTERS.get((int(numbers[1]), int(numbers[2]))) if numbers else None
    if name is None:
        raise BackendUnavailable(
            f"vLLM {version} is installed, the plugin knows {supported()}; install one of those, or unset "
            "COTERIE_CONFIG: a baked checkpoint (coterie bake) needs no plugin"
        )
    return name
