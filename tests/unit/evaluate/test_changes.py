"""Pruning as evaluation applies it: by window, whatever the batch; with what it kept and sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement, TraceError
from coterie.evaluate.quality import evaluate
from coterie.placement.placement import Placement
from coterie.pruning.fitting import RuleChoice, fit_rule
from coterie.pruning.routed import RoutedTrace, linear_devices
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

pytestmark = pytest.mark.needs("transformers")
TWO = Topology.parse("2")


def recorded(model: Any, tokenizer: Any, text: str) -> RoutingTrace:
    """A trace of the model, in memory: 8 sequences of 30 tokens."""
    import torch

    from coterie.models.intercept import intercept
    from coterie.models.layers import spec_of

    ids_LTK: list[Any] = []
    weights_LTK: list[Any] = []

    def keep(layer: int, hidden: Any, ids: Any, weights: Any) -> None:
        ids_LTK.append(ids.numpy().astype(np.uint8))
        weights_LTK.append(weights.float().numpy())

    with torch.no_grad(), intercept(model, keep):
        model(input_ids=torch.tensor(tokenizer(text)["input_ids"][:240]).view(8, 30))
    return RoutingTrace(
        np.stack(ids_LTK), spec_of(model), weights=np.stack(weights_LTK),
        sequence_ids=np.repeat(np.arange(8, dtype=np.int32), 30),
    )  # fmt: skip


def quality(model: Any, tokenizer: Any, text: str, change: Any, batch: int | None = None) -> dict[str, Any]:
    return evaluate(model, tokenizer, {"a": text}, changes=[change], window=32, batch=batch).to_json()


def test_nothing_is_pruned_at_zero(model: Any, tokenizer: Any, text: str) -> None:
    from coterie.evaluate.changes import pruning

    change = pruning(model, RuleChoice("cap", 0.0), topology=TWO)
    figures = quality(model, tokenizer, text, change)
    assert (figures["kl"], figures["top1_agreement"]) == (0, 1)
    assert change.to_json()["measured"]["kept_weight"] == pytest.approx(1)


def test_homes_go_by_window_whatever_the_batch(model: Any, tokenizer: Any, text: str) -> None:
    from coterie.evaluate.changes import pruning

    results, counted = [], []
    for batch in (1, 5, None):
        change = pruning(model, RuleChoice("cap", 0.3), topology=TWO)
        results.append(quality(model, tokenizer, text, change, batch))
        counted.append(change.to_json()["measured"])
    for figures, measured in zip(results[1:], counted[1:], strict=True):
        assert figures["kl"] == pytest.approx(results[0]["kl"], rel=1e-4)
        assert measured == pytest.approx(counted[0])
    assert results[0]["kl"] > 0
    assert 0 < counted[0]["remote_peak_traffic"] < 0.5  # half of the windows are at home on either device


def test_a_window_is_pruned_as_its_home_says(model: Any, tokenizer: Any, text: str) -> None:
    import coterie
    from coterie.evaluate.changes import pruning
    from coterie.evaluate.perplexity import perplexity
    from coterie.evaluate.text import encode_text

    encoded = encode_text(tokenizer, "a", text, 60)  # two windows of 32, the last with 29 scored tokens
    change = pruning(model, RuleChoice("cap", 0.4), topology=TWO)
    together = perplexity(model, encoded, 32, 29, changes=[change]).nats
    import torch

    nats = 0.0
    for home, start, first in ((0, 0, 1), (1, 29, 32)):
        ids = torch.tensor([encoded.ids[start : start + 32]])
        with torch.no_grad(), coterie.prune_destinations(model, p=0.4, topology="2", homes=[home]):
            logp = model(input_ids=ids).logits[0].double().log_softmax(-1)
        nats -= sum(float(logp[t - 1, ids[0, t]]) for t in range(first - start, 32))
    assert together == pytest.approx(nats, rel=1e-6)


def test_what_is_fitted_is_fitted_on_a_trace(model: Any, tokenizer: Any, text: str) -> None:
    from coterie.evaluate.changes import pruning

    trace = recorded(model, tokenizer, text)
    routed = RoutedTrace(trace, linear_devices(trace.spec, TWO), TWO)
    unpruned = pruning(model, RuleChoice("cap", 0.0), topology=TWO)
    quality(model, tokenizer, text, unpruned)
    for choice in (RuleChoice("priced", peak=0.25), RuleChoice("cap", peak=0.3), RuleChoice("priced", 0.3)):
        change = pruning(model, choice, topology=TWO, trace=trace)
        assert quality(model, tokenizer, text, change)["kl"] > 0
        result = change.to_json()
        fitted = fit_rule(choice, routed).describe()
        assert {name: result[name] for name in fitted} == fitted
        assert result["asked"] == ({"p": 0.3} if choice.p else {"peak": choice.peak})
        assert result["measured"]["remote_peak_traffic"] < unpruned.to_json()["measured"]["remote_peak_traffic"]


def test_a_placement_says_where_experts_live(model: Any, tokenizer: Any, text: str) -> None:
    from coterie.evaluate.changes import pruning
    from coterie.models.layers import spec_of

    placement = Placement.from_devices(
        [[0, 1, 0, 1], [1, 1, 0, 0]], TWO, spec_of(model), method={"name": "by hand"}, metrics={}
    )
    change = pruning(model, RuleChoice("cap", 0.3), placement=placement)
    linear = pruning(model, RuleChoice("cap", 0.3), topology=TWO)
    assert quality(model, tokenizer, text, change)["kl"] != quality(model, tokenizer, text, linear)["kl"]
    assert change.to_json()["placement"] == {"name": "by hand"}
    assert linear.to_json()["placement"] == "linear"


def test_bad_input_is_one_clear_error(model: Any, make_trace: Any) -> None:
    from coterie.evaluate.changes import pruning

    foreign = MoESpec("other", 2, 8, 2)
    placement = Placement.from_devices(np.arange(8)[None].repeat(2, 0) % 2, TWO, foreign)
    with pytest.raises(InfeasiblePlacement, match="the placement is for other"):
        pruning(model, RuleChoice("cap", 0.3), placement=placement)
    with pytest.raises(ConfigError, match="pruning needs devices"):
        pruning(model, RuleChoice("cap", 0.3))
    with pytest.raises(ConfigError, match="not both"):
        pruning(model, RuleChoice("cap", 0.3), placement=placement, topology=TWO)
    with pytest.raises(ConfigError, match="the rule priced is fitted on a trace"):
        pruning(model, RuleChoice("priced", 0.3), topology=TWO)
    with pytest.raises(ConfigError, match="a target peak is fitted on a trace"):
        pruning(model, RuleChoice("cap", peak=0.3), topology=TWO)
    with pytest.raises(TraceError, match="has 2 MoE layers of 16 experts, top-4, the model 2 of 4, top-2"):
        pruning(model, RuleChoice("priced", 0.3), topology=TWO, trace=make_trace())


def test_rounding_costs_next_to_nothing_and_is_undone() -> None:
    """Eight bits, and the same weights afterwards."""
    import torch

    from coterie import data
    from coterie.evaluate.changes import rounding
    from coterie.models.layers import find_moe_layers
    from coterie.models.load import load_model, load_tokenizer
    from coterie.study.measure import Bench, window_ids

    model, tokenizer = load_model("tiny-qwen3-moe", "float32"), load_tokenizer("tiny-qwen3-moe")
    ids, _ = window_ids(tokenizer, {"prose": data.text("prose")[:6000]}, 64, (0.0, 1.0), limit=6)
    before = [layer.experts.down_proj.clone() for layer in find_moe_layers(model)]
    measured = Bench(model, ids).measure([rounding()])
    assert 0 < measured.kl < 1e-3
    after = [layer.experts.down_proj for layer in find_moe_layers(model)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
