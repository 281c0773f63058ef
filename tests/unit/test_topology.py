"""Devices and nodes: what is written, what is meant, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.topology import MAX_DEVICES, Topology


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", Topology(1, 8)), ("2x8", Topology(2, 8)), (" 2 X 4 ", Topology(2, 4)), ("1x3", Topology(1, 3)),
        ("2x8,inter=2.5", Topology(2, 8, 2.5)), ("2x8, inter = 1", Topology(2, 8, 1.0)), ("4096", Topology(1, 4096)),
    ],
)  # fmt: skip
def test_written_as_text(text: str, expected: Topology) -> None:
    assert Topology.parse(text) == expected
    assert Topology.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not understood; write it like 8"),
        ("x", "is not understood"),
        ("2y4", "is not understood"),
        ("2x", "is not understood"),
        ("2x4x2", "is not understood"),
        ("-2", "is not understood"),
        ("2.5", "is not understood"),
        ("8,", "is not understood"),
        ("2x4,intra=5", "unknown option 'intra'"),
        ("2x4,inter", "is not a number"),
        ("2x4,inter=fast", "inter = 'fast'"),
        ("2x4,inter=0.5", "costs 1 to 1e6"),
        ("2x4,inter=nan", "costs 1 to 1e6"),
        ("2x4,inter=1e999", "costs 1 to 1e6"),
        ("0", "at least 1"),
        ("2x0", "at least 1"),
        ("0x2", "at least 1"),
        ("4097", f"at most {MAX_DEVICES}"),
        ("9" * 30, f"at most {MAX_DEVICES}"),
        ("missing.yaml", r"missing\.yaml does not exist"),
    ],
)
def test_typos_are_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        Topology.parse(text)
    assert "\n" not in str(raised.value)


def test_written_as_yaml(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "num_nodes: 2\ndevices_per_node: 2\ninter_cost: 3\nslots_per_device: [3, 2, 2, 1]\n"
        "intra_bandwidth_bytes_per_s: 400GB/s\ninter_bandwidth_bytes_per_s: 25000000000\n"
    )
    found = Topology.parse(str(path))
    assert found == Topology(2, 2, 3.0, (3, 2, 2, 1), 400e9, 25e9)
    assert Topology.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no mapping"),
        ("[1, 2]", "holds no mapping"),
        ("[" * 1500, "cannot read the topology file"),
        ("num_nodes: 2001-99-99", "cannot read the topology file"),
        ("num_nodes: [", "cannot read the topology file"),
        ("nodes: 2", "unknown key 'nodes'"),
        ("1: 2", "unknown key '1'"),
        ("num_nodes: two", "num_nodes = 'two' in the topology has the wrong type"),
        ("num_nodes: true", "wrong type"),
        ("num_nodes: 2.0", "wrong type"),
        ("slots_per_device: 3", "wrong type"),
        ("slots_per_device: [1.5]", "wrong type"),
        ("slots_per_device: [2, 2]", "2 entries in slots_per_device, 1 devices"),
        ("slots_per_device: [0]", "an entry below 1"),
        ("slots_per_device: []", "0 entries"),
        ("speed_per_device: [1, 2]", "2 entries in speed_per_device, 1 devices"),
        ("speed_per_device: [0]", "holds 0; a speed is from 0.001 to 1000"),
        ("speed_per_device: [.nan]", "a speed is from"),
        ("speed_per_device: fast", "wrong type"),
        ("speed_per_device: [true]", "wrong type"),
        ("link_costs: [0]", "wrong type"),
        ("link_costs: [[1]]", "0 to itself"),
        ("link_costs: [[0], [0]]", "2 entries in link_costs, 1 devices"),
        ("devices_per_node: 2\nlink_costs: [[0, 1], [0]]", "row 1 of link_costs has 1 entries"),
        ("devices_per_node: 2\nlink_costs: [[0, 1], [2, 0]]", "1 from device 0 to 1 and 2 back"),
        ("devices_per_node: 2\nlink_costs: [[0, 0], [0, 0]]", "0 from device 0 to 1"),
        (
            "devices_per_node: 2\nlink_costs: [[0, .nan], [.nan, 0]]",
            "from device 0 to 1; it is 0 to itself",
        ),
        ("inter_cost: .nan", "costs 1 to 1e6"),
        ("inter_cost: yes", "wrong type"),
        ("inter_cost: 1" + "0" * 400, "inter_cost in the topology is an integer too large"),
        ("intra_bandwidth_bytes_per_s: 25", None),
        ("intra_bandwidth_bytes_per_s: -25", "intra_bandwidth_bytes_per_s"),
        ("intra_bandwidth_bytes_per_s: 0", "intra_bandwidth_bytes_per_s"),
        ("inter_bandwidth_bytes_per_s: .nan", "inter_bandwidth_bytes_per_s"),
        ("inter_bandwidth_bytes_per_s: .inf", "inter_bandwidth_bytes_per_s"),
        ("inter_bandwidth_bytes_per_s: fast", "write it like 25GB/s"),
    ],
)
def test_yaml_that_cannot_be(tmp_path: Path, content: str, words: str | None) -> None:
    path = tmp_path / "t.yml"
    path.write_text(content)
    if words is None:
        Topology.parse(str(path))
        return
    with pytest.raises(ConfigError, match=words) as raised:
        Topology.parse(str(path))
    assert "\n" not in str(raised.value)


def test_unequal_devices_and_links(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "devices_per_node: 3\nspeed_per_device: [1, 0.5, 1]\nlink_costs: [[0, 1, 3], [1, 0, 3], [3, 3, 0]]\n"
    )
    found = Topology.parse(str(path))
    assert found.speeds().tolist() == [1, 0.5, 1]
    assert found.cost_matrix().tolist() == [[0, 1, 3], [1, 0, 3], [3, 3, 0]]
    price_G, node = found.visit_prices()
    assert price_G == pytest.approx([6 / 7, 6 / 7, 9 / 7])  # mean cost of a link: 2 to the first two, 3 to the last
    assert node == 0
    found.save(path)
    assert Topology.parse(str(path)) == found
    part = found.part(np.array([0, 2]), 2)
    assert part.cost_matrix().tolist() == [[0, 3], [3, 0]]
    assert (part.num_nodes, part.speed_per_device) == (2, (1, 1))


@pytest.mark.parametrize("text", ["1", "4", "2x3,inter=5", "4x1,inter=3"])
def test_the_default_costs_written_out_price_visits_alike(text: str) -> None:
    plain = Topology.parse(text)
    written = replace(plain, link_costs=tuple(map(tuple, plain.cost_matrix().tolist())))
    for mine, theirs in zip(written.visit_prices(), plain.visit_prices(), strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_a_binary_file_is_no_topology(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"t\.yaml is no UTF-8 text"):
        Topology.parse(str(tmp_path / "t.yaml"))


@pytest.mark.parametrize(
    ("topology", "experts", "slots"),
    [
        (Topology(1, 3), 8, [3, 3, 2]),
        (Topology(2, 2), 8, [2, 2, 2, 2]),
        (Topology(1, 1), 5, [5]),
        (Topology(1, 3), 3, [1, 1, 1]),
        (Topology(1, 3, slots_per_device=(1, 5, 2)), 8, [1, 5, 2]),
    ],
)
def test_slots(topology: Topology, experts: int, slots: list[int]) -> None:
    assert topology.slots(experts).tolist() == slots


def test_slots_that_do_not_fit() -> None:
    with pytest.raises(InfeasiblePlacement, match="7 experts on 8 devices leave devices empty; use at most 7"):
        Topology(2, 4).slots(7)
    with pytest.raises(InfeasiblePlacement, match="the topology has 8 slots for 9 experts"):
        Topology(1, 3, slots_per_device=(1, 5, 2)).slots(9)


def test_links_cost_by_what_they_cross() -> None:
    topology = Topology(2, 2, 5.0)
    assert topology.num_devices == 4
    assert topology.node_of_device().tolist() == [0, 0, 1, 1]
    assert topology.cost_matrix().tolist() == [[0, 1, 5, 5], [1, 0, 5, 5], [5, 5, 0, 1], [5, 5, 1, 0]]


@pytest.mark.parametrize(
    "fields", [{"num_nodes": 0}, {"inter_cost": 0.0}, {"intra_bandwidth_bytes_per_s": float("nan")}]
)
def test_what_is_built_is_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Topology(**fields)


def test_measured_fields_are_kept_and_checked(tmp_path: Path) -> None:
    found = Topology(
        2, 2, intra_bandwidth_bytes_per_s=1e9, inter_bandwidth_bytes_per_s=1e8, bus_bandwidth_bytes_per_s=3e9,
        intra_latency_s=1e-4, inter_latency_s=2e-4, compute_base_s=0.0, compute_pair_s=1e-6,
        measured={"by": "coterie calibrate", "links": [{"bytes": 10, "seconds": 0.1}]},
    )  # fmt: skip
    found.save(tmp_path / "t.yaml")
    again = Topology.parse(str(tmp_path / "t.yaml"))
    assert again == found
    assert again.measured == found.measured
    assert hash(again) == hash(found)
    for fields, words in (
        ({"intra_latency_s": -1.0}, "intra_latency_s = -1 in the topology; a time is at least 0"),
        ({"compute_pair_s": float("inf")}, "compute_pair_s = inf"),
        ({"bus_bandwidth_bytes_per_s": 0.0}, "a bandwidth is above 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Topology(**fields)
    with pytest.raises(ConfigError, match="measured = 3 in the topology has the wrong type"):
        Topology.from_json({"measured": 3})
