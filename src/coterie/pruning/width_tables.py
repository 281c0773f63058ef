"""The tables of every policy: what they are, and whether a plan's can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, unknown_name
from coterie.pruning.width_plan import WidthPlan

MOST_STEPS, FEWEST_STEPS, KERNEL_STEP = 64, 16, 16

# For each policy its arrays: element type, and axes: layers, experts, steps, tiers, roles (empty: one number).
TABLES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "value": {"value_LES": ("float32", "LES"), "threshold": ("float32", "")},
    "crisp": {"code_LEE": ("uint8", "LEE"), "width_CR": ("int32", "CR")},
    "symmetric": {"code_LEE": ("uint8", "LEE"), "width_CR": ("int32", "CR")},
    "uniform": {"width": ("int32", "")},
    "by-weight": {"cut_S": ("float32", "S")},
    "drop": {"width_LE": ("int32", "LE")},
    "skip": {"threshold": ("float32", "")},
}
POLICIES = tuple(TABLES)
PRICED: Mapping[str, tuple[str, str]] = {"code_LEE": ("uint8", "LEE"), "price_C": ("float32", "C")}  # value, on request
_STEP = {"step": ("int32", "")}


def default_step(width: int) -> int:
    """Widths are multiples of this many neurons: a 64th of an expert, but at least 16, as the kernels want it.

    Where 16 would leave fewer than 16 widths to choose from, it is a 16th of the expert instead.
    """
    step = -(-width // MOST_STEPS)
    if width >= FEWEST_STEPS * KERNEL_STEP:
        return -(-step // KERNEL_STEP) * KERNEL_STEP
    return max(1, -(-width // FEWEST_STEPS))


def num_steps(width: int, step: int) -> int:
    """How many widths above zero there are, S."""
    return -(-width // step)


def metadata_bytes(plan: WidthPlan) -> int:
    """Bytes of a plan's tables, apart from the order: what serving a reordered checkpoint holds beside it."""
    return sum(table.nbytes for table in plan.tables.values())


def is_priced(plan: WidthPlan) -> bool:
    """Whether a plan of the policy value asks more of rare company."""
    return plan.policy == "value" and "price_C" in plan.tables


def least_anchor_width(plan: WidthPlan) -> int:
    """What a token's anchor runs at least under `crisp` and `symmetric`, where a token has more than two experts.

    It is the width of the auxiliary in the coldest tier that runs one, else of a hot combination's dominant. More would
    make an anchor wider in rarer company.
    """
    width_CR = plan.tables["width_CR"]
    hot, _, _ = width_CR
    return next((int(width) for width in width_CR[::-1, 1] if width), int(hot[0]))


def check_plan(plan: WidthPlan) -> None:
    """Raise unless a plan's order and tables are those of its policy and can be.

    Raises:
        ConfigError: saying what is wrong.
    """
    if plan.policy not in TABLES:
        raise unknown_name("width policy", plan.policy, POLICIES)
    spec = plan.spec
    _require_order(plan)
    wanted = {**_STEP, **TABLES[plan.policy]}
    if plan.policy == "value" and (PRICED.keys() & plan.tables.keys()):
        wanted |= PRICED
    for name in (*(wanted.keys() - plan.tables.keys()), *(plan.tables.keys() - wanted.keys())):
        raise ConfigError(f"a plan of policy {plan.policy} holds the tables {', '.join(sorted(wanted))}; see {name}")
    step = int(plan.tables["step"]) if plan.tables["step"].shape == () else 0
    if not 1 <= step <= plan.width:
        raise ConfigError(f"a step of {step} neurons is not within 1 and the expert's {plan.width}")
    axes = {"L": spec.num_layers, "E": spec.num_experts, "S": num_steps(plan.width, step), "C": 3, "R": 2}
    for name, (dtype, letters) in wanted.items():
        table, shape = plan.tables[name], tuple(axes[letter] for letter in letters)
        if table.dtype != np.dtype(dtype) or table.shape != shape:
            raise ConfigError(
                f"the table {name} is {table.dtype} {list(table.shape)}; the policy {plan.policy} needs {dtype} "
                f"{list(shape)} here"
            )
        _require_values(name, table, plan.width)


def _require_order(plan: WidthPlan) -> None:
    shape = (plan.spec.num_layers, plan.spec.num_experts, plan.width)
    if plan.order_LEI.shape != shape or plan.order_LEI.dtype.kind not in "iu":
        raise ConfigError(
            f"the order of neurons is {plan.order_LEI.dtype} {list(plan.order_LEI.shape)}, not integers {list(shape)}"
        )
    for layer, order_EI in enumerate(plan.order_LEI):
        wrong = (np.sort(order_EI, axis=1) != np.arange(plan.width)).any(axis=1)
        if wrong.any():
            raise ConfigError(
                f"the order of layer {layer}, expert {int(wrong.argmax())} does not name each of its {plan.width} "
                "neurons once"
            )


def _require_values(name: str, table: NDArray[Any], width: int) -> None:
    """Raise unless the entries of one table can be."""
    reason = None
    if not np.isfinite(table).all() or (table < 0).any():
        reason = "holds negative numbers or NaN"
    elif name.startswith("width") and (table > width).any():
        reason = f"holds a width of {int(table.max())}, more than the expert's {width} neurons"
    elif name == "code_LEE" and (table > 5).any():
        reason = f"holds the code {int(table.max())}; they run from 0 to 5"
    elif name == "code_LEE" and not np.array_equal(table, table.transpose(0, 2, 1)):
        reason = "is not symmetric; a combination has no order"
    elif name == "value_LES" and (np.diff(table, axis=2) > 0).any():
        reason = "rises along an expert's neurons; they stand by falling value"
    if reason:
        raise ConfigError(f"the table {name} {reason}")
