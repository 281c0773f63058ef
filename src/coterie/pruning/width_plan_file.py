"""A width plan as one safetensors file, written whole or not at all and checked on reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coterie.errors import ConfigError
from coterie.files import replacing
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_tables import check_plan
from coterie.spec import MoESpec

KIND, SCHEMA_VERSION = "width_plan", 1
_KEY, _ORDER, _TABLE = "coterie", "order_LEI", "table."


def save_plan(plan: WidthPlan, path: str | Path) -> None:
    """Write a plan, whole or not at all.

    Raises:
        ConfigError: when the plan's tables are not those of its policy, or the file cannot be written.
    """
    check_plan(plan)
    about = {
        "kind": KIND, "schema_version": SCHEMA_VERSION, "spec": plan.spec.to_json(), "identity": plan.identity,
        "width": plan.width, "policy": plan.policy, "settings": dict(plan.settings),
    }  # fmt: skip
    tables = {f"{_TABLE}{name}": np.ascontiguousarray(table) for name, table in plan.tables.items()}
    tables |= {f"{_TABLE}{name}": table for name, table in plan.tables.items() if not table.shape}
    arrays = {_ORDER: np.ascontiguousarray(plan.order_LEI), **tables}
    with replacing(Path(path)) as temporary:
        save_file(arrays, temporary, {_KEY: json.dumps(about, allow_nan=False)})


def load_plan(path: str | Path) -> WidthPlan:
    """Read a plan that `save_plan` wrote.

    Raises:
        ConfigError: when the file is missing, truncated, no width plan, or one that cannot be.
    """
    text, arrays = _read(Path(path))
    try:
        about = json.loads(text)
        kind, version = about["kind"], about["schema_version"]
    except (KeyError, TypeError, ValueError) as error:
        raise _no_plan(path, "a safetensors file but no width plan") from error
    if kind != KIND:
        raise _no_plan(path, f"a {kind}, not a width plan")
    if version != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema {version!r} of width plans, this version reads {SCHEMA_VERSION}; upgrade")
    try:
        plan = WidthPlan(
            MoESpec.from_json(about["spec"]), str(about["identity"]), int(about["width"]), arrays.pop(_ORDER),
            str(about["policy"]), dict(about["settings"]),
            {name.removeprefix(_TABLE): table for name, table in arrays.items()},
        )  # fmt: skip
        check_plan(plan)
    except (KeyError, TypeError, ValueError) as error:
        raise _no_plan(path, f"damaged: {error} is missing or makes no sense") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; make it again with coterie widths") from error
    return plan


def _no_plan(path: str | Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is {what}; make one with coterie widths")


def _read(path: Path) -> tuple[str, dict[str, NDArray[Any]]]:
    """The metadata's text and every array."""
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_KEY, "")
            return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; make one with coterie widths") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise _no_plan(path, f"truncated or no safetensors file ({error})") from error
