"""Width plans on disk: what is written is read back, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coterie.errors import ConfigError
from coterie.pruning.width_plan_file import load_plan, save_plan
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import POLICIES


@pytest.mark.parametrize("policy", [*POLICIES, "priced"])
def test_there_and_back(make_profile: Any, tmp_path: Path, policy: str) -> None:
    options: dict[str, Any] = {"prices": (1, 1.5, 2)} if policy == "priced" else {}
    plan = plan_widths(make_profile(), "value" if policy == "priced" else policy, bytes=0.8, **options)
    save_plan(plan, tmp_path / "w.safetensors")
    back = load_plan(tmp_path / "w.safetensors")
    assert (back.spec, back.identity, back.width, back.policy, back.settings) == (
        plan.spec, plan.identity, plan.width, plan.policy, plan.settings,
    )  # fmt: skip
    assert np.array_equal(back.order_LEI, plan.order_LEI)
    assert back.tables.keys() == plan.tables.keys()
    for name, table in plan.tables.items():
        assert (back.tables[name].dtype, back.tables[name].shape) == (table.dtype, table.shape)
        assert np.array_equal(back.tables[name], table)
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def broken(plan: Any, **tables: Any) -> Any:
    return replace(plan, tables={**plan.tables, **tables})


def test_tables_that_cannot_be_are_not_written(make_profile: Any, tmp_path: Path) -> None:
    plan = plan_widths(make_profile(), "crisp")
    value = plan_widths(make_profile(), "value", threshold=0.1)
    one_way = plan.tables["code_LEE"].copy()
    one_way[0, 0, 1] ^= 1
    rising = value.tables["value_LES"][:, :, ::-1].copy()
    twice = plan.order_LEI.copy()
    twice[1, 2, 3] = twice[1, 2, 4]
    for bad, message in (
        (replace(plan, policy="crips"), "unknown width policy"),
        (broken(plan, code_LEE=one_way), "code_LEE is not symmetric"),
        (broken(plan, code_LEE=np.full_like(one_way, 6)), "holds the code 6"),
        (broken(plan, code_LEE=one_way.astype(np.int64)), r"needs uint8 \[2, 8, 8\] here"),
        (broken(plan, width_CR=np.full((3, 2), 65, np.int32)), "a width of 65, more than the expert's 64"),
        (broken(plan, width_CR=np.full((3, 2), -1, np.int32)), "negative numbers"),
        (broken(plan, width_CR=np.zeros((2, 2), np.int32)), r"is int32 \[2, 2\]"),
        (broken(plan, step=np.array(0, np.int32)), "a step of 0 neurons"),
        (broken(plan, more=np.zeros(1)), "see more"),
        (replace(plan, tables={}), "holds the tables code_LEE, step, width_CR; see"),
        (broken(value, value_LES=rising), "rises along an expert's neurons"),
        (broken(value, threshold=np.array(np.nan, np.float32)), "or NaN"),
        (broken(value, code_LEE=one_way), "see price_C"),
        (replace(plan, order_LEI=twice), "the order of layer 1, expert 2 does not name each of its 64 neurons once"),
        (replace(plan, order_LEI=plan.order_LEI[:1]), "the order of neurons is uint16"),
        (replace(plan, order_LEI=plan.order_LEI.astype(float)), "the order of neurons is float64"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_plan(bad, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_is_no_plan(make_profile: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(ConfigError, match=r"does not exist; make one with coterie widths"):
        load_plan(path)
    save_plan(plan_widths(make_profile(), "crisp"), path)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="truncated or no safetensors file"):
            load_plan(path)
    arrays = {"a": np.zeros(2)}
    for metadata, message in (
        (None, "a safetensors file but no width plan"),
        ({"coterie": "{"}, "a safetensors file but no width plan"),
        ({"coterie": json.dumps({"kind": "routing_trace", "schema_version": 1})}, "a routing_trace, not a width plan"),
        ({"coterie": json.dumps({"kind": "width_plan", "schema_version": 2})}, "has schema 2 of width plans"),
        ({"coterie": json.dumps({"kind": "width_plan", "schema_version": 1})}, "damaged: 'spec' is missing"),
    ):
        save_file(arrays, path, metadata)
        with pytest.raises(ConfigError, match=message):
            load_plan(path)


def test_a_changed_file_is_found_out(make_profile: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    plan = plan_widths(make_profile(), "crisp")
    save_plan(plan, path)
    table = plan.tables["width_CR"].tobytes()
    path.write_bytes(path.read_bytes().replace(table, np.full((3, 2), 99, np.int32).tobytes()))
    with pytest.raises(ConfigError, match=r"w.safetensors: the table width_CR holds a width of 99.*; make it again"):
        load_plan(path)
