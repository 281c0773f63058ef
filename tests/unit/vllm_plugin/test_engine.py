"""Devices, homes and what is said of traffic, for every way to serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.vllm_plugin.config import PluginConfig
from coterie.vllm_plugin.engine import Engine

SPEC = MoESpec("toy", 2, 16, 4)
ALONE = Engine("0.32.0", SPEC)
SPREAD = Engine("0.32.0", SPEC, expert_ranks=4, expert_rank=2, all_to_all=True, backend="deepep_high_throughput")
CONFIG = PluginConfig(Path("coterie.yaml"))


@pytest.mark.parametrize(
    ("change", "home", "drops", "said"),
    [
        ({}, 2, True, "deepep_high_throughput sends nothing to a dropped device"),
        ({"backend": "deepep_low_latency"}, 2, True, "deepep_low_latency sends nothing"),
        ({"backend": "deepep_v2"}, 2, True, "deepep_v2 sends nothing"),
        ({"backend": "allgather_reducescatter"}, 2, False, "no traffic is saved: allgather_reducescatter gathers"),
        ({"backend": "mori_high_throughput"}, 2, False, "no traffic is known to be saved: mori_high_throughput"),
        ({"gathers_first": True}, None, False, "gathers every token everywhere"),
        ({"attention_ranks": 2}, None, True, "sends nothing"),  # each token's attention is on two ranks
        ({"attention_ranks": 2, "shards": 2}, 2, True, "sends nothing"),  # which share the tokens out before they route
        ({"attention_ranks": 4, "all_to_all": False}, None, False, "no traffic is saved: every rank has every token"),
        ({"expert_ranks": 1, "all_to_all": False}, None, False, "no traffic is saved: no rank holds fewer"),
    ],
)
def test_homes_and_traffic(change: dict[str, Any], home: int | None, drops: bool, said: str) -> None:
    engine = replace(SPREAD, **change)
    assert (engine.home, engine.drops) == (home, drops)
    assert said in engine.traffic()


def test_expert_parallelism_says_the_devices() -> None:
    assert SPREAD.topology(CONFIG) == Topology.parse("4")
    nodes = Topology.parse("2x2,inter=3")
    assert SPREAD.topology(replace(CONFIG, devices=nodes)) == nodes
    for wrong in (Topology.parse("8"), Topology(1, 4, slots_per_device=(5, 5, 3, 3))):
        with pytest.raises(ConfigError, match="spreads 16 experts evenly over 4 ranks"):
            SPREAD.topology(replace(CONFIG, devices=wrong))


def test_without_it_the_file_does() -> None:
    assert ALONE.topology(replace(CONFIG, devices=Topology.parse("8"))) == Topology.parse("8")
    with pytest.raises(ConfigError, match="add devices: 8"):
        ALONE.topology(CONFIG)


def test_a_placement_needs_a_checkpoint_that_lies_so() -> None:
    placed = replace(CONFIG, placement=Placement(np.arange(32).reshape(2, 16) % 16, Topology.parse("4"), SPEC))
    assert ALONE.topology(placed) is None
    with pytest.raises(ConfigError, match="4 ranks hold this checkpoint's experts in order; bake"):
        SPREAD.topology(placed)
