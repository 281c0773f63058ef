"""Advice: the better placement where there is one, and a plain reason where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.models.expert_shape import ExpertSizes
from coterie.placement.driver import prepare
from coterie.placement.metrics import average, measure
from coterie.report.advice import Situation, advise, memory
from coterie.report.advice_engines import ENGINES, backend_of, how_to_use
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

FOUR = Topology.parse("4")
CALIBRATED = Topology(
    1, 4, intra_bandwidth_bytes_per_s=1e9, intra_latency_s=1e-5, compute_base_s=1e-5, compute_pair_s=1e-7
)


def even_trace(tokens: int = 2000) -> RoutingTrace:
    """Routing without any company or favourites: every placement is as good as another."""
    ids = np.argsort(np.random.default_rng(0).random((6, tokens, 16)), axis=2)[:, :, :4].astype(np.uint8)
    sequences = np.arange(tokens, dtype=np.int32) // 50
    return RoutingTrace(ids, MoESpec("even", 6, 16, 4), sequence_ids=sequences, provenance={"synthetic": True})


def test_company_is_worth_placing_by_and_the_figures_are_of_unseen_tokens(make_trace: Any) -> None:
    setting = prepare(make_trace(layers=6, tokens=2000), FOUR)
    advice = advise(setting, Situation())
    assert advice.found["gain"]
    assert advice.found["recommended"] != "linear"
    later = split(setting.trace, 0.2).second
    in_order = np.tile(np.repeat(np.arange(4), 4), (6, 1))
    for name, device_LE in (("linear", in_order), (advice.found["recommended"], advice.placement.device_of_expert())):
        assert advice.found["expected"][name] == average(measure(setting.trace, device_LE, FOUR, later))
    about = advice.found["trace"]
    counts = [about[f"{part}_tokens"] for part in ("fit", "choice", "judging", "heldout")]
    assert sum(counts) == 2000
    assert min(counts) > 0


def test_times_are_predicted_where_they_can_be(make_trace: Any) -> None:
    made = make_trace(layers=3, tokens=1000)
    trace = replace(made, spec=replace(made.spec, hidden_size=64))
    found = advise(prepare(trace, CALIBRATED), Situation(batch=16)).found
    assert found["compared_by"] == "predicted time of a step"
    assert any(name.startswith("coterie-") for name in found["validation"]["scores"])
    for each in found["expected"].values():
        assert each["step_s"] == pytest.approx(each["compute_s"] + each["communication_s"])
        assert each["bytes_per_token"] == pytest.approx(each["remote_dpt"] * (64 * 2 * 2 + 4 * 8))
    unknown = advise(prepare(made, CALIBRATED), Situation())  # no hidden size: counts decide
    assert unknown.found["compared_by"].startswith("the objective")


def test_no_gain_where_routing_has_no_company() -> None:
    advice = advise(prepare(even_trace(), FOUR), Situation())
    assert not advice.found["gain"]
    assert advice.found["recommended"] == "linear"
    assert advice.found["reason"].startswith("no gain here: linear is already as good")
    assert (advice.placement.physical_to_logical_map == np.arange(16)).all()


def test_no_gain_on_one_device(make_trace: Any) -> None:
    advice = advise(prepare(make_trace(), Topology.parse("1")), Situation())
    assert "on one device nothing travels" in advice.found["reason"]
    assert not advice.found["gain"]


def test_without_an_all_to_all_only_balance_counts(make_trace: Any) -> None:
    setting = prepare(make_trace(layers=12, tokens=3000, sequences=60), FOUR)
    found = advise(setting, Situation("none")).found
    assert found["compared_by"] == "B"
    assert "saves no traffic" in found["reason"]
    assert found["expected"][found["recommended"]]["balance"] < found["expected"]["linear"]["balance"]
    even = advise(prepare(even_trace(), FOUR), Situation("allgather_reducescatter")).found
    assert not even["gain"]
    assert "every token goes to every rank" in even["reason"]


def test_memory_of_copies(make_trace: Any) -> None:
    setting = prepare(make_trace(layers=5), FOUR)
    sizes = ExpertSizes(MoESpec("toy", 5, 16, 4, hidden_size=100), 30, "bfloat16")
    priced = memory(setting, Situation(sizes=sizes, redundant=5))
    assert priced["expert_bytes"] == 3 * 100 * 30 * 2
    assert priced["redundant_bytes_per_device"] == 2 * 5 * priced["expert_bytes"]  # 5 slots on 4 devices: 2 on one
    assert memory(setting, Situation())["expert_bytes"] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_commands_that_name_the_file(make_trace: Any, engine: str) -> None:
    placement = advise(prepare(make_trace(tokens=400), FOUR), Situation()).placement
    use = how_to_use(engine, placement, "my placement.json", "MODEL", backend_of(engine, None))
    assert "'my placement.json'" in use.commands[0]
    assert use.commands[0].startswith("coterie bake" if engine == "vllm" else "coterie export")
    assert " 4" in use.commands[-1]
    assert use.notes


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        backend_of("vlm", None)
    with pytest.raises(ConfigError, match="batch is at least 1"):
        advise(prepare(even_trace(200), FOUR), Situation(batch=0))
