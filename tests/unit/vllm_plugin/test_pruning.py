"""Pruning what a router chose: as the rules say, for the tokens of a step alone, ids as the backend needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, LayerTokens, Naive, Priced, PruningRule
from coterie.pruning.traffic import kept_weight, remote_dpt, remote_visits
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.vllm_plugin.config import PluginConfig, PruneConfig
from coterie.vllm_plugin.engine import Engine

pytestmark = pytest.mark.needs("torch")

SPEC = MoESpec("toy", 2, 16, 4)
TOKENS = 300
COSTS = "2x2,inter=3"


def engine(**fields: Any) -> Engine:
    return Engine("0.32.0", SPEC, **{"renormalises": True, **fields})


def spread(**fields: Any) -> Engine:
    return engine(
        expert_ranks=4, expert_rank=1, all_to_all=True, **{"backend": "deepep_high_throughput", **fields}
    )  # fmt: skip


def config(prune: PruneConfig, devices: str | None = COSTS, placement: Placement | None = None) -> PluginConfig:
    return PluginConfig(Path("coterie.yaml"), prune, (devices and Topology.parse(devices)) or None, placement)


def decisions(seed: int = 0) -> tuple[Any, Any]:
    """Weights [T, K] float32 and ids [T, K] int32, in no order, as vLLM's CPU router gives them."""
    import torch

    made = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(TOKENS, 16, generator=made).topk(4, sorted=False)
    return weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def expected(rule: PruningRule, layer: int, weights: Any, ids: Any, device_E: Any, home: int) -> tuple[Any, Any]:
    """What is kept by the offline rule, and its view of the tokens."""
    tokens = LayerTokens.of(
        ids.numpy(), weights.double().numpy(), None, device_E, np.full(TOKENS, home),
        Topology.parse(COSTS).cost_matrix(),
    )  # fmt: skip
    return rule.prune_layer(layer, tokens), tokens


THETA = ((0.1, 0.2, 0.15, 0.05), (0.3, 0.1, 0.2, 0.1))
RULES = [
    (PruneConfig("cap", 0.3), Cap(0.3)), (PruneConfig("naive", 0.3), Naive(0.3)),
    (PruneConfig("priced", thetas=THETA, floor=0.4), Priced(np.array(THETA), 0.4)),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "rule"), RULES)
@pytest.mark.parametrize("home", [None, 1])
def test_every_rule_decides_as_offline(asked: PruneConfig, rule: PruningRule, home: int | None) -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    pruning = RouterPruning(config(asked), engine() if home is None else spread(backend="allgather_reducescatter"))
    device_E = np.repeat(np.arange(4), 4)
    pruning.begin_step(TOKENS)
    for layer in range(2):
        weights, ids = decisions(layer)
        kept_TK, tokens = expected(rule, layer, weights, ids, device_E, -1 if home is None else home)
        out, out_ids, kept = pruning.decide(layer, weights, ids)
        np.testing.assert_array_equal(kept.numpy(), kept_TK)
        np.testing.assert_array_equal((out != 0).numpy(), kept_TK)
        np.testing.assert_allclose(out.sum(1).numpy(), np.where(kept_TK.any(1), 1, 0), atol=1e-6)
        assert out_ids is ids
    stats = pruning.stats()
    assert stats.num_tokens == TOKENS
    assert stats.kept_weight[1] == pytest.approx(kept_weight(tokens, kept_TK).mean())
    assert stats.remote_dpt[1] == pytest.approx(remote_dpt(remote_visits(tokens, kept_TK), TOKENS))


def test_dropped_slots_get_minus_one_where_that_saves_the_visit() -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    pruning = RouterPruning(config(PruneConfig("cap", 0.4)), spread())
    weights, ids = decisions()
    out, out_ids, kept = pruning.decide(0, weights, ids)
    assert not kept.all()
    assert out_ids.dtype == ids.dtype
    np.testing.assert_array_equal(out_ids.numpy(), np.where(kept.numpy(), ids.numpy(), -1))
    assert (out[~kept] == 0).all()


@pytest.mark.parametrize("renormalise", [None, True, False])
def test_p_zero_is_the_identity(renormalise: bool | None) -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    pruning = RouterPruning(config(PruneConfig("cap", 0.0, renormalise=renormalise)), spread())
    weights, ids = decisions()
    out, out_ids, _ = pruning.decide(0, weights, ids)
    assert out.equal(weights)
    assert out_ids.equal(ids)


def test_only_the_tokens_of_steps_count() -> None:
    import torch

    from coterie.vllm_plugin.pruning import RouterPruning

    def run(pruning: RouterPruning, rows: slice) -> None:
        for layer in range(2):
            pruning.decide(layer, weights[rows], ids[rows])

    weights, ids = decisions()
    asked = config(PruneConfig("cap", 0.3))
    whole, padded = RouterPruning(asked, engine()), RouterPruning(asked, engine())
    whole.begin_step(100)
    run(whole, slice(0, 100))
    run(padded, slice(0, TOKENS))  # a warm-up
    padded.begin_step(100)
    weights = weights.clone()
    weights[100:] = torch.nan  # what a captured graph pads a step with may be anything
    run(padded, slice(0, TOKENS))
    padded.end_step()
    run(padded, slice(0, TOKENS))
    assert padded.stats().to_json() == whole.stats().to_json()


def test_each_shard_of_a_step_counts_its_own_tokens() -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    weights, ids = decisions()
    seen = []
    for shard in range(2):
        pruning = RouterPruning(config(PruneConfig("cap", 0.3)), spread(attention_ranks=2, shards=2, shard=shard))
        pruning.begin_step(TOKENS - 1)  # the last row of the second half is padding
        rows = slice(shard * TOKENS // 2, (shard + 1) * TOKENS // 2)
        for layer in range(2):
            pruning.decide(layer, weights[rows], ids[rows])
        seen.append(pruning.stats().num_tokens)
    assert seen == [TOKENS // 2, TOKENS // 2 - 1]


def test_a_placement_says_where_experts_are() -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    rng = np.random.default_rng(3)
    placement = Placement(np.stack([rng.permutation(16) for _ in range(2)]), Topology.parse(COSTS), SPEC)
    pruning = RouterPruning(config(PruneConfig("cap", 0.3), None, placement), engine())
    weights, ids = decisions()
    kept_TK, _ = expected(Cap(0.3), 1, weights, ids, placement.device_of_expert()[1], -1)
    np.testing.assert_array_equal(pruning.decide(1, weights, ids)[2].numpy(), kept_TK)


def test_the_functions_can_be_captured_whole() -> None:
    """No graph break, so nothing waits for the device or depends on data; the same decisions come out."""
    import torch

    from coterie.vllm_plugin.pruning import RouterPruning

    pruning = RouterPruning(config(PruneConfig("cap", 0.3)), spread())
    weights, ids = decisions()
    captured = torch.compile(lambda w, i: pruning.decide(0, w, i), backend="eager", fullgraph=True)
    for one, other in zip(captured(weights, ids), pruning.decide(0, weights, ids), strict=True):
        assert one.equal(other)


def test_what_does_not_fit_the_model_is_refused() -> None:
    from coterie.vllm_plugin.pruning import RouterPruning

    cap = PruneConfig("cap", 0.3)
    with pytest.raises(ConfigError, match="say renormalise: true or false"):
        RouterPruning(config(cap), engine(renormalises=None))
    with pytest.raises(ConfigError, match=r"thetas have shape \[2, 4\], the model and its devices need \[2, 8\]"):
        RouterPruning(config(PruneConfig("priced", thetas=THETA), "8"), engine())
    other = Placement(np.arange(8)[None], Topology.parse("4"), MoESpec("other", 1, 8, 2))
    with pytest.raises(InfeasiblePlacement, match="use a placement made from this model's trace"):
        RouterPruning(config(cap, None, other), engine())
    published = Placement(np.arange(32).reshape(2, 16) % 16, Topology.parse("4"), SPEC)
    with pytest.raises(ConfigError, match="numbers experts as published"):
        RouterPruning(config(cap, None, published), engine(expert_order="0123456789abcdef"))
    with pytest.raises(InfeasiblePlacement, match="16 experts"):
        RouterPruning(config(cap, "32"), engine())
