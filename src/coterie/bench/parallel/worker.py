"""One rank of the parallel benchmark: does what the benchmark says, line by line, until it says no more.

Every rank is given the same lines at the same time, since they exchange with one another. Lines are JSON, and so is the
one line that answers each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from coterie.bench.parallel.replay_file import load_replay
from coterie.errors import CoterieError
from coterie.parallel.calibrate import measure_links
from coterie.parallel.processes import Launch, joined
from coterie.parallel.timing import Stage, emulated_experts
from coterie.placement.placement import Placement
from coterie.topology import Topology

TIMEOUT_SECONDS = 60.0


def main() -> None:
    """Join the group, say so, and answer lines."""
    torch.set_num_threads(1)
    try:
        with joined(Launch.of_environment(), TIMEOUT_SECONDS) as comms:
            _say({"ready": comms.rank})
            stage: Stage | None = None
            for line in sys.stdin:
                asked = json.loads(line)
                if stage is None or asked.get("hidden_size"):
                    stage = Stage(comms, int(asked.get("hidden_size", 1)), torch.bfloat16)
                _say(_ACTIONS[asked["do"]](stage, asked))
    except CoterieError as error:
        _say({"error": str(error)})
        sys.exit(2)


def _hello(stage: Stage, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"rank": stage.comms.rank}


def _links(stage: Stage, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Times of exchanges of several sizes."""
    found = measure_links(stage, Topology.from_json(asked["topology"]), asked["tokens"], asked["repeats"])
    return {name: [[point.units, point.seconds] for point in points] for name, points in found.items()}


def _time(stage: Stage, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Times of steps of one configuration after another."""
    rows = []
    for item in asked["items"]:
        experts = emulated_experts(*item["compute"])
        times = stage.time_steps(load_replay(item["replay"]), _placement(item["placement"]), experts, item["steps"])
        rows.append({
            "seconds": times.seconds_S.tolist(), "compute": times.compute_S.tolist(),
            "sent": times.sent_bytes_G.tolist(), "copies": times.copies,
        })  # fmt: skip
    return {"rows": rows}


_ACTIONS = {"hello": _hello, "links": _links, "time": _time}


@cache
def _placement(file: str) -> Placement:
    return Placement.load(file)


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - the answer goes to the benchmark that started this


if __name__ == "__main__":
    main()
