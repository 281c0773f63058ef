"""The demo's live step: without torch it says what is missing; with it, a model is recorded and placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.cli import demo_live
from coterie.placement.placement import Placement
from coterie.trace.routing_trace import RoutingTrace


def test_without_torch_the_step_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_live, "find_spec", lambda name: None)
    demo_live.record_and_place(tmp_path, tmp_path)
    assert "pip install 'coterie[models]'" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("torch")
@pytest.mark.needs("transformers")
def test_the_shipped_model_is_recorded_and_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_live, "TOKENS", 1024)
    demo_live.record_and_place(tmp_path, Path("somewhere"))
    output: Any = capsys.readouterr().out
    trace = RoutingTrace.load(tmp_path / "tiny-trace.safetensors")
    placement = Placement.load(tmp_path / "tiny-placement.json")
    assert trace.num_tokens == 1024
    assert (trace.spec.num_experts, trace.spec.top_k) == (64, 8)
    placement.require_model(trace.spec, "the trace")
    assert "somewhere/tiny-placement.json" in output
