"""Replayed decisions are the recorded ones, in the ids, the weights, the widths and the reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError, TraceError

pytestmark = pytest.mark.needs("transformers")


def test_a_model_decides_as_recorded(store: Any, decisions: Any) -> None:
    import torch

    from coterie.bench.offload.replay import Replayer, replay_decode, replay_prefill

    scaled = decisions.scaled(store.layout.width)
    replayer, seen = Replayer(scaled), []
    model = coterie.offload(store.folder, "50%", replayer.widths, observe=lambda *visit: seen.append(visit))
    with replayer.intercepting(model):
        assert len(replay_decode(model, replayer, np.array([[4, 40], [5, 41]]))) == 2
        assert replay_prefill(model, replayer, np.arange(10, 15)) > 0
    rows = [[4, 40]] * 3 + [[5, 41]] * 3 + [list(range(10, 15))] * 3
    assert len(seen) == len(rows)
    for (layer, ids_TK, weights_TK, widths_TK), tokens in zip(seen, rows, strict=True):
        assert np.array_equal(ids_TK.numpy(), scaled.ids_TLK[tokens, layer])
        assert torch.allclose(weights_TK.float(), torch.from_numpy(scaled.weights_TLK[tokens, layer]), atol=4e-3)
        assert np.array_equal(widths_TK.numpy(), scaled.widths_TLK[tokens, layer])
    model.close()
    with pytest.raises(ConfigError, match="token 90 is to be replayed, 90 are recorded"):
        replayer.at(np.array([90]))


def test_widths_keep_their_share_of_an_expert(decisions: Any) -> None:
    assert np.array_equal(decisions.scaled(256).widths_TLK, decisions.widths_TLK * 4)
    assert np.array_equal(decisions.scaled(96).widths_TLK, -(-decisions.widths_TLK * 3 // 2))
    assert decisions.scaled(64) == decisions or np.array_equal(decisions.scaled(64).widths_TLK, decisions.widths_TLK)


def test_recording_gives_what_the_routers_chose(decisions: Any) -> None:
    import torch

    from coterie.bench.offload.decisions import record_decisions
    from coterie.models.load import load_model

    model = load_model("tiny-mixtral", "float32")
    ids_WN = torch.randint(3, 4096, (3, 8), generator=torch.Generator().manual_seed(1))
    with coterie.record(model) as recorder, torch.inference_mode():
        model(input_ids=ids_WN, use_cache=False)
    trace, found = recorder.trace(), record_decisions(model, ids_WN, batch=2)
    assert np.array_equal(np.asarray(trace.expert_ids).swapaxes(0, 1), found.ids_TLK)
    assert np.allclose(np.asarray(trace.weights).swapaxes(0, 1), found.weights_TLK, atol=1e-5)


def test_pruned_traces_are_refused(make_trace: Any) -> None:
    from coterie.bench.offload.decisions import decisions_of_trace

    with pytest.raises(TraceError, match="replay the trace before pruning"):
        decisions_of_trace(make_trace(kept=0.8))


@pytest.mark.parametrize("policy", ["company", "lru-whole", "lru-layer-whole"])
def test_warming_gives_the_state_that_running_gives(policy: str, store: Any, decisions: Any) -> None:
    """What is read after warming is what a simulator reads there, and what a model that ran it all reads."""
    from coterie.bench.offload.bounds import reads_of
    from coterie.bench.offload.replay import Replayer, replay_decode
    from coterie.bench.offload.systems import System
    from coterie.bench.offload.timing import budget_bytes, time_round
    from coterie.policies.registry import make_policy

    scaled, system = decisions.scaled(store.layout.width), System("any", policy, widths="any")
    uses, budget = scaled.uses(store.layout), budget_bytes(system, 0.3, store)
    read_T = reads_of(uses, make_policy(policy, uses.shape), budget // store.layout.block_bytes)
    timed = time_round(store, system, 0.3, scaled, np.arange(60, 71), None)
    assert timed.tokens == 10
    assert timed.stats.loaded_bytes == int(read_T[61:71].sum()) * store.layout.block_bytes > 0
    assert timed.stats.peak_expert_bytes <= budget
    replayer = Replayer(scaled)
    model = coterie.offload(store.folder, budget, replayer.widths, policy=policy)
    with replayer.intercepting(model):
        replay_decode(model, replayer, np.arange(61)[:, None])
        before = model.stats()
        replay_decode(model, replayer, np.arange(61, 71)[:, None])
    assert model.stats().since(before).loaded_bytes == timed.stats.loaded_bytes
    model.close()


def test_skipping_on_a_miss_is_simulated_as_it_runs(store: Any, decisions: Any) -> None:
    from dataclasses import replace

    from coterie.bench.offload.bounds import reads_of
    from coterie.bench.offload.systems import System
    from coterie.bench.offload.timing import time_round
    from coterie.policies.registry import make_policy

    whole = replace(decisions.scaled(store.layout.width), widths_TLK=None)
    uses, blocks = whole.uses(store.layout), int(0.3 * 24 * 16)
    reads = {
        factor: reads_of(uses, make_policy("company", uses.shape), blocks, whole.weights_TLK, factor)
        for factor in (0, 0.8)
    }
    assert reads[0.8].sum() < reads[0].sum()
    timed = time_round(store, System("any"), 0.3, whole, np.arange(60, 71), None, options={"skip_misses": 0.8})
    assert timed.stats.skipped > 0
    # weights are bfloat16 in the model, so a slot at the edge may go either way
    assert abs(timed.stats.loaded_bytes - int(reads[0.8][61:71].sum()) * store.layout.block_bytes) <= (
        2 * store.layout.record_bytes
    )


def test_full_offload_reads_exactly_what_is_chosen(store: Any, decisions: Any) -> None:
    from dataclasses import replace

    from coterie.bench.offload.systems import FULL, lossless_systems
    from coterie.bench.offload.timing import time_round

    full = next(system for system in lossless_systems(2) if system.name == FULL)
    whole = replace(decisions.scaled(store.layout.width), widths_TLK=None)
    timed = time_round(store, full, 0.3, whole, np.arange(30, 41), None)
    assert timed.stats.loaded_bytes == timed.stats.chosen_bytes == 10 * 3 * 2 * store.layout.record_bytes
    assert timed.stats.hits == 0


def test_a_warm_model_was_not_used_before(store: Any) -> None:
    import torch

    model = coterie.offload(store.folder, "50%")
    model.warm([(0, np.array([1, 2]), np.array([16, 3]))])
    assert model.stats().loaded_bytes == (16 + 3) * store.layout.block_bytes
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5]]))
    with pytest.raises(ConfigError, match="warm one that was just made"):
        model.warm([])
    model.close()


def test_what_does_not_fit_whole_warms_expert_by_expert(store: Any) -> None:
    """As a long prompt leaves it behind; and what is read ahead learns it."""
    model = coterie.offload(store.folder, "20%", ahead=True)  # four of 24 experts
    model.warm((layer, np.arange(8), np.full(8, 16)) for layer in range(3))
    stats = model.stats()
    assert 0.9 * stats.budget_bytes < stats.loaded_bytes <= stats.budget_bytes
    assert stats.peak_expert_bytes <= stats.budget_bytes
    model.close()


def test_a_block_that_is_corrupted_is_named_when_warming(store: Any, tmp_path: Any) -> None:
    import shutil

    from coterie.errors import CheckpointError

    folder = shutil.copytree(store.folder, tmp_path / "store")
    with (folder / "experts.bin").open("r+b") as file:
        file.seek(store.layout.offset(0, 2) + 3 * store.layout.block_bytes)
        file.write(b"\xaa\xbb\xcc")
    model = coterie.offload(folder, "50%")
    with pytest.raises(CheckpointError, match="corrupted in layer 0, expert 2, block 3"):
        model.warm([(0, np.arange(4), np.full(4, 16))])
    model.close()
