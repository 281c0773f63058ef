"""What is compared: a system is a policy, a schedule, widths and how the runtime is told to use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.errors import unknown_name
from coterie.policies.registry import DEFAULT

FULL, LOSSLESS = "full", "lossless"
MOE_OFFLOAD = ("moe-offload-lru", "moe-offload-lru-layer")
ROUNDED = "8 bits"  # widths of systems at full width that read a store in eight bits


@dataclass(frozen=True)
class System:
    """One way to run a model that does not fit.

    Attributes:
        name: in tables and results.
        policy: what decides evictions.
        schedule: the order of a layer's loads.
        widths: which widths of `plans.Plans` its experts run at; None: full.
        options: further arguments of `coterie.offload`.
        by_budget: whether it runs differently at every budget.
        bits: 8: it reads a store in eight bits, within the same bytes; None: one of the weights as they are.
        budget_experts: memory in experts instead of the budget; None: the budget.
        about: what it is, in a few words.
    """

    name: str
    policy: str = DEFAULT
    schedule: str = "johnson"
    widths: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    by_budget: bool = False
    bits: int | None = None
    budget_experts: int | None = None
    about: str = ""


def lossless_systems(top_k: int) -> list[System]:
    """Those whose outputs are the full model's.

    Args:
        top_k: experts that a token chooses in a layer: what full offload has memory for, so that nothing stays.
    """
    whole = {"pieces": False}  # as those systems do, an expert computes when all of it is there
    return [
        System(
            FULL, "lru-whole", "fifo", None, whole, budget_experts=top_k, about="every chosen expert is always read"
        ),
        System(MOE_OFFLOAD[0], "lru-whole", "fifo", None, whole, about="LRU of whole experts, all layers, on demand"),
        System(MOE_OFFLOAD[1], "lru-layer-whole", "fifo", None, whole, about="the same by layer: MoE-Offload's"),
        System(
            "lossless in wholes", options=whole, about="ours at full width, an expert computed when all of it is there"
        ),
        System(LOSSLESS, about="ours at full width"),
        System("lossless + ahead", options={"ahead": True}, about="the same, reading ahead while the link is idle"),
    ]


def width_systems() -> list[System]:
    """Ours, with widths that do not depend on what is cached."""
    return [
        System("crisp", widths="crisp", about="the paper's plan (alpha 0.6, beta 0.9) in our runtime"),
        System("value at crisp's loss", widths="value at crisp's loss", about="value widths, as lossy as the plan"),
        System("value 1.5%", widths="value 1.5%", about="value widths that cost at most 1.5% (see `plans.upper`)"),
        System("value 3.6%", widths="value 3.6%", about="value widths that cost at most 3.6%"),
    ]


def cached_systems() -> list[System]:
    """Those whose outputs depend on what is cached; their settings are chosen for every budget."""
    return [
        System("value 1.5% + cached", widths="value 1.5% + cached", by_budget=True,
               about="value widths, and what is resident beyond them for free; at most 1.5%"),
        System("value 1.5% + cached in 8 bits", widths="value 1.5% + cached in 8 bits", by_budget=True, bits=8,
               about="the same from a store in eight bits; at most 1.5%, rounding included"),
        System("skip-on-miss", by_budget=True, about="full width; light experts that miss are skipped; at most 1.5%"),
    ]  # fmt: skip


def rounded_systems() -> list[System]:
    """Those at full width that read a store in eight bits; they cost what rounding does."""
    return [
        System("lru by layer in 8 bits", "lru-layer-whole", "fifo", ROUNDED, {"pieces": False}, bits=8,
               about="MoE-Offload's cache, from a store in eight bits"),
        System("full width in 8 bits", widths=ROUNDED, bits=8, about="ours at full width, from a store in eight bits"),
    ]  # fmt: skip


def chosen_systems(systems: Sequence[System], names: Sequence[str]) -> list[System]:
    """The systems of these names, in their own order; without names all.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    known = [system.name for system in systems]
    for name in names:
        if name not in known:
            raise unknown_name("system", name, known)
    return [system for system in systems if not names or system.name in names]
