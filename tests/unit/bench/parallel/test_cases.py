"""What the parallel benchmark fits, how it scales its machines, and what its table says of made-up times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from coterie.bench.parallel.cases import RULES, Case, Routing, at_link_costs, candidates_of, copied, pruned, unpruned
from coterie.bench.parallel.machines import MACHINES
from coterie.bench.parallel.measure import Timings
from coterie.bench.parallel.run import Setting, machines, scaled_experts
from coterie.bench.parallel.table import checks, find, rows_of, tuning_row
from coterie.errors import ConfigError
from coterie.parallel.choice import choose
from coterie.parallel.replay import spaced_layers
from coterie.placement.step_time import StepModel
from coterie.pruning.destinations import Cap
from coterie.pruning.routed import RoutedTrace, squared_loss
from coterie.topology import Topology
from coterie.trace.splits import split

NODE = Topology(1, 4, intra_bandwidth_bytes_per_s=1e6, intra_latency_s=1e-3)


@pytest.fixture(scope="module")
def routing(make_trace: Any) -> Routing:
    weights = np.random.default_rng(0).dirichlet(np.ones(4) * 0.7, (2, 800)).astype(np.float32)
    return Routing.of(make_trace(layers=2, tokens=800, sequences=20, weights=weights), 4, 20, 2)


def test_halves_do_not_overlap(routing: Routing) -> None:
    parts = split(routing.trace, 0.5)
    assert parts.num_first + parts.num_second == 800
    assert routing.fit.ids_LGTK[0, 0, 0].tolist() == routing.trace.expert_ids[0, 0].tolist()
    assert routing.heldout.ids_LGTK[0, 0, 0].tolist() == routing.trace.expert_ids[0, parts.num_first].tolist()


def test_layers_are_spread_over_the_model() -> None:
    assert spaced_layers(26, 4) == (3, 9, 16, 22)
    assert spaced_layers(2, 9) == (0, 1)


def test_every_rule_at_every_threshold(routing: Routing) -> None:
    pick = candidates_of(routing, Topology(1, 4), 2, seed=0)[3]
    assert pick.name == "ours-0"
    found = pruned(pick.placement, routing, (0.1, 0.3))
    assert [(case.rule, case.p) for case in found] == [(r, p) for p in (0.1, 0.3) for r in RULES]
    for case in found:
        assert case.replay.kept_weight() < 1
        assert case.name == f"ours, {case.rule} {case.p:g}"
    routed = RoutedTrace(routing.trace, pick.placement.device_of_expert(), Topology(1, 4))
    first = split(routing.trace, 0.5).first
    assert found[2].replay.kept_weight() >= found[1].replay.kept_weight() - 0.05
    assert squared_loss(routed, Cap(0.3), first) > squared_loss(routed, Cap(0.1), first) > 0


def test_lines_with_copies(routing: Routing) -> None:
    assert copied(routing, Topology(1, 4), 0, seed=0) == []
    found = copied(routing, Topology(1, 4), 4, seed=0)
    assert [case.name for case in found] == ["eplb, copies", "ours, copies"]
    for case in found:
        assert case.where.num_copies == 4
        with_them = case.replay.traffic(case.where.where(), Topology(1, 4))["remote_dpt"]
        first_LE = case.where.hosts().argmax(axis=2)  # the first copy of each alone
        assert with_them < case.replay.traffic(first_LE, Topology(1, 4))["remote_dpt"]


def test_costs_of_crossing_change_what_is_dropped(routing: Routing) -> None:
    topology = Topology(2, 2)
    pick = candidates_of(routing, topology, 1, seed=0)[3].placement
    near, far = at_link_costs(pick, routing, 0.3, (1.0, 5.0))
    nodes = [case.replay.traffic(pick.device_of_expert(), topology)["remote_npt"] for case in (near, far)]
    assert nodes[1] < nodes[0]


def test_experts_are_scaled_to_the_share_of_a_class(routing: Routing) -> None:
    linear = candidates_of(routing, NODE, 1, seed=0)[0]
    base, pair = scaled_experts(NODE, linear, routing, (1e-3, 1e-4), 0.8)
    assert base / pair == pytest.approx(10)
    topology = Topology.from_json({**NODE.to_json(), "compute_base_s": base, "compute_pair_s": pair})
    times = routing.fit.predict(StepModel.of(topology, 2048, 6), linear.placement.device_of_expert())
    shares = np.mean([time.communication for time in times]) / np.mean([time.total for time in times])
    assert shares == pytest.approx(0.8)


def test_the_machines() -> None:
    assert [machine.name for machine in machines(["C", "A"])] == ["A", "C"]
    assert {machine.like for machine in MACHINES} - {None} <= {machine.name for machine in MACHINES}
    with pytest.raises(ConfigError, match="no emulated machine 'D'; choose from A, B, C, cluster A, cluster B"):
        machines(["A", "D"])
    with pytest.raises(ConfigError, match="no emulated machine none"):
        machines([])
    quick = Setting().quick()
    assert (quick.machines, quick.thresholds) == (("A", "cluster B"), (0.2,))


def timings(seconds: float) -> Timings:
    rounds = np.array([1.0, 1.5, 1.1]) * seconds  # slow rounds are slow for all
    return Timings(rounds, rounds * 0.2, np.full(3, seconds), 1000.0, True, 1050.0, (0.02, 0.05))


def test_the_table_and_its_targets(routing: Routing) -> None:
    candidates = candidates_of(routing, Topology(1, 4), 2, seed=0)
    cases = unpruned(candidates, routing) + pruned(candidates[3].placement, routing, (0.2, 0.3))
    made = {"linear": 1.0, "eplb": 0.9, "cap": 0.8, "ours-0": 0.7, "ours-1": 0.75}
    lossy = {"naive": 0.68, "cap": 0.6, "priced": 0.58, "priced, squares": 0.6}
    times = [timings(made[case.placement] if case.rule == "none" else lossy[case.rule]) for case in cases]
    rows = rows_of("A", NODE, cases, times)
    rows.append({**find(rows, "A", "ours-0"), "placement": "ours", "point": "ours-0"})
    linear, ours = find(rows, "A", "linear"), find(rows, "A", "ours")
    assert {"class", "placement", "rule", "p", "tokens_per_s", "predicted_tokens_per_s", "remote_dpt", "peak_traffic",
            "bytes_on_wire"} <= set(linear)  # fmt: skip
    assert ours["speedup_over_linear"] == pytest.approx(1 / 0.7)
    assert ours["speedup_over_eplb"] == pytest.approx(0.9 / 0.7)
    assert linear["tokens_per_s"] == pytest.approx(4 * 20 / 1.1)
    assert linear["communication_share"] == pytest.approx(0.8)
    assert linear["wire_overhead"] == pytest.approx(0.05)
    found = {row["what"]: row for row in checks(rows, {"A": 0.8})}
    assert all(row["met"] for row in found.values())
    assert found["lossless speed-up over linear"]["shown"] == "1.43x"
    assert found["CAP's rule at 0.2 over naive at 0.3"]["found"] == pytest.approx(0.68 / 0.6)
    assert found["the pick, of the fastest measured"]["found"] == 1.0
    json.dumps([rows, list(found.values())], allow_nan=False)


def test_a_target_that_is_missed_is_said(routing: Routing) -> None:
    cases = unpruned(candidates_of(routing, Topology(1, 4), 1, seed=0), routing)
    rows = rows_of("A", NODE, cases, [timings(1.0) for _ in cases])
    rows.append({**find(rows, "A", "ours-0"), "placement": "ours"})
    found = {row["what"]: row["met"] for row in checks(rows, {"A": 0.2})}
    assert not found["lossless speed-up over linear"]
    assert not found["linear communicates 20% of a step"]


def test_what_tuning_found_is_told() -> None:
    choice = choose(["linear", "ours-0"], [2.0, 1.0], lambda indices: np.array([[2.0, 1.0]])[:, list(indices)])
    row = tuning_row("B", choice)
    assert (row["pick"], row["beats_linear"], len(row["candidates"])) == ("ours-0", True, 2)


def test_cases_have_names() -> None:
    assert Case("linear", None, "none", 0.0, None).name == "linear"  # type: ignore[arg-type]
