"""Whole traces pruned: what is written, what is reported, and what must not be left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError, TraceError
from coterie.pruning.destinations import Cap, LayerTokens
from coterie.pruning.fitting import RuleChoice
from coterie.pruning.prune import prune_trace, prune_trace_to
from coterie.pruning.routed import linear_devices
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

DEVICES = Topology.parse("2x2,inter=2")
CHOICES = (RuleChoice("cap", p=0.25), RuleChoice("naive", peak=0.5), RuleChoice("priced", p=0.3, floor=0.1))


def toy(interleaved: bool = False) -> RoutingTrace:
    """Two layers, 90 tokens of 9 sequences, 8 experts, top-3."""
    generator = np.random.default_rng(3)
    ids = np.argsort(generator.random((2, 90, 8)), axis=2)[:, :, :3].astype(np.uint8)
    weights = generator.dirichlet(np.ones(3), (2, 90)).astype(np.float16)
    numbers = np.arange(90) % 9 if interleaved else np.arange(90) // 10
    return RoutingTrace(
        ids, MoESpec("toy", 2, 8, 3), weights=weights, sequence_ids=numbers.astype(np.int32),
        positions=np.arange(90, dtype=np.int32), weight_ordered=False, provenance={"source": "test"},
    )  # fmt: skip


def plain_figures(trace: RoutingTrace, kept_LTK: np.ndarray, tokens: object) -> tuple[float, float, float]:
    """Remote DPT, remote peak traffic and kept weight, mean over layers, counted token by token."""
    device_LE, homes = linear_devices(trace.spec, DEVICES), trace.homes(4)
    chosen = np.arange(trace.num_tokens)[tokens]  # type: ignore[index]
    assert trace.weights is not None
    dpt, peak, weight = [], [], []
    for layer in range(trace.num_layers):
        visits, share = [0] * 4, 0.0
        before = np.ones(kept_LTK.shape[1:], bool) if trace.kept is None else trace.kept[layer]
        for t in chosen:
            kept = kept_LTK[layer, t]
            for device in set(device_LE[layer, trace.expert_ids[layer, t, kept]]) - {homes[t]}:
                visits[device] += 1
            w = trace.weights[layer, t].astype(np.float64)
            share += w[kept].sum() / w[before[t]].sum()
        dpt.append(sum(visits) / len(chosen))
        peak.append(max(visits) / len(chosen))
        weight.append(share / len(chosen))
    return float(np.mean(dpt)), float(np.mean(peak)), float(np.mean(weight))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_the_report_is_what_counting_gives(choice: RuleChoice, interleaved: bool) -> None:
    trace = toy(interleaved)
    kept_LTK, report = prune_trace(trace, linear_devices(trace.spec, DEVICES), DEVICES, choice, heldout=0.4)
    parts = split(trace, 0.4)
    assert report.split_by == "sequence"
    for part, tokens in ((report.fit, parts.first), (report.heldout, parts.second)):
        dpt, peak, weight = plain_figures(trace, kept_LTK, tokens)
        assert part.mean("remote_dpt") == pytest.approx(dpt)
        assert part.mean("remote_peak_traffic") == pytest.approx(peak)
        assert part.mean("kept_weight") == pytest.approx(weight)
        before = plain_figures(trace, np.ones_like(kept_LTK), tokens)
        assert part.mean("unpruned_remote_dpt") == pytest.approx(before[0])
        assert part.mean("unpruned_remote_peak_traffic") == pytest.approx(before[1])
        assert part.to_json()["layers"]["kept_weight"] == part.kept_weight.tolist()
        assert 0 < weight < 1
    assert report.fit.num_tokens + report.heldout.num_tokens == 90


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_the_file_holds_the_same_and_remembers_how(choice: RuleChoice, tmp_path: Path) -> None:
    trace, target = toy(), tmp_path / "pruned.safetensors"
    device_LE = linear_devices(trace.spec, DEVICES)
    kept_LTK, report = prune_trace(trace, device_LE, DEVICES, choice)
    written = prune_trace_to(target, trace, device_LE, DEVICES, choice, placement="mine.json")
    assert written.to_json() == report.to_json()
    pruned = RoutingTrace.load(target)
    np.testing.assert_array_equal(pruned.kept, kept_LTK)
    for name in ("expert_ids", "weights", "sequence_ids", "positions"):
        np.testing.assert_array_equal(getattr(pruned, name), getattr(trace, name))
    remembered = pruned.provenance["pruning"]
    assert pruned.provenance["source"] == "test"
    assert remembered["rule"] == choice.name
    assert remembered["placement"] == "mine.json"
    assert remembered["coterie"] == coterie.__version__
    assert Topology.from_json(remembered["topology"]) == DEVICES
    if choice.name == "priced":
        assert np.shape(remembered["theta"]) == (2, 4)
        assert remembered["asked_p"] == 0.3


def test_pruning_twice_only_drops_more_and_remembers_both(tmp_path: Path) -> None:
    trace, device_LE = toy(), linear_devices(toy().spec, DEVICES)
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    prune_trace_to(once, trace, device_LE, DEVICES, RuleChoice("cap", p=0.2))
    first = RoutingTrace.load(once)
    report = prune_trace_to(twice, first, device_LE, DEVICES, RuleChoice("naive", p=0.4))
    second = RoutingTrace.load(twice)
    assert first.kept is not None
    assert second.kept is not None
    assert not (second.kept & ~first.kept).any()
    assert second.kept.sum() < first.kept.sum()
    assert second.provenance["pruning"]["previous"]["rule"] == "cap"
    assert report.heldout.mean("kept_weight") == pytest.approx(
        plain_figures(first, np.asarray(second.kept), split(first, 0.5).second)[2]
    )


def test_a_file_may_be_pruned_in_place(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    toy().save(path)
    device_LE = linear_devices(toy().spec, DEVICES)
    prune_trace_to(path, RoutingTrace.load(path), device_LE, DEVICES, RuleChoice("cap", p=0.3))
    kept_LTK, _ = prune_trace(toy(), device_LE, DEVICES, RuleChoice("cap", p=0.3))
    np.testing.assert_array_equal(RoutingTrace.load(path).kept, kept_LTK)


def test_tokens_that_lose_everything_are_counted() -> None:
    trace = toy()
    kept_LTK, report = prune_trace(trace, linear_devices(trace.spec, DEVICES), DEVICES, RuleChoice("priced", peak=0.0))
    empty = ~kept_LTK[:, split(trace, 0.5).second].any(axis=2)
    assert report.heldout.mean("emptied") == pytest.approx(empty.mean())
    assert 0 < empty.mean() < 1
    assert report.fit.mean("remote_peak_traffic") == 0


def test_failures_and_interruptions_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, target = toy(), tmp_path / "pruned.safetensors"
    device_LE = linear_devices(trace.spec, DEVICES)
    with pytest.raises(ConfigError, match="cannot bring"):
        prune_trace_to(target, trace, device_LE, DEVICES, RuleChoice("cap", peak=0.001))
    with pytest.raises(TraceError, match="needs routing weights"):
        prune_trace_to(target, replace(trace, weights=None), device_LE, DEVICES, RuleChoice("cap", p=0.1))

    def interrupted(rule: Cap, layer: int, tokens: LayerTokens) -> np.ndarray:
        if layer == 1:
            raise KeyboardInterrupt
        return tokens.before_TK

    monkeypatch.setattr(Cap, "prune_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune_trace_to(target, trace, device_LE, DEVICES, RuleChoice("cap", p=0.1))
    assert list(tmp_path.iterdir()) == []


def test_large_traces_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, device_LE = toy(), linear_devices(toy().spec, DEVICES)
    whole = [prune_trace(trace, device_LE, DEVICES, choice) for choice in CHOICES]
    monkeypatch.setattr("coterie.trace.check._TOKENS_AT_ONCE", 7)
    for choice, (kept_LTK, report) in zip(CHOICES, whole, strict=True):
        kept, again = prune_trace(trace, device_LE, DEVICES, choice)
        np.testing.assert_array_equal(kept, kept_LTK)
        assert again.rule == report.rule
        assert again.heldout.mean("kept_weight") == pytest.approx(report.heldout.mean("kept_weight"))
