"""Calibrating and tuning between real processes, and what a wrong start says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from coterie.errors import RankError
from coterie.models.load import resolve
from coterie.parallel.pipeline import start_ranks
from coterie.placement.placement import Placement
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.timeout(600)]


def test_two_processes_calibrate_and_tune(tmp_path: Path) -> None:
    topology, trace, out = tmp_path / "t.yaml", tmp_path / "trace.safetensors", tmp_path / "p.json"
    record(trace)
    said = json.loads(start_ranks(2, ["calibrate", "--out", str(topology), "--model", "tiny-qwen3-moe",
                                      "--repeats", "1", "--json"]))  # fmt: skip
    found = Topology.parse(str(topology))
    assert said["out"] == str(topology)
    assert (found.num_nodes, found.devices_per_node) == (1, 2)
    assert (found.intra_bandwidth_bytes_per_s or 0) > 0
    assert found.compute_pair_s is not None
    config = str(resolve("tiny-qwen3-moe") / "config.json")
    tune = ["tune", "--trace", str(trace), "--model", config, "--topology", str(topology), "--out", str(out),
            "--spectrum", "2", "--rounds", "2", "--best", "1", "--batch", "16", "--layers", "2"]  # fmt: skip
    result = json.loads(start_ranks(2, [*tune, "--json"]))
    names = [row["name"] for row in result["candidates"]]
    assert names[:3] == ["linear", "eplb", "cap"]
    assert sum(row["measured_s"] is not None for row in result["candidates"]) == 3
    assert Placement.load(out).method["tuned"]["pick"] == result["pick"]
    copied = json.loads(start_ranks(2, [*tune, "--redundant", "6", "--dispatch", "nearest", "--json"]))
    assert (copied["redundant"], copied["dispatch"]) == (6, "nearest")
    assert Placement.load(out).num_copies == 6
    with pytest.raises(RankError, match=r"1 ranks and a topology of 2 devices; start one rank for each device"):
        start_ranks(1, tune)
    with pytest.raises(RankError, match=r"the trace is of .* --model is tiny-mixtral"):
        start_ranks(1, [*tune[:3], "--model", "tiny-mixtral", *tune[5:]])


def record(path: Path) -> None:
    import sys

    subprocess.run(
        [sys.executable, "-m", "coterie", "record", "tiny-qwen3-moe", "--domain", "prose", "--tokens", "500",
         "--length", "100", "--out", str(path)],
        check=True, capture_output=True,
    )  # fmt: skip
