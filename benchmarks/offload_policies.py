"""How many expert uses miss when a share of the experts fits in memory, by policy, on real decode routing.

A cache holds whole experts. The earlier half of the sequences fills the cache and teaches the policies that learn; the
later half, in order, is counted (`--cold`: from an empty cache and knowing nothing instead). LRU and per-layer LRU mark
all experts of a token as used before they evict, as MoE-Offload does. Constants of policies are chosen inside the
earlier halves alone: `--tune` replays the grid there and prints it.

    python benchmarks/offload_policies.py [TRACE ...] [--budgets 0.1 0.2 0.3 0.5] [--tune] [--cold]

Prints for each trace the miss ratio of every policy (whole experts: also the bytes read as a share of full offload),
its ratio to the better of the two LRUs, and how well the next layer is guessed; then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.policies.company import Company
from coterie.policies.eviction import EvictionPolicy
from coterie.policies.prefetch import recall
from coterie.policies.reuse import Reuse
from coterie.simulate.offload import SIMULATED, budget_in_blocks, build, decode_tokens, replay, uses_of
from coterie.trace.open import open_trace
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

TRACES = ("gptoss20b-decode",)
HELDOUT = 0.5
TUNED_AT = (0.2, 0.3)
TUNING_TOKENS = 3000
GRID: dict[type[EvictionPolicy], dict[str, tuple[Any, ...]]] = {
    Reuse: {"short": (0.5, 0.7, 0.85), "long": (0.95, 0.97, 0.99), "weight": (0.2, 0.3, 0.5), "near": (0.5, 1.0)},
    Company: {"discount": (0.7, 0.8, 0.9), "averages": ((0.5, 0.95), (0.7, 0.97)), "rate": (0.1, 0.2, 0.4)},
}


def tune(traces: dict[str, RoutingTrace]) -> dict[str, Any]:
    """The grid inside the earlier halves: misses over per-layer LRU's, mean of traces and budgets."""
    earlier = {}
    for name, trace in traces.items():
        tokens = np.arange(trace.num_tokens)[decode_tokens(trace)]
        first = np.arange(trace.num_tokens)[split(trace, HELDOUT, tokens).first][:TUNING_TOKENS]
        earlier[name] = uses_of(trace, first)
    base = {key: misses(lambda s: build("lru-layer", s), key, earlier) for key in itertools.product(earlier, TUNED_AT)}
    found: dict[str, Any] = {}
    for policy, grid in GRID.items():
        rows = []
        for values in itertools.product(*grid.values()):
            settings = dict(zip(grid, values, strict=True))
            make = lambda uses, settings=settings, policy=policy: policy(uses.shape, **settings)  # noqa: E731
            ratio = float(np.mean([misses(make, key, earlier) / base[key] for key in base]))
            rows.append({"ratio": ratio, **settings})
            print(f"  {policy.name:8} {ratio:.4f}  {settings}", flush=True)
        found[policy.name] = min(rows, key=lambda row: row["ratio"])
        print(f"best of {policy.name}: {found[policy.name]}")
    return found


def misses(make: Callable[[Any], EvictionPolicy], key: tuple[str, float], earlier: dict[str, Any]) -> float:
    """Miss ratio on the second half of the tuning tokens, after the first half."""
    uses = earlier[key[0]]
    return replay(uses, make(uses), budget_in_blocks(uses, key[1]), len(uses.ids_TLK) // 2).miss_ratio


def measure(name: str, trace: RoutingTrace, budgets: list[float], cold: bool) -> dict[str, Any]:
    """All figures of one trace, printed and returned."""
    tokens = np.arange(trace.num_tokens)[decode_tokens(trace)]
    parts = split(trace, HELDOUT, tokens)
    uses = uses_of(trace, parts.second if cold else tokens)
    warm = 0 if cold else parts.num_first
    print(f"\n{name}: {warm} tokens to warm up, {parts.num_second} counted; share of expert uses that miss")
    print(f"  {'budget':8}" + "".join(f"{policy:>11}" for policy in SIMULATED) + f"{'company/LRU':>13}")
    rows: dict[str, Any] = {}
    for share in budgets:
        blocks = budget_in_blocks(uses, share)
        row = {policy: replay(uses, build(policy, uses), blocks, warm).miss_ratio for policy in SIMULATED}
        better = min(row["lru"], row["lru-layer"])
        rows[f"{share:.0%}"] = {**row, "over_better_lru": {policy: row[policy] / better for policy in row}}
        figures = "".join(f"{row[policy]:11.3f}" for policy in SIMULATED)
        print(f"  {share:8.0%}{figures}{row['company'] / better:13.3f}", flush=True)
    top_k = trace.spec.top_k
    guessed = {f"{count}": recall(uses.ids_TLK, count, warm) for count in (top_k, 2 * top_k)}
    print("  next layer's experts among the guesses: " + ", ".join(f"{n}: {r:.3f}" for n, r in guessed.items()))
    return {"miss_ratio": rows, "recall": guessed, "warm_tokens": warm, "tokens": parts.num_second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", default=TRACES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    traces = {name.split("/")[-1]: open_trace(name) for name in arguments.traces}
    result: dict[str, Any] = {"benchmark": "offload_policies", "cold": arguments.cold}
    if arguments.tune:
        result["tuned"] = tune(traces)
    else:
        result["traces"] = {
            name: measure(name, trace, arguments.budgets, arguments.cold) for name, trace in traces.items()
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
