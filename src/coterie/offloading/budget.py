"""What a byte budget holds, and whether a model can run within it."""

from __future__ import annotations

from coterie.checkpoint.store_layout import StoreLayout
from coterie.errors import BudgetError, ConfigError
from coterie.units import format_bytes, parse_bytes, parse_fraction


def budget_blocks(
    budget: str | int | float, layout: StoreLayout, free_bytes: int, widest: int | None = None, beside_bytes: int = 0
) -> int:
    """How many blocks of neurons may be in memory at any moment.

    Args:
        budget: bytes ("6GiB", or an integer), or a share of all experts ("20%", or a float within 0 and 1).
        layout: of the store.
        free_bytes: memory that can be taken.
        widest: neurons that an expert runs at most; None: all.
        beside_bytes: what the budget pays for beside the blocks, as staging and scratch of a device.

    Returns:
        Blocks of experts, without what is beside them.

    Raises:
        BudgetError: when it does not hold one expert that wide, or is more than the free memory.
        ConfigError: when it is neither.
    """
    total = layout.num_records * layout.blocks
    least, beside = most_blocks(layout, widest), -(-beside_bytes // layout.block_bytes)
    smallest = least + beside
    blocks, asked = _parse(budget, layout, total)
    if blocks < smallest:
        needed, share = smallest * layout.block_bytes, smallest / total
        narrow = "" if least == layout.blocks else f" as wide as the plan runs any ({widest} of {layout.width} neurons)"
        if beside:
            narrow += f" and {format_bytes(beside_bytes)} of staging and scratch"
        raise BudgetError(
            f"a budget of {asked} is too small: the smallest workable one holds one expert{narrow}, {needed:,} bytes "
            f"({format_bytes(needed)}, {share:.2%} of all experts)"
        )
    blocks = min(blocks, total + beside)
    taken = blocks * layout.block_bytes
    if taken > free_bytes:
        raise BudgetError(
            f"a budget of {asked} is {taken:,} bytes ({format_bytes(taken)}), {free_bytes:,} "
            f"({format_bytes(free_bytes)}) of memory are free; choose a smaller one"
        )
    return blocks - beside


def most_blocks(layout: StoreLayout, widest: int | None) -> int:
    """The most blocks that one expert takes where none runs more than `widest` neurons (None: all)."""
    return layout.blocks if widest is None else max(1, layout.blocks_of(widest))


def _parse(budget: str | int | float, layout: StoreLayout, total: int) -> tuple[int, str]:
    if isinstance(budget, bool):
        raise ConfigError(f"budget {budget!r} is neither bytes nor a share; write it like 6GiB or 20%")
    if isinstance(budget, int):
        return budget // layout.block_bytes, f"{budget:,} bytes"
    if isinstance(budget, float):
        return int(parse_fraction(str(budget)) * total), f"{budget:.2%} of all experts"
    if budget.strip().endswith("%"):
        return int(parse_fraction(budget) * total), f"{budget} of all experts"
    return parse_bytes(budget) // layout.block_bytes, budget
