"""`coterie simulate offload` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.pruning.width_plan import WidthPlan
from coterie.pruning.width_plan_file import save_plan
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make_trace: Any) -> Run:
    """Run the command on a small trace; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    make_trace(layers=3, tokens=90, experts=8, top_k=2).save("trace.safetensors")

    def call(*arguments: str, trace: str = "trace.safetensors") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", "simulate", "offload", trace, *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    return call


def test_json_is_one_object(run: Run) -> None:
    code, out, _ = run("--budgets", "25%, 0.5", "--policies", "lru,belady", "--warm", "20%", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {
        "budgets", "trace", "widths", "model", "tokens", "warm_tokens", "blocks_per_expert", "smallest_budget",
    }  # fmt: skip
    assert list(result["budgets"]) == ["25%", "0.5"]
    for rows in result["budgets"].values():
        assert list(rows) == ["lru", "belady"]
        assert 0 < rows["belady"]["miss_ratio"] < rows["lru"]["miss_ratio"] <= 1
        assert rows["lru"]["bytes_share"] == rows["lru"]["miss_ratio"]
    assert (result["tokens"], result["warm_tokens"], result["blocks_per_expert"]) == (90, 18, 1)
    assert result["smallest_budget"] == 0.0834


def test_people_get_a_table_of_every_policy(run: Run) -> None:
    code, out, _ = run("--budgets", "30%,60%")
    assert code == 0
    header = next(line for line in out.splitlines() if "budget" in line)
    assert header.split() == ["budget", "lru", "lru-layer", "lfu", "reuse", "company", "belady"]
    assert "60%" in out
    assert "90 tokens counted, 0 before them to warm up" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "5%"], "the smallest that works here is 8.34%"),
        (["--budgets", "120%"], "'120%' is not within 0 and 1"),
        (["--budgets", ","], "names none"),
        (["--policies", ""], "names none"),
        (["--policies", "lruu"], "did you mean 'lru'"),
        (["--warm", "100%"], "90 of 90 tokens warm the cache"),
    ],
)
def test_what_a_user_can_cause_is_one_line(run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("coterie: error: ")
    assert err.count("\n") == 1


def plan_file(path: str, spec: MoESpec) -> str:
    """A uniform plan of 12 of 32 neurons."""
    order = np.tile(np.arange(32, dtype=np.int32), (spec.num_layers, spec.num_experts, 1))
    tables = {"step": np.array(4, np.int32), "width": np.array(12, np.int32)}
    save_plan(WidthPlan(spec, "toy", 32, order, "uniform", {}, tables), path)
    return path


def test_widths_are_what_is_read(run: Run, make_trace: Any) -> None:
    trace = make_trace(layers=3, tokens=90, experts=8, top_k=2)
    weighted = RoutingTrace(trace.expert_ids, trace.spec, weights=np.full(trace.expert_ids.shape, 0.5, np.float32))
    weighted.save("weighted.safetensors")
    plan = plan_file("plan.safetensors", trace.spec)
    code, out, _ = run("--budgets", "38%", "--widths", plan, "--json", trace="weighted.safetensors")
    result = json.loads(out)
    assert code == 0
    assert (result["widths"], result["blocks_per_expert"]) == (plan, 16)
    # 38% of all bytes hold the first 12 of 32 neurons of every expert: each is read once
    for row in result["budgets"]["38%"].values():
        assert row["bytes_share"] == pytest.approx(row["miss_ratio"] * 12 / 32)
        assert row["miss_ratio"] <= 24 / (90 * 3 * 2)
    code, _, err = run("--widths", plan)
    assert code == 2
    assert "replaying widths needs routing weights" in err
    other = plan_file("other.safetensors", MoESpec("other", 2, 8, 2))
    code, _, err = run("--widths", other, trace="weighted.safetensors")
    assert code == 2
    assert "the plan is for 2 layers of 8 experts, top-2, the trace of 3 layers" in err
    code, _, err = run("--widths", "missing.safetensors")
    assert code == 2
    assert err.count("\n") == 1


def test_a_missing_trace_is_one_line(run: Run) -> None:
    code, _, err = run(trace="missing.npz")
    assert code == 2
    assert "missing.npz" in err
    assert err.count("\n") == 1
