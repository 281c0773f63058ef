"""What it is worth to know that one device is slow: predicted seconds of a step.

One of 8 devices computes at half speed. Every method that does not know (linear, EPLB, CAP, CAP's spectrum, and Coterie
told that all are equal) and Coterie that does are fitted on the earlier half of the sequences; steps of the later half
are predicted on the unequal machine (`placement/step_time.py`). How much of a step is communication decides what
balance is worth, so machines of three kinds are taken: links and experts such that the linear placement, on equal
devices, communicates 80%, 50% or 20% of a step. Coterie, told or not, is taken twice: its default pick, which knows
nothing of links, and (`timed`) the point of its spectrum with the least predicted time on the earlier half, as `advise`
chooses; where it is not told of the slow device, that time is of equal devices. These are predictions of a model, not
measured times.

    python benchmarks/unequal.py [TRACE ...] [--slow 0 7] [--speed 0.5] [--seed 0]

Prints a table for each trace, ratios over the best that does not know, then one JSON line; `--slow`: each of these
devices in turn is the slow one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.parallel.replay import Replay
from coterie.placement.candidates import Candidates
from coterie.placement.driver import choose, prepare, spaced_points
from coterie.placement.step_time import StepModel
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent")
IGNORANT = ("linear", "eplb", "cap", "cap-spectrum", "coterie")
SHARES = (0.8, 0.5, 0.2)
SPECTRUM_POINTS = 12
DEVICES, HELDOUT, BATCH, HIDDEN_SIZE = 8, 0.5, 64, 2048
LINK_BYTES_PER_S = 25e9  # any will do: the experts' time is scaled to it


def fitted(trace: RoutingTrace, topology: Topology, method: str, seed: int) -> tuple[Candidates, int]:
    """What the method proposes on the earlier half, and its choice."""
    return choose(prepare(trace, topology, seed=seed), method, split(trace, HELDOUT).first)


def timed(replay: Replay, topology: Topology, candidates: Candidates, top_k: int) -> NDArray[np.int64]:
    """The point of a spectrum whose steps are predicted to be the shortest, [L, E]."""
    balances = candidates.path.means(candidates.fit.values("balance"))
    points = [candidates.placement(point) for point in spaced_points(balances, SPECTRUM_POINTS)]
    return min(points, key=lambda device_LE: seconds(replay, topology, device_LE, top_k))


def machine(replay: Replay, linear_LE: NDArray[np.int64], share: float, top_k: int) -> Topology:
    """Equal devices on which linear communicates this share of a step."""
    links = Topology(1, DEVICES, intra_bandwidth_bytes_per_s=LINK_BYTES_PER_S, compute_base_s=0.0, compute_pair_s=1.0)
    times = replay.predict(StepModel.of(links, HIDDEN_SIZE, top_k), linear_LE)
    communication, pairs = (np.mean([getattr(time, name) for time in times]) for name in ("communication", "compute"))
    return replace(links, compute_pair_s=float(communication * (1 - share) / (share * pairs)))


def seconds(replay: Replay, topology: Topology, device_LE: NDArray[np.int64], top_k: int) -> float:
    """Mean predicted seconds of a step."""
    model = StepModel.of(topology, HIDDEN_SIZE, top_k)
    return float(np.mean([time.total for time in replay.predict(model, device_LE)]))


def measure(name: str, slow: list[int], speed: float, seed: int) -> dict[str, Any]:
    """All figures of one trace, printed and returned."""
    trace, equal = open_trace(name), Topology(1, DEVICES)
    parts, top_k = split(trace, HELDOUT), trace.spec.top_k
    known = {method: fitted(trace, equal, method, seed) for method in IGNORANT}
    picks = {method: candidates.placement(point) for method, (candidates, point) in known.items()}
    earlier, later = (Replay.of(trace, DEVICES, BATCH, part) for part in (parts.first, parts.second))
    columns = (*IGNORANT, "timed", "told", "told, timed", "ratio", "ratio, timed")
    print(f"\n{name}: predicted ms of a step of {DEVICES} x {BATCH} held-out tokens, one device at speed {speed:g}")
    print(f"  {'slow':>4} {'share':>6}" + "".join(f"{column:>13}" for column in columns))
    rows = []
    for device in slow:
        speeds = tuple(speed if g == device else 1.0 for g in range(DEVICES))
        told, point = fitted(trace, replace(equal, speed_per_device=speeds), "coterie", seed)
        for share in SHARES:
            even = machine(earlier, picks["linear"], share, top_k)
            uneven = replace(even, speed_per_device=speeds)
            ignorant = {**picks, "timed": timed(earlier, even, known["coterie"][0], top_k)}
            times = {method: seconds(later, uneven, device_LE, top_k) for method, device_LE in ignorant.items()}
            mine = [
                seconds(later, uneven, device_LE, top_k)
                for device_LE in (told.placement(point), timed(earlier, uneven, told, top_k))
            ]
            ratios = [time / min(times.values()) for time in mine]
            rows.append({"slow": device, "share": share, "ignorant": times, "told": mine, "ratio": ratios})
            line = "".join(f"{1e3 * time:13.3f}" for time in (*times.values(), *mine))
            print(f"  {device:>4} {share:>6.0%}{line}" + "".join(f"{ratio:13.3f}" for ratio in ratios))
    worst = [max(row["ratio"][kind] for row in rows) for kind in (0, 1)]
    return {"rows": rows, "worst_ratio": worst[0], "worst_ratio_timed": worst[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--slow", nargs="+", type=int, default=[0, DEVICES - 1])
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    traces = {name: measure(name, arguments.slow, arguments.speed, arguments.seed) for name in arguments.traces}
    about = {"speed": arguments.speed, "seed": arguments.seed, "batch": BATCH, "coterie": coterie.__version__}
    print(json.dumps({"benchmark": "unequal", "predicted": True, **about, "traces": traces}))


if __name__ == "__main__":
    main()
