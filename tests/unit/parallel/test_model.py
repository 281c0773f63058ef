"""A model spread over ranks (threads here) against the same model in one piece, for every family that can be spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.copies import RULES
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

pytestmark = pytest.mark.needs("transformers")
FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "ernie4_5_moe",
    "phimoe", "granitemoe", "gpt_oss",
)  # fmt: skip
PROMPTS = ([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]], [[20, 21, 22]], [])  # of each rank


def _placed(folder: Path, topology: str, seed: int = 0) -> Placement:
    from coterie.models.layers import spec_of
    from coterie.models.load import build_skeleton

    spec, rng = spec_of(build_skeleton(folder)), np.random.default_rng(seed)
    order_LE = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(order_LE, Topology.parse(topology), spec)


def _copied(folder: Path, topology: str, rule: str) -> Placement:
    """A random placement whose every device holds two experts more than its share."""
    plain, rng = _placed(folder, topology), np.random.default_rng(1)
    hosts_LEG = plain.hosts()
    for hosts_EG in hosts_LEG:
        for device in range(plain.topology.num_devices):
            hosts_EG[rng.permutation(np.flatnonzero(~hosts_EG[:, device]))[:2], device] = True
    slots = tuple(hosts_LEG[0].sum(axis=0).tolist())
    return Placement.from_hosts(
        hosts_LEG, replace(plain.topology, slots_per_device=slots), plain.spec, {"dispatch": rule}
    )


def _on_ranks(folder: Path, placement: Placement, work: Any, **options: Any) -> list[Any]:
    """`work(parallel)` on every rank; models are read before, one after the other."""
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.load import load_rank
    from coterie.parallel.model import ExpertParallel

    ranks = placement.topology.num_devices
    loaded = [load_rank(folder, placement, rank) for rank in range(ranks)]
    return run_ranks(ranks, lambda comms: work(ExpertParallel(loaded[comms.rank], placement, comms, **options)))


def _logits(parallel: Any) -> Any:
    import torch

    logits = None
    with torch.inference_mode():
        if PROMPTS[parallel.comms.rank]:
            logits = parallel.model(torch.tensor(PROMPTS[parallel.comms.rank])).logits
        parallel.drain()
    return logits, parallel.traffic.gather(parallel.comms)


def _whole(folder: Path) -> tuple[Any, list[Any], list[list[Any]]]:
    """The model in one piece: logits of each rank's prompts, and the experts that they chose, by layer and rank."""
    import torch

    from coterie.models.intercept import intercept
    from coterie.models.load import load_model

    model, chosen = load_model(folder), []
    seen: dict[int, Any] = {}

    def see(layer: int, hidden: Any, ids: Any, weights: Any) -> None:
        seen[layer] = ids.numpy()

    logits = []
    with intercept(model, see) as layers, torch.inference_mode():
        for prompts in PROMPTS:
            logits.append(model(torch.tensor(prompts)).logits if prompts else None)
            chosen.append([seen[layer] for layer in range(len(layers))] if prompts else None)
    return model, logits, chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_model_and_bytes_those_that_metrics_predict(
    family: str, tiny_checkpoint: Any
) -> None:
    folder = tiny_checkpoint(family)
    _check_logits_and_bytes(folder, _placed(folder, "3"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_with_copies_logits_are_the_same_and_bytes_those_that_the_rule_predicts(
    family: str, rule: str, tiny_checkpoint: Any
) -> None:
    folder = tiny_checkpoint(family)
    _check_logits_and_bytes(folder, _copied(folder, "3", rule))


def _check_logits_and_bytes(folder: Path, placement: Placement) -> None:
    import torch

    from coterie.parallel.traffic import predicted_bytes

    _, expected, chosen = _whole(folder)
    done = _on_ranks(folder, placement, _logits)
    for (logits, _), whole in zip(done, expected, strict=True):
        if whole is not None:
            torch.testing.assert_close(logits, whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-5)
    homes = np.repeat([rank for rank, ids in enumerate(chosen) if ids], [len(ids[0]) for ids in chosen if ids])
    ids_LTK = np.concatenate([np.stack(ids) for ids in chosen if ids], axis=1).astype(np.uint8)
    trace = RoutingTrace(ids_LTK, placement.spec, home_ids=homes.astype(np.int32))
    predicted = predicted_bytes(trace, placement, 4 * 32)
    for _, gathered in done:
        assert np.array_equal(gathered["dispatch"], predicted["dispatch"])
        assert np.array_equal(gathered["combine"], predicted["combine"])
    assert predicted["dispatch"].sum() > 0


@pytest.mark.parametrize("copies", [False, True])
def test_two_hops_give_the_same_logits(copies: bool, tiny_checkpoint: Any) -> None:
    import torch

    folder = tiny_checkpoint("qwen3_moe")
    placement = _copied(folder, "3x1", RULES[0]) if copies else _placed(folder, "3x1")
    flat = _on_ranks(folder, placement, _logits)
    relayed = _on_ranks(folder, placement, _logits, two_hop=True)
    for (one, _), (other, _) in zip(flat, relayed, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("copies", [0, 6])
def test_a_rank_holds_its_own_experts_alone(copies: int, tiny_checkpoint: Any) -> None:
    import torch

    from coterie.models.layers import find_moe_layers
    from coterie.models.load import load_model
    from coterie.parallel.layer_placement import experts_of_device
    from coterie.parallel.load import load_rank

    folder = tiny_checkpoint("deepseek_v2")
    placement = _copied(folder, "3", RULES[0]) if copies else _placed(folder, "3")
    whole, experts_held = find_moe_layers(load_model(folder)), placement.spec.num_experts + copies
    loaded = [load_rank(folder, placement, rank) for rank in range(3)]
    held = sum(each.expert_bytes for each in loaded)
    assert held * placement.spec.num_experts == loaded[0].all_expert_bytes * experts_held
    for rank, each in enumerate(loaded):
        for layer in find_moe_layers(each.model):
            own = experts_of_device(placement, layer.index, rank)
            experts: Any = layer.experts
            reference: Any = whole[layer.index].experts
            assert torch.equal(experts.gate_up_proj, reference.gate_up_proj[own])
            assert torch.equal(experts.down_proj, reference.down_proj[own])


def test_padding_and_rows_that_ended_are_not_sent(tiny_checkpoint: Any) -> None:
    import torch

    folder = tiny_checkpoint("mixtral")
    placement = _placed(folder, "2")
    both = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])

    def work(parallel: Any) -> Any:
        with torch.inference_mode():
            if parallel.comms.rank == 0:
                mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
                padded = parallel.model(both, attention_mask=mask).logits
                sent = parallel.traffic.dispatch_LG.copy()
                parallel.model(both[:1, 2:])
                parallel.model(both[1:])
                alone = parallel.traffic.dispatch_LG - sent
                parallel.ended_B = torch.tensor([True, True])
                before = parallel.traffic.dispatch_LG.copy()
                parallel.model(both)
                parallel.drain()
                return padded, sent, alone, parallel.traffic.dispatch_LG - before
            parallel.drain()
            return None

    padded, sent, alone, ended = _on_ranks(folder, placement, work)[0]
    assert padded.isfinite().all()
    assert sent.sum() > 0
    assert np.array_equal(sent, alone)
    assert not ended.any()


@pytest.mark.parametrize("rule", ["cap", "naive", "priced"])
def test_pruned_as_the_one_process_form_does(rule: str, tiny_checkpoint: Any) -> None:
    import torch

    import coterie
    from coterie.models.load import load_model

    folder = tiny_checkpoint("deepseek_v2")
    placement = _placed(folder, "3")
    options: dict[str, Any] = {"rule": rule, "p": 0.4}
    if rule == "priced":
        options = {"rule": rule, "thetas": np.full((placement.spec.num_layers, 3), 0.3)}
    model = load_model(folder)
    expected = []
    for rank, prompts in enumerate(PROMPTS):
        with coterie.prune_destinations(model, placement, homes=rank, **options), torch.inference_mode():
            expected.append(model(torch.tensor(prompts)).logits if prompts else None)

    def work(parallel: Any) -> Any:
        with coterie.prune_destinations(parallel.model, placement, homes=parallel.comms.rank, **options) as pruner:
            return *_logits(parallel), pruner.stats()

    done = _on_ranks(folder, placement, work)
    unpruned = _on_ranks(folder, placement, _logits)
    for (logits, *_), whole in zip(done, expected, strict=True):
        if whole is not None:
            torch.testing.assert_close(logits, whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-5)
    assert done[0][1]["dispatch"].sum() < unpruned[0][1]["dispatch"].sum()
    rows = sum(stats.remote_dpt * stats.num_tokens for *_, stats in done)
    assert np.allclose(done[0][1]["dispatch"].sum(axis=(1, 2)), rows * 4 * 32)


def test_refusals(tiny_checkpoint: Any) -> None:
    from coterie.parallel.expert_parallel import require_size
    from coterie.parallel.load import load_rank

    mixtral = tiny_checkpoint("mixtral")
    placement = _placed(mixtral, "4")
    with pytest.raises(ConfigError, match=r"2 ranks, but the placement is for 4 devices \(4\)"):
        require_size(placement, 2)
    with pytest.raises(InfeasiblePlacement, match="9 ranks for 8 experts"):
        require_size(placement, 9)
    with pytest.raises(InfeasiblePlacement, match="the placement is for"):
        load_rank(tiny_checkpoint("qwen3_moe"), placement, 0)
    baked = replace(placement, method={"trace": {"coterie_expert_order": "0123456789abcdef"}})
    with pytest.raises(ConfigError, match="use files of one numbering"):
        load_rank(mixtral, baked, 0)


def test_an_unknown_rule_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from coterie.parallel.expert_parallel import expert_parallel
    from coterie.parallel.in_memory import run_ranks

    placed = Placement(np.arange(4)[None], Topology(1, 1), MoESpec("toy", 1, 4, 2))
    with pytest.raises(ConfigError, match="did you mean 'nearest'"):
        run_ranks(1, lambda comms: expert_parallel(tmp_path, placed, comms, dispatch="nearst"))


def test_training_is_refused(tiny_checkpoint: Any) -> None:
    import torch

    folder = tiny_checkpoint("mixtral")

    def work(parallel: Any) -> None:
        hidden = torch.zeros((1, 32), requires_grad=True)
        parallel.model.model.layers[0].mlp.experts(hidden, torch.zeros((1, 2), dtype=torch.int64), torch.ones((1, 2)))

    with pytest.raises(ConfigError, match="do not train"):
        _on_ranks(folder, _placed(folder, "1"), work)
