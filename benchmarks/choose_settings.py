"""Which settings of placement do best on tokens that did not fit, inside the earlier half of each trace.

The later half of every trace only measures (`placement.py`), so settings must be chosen without it. Here the earlier
half is cut again, by whole sequences: the earlier 60% of its tokens fit and the rest scores, then the other way round.
Short recordings count as much as long ones: each fit is repeated on the 500 and the 1,000 of its tokens that are
nearest to the score.

    python benchmarks/choose_settings.py [TRACE ...] [--topology 8] [--every 4]

One setting at a time is varied around those of the package, always by fits on the same tokens. A variant is scored by

    equal B   cost (visits, the busiest device's included) of its spectrum over that of CAP's: at each of CAP's points
              that of its cheapest point with no more B; the mean, the worst, and for how many it has no such point
    pick      DPT, peak and B of its default pick over those of CAP's Algorithm 1, and the same as one objective

all by the package's own objective, whatever a variant's search minimised. Means over all fits; then one JSON line.
Every fourth layer is used (`--every 1`: all).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from coterie.placement import driver, problem, refine
from coterie.placement.candidates import Candidates, Measured, Setting, measure_candidates, propose
from coterie.placement.driver import choose, prepare
from coterie.placement.metrics import average
from coterie.topology import Topology
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

TRACES = ("dsv2lite-law", "dsv2lite-intent", "gptoss20b-decode")
HELDOUT = 0.5
SCORED = 0.4
SIZES = (500, 1000, None)
COLUMNS = ("equal_b", "worst", "beyond", "objective", "dpt", "peak", "b")


@dataclass(frozen=True)
class Variant:
    """The package's settings but for some.

    Attributes:
        constants: by module and name, what to set for the time of a fit.
        peak: weight of the busiest device over the default's.
        balance: price of balance over the default's.
    """

    constants: Mapping[tuple[ModuleType, str], Any] = field(default_factory=dict)
    peak: float = 1.0
    balance: float = 1.0

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[Setting]:
        """The setting to fit in, and the constants set for as long."""
        objective = setting.objective
        scaled = replace(objective, peak=self.peak * objective.peak, balance=self.balance * objective.balance)
        with ExitStack() as stack:
            for (module, name), value in self.constants.items():
                stack.enter_context(patch.object(module, name, value))
            yield replace(setting, objective=scaled)


VARIANTS = {
    "as packaged": Variant(),
    "window tokens 256": Variant({(problem, "WINDOW_TOKENS"): 256}),
    "windows 2": Variant({(problem, "NUM_WINDOWS"): 2}),
    "windows 8": Variant({(problem, "NUM_WINDOWS"): 8}),
    "peak x 0.67": Variant(peak=2 / 3),
    "peak x 1.33": Variant(peak=4 / 3),
    "balance x 1.33": Variant(balance=4 / 3),
    "errors 1": Variant({(driver, "STANDARD_ERRORS"): 1}),
    "limits 4, tail 4": Variant({(refine, "NUM_LIMITS"): 4, (refine, "NUM_TAIL_LIMITS"): 4}),
    "patience 15": Variant({(refine, "PATIENCE"): 15}),
}


@dataclass(frozen=True)
class Fold:
    """Tokens that fit and tokens that score, and what CAP reaches there.

    Attributes:
        setting: trace, topology, objective.
        fit: [T] indices.
        score: [T] indices.
        cap: CAP's spectrum, of each layer Algorithm 1's placement first, and its metrics on the tokens that score.
    """

    setting: Setting
    fit: np.ndarray
    score: np.ndarray
    cap: tuple[Candidates, Measured]


def every_layer(trace: RoutingTrace, every: int) -> RoutingTrace:
    """The trace with one layer of so many."""
    layers = slice(min(1, every - 1), None, every)
    ids = trace.expert_ids[layers]
    kept = None if trace.kept is None else trace.kept[layers]
    return replace(
        trace, expert_ids=ids, kept=kept, weights=None, spec=replace(trace.spec, num_layers=len(ids), layer_ids=())
    )


def folds(trace: RoutingTrace, topology: Topology) -> Iterator[tuple[dict[str, Any], Fold]]:
    """Every fold of the trace's earlier half, described; nothing else of the trace is read."""
    half = split(trace, HELDOUT).first
    setting = prepare(trace, topology)
    everything = np.arange(trace.num_tokens)
    for direction, share in (("forward", SCORED), ("backward", 1 - SCORED)):
        parts = split(trace, share, half)
        early, late = everything[parts.first], everything[parts.second]
        fit, score = (early, late) if direction == "forward" else (late, early)
        for size in SIZES:
            if size is not None and size >= fit.size:
                continue
            part = fit if size is None else fit[-size:] if direction == "forward" else fit[:size]
            candidates = propose(setting, "cap-spectrum", part)
            cap = (candidates, measure_candidates(setting, candidates, score))
            yield {"direction": direction, "size": size or "all"}, Fold(setting, part, score, cap)


def scores(fold: Fold, variant: Variant) -> dict[str, float]:
    """The figures of one variant on one fold; see the module."""
    objective = fold.setting.objective
    with variant.applied(fold.setting) as setting:
        candidates, point = choose(setting, "coterie", fold.fit)
    measured = measure_candidates(setting, candidates, fold.score)
    curves = [
        (chosen.path.means(held.values("balance")), chosen.path.means(held.costs(objective)))
        for chosen, held in ((candidates, measured), fold.cap)
    ]
    (balance, cost), theirs = curves
    cheapest = [(cost[balance <= b].min(initial=np.inf), c) for b, c in zip(*theirs, strict=True)]
    gaps = np.array([ours / c for ours, c in cheapest])
    mine = average(measured.at(candidates.path.choice(point)))
    cap = average([layer[0] for layer in fold.cap[1].layers])

    def total(figures: Mapping[str, float]) -> float:
        visits = objective.device * figures["dpt"] + objective.node * figures["npt"]
        return visits + objective.peak * figures["peak_traffic"] + objective.balance * figures["balance"]

    reached = gaps[np.isfinite(gaps)]
    return {
        "equal_b": float(reached.mean()) if reached.size else np.nan,
        "worst": float(reached.max()) if reached.size else np.nan,
        "beyond": float(gaps.size - reached.size),
        "objective": total(mine) / total(cap),
        "dpt": mine["dpt"] / cap["dpt"],
        "peak": mine["peak_traffic"] / cap["peak_traffic"],
        "b": mine["balance"] / cap["balance"],
    }


def show(title: str, rows: list[dict[str, Any]], key: str) -> None:
    """Means over the rows that share a key."""
    print(f"\n{title:22}" + "".join(f"{name:>10}" for name in COLUMNS))
    order = list(dict.fromkeys(row[key] for row in rows))
    for value, group in groupby(sorted(rows, key=lambda row: order.index(row[key])), key=lambda row: row[key]):
        members = list(group)
        print(f"{value!s:22}" + "".join(f"{np.nanmean([row[name] for row in members]):10.3f}" for name in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--topology", default="8")
    parser.add_argument("--every", type=int, default=4, help="use one layer of so many")
    options = parser.parse_args()
    topology = Topology.parse(options.topology)
    rows: list[dict[str, Any]] = []
    for name in options.traces:
        started = time.perf_counter()
        for about, fold in folds(every_layer(open_trace(name), options.every), topology):
            for label, variant in VARIANTS.items():
                rows.append({"trace": name.split("/")[-1], **about, "variant": label, **scores(fold, variant)})
        mine = [row for row in rows if row["trace"] == name.split("/")[-1]]
        show(f"{mine[0]['trace']}"[:22], mine, "variant")
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    for size in dict.fromkeys(row["size"] for row in rows):
        show(f"fitted on {size} tokens", [row for row in rows if row["size"] == size], "variant")
    show("all", rows, "variant")
    print(json.dumps({"benchmark": "choose_settings", "topology": str(topology), "every": options.every, "rows": rows}))


if __name__ == "__main__":
    main()
