"""Advice: the better placement where there is one, and a plain reason where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.engines.base import export_file
from coterie.engines.registry import get_exporter
from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.models.expert_shape import ExpertSizes
from coterie.placement.driver import prepare
from coterie.placement.metrics import average, measure
from coterie.report.advice import Situation, advise
from coterie.report.advice_copies import memory, without_copies
from coterie.report.advice_engines import ENGINES, backend_of, how_to_use, refusals, require_one_to_write
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split
from coterie.vllm_plugin import backends

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
    setting = prepare(make_trace(layers=5), FOUR, redundant=5)
    sizes = ExpertSizes(MoESpec("toy", 5, 16, 4, hidden_size=100), 30, "bfloat16")
    priced = memory(setting, sizes)
    assert priced["expert_bytes"] == 3 * 100 * 30 * 2
    assert priced["redundant_bytes_per_device"] == 2 * 5 * priced["expert_bytes"]  # 5 slots on 4 devices: 2 on one
    assert memory(setting, None)["expert_bytes"] is None


def lonely_pairs(tokens: int = 2400) -> RoutingTrace:
    """One expert that keeps company with all others alike: with a copy on every device no token needs two."""
    rng = np.random.default_rng(0)
    ids = np.stack([np.zeros((6, tokens), dtype=int), rng.integers(1, 13, (6, tokens))], axis=2).astype(np.uint8)
    sequences = np.arange(tokens, dtype=np.int32) // 50
    return RoutingTrace(ids, MoESpec("lonely", 6, 13, 2), sequence_ids=sequences, provenance={"synthetic": True})


def test_copies_are_used_where_they_beat_the_best_without_them() -> None:
    setting = prepare(lonely_pairs(), FOUR, redundant=3, dispatch="nearest")
    advice = advise(setting, Situation())
    copies = advice.found["copies"]
    assert advice.found["recommended"] in ("coterie+3", "eplb+3")
    assert copies["used"]
    assert copies["gain"] > 0.1
    assert copies["dispatch"] == "nearest"
    assert advice.placement.num_copies == 3
    assert advice.placement.hosts()[:, 0].all()  # the popular one is everywhere
    later = split(setting.trace, 0.2).second
    expected = average(measure(setting.trace, advice.placement.hosts(), FOUR, later, "nearest"))
    assert advice.found["expected"][advice.found["recommended"]] == expected
    assert advice.placement.method["dispatch"] == "nearest"
    assert advise(prepare(lonely_pairs(), FOUR), Situation()).found["copies"] is None


def test_copies_that_bring_nothing_are_not_used(make_trace: Any) -> None:
    setting = prepare(even_trace(), FOUR, redundant=4, dispatch="random")
    found = advise(setting, Situation()).found
    assert found["recommended"] == "linear"
    assert not found["copies"]["used"]
    assert found["memory"]["redundant_share"] == 0.25


def test_an_engine_that_loads_no_copies_gets_none() -> None:
    setting = prepare(lonely_pairs(), FOUR, redundant=3)
    refused = refusals("vllm", setting)
    assert "baked checkpoint, which has no copies" in refused[3]
    found = advise(setting, Situation(refused=refused)).found
    assert found["copies"]["refused"] == refused[3]
    assert "+" not in found["recommended"]
    assert found["reason"].startswith(
        "no gain here: vLLM gives every rank the same number of slots, and 13 experts on 4"
    )


def test_uneven_ranks_are_refused_with_the_remedy(make_trace: Any) -> None:
    three = Topology.parse("3")
    plain = prepare(make_trace(layers=6, tokens=2000), three)  # 16 experts
    refused = refusals("sglang", plain)
    assert refused == {0: "SGLang gives every rank the same number of slots, and 16 experts on 3 devices are 5 to 6 a "
                          "device; --redundant 2 would make them even"}  # fmt: skip
    assert advise(plain, Situation(refused=refused)).found["reason"] == f"no gain here: {refused[0]}"
    even = prepare(plain.trace, three, redundant=2, dispatch="nearest")
    assert set(refusals("sglang", even)) == {0}
    advice = advise(even, Situation(refused=refusals("sglang", even)))
    assert advice.placement.num_copies == 2
    assert refusals("sglang", prepare(plain.trace, FOUR)) == {}
    assert "takes no placement for 1 device" in refusals("tensorrt-llm", prepare(plain.trace, Topology.parse("1")))[0]


def company_in_order(tokens: int = 1200) -> RoutingTrace:
    """Each token's experts lie on one of three devices, in order, and each device has as many tokens."""
    rng = np.random.default_rng(0)
    first, end = np.array([[0, 6, 11], [6, 11, 16]])[:, np.arange(tokens) % 3]
    ids = np.stack([[rng.permutation(np.arange(*held))[:4] for held in zip(first, end, strict=True)] for _ in range(6)])
    sequences = np.arange(tokens, dtype=np.int32) // 50
    spec = MoESpec("in order", 6, 16, 4)
    return RoutingTrace(ids.astype(np.uint8), spec, sequence_ids=sequences, provenance={"synthetic": True})


def test_copies_that_the_engine_needs_are_recommended_whatever_they_bring() -> None:
    """Nothing beats linear here, but SGLang gives every rank as many slots, and 16 experts on 3 devices are uneven."""
    setting = prepare(company_in_order(), Topology.parse("3"), redundant=2, dispatch="nearest")
    advice = advise(setting, Situation(refused=refusals("sglang", setting)))
    found = advice.found
    assert (found["gain"], found["use"]) == (False, True)
    assert found["recommended"] in ("eplb+2", "coterie+2")
    assert (found["copies"]["used"], found["copies"]["needed"]) == (True, True)
    assert found["reason"].startswith(
        "SGLang gives every rank the same number of slots, and 16 experts on 3 devices are 5 to 6 a device; 2 copies "
        "make them even"
    )
    assert advice.placement.slots_per_device.tolist() == [6, 6, 6]
    enough = prepare(setting.trace, FOUR, redundant=4, dispatch="nearest")
    assert not advise(enough, Situation(refused=refusals("sglang", enough))).found["use"]


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
@pytest.mark.parametrize(("devices", "redundant"), [("3", 2), ("4", 0), ("4", 4), ("4", 2)])
def test_what_is_recommended_can_be_exported(engine: str, devices: str, redundant: int, tmp_path: Path) -> None:
    setting = prepare(even_trace(400), Topology.parse(devices), redundant=redundant, dispatch="random")
    refused = refusals(engine, setting)
    require_one_to_write(refused, redundant)
    placement = advise(setting, Situation(refused=refused)).placement
    exporter, spec = get_exporter(engine), replace(placement.spec, layer_ids=tuple(range(6)), num_model_layers=6)
    assert export_file(exporter, placement, tmp_path / "e.json", spec).path.is_file()


@pytest.mark.parametrize(("engine", "redundant"), [("sglang", 0), ("sglang", 1), ("vllm", 2)])
def test_where_nothing_is_loaded_there_is_nothing_to_write(engine: str, redundant: int) -> None:
    setting = prepare(even_trace(200), Topology.parse("3"), redundant=redundant)
    with pytest.raises(InfeasiblePlacement, match=r"no placement for --out: .* 5 to 6 a device"):
        require_one_to_write(refusals(engine, setting), redundant)


def test_backends_that_vllm_replaces_send_tokens_everywhere() -> None:
    assert not Situation("pplx").selective
    assert all(Situation(name).selective for name in backends.DROPS)


def test_slots_that_a_topology_lists_count_copies(make_trace: Any) -> None:
    topology = Topology(1, 4, slots_per_device=(6, 6, 5, 3))
    setting = prepare(make_trace(layers=3, tokens=1000), topology, redundant=4)
    assert without_copies(setting).topology.slots_per_device == (5, 4, 4, 3)
    assert memory(setting, None)["redundant_slots_per_device"] == 2
    found = advise(setting, Situation()).found
    assert {"linear", "coterie+4"} <= set(found["expected"])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_commands_that_name_the_file(make_trace: Any, engine: str) -> None:
    placement = advise(prepare(make_trace(tokens=400), FOUR), Situation()).placement
    use = how_to_use(engine, placement, "my placement.json", "MODEL", backend_of(engine, None))
    assert "'my placement.json'" in use.commands[0]
    assert use.commands[0].startswith("coterie bake" if engine == "vllm" else "coterie export")
    assert " 4" in use.commands[-1]
    assert use.notes
    config = how_to_use(engine, placement, "p.json", "config.json", backend_of(engine, None))
    assert "config.json" not in config.commands[-1]  # a config alone cannot be served


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        backend_of("vlm", None)
    with pytest.raises(ConfigError, match="batch is at least 1"):
        advise(prepare(even_trace(200), FOUR), Situation(batch=0))
