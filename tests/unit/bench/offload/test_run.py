"""The whole bench on a tiny model: keys, agreement of what is simulated and read, settings within their allowance."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import BudgetError, ConfigError

pytestmark = pytest.mark.needs("transformers")

ROW_KEYS = {
    "budget", "system", "tokens_per_s", "bytes_share", "timed_bytes_share", "bound_tokens_per_s", "share_of_bound",
    "belady_tokens_per_s", "own_bound_tokens_per_s", "share_of_own_bound", "overlap", "attainable_overlap",
    "perplexity_increase", "interval_95", "over_full", "over_moe_offload", "asked",
}  # fmt: skip


@pytest.fixture(scope="module")
def source() -> Any:
    from coterie import data
    from coterie.bench.offload.run import source_of_model
    from coterie.study.widths.context import StudySize

    texts = {name: data.text(name) for name in ("prose", "code", "papers")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return source_of_model("tiny-mixtral", texts, size=StudySize(32, 600, 8, 8, 3_000, 3))


@pytest.fixture(scope="module")
def small_shape() -> Any:
    from coterie.bench.offload.bench_model import BenchShape

    return BenchShape(6, 8, 2, 128, 384)


@pytest.fixture(scope="module")
def result(source: Any, small_shape: Any) -> Any:
    from coterie.bench.offload.run import run_bench
    from coterie.bench.offload.table import Setting

    setting = Setting({"10%": 0.1, "50%": 0.5}, 2e9, 4, 2)
    names = ["full", "moe-offload-lru", "moe-offload-lru-layer", "lossless", "value 3.6%"]
    return run_bench(source, setting, systems=names, studies=["batches", "scheduling"], shape=small_shape)


def test_rows_have_what_was_promised(result: Any) -> None:
    json.dumps(result, allow_nan=False)
    assert [(row["budget"], row["system"]) for row in result["rows"][:5]] == [
        ("10%", name) for name in result["systems"]
    ]
    assert len(result["rows"]) == 10
    for row in result["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["tokens_per_s"] > 0
        assert 0 <= row["overlap"] <= 1
        assert row["share_of_belady"] <= row["share_of_own_bound"] * 1.5
        lossy = row["system"] == "value 3.6%"
        assert (row["perplexity_increase"] != 0) == lossy
        assert row["bytes_share"] <= row["demanded_share"] + 1e-9
        assert row["belady_bytes_share"] <= row["bytes_share"] + 1e-9
    assert {"versions", "seed", "configuration", "emulated_bandwidth", "routing", "bench_model", "widths"} <= set(
        result
    )
    assert result["bench_model"]["random_weights"]
    assert result["batches"]
    assert {row["batch"] for row in result["batches"]} == {1, 4, 16}
    assert result["scheduling"]["microseconds"].keys() == {"looking up widths", "coordination", "both"}


def test_full_offload_and_resident_experts_are_the_ends(result: Any) -> None:
    rows = {(row["budget"], row["system"]): row for row in result["rows"]}
    for budget in ("10%", "50%"):
        assert rows[budget, "full"]["timed_bytes_share"] == 1
        assert rows[budget, "full"]["bytes_share"] == 1
    assert rows["10%", "full"]["tokens_per_s"] == rows["50%", "full"]["tokens_per_s"]
    assert rows["50%", "lossless"]["bytes_share"] < rows["10%", "lossless"]["bytes_share"] < 1
    assert rows["10%", "value 3.6%"]["bytes_share"] < rows["10%", "lossless"]["bytes_share"]


def test_without_memory_for_all_computing_is_what_is_left_of_the_waiting(
    source: Any, small_shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.bench.offload import table
    from coterie.bench.offload.run import run_bench

    monkeypatch.setattr(table, "available_bytes", lambda: small_shape.layout.total_bytes)
    monkeypatch.setattr(table, "Resident", None)
    found = run_bench(source, table.Setting({"20%": 0.2}, 1e9, 2, 1), systems=["lossless"], shape=small_shape)
    row = found["rows"][0]
    assert 0 < row["compute_seconds_per_token"] < 1 / row["tokens_per_s"]


def test_widths_are_chosen_on_calibration_text(source: Any) -> None:
    from coterie.bench.offload.plans import upper

    plans = source.plans
    chosen = plans.get("value 3.6%")
    calibrated = plans.context.evaluate(chosen.plan, plans.context.calibration).measured
    assert upper(calibrated.rise_WS) <= 0.036
    assert calibrated.increase == pytest.approx(chosen.calibration_increase)
    held_out = plans.context.evaluate(chosen.plan).measured
    assert held_out.increase == pytest.approx(chosen.increase)
    assert chosen.decisions.widths_TLK.max() <= 384


def test_lanes_lose_what_a_batch_of_windows_loses(source: Any, small_shape: Any) -> None:
    """Without anything that depends on the cache; and what is resident only ever lowers the loss here."""
    from coterie.bench.offload.decisions import record_decisions
    from coterie.bench.offload.lanes import Lane, run_lanes
    from coterie.pruning.width_planning import plan_widths

    context = source.plans.context
    plan = plan_widths(context.profile, "value", bytes=0.4)
    lanes = [Lane(0.2), Lane(0.2, plan), Lane(0.5, plan, use_cached=True), Lane(0.2, None, skip_misses=1.0)]
    ids_WN = context.bench.ids_WN[:4]
    full, narrow, cached, skipped = run_lanes(context.model, ids_WN, lanes, small_shape.layout, 384, 2)
    base_WS = context.bench.base_WS[:4]
    assert np.allclose(full.nll_WS, base_WS, atol=1e-4)
    expected = record_decisions(context.model, ids_WN, plan)
    assert np.array_equal(narrow.decisions.ids_TLK, expected.ids_TLK)
    assert np.array_equal(narrow.decisions.widths_TLK, expected.widths_TLK)
    assert base_WS.mean() < cached.nll_WS.mean() < narrow.nll_WS.mean()
    assert skipped.nll_WS.mean() > base_WS.mean()
    assert full.warm_W.tolist() == [True, False, True, False]


def test_a_lane_decides_as_the_runtime(source: Any, small_shape: Any, tmp_path: Any) -> None:
    """One sequence, from an empty cache: the same widths run, token by token and layer by layer."""
    import torch

    import coterie
    from coterie.bench.offload.lanes import Lane, LaneCache
    from coterie.bench.offload.replay import Decoder
    from coterie.models.reorder import reordered
    from coterie.models.widths import apply_widths
    from coterie.pruning.width_planning import plan_widths

    context = source.plans.context
    plan = plan_widths(context.profile, "value", bytes=0.4)
    context.model.save_pretrained(tmp_path / "model")
    coterie.pack(tmp_path / "model", tmp_path / "store", profile=context.profile)
    seen, lane_seen = [], []
    model = coterie.offload(
        tmp_path / "store", "40%", plan, use_cached=True, skip_misses=0.7,
        observe=lambda layer, ids, weights, widths: seen.append(widths.tolist()),
    )  # fmt: skip
    from coterie.checkpoint.expert_store import open_store

    layout = open_store(tmp_path / "store").layout
    cache = LaneCache(Lane(0.4, plan, True, 0.7), layout, 384)

    def settle(layer: int, ids_TK: Any, weights_TK: Any) -> Any:
        from coterie.pruning.widths import widths

        widths_TK = widths(plan, layer, ids_TK.numpy(), weights_TK.numpy())
        cache.settle(layer, ids_TK[0].numpy(), weights_TK[0].numpy(), widths_TK[0])
        lane_seen.append(widths_TK.tolist())
        return torch.from_numpy(widths_TK)

    ids = context.bench.ids_WN[0]
    offloaded, resident = Decoder(model), Decoder(context.model)
    for token in ids:
        offloaded.step(token[None, None])
    with reordered(context.model, plan.order_LEI), apply_widths(context.model, settle):
        for token in ids:
            resident.step(token[None, None])
    assert lane_seen == seen
    assert model.stats().skipped > 0
    model.close()


def test_settings_that_depend_on_the_cache_stay_within_their_allowance(
    source: Any, small_shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.bench.offload.cached_plans._TRIES", 2)
    from coterie.bench.offload.cached_plans import CACHED, CACHED_8_BITS, SKIPPED, CachedPlans

    cached = CachedPlans(source.plans, small_shape, (0.2, 0.5))
    for name in (CACHED, CACHED_8_BITS, SKIPPED):
        low, high = (cached.get(name, share) for share in (0.2, 0.5))
        for measured in (low, high):
            assert measured.calibration_increase <= 0.015
            assert len(measured.decisions) == context_tokens(source)
        assert low is cached.get(name, 0.2)
    assert set(cached.to_json()[SKIPPED]) == {"20%", "50%"}
    assert cached.get(CACHED, 0.5).options == {"use_cached": True}


def test_a_store_in_eight_bits_reads_half_within_the_same_bytes(source: Any, small_shape: Any) -> None:
    from coterie.bench.offload.run import run_bench
    from coterie.bench.offload.table import Setting

    setting = Setting({"20%": 0.2}, None, 4, 2)
    names = ["full", "moe-offload-lru-layer", "lossless", "lru by layer in 8 bits", "full width in 8 bits"]
    rows = {row["system"]: row for row in run_bench(source, setting, systems=names, shape=small_shape)["rows"]}
    rounded, whole = rows["full width in 8 bits"], rows["lossless"]
    assert rounded["demanded_share"] == 0.5
    assert rounded["bytes_share"] < 0.5 * whole["bytes_share"]  # twice as many experts fit, too
    assert rounded["budget_bytes"] <= whole["budget_bytes"]
    assert rows["lru by layer in 8 bits"]["bytes_share"] < 0.5 * rows["moe-offload-lru-layer"]["bytes_share"]
    assert 0 < abs(rounded["perplexity_increase"]) < 0.005


def context_tokens(source: Any) -> int:
    return int(source.plans.context.bench.ids_WN.numel())


def test_what_cannot_be(source: Any, small_shape: Any, make_trace: Any) -> None:
    from coterie.bench.offload.run import run_bench, source_of_trace
    from coterie.bench.offload.table import Setting

    setting = Setting({"10%": 0.1}, None, 4, 2)
    with pytest.raises(BudgetError, match=r"4% .* the smallest that works here is 4\.17%"):
        run_bench(source, replace(setting, budgets={"4%": 0.04}), shape=small_shape)
    with pytest.raises(ConfigError, match="unknown system 'losless'; did you mean 'lossless'"):
        run_bench(source, setting, systems=["losless"], shape=small_shape)
    with pytest.raises(ConfigError, match="unknown table 'length'; did you mean 'lengths'"):
        run_bench(source, setting, studies=["length"], shape=small_shape)
    with pytest.raises(ConfigError, match=r"100 tokens are to be timed, 256 were recorded.*at most 85"):
        run_bench(source, replace(setting, tokens=100), shape=small_shape)
    with pytest.raises(ConfigError, match="1 tokens in 2 rounds"):
        run_bench(source, replace(setting, tokens=1), shape=small_shape)
    other = source_of_trace(make_trace(layers=5, tokens=60, experts=8, top_k=2), "toy")
    with pytest.raises(ConfigError, match="the routing is of 5 layers of 8 experts, top-2"):
        run_bench(other, setting, shape=small_shape)
