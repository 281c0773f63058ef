"""`coterie trace info` prints what the summary says."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest

from coterie.cli import main
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.synthetic import synthesize


@pytest.fixture
def run(monkeypatch, capsys):
    def call(trace, *arguments):
        module = ModuleType("coterie.trace.open")
        module.open_trace = lambda path, progress=None: trace
        monkeypatch.setitem(sys.modules, "coterie.trace.open", module)
        monkeypatch.setattr(sys, "argv", ["coterie", "trace", "info", "t.safetensors", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return call


def test_people_read_shape_origin_and_skew(run):
    out = run(synthesize(2, 16, 4, 300))
    assert "SYNTHETIC, synthetic deepseek-like" in out
    assert "2 MoE layers, 16 experts, top-4" in out
    assert "300 tokens" in out
    assert "no phases recorded" in out
    assert "top 25% of anchor pairs" in out
    assert "seed: 0" in out
    assert "dropped on import: nothing" in out
    assert len([line for line in out.splitlines() if line.split()[:2] in (["0", "-"], ["1", "-"])]) == 2


def test_json_is_one_object(run):
    out = run(synthesize(2, 16, 4, 300), "--json")
    summary = json.loads(out)
    assert len(out.splitlines()) == 1
    assert summary["synthetic"] is True
    assert len(summary["per_layer"]) == 2


def test_what_is_missing_is_said(run):
    ids = np.array([[[0, 1, 2], [1, 2, 3]]], dtype=np.uint8)
    dropped = {"dropped": {"warm_up": 1200, "padding": 0}, "inferred": {}}
    out = run(RoutingTrace(ids, MoESpec("olmoe-like", 1, 4, 3), provenance=dropped))
    assert "1,200 rows of warm up" in out
    assert "no weights, so the anchor is unknown" in out
    assert "inferred" not in out
    out = run(RoutingTrace(ids[:, :, :1], MoESpec("m", 1, 4, 1)))
    assert "one expert a token makes no combinations" in out
