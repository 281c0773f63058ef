"""How like real routing the synthetic traces are, and the search that fitted them.

Every statistic is computed for each layer and averaged. Placements group experts on 8 devices: linear is expert
e on device e // (E / 8); greedy deals the experts out in turns, each device taking the expert with most co-activation
with those it has (Jaccard). Greedy groupings are made on the first half of the sequences and measured on both.

    python benchmarks/synthetic.py [TRACE ...]                   real against synthetic, then one JSON line
    python benchmarks/synthetic.py --fit deepseek [TRACE ...]    search for parameters from the shipped ones
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import numpy as np

from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.combinations import combination_counts, shares_needed, top_share
from coterie.profile.load import expert_load, imbalance
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split
from coterie.trace.synthetic import MODELS, RoutingModel, synthesize

DEVICES = 8
DEFAULT_TRACES = {"deepseek": ["dsv2lite-law", "dsv2lite-intent"], "gpt-oss": ["gptoss20b-decode"]}
LAG = 20  # tokens: far enough for the drift to have died away, near enough to be in the same sequence

# what --fit minimises: squared log-ratios to the real figures, times these
FIT_WEIGHTS = {
    "load max/mean": 2, "load 25%": 1, "load 50%": 1, "load 75%": 1, "top 25% of anchor pairs hold": 4,
    "anchor pairs for 60%": 1, "anchor pairs for 90%": 1, "Jaccard, top 1% of pairs": 1.5,
    "Jaccard, top 10% of pairs": 2, "Jaccard, all pairs": 2, "DPT greedy / linear, fit": 5,
    "DPT greedy / linear, held out": 5, "overlap, next token": 1, f"overlap, {LAG} tokens on": 1,
    "overlap, any token": 1, "weight 1": 2, "weight 2": 1, "weight K": 1,
}  # fmt: skip
FIT_BOUNDS = {
    "popularity": (0.1, 5.0), "company": (1.5, 20.0), "decay": (0.2, 3.0), "sequence_share": (0.01, 0.4),
    "drift_share": (0.05, 0.6), "drift_correlation": (0.4, 0.98), "weight_scale": (0.03, 1.0),
}  # fmt: skip


def greedy_groups(p_EE: np.ndarray, num_devices: int) -> np.ndarray:
    """The device of each expert, [E]."""
    device_E = np.full(len(p_EE), -1)
    affinity_GE = np.zeros((num_devices, len(p_EE)))
    for turn in range(len(p_EE)):
        free = np.flatnonzero(device_E < 0)
        score = affinity_GE[turn % num_devices] if turn >= num_devices else p_EE.sum(axis=1)
        expert = free[np.argmax(score[free])]
        device_E[expert] = turn % num_devices
        affinity_GE[turn % num_devices] += p_EE[expert]
    return device_E


def devices_per_token(ids_TK: np.ndarray, device_E: np.ndarray) -> float:
    visited_TG = np.zeros((len(ids_TK), DEVICES), dtype=bool)
    np.put_along_axis(visited_TG, device_E[ids_TK], True, axis=1)
    return float(visited_TG.sum(axis=1).mean())


def placement_figures(ids_TK: np.ndarray, first: object, second: object, num_experts: int) -> dict[str, float]:
    first_ids, second_ids = ids_TK[first], ids_TK[second]
    counts = [coactivation_counts(part, None, num_experts) for part in (first_ids, second_ids)]
    linear = np.arange(num_experts) * DEVICES // num_experts
    mine, theirs = (greedy_groups(jaccard(part), DEVICES) for part in counts)
    on_first, on_second = (devices_per_token(part, linear) for part in (first_ids, second_ids))
    held_out, best = devices_per_token(second_ids, mine), devices_per_token(second_ids, theirs)
    top_k = ids_TK.shape[1]
    miss = math.comb(num_experts - num_experts // DEVICES, top_k) / math.comb(num_experts, top_k)
    return {
        "DPT linear / independent": devices_per_token(ids_TK, linear) / (DEVICES * (1 - miss)),
        "DPT greedy / linear, fit": devices_per_token(first_ids, mine) / on_first,
        "DPT greedy / linear, held out": held_out / on_second,
        "held-out DPT saved": on_second - held_out,
        "DPT saved, grouped on the second half": on_second - best,
        "load correlation of halves": float(np.corrcoef(*(np.diagonal(part) for part in counts))[0, 1]),
    }


def overlap_figures(ids_TK: np.ndarray, sequence_ids: np.ndarray, num_experts: int) -> dict[str, float]:
    """Mean share of a token's experts that another token shares."""
    chosen_TE = np.zeros((len(ids_TK), num_experts), dtype=bool)
    np.put_along_axis(chosen_TE, ids_TK, True, axis=1)

    def at(lag: int) -> float:
        same = sequence_ids[lag:] == sequence_ids[:-lag]
        return float((chosen_TE[lag:] & chosen_TE[:-lag])[same].sum() / (same.sum() * ids_TK.shape[1]))

    frequency_E = chosen_TE.mean(axis=0)
    sets = np.unique(np.packbits(chosen_TE, axis=1), axis=0)
    return {
        "overlap, next token": at(1),
        f"overlap, {LAG} tokens on": at(LAG),
        "overlap, any token": float((frequency_E**2).sum() / ids_TK.shape[1]),
        "distinct expert sets / tokens": len(sets) / len(ids_TK),
    }


def layer_figures(trace: RoutingTrace, layer: int, first: object, second: object) -> dict[str, float]:
    num_experts = trace.spec.num_experts
    ids_TK = trace.layer(layer).expert_ids_TK.astype(np.int64)
    load_E = expert_load(ids_TK, None, num_experts)
    pairs = combination_counts(trace, layer)
    p_EE = jaccard(coactivation_counts(ids_TK, None, num_experts))
    falling = np.sort(p_EE[np.triu_indices(num_experts, 1)])[::-1]
    for_60, for_90 = shares_needed(pairs)
    weights_TK = np.sort(trace.layer(layer).weights_TK.astype(np.float64), axis=1)[:, ::-1]
    quartiles = np.quantile(load_E / load_E.mean(), (0.25, 0.5, 0.75))
    return {
        "load max/mean": imbalance(load_E),
        **{f"load {name}": float(q) for name, q in zip(("25%", "50%", "75%"), quartiles, strict=True)},
        "top 25% of anchor pairs hold": top_share(pairs),
        "anchor pairs for 60%": for_60,
        "anchor pairs for 90%": for_90,
        "Jaccard, top 1% of pairs": float(falling[: math.ceil(0.01 * falling.size)].mean()),
        "Jaccard, top 10% of pairs": float(falling[: math.ceil(0.1 * falling.size)].mean()),
        "Jaccard, all pairs": float(falling.mean()),
        **placement_figures(ids_TK, first, second, num_experts),
        **overlap_figures(ids_TK, np.asarray(trace.sequence_ids), num_experts),
        **{f"weight {k + 1}": float(w) for k, w in enumerate(weights_TK.mean(axis=0)[:4])},
        "weight K": float(weights_TK[:, -1].mean()),
    }


def figures(trace: RoutingTrace) -> dict[str, float]:
    """Every statistic, mean over layers; persistence is a ratio of means, since a layer's own gain may be near zero."""
    halves = split(trace, 0.5)
    layers = [layer_figures(trace, layer, halves.first, halves.second) for layer in range(trace.num_layers)]
    means = {name: float(np.mean([figure[name] for figure in layers])) for name in layers[0]}
    saved, possible = means.pop("held-out DPT saved"), means.pop("DPT saved, grouped on the second half")
    return {**means, "persistence of the grouping": saved / possible}


def synthesize_like(trace: RoutingTrace, model: RoutingModel, seed: int, layers: int = 0, tokens: int = 0):
    spec = trace.spec
    return synthesize(
        layers or spec.num_layers, spec.num_experts, spec.top_k, tokens or trace.num_tokens, seed=seed, like=model,
        sequence_tokens=max(1, trace.num_tokens // max(1, trace.num_sequences)),
    )  # fmt: skip


def loss(real: dict[str, float], synthetic: dict[str, float]) -> float:
    return float(np.mean([(w * math.log(synthetic[name] / real[name])) ** 2 for name, w in FIT_WEIGHTS.items()]))


def fit(start: RoutingModel, traces: list[RoutingTrace], seed: int, steps: int) -> RoutingModel:
    """Random local search, two seeds a candidate so that it fits no single draw of embeddings."""
    every = [figures(trace) for trace in traces]
    real = {name: float(np.mean([one[name] for one in every])) for name in every[0]}
    # the middle trace by length of sequence stands for the shape of all
    shape = sorted(traces, key=lambda trace: trace.num_tokens / max(1, trace.num_sequences))[len(traces) // 2]

    def score(model: RoutingModel) -> float:
        drawn = [figures(synthesize_like(shape, model, seed + s, layers=12, tokens=6000)) for s in range(2)]
        return loss(real, {name: float(np.mean([one[name] for one in drawn])) for name in drawn[0]})

    rng = np.random.default_rng(seed)
    best, best_score = start, score(start)
    for step in range(steps):
        size = 0.25 * (1 - step / steps) + 0.02
        changed = {}
        for name, (low, high) in FIT_BOUNDS.items():
            if rng.random() < 0.5:
                changed[name] = float(np.clip(getattr(best, name) * math.exp(size * rng.standard_normal()), low, high))
        candidate = replace(best, **changed)
        candidate_score = score(candidate)
        if candidate_score < best_score:
            best, best_score = candidate, candidate_score
            print(f"step {step}: {best_score:.5f} {best}", flush=True)
    return best


def compare(name: str, trace: RoutingTrace, seed: int) -> dict[str, object]:
    like = "gpt-oss" if "gpt" in f"{trace.spec.model} {name}".lower() else "deepseek"
    model = MODELS[like]
    real, drawn = figures(trace), [figures(synthesize_like(trace, model, seed + s)) for s in range(3)]
    print(f"\n{name} ({trace.num_layers} layers, {trace.spec.num_experts} experts, top-{trace.spec.top_k}, ", end="")
    print(f"{trace.num_tokens} tokens) against {model.name}, mean and range of 3 seeds")
    print(f"{'':<32}{'real':>9}{'synthetic':>11}{'ratio':>8}    range")
    for figure, value in real.items():
        values = [one[figure] for one in drawn]
        mean = float(np.mean(values))
        print(f"{figure:<32}{value:>9.3f}{mean:>11.3f}{mean / value:>8.2f}    {min(values):.3f} to {max(values):.3f}")
    means = {figure: float(np.mean([one[figure] for one in drawn])) for figure in real}
    return {"trace": name, "like": like, "loss": loss(real, means), "real": real, "synthetic": means}


def main() -> None:
    from coterie.trace.open import open_trace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="paths or names of shipped traces")
    parser.add_argument("--fit", choices=sorted(MODELS), help="search for parameters instead")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = (
        options.traces
        or DEFAULT_TRACES.get(options.fit)
        or [name for names in DEFAULT_TRACES.values() for name in names]
    )
    traces = {name: open_trace(name) for name in names}
    if options.fit:
        print(fit(MODELS[options.fit], list(traces.values()), options.seed, options.steps))
    else:
        results = [compare(name, trace, options.seed) for name, trace in traces.items()]
        print(json.dumps({"devices": DEVICES, "seed": options.seed, "results": results}))


if __name__ == "__main__":
    main()
