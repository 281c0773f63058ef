"""What destination pruning costs a live model: time in the forward pass, and quality on held-out text.

Time: one layer's rule and the new weights, on decisions that the model makes, beside the whole MoE layer on the same
tokens; best of several runs, on this machine, with one thread. One layer of OLMoE-1B-7B's shape (64 experts of width
1,024, top-8, hidden size 2,048; random weights) stands for models of real size.

Quality, the shape of CAP's Table I: the model's routing is recorded on the first half of every shipped text, the
experts are placed on that trace by `coterie place`'s default method, and prices are fitted on it; the second halves
measure. Perplexity is compared with the unpruned model's on the same windows; KL and the share of tokens with the same
most likely next token are against its predictions. "at cap's peak": as strong as brings the remote peak traffic of the
unpruned model's held-out decisions to what CAP's rule with that p reaches; only this one level is chosen on held-out
decisions, the shape of the prices comes from the fitting texts. Homes are rows, which are as many as devices.

    python benchmarks/pruning_live.py [MODEL ...] [--topology 8] [--tokens 8192] [--only speed|quality]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import coterie
from coterie import data
from coterie.evaluate.compare import compare
from coterie.evaluate.text import EncodedText
from coterie.evaluate.windows import in_batches, sliding_windows
from coterie.models.intercept import intercept
from coterie.models.layers import spec_of
from coterie.models.load import load_model, load_tokenizer
from coterie.models.prune import renormalises
from coterie.placement.driver import place, prepare
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced, PruningRule
from coterie.pruning.fitting import THRESHOLD_STEPS, weakest
from coterie.pruning.prices import fit_prices
from coterie.pruning.routed import RoutedTrace, peaks
from coterie.topology import Topology
from coterie.trace.routing_trace import ALL_TOKENS, RoutingTrace

THRESHOLDS = (0.1, 0.2, 0.3)
TOKEN_COUNTS = (1, 64, 4096)
FLOORS = {"priced": 0.0, "priced, floor 0.5": 0.5}
WINDOW, STRIDE = 256, 192
MAX_SHARE = 0.01

# ---- time -----------------------------------------------------------------------------------------------------------


def microseconds(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """The least time of one run, tried for about so many seconds and at least three times."""
    with torch.inference_mode():
        run()
        best, tries, started = float("inf"), 0, time.perf_counter()
        while tries < 3 or time.perf_counter() - started < seconds:
            before = time.perf_counter()
            run()
            best, tries = min(best, time.perf_counter() - before), tries + 1
    return best * 1e6


def olmoe_layer() -> Any:
    """A model of one layer of OLMoE-1B-7B's shape with a vocabulary of four tokens, bf16."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=4, hidden_size=2048, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return OlmoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def speed(model: Any, topology: str) -> list[dict[str, Any]]:
    """For each number of tokens and rule: microseconds of pruning one layer, and its share of that layer's time."""
    parsed = Topology.parse(topology)
    theta_LG = np.full((spec_of(model).num_layers, parsed.num_devices), 0.1)
    rules = {"cap": Cap(0.2), "naive": Naive(0.2), "priced": Priced(theta_LG), "priced, floor": Priced(theta_LG, 0.8)}
    rows = []
    for count in TOKEN_COUNTS:
        hidden_BSH = torch.randn(1, count, model.config.hidden_size, dtype=model.dtype)
        decided: list[Any] = []

        def keep(layer: int, *decision: Any, into: list[Any] = decided) -> None:
            into[:] = decision

        with intercept(model, keep) as layers, torch.inference_mode():
            block = layers[0].block
            block(hidden_BSH)
        layer_us = microseconds(lambda block=block, hidden=hidden_BSH: block(hidden), seconds=3)
        row = {"tokens": count, "layer_us": layer_us, "rules": {}}
        for name, rule in rules.items():
            with coterie.prune_destinations(model, rule=rule, topology=topology, count=False) as pruner:
                block(hidden_BSH)  # says where the tokens live
                cost = microseconds(lambda pruner=pruner, decided=decided: pruner.decide(0, *decided))
            row["rules"][name] = {"us": cost, "share": cost / (layer_us + cost)}
        rows.append(row)
    return rows


def show_speed(name: str, topology: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name} on {topology} devices: time of one MoE layer, and of pruning in it")
    print(f"{'tokens':>7}{'layer µs':>12}  " + "".join(f"{rule + ' µs':>20}" for rule in rows[0]["rules"]))
    for row in rows:
        costs = [f"{cost['us']:.0f} ({cost['share']:.1%})" for cost in row["rules"].values()]
        print(f"{row['tokens']:7}{row['layer_us']:12.0f}  " + "".join(f"{cost:>20}" for cost in costs))
    worst = max(cost["share"] for cost in rows[-1]["rules"].values())
    verdict = "met" if worst <= MAX_SHARE else "NOT met"
    print(
        f"at {rows[-1]['tokens']} tokens pruning takes at most {worst:.2%} of the layer "
        f"(at most {MAX_SHARE:.0%}): {verdict}"
    )


# ---- quality --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A model, twice, with its placement, and the decisions that rules are fitted on and compared on."""

    model: Any
    reference: Any
    text: EncodedText
    placement: Placement
    fit: RoutedTrace
    heldout: RoutedTrace


def token_ids(tokenizer: Any, tokens: int, second_half: bool) -> EncodedText:
    """About so many tokens from the halves of all shipped texts, in equal parts."""
    names = data.text_names()
    ids: list[int] = []
    size = 0
    for name in names:
        text = data.text(name)
        half = text[len(text) // 2 :] if second_half else text[: len(text) // 2]
        found = tokenizer(half, add_special_tokens=False, verbose=False)["input_ids"][: tokens // len(names)]
        ids += found
        size += len(tokenizer.decode(found).encode())
    return EncodedText("held-out" if second_half else "fitting", tuple(ids), size)


def recorded(model: Any, text: EncodedText, rows: int) -> RoutingTrace:
    """The routing of a text's windows, the same and in the same batches as those that `measure` runs."""
    ids_T = torch.tensor(text.ids)
    with coterie.record(model) as recorder, torch.inference_mode():
        for windows in in_batches(sliding_windows(len(ids_T), WINDOW, STRIDE), rows):
            model(input_ids=torch.stack([ids_T[window.start : window.end] for window in windows]), use_cache=False)
    return recorder.trace()


def set_up(name: str, topology: Topology, tokens: int) -> Setup:
    model, reference, tokenizer = load_model(name), load_model(name), load_tokenizer(name)
    fitting, measuring = token_ids(tokenizer, tokens, False), token_ids(tokenizer, tokens, True)
    trace = recorded(model, fitting, topology.num_devices)
    placement = place(prepare(trace, topology))
    device_LE = placement.device_of_expert()
    heldout = recorded(model, measuring, topology.num_devices)
    return Setup(
        model, reference, measuring, placement, RoutedTrace(trace, device_LE, topology),
        RoutedTrace(heldout, device_LE, topology),
    )  # fmt: skip


def rules_of(setup: Setup) -> Iterator[tuple[str, float, str, PruningRule]]:
    """(rule, p, compared at, fitted rule)."""
    prices = fit_prices(setup.fit, ALL_TOKENS)
    strengths = prices.num_strengths
    for p in THRESHOLDS:
        yield "cap", p, "equal p and peak", Cap(p)
    for p in THRESHOLDS:
        yield "naive", p, "equal p", Naive(p)
    for p in THRESHOLDS:
        peak = float(peaks(setup.heldout, Cap(p), ALL_TOKENS).mean())
        yield "naive", p, "equal peak", weakest(
            lambda n: Naive(n / THRESHOLD_STEPS), THRESHOLD_STEPS, setup.heldout, ALL_TOKENS, peak
        )  # fmt: skip
        for name, floor in FLOORS.items():
            yield name, p, "equal peak", weakest(
                lambda n, floor=floor: Priced(prices.theta(n), floor), strengths, setup.heldout, ALL_TOKENS, peak
            )  # fmt: skip


@contextmanager
def pruned(setup: Setup, rule: PruningRule, renormalise: bool) -> Iterator[Any]:
    with coterie.prune_destinations(setup.model, setup.placement, rule=rule, renormalise=renormalise) as pruner:
        yield pruner


def measure(setup: Setup, rule: PruningRule, renormalise: bool) -> dict[str, Any]:
    """Quality on the held-out text against the unpruned model, and the traffic that was left."""
    rows = setup.placement.topology.num_devices
    with ExitStack() as stack:
        pruner = stack.enter_context(pruned(setup, rule, renormalise))
        result = compare(setup.model, setup.reference, setup.text, WINDOW, STRIDE, batch=rows)
    stats = pruner.stats().to_json()
    return {
        "perplexity": result.model.perplexity,
        "increase": result.model.perplexity / result.reference.perplexity - 1,
        "kl": float(result.kl_R.mean(dtype=np.float64)),
        "agreement": result.agreeing / len(result.kl_R),
        **{key: stats[key] for key in ("remote_dpt", "remote_peak_traffic", "kept_weight", "emptied")},
    }


def quality(name: str, topology: Topology, tokens: int) -> dict[str, Any]:
    """All rows of the table."""
    setup = set_up(name, topology, tokens)
    own = renormalises(setup.model)
    rows = [{"rule": "none", "p": 0.0, "at": "", "renormalise": own, **measure(setup, Cap(0.0), own)}]
    for rule_name, p, at, rule in rules_of(setup):
        for renormalise in (False, True):
            about = {"rule": rule_name, "p": p, "at": at, "renormalise": renormalise}
            if isinstance(rule, Naive):
                about["fitted_p"] = rule.p
            rows.append({**about, **measure(setup, rule, renormalise)})
    return {
        "rows": rows,
        "renormalises_itself": own,
        "fit_tokens": setup.fit.trace.num_tokens,
        "heldout_tokens": len(setup.text.ids),
        "placement": setup.placement.metrics,
        "lost_at_equal_peak": at_equal_peak(rows),
    }


def at_equal_peak(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each p and way of weighting: what the other rules lose at cap's peak, as a share of what cap loses."""
    ratios: list[dict[str, Any]] = []
    for row in (row for row in rows if row["at"] == "equal peak"):
        key = {"p": row["p"], "renormalise": row["renormalise"]}
        cap = next(other for other in rows if {**key, "rule": "cap"}.items() <= other.items())
        ratios.append({"rule": row["rule"], **key, **{what: row[what] / cap[what] for what in ("increase", "kl")}})
    return ratios


def show_quality(name: str, topology: Topology, result: dict[str, Any]) -> None:
    placed = result["placement"]["heldout"]
    print(
        f"\n{name} on {topology} devices, experts placed by coterie on {result['fit_tokens']:,} tokens "
        f"(DPT {placed['dpt']:.2f}, B {placed['balance']:.2f}); {result['heldout_tokens']:,} held-out tokens"
    )
    print(f"the model itself {'renormalises' if result['renormalises_itself'] else 'does not renormalise'} its weights")
    print(
        f"{'rule':18}{'p':>5} {'compared at':18}{'renorm':>7}{'perplexity':>12}{'increase':>10}{'KL':>9}{'top-1':>8}"
        f"{'remote DPT':>12}{'peak':>8}{'kept':>8}{'emptied':>9}"
    )
    for row in result["rows"]:
        print(
            f"{row['rule']:18}{row['p']:5.1f} {row['at']:18}{'yes' if row['renormalise'] else 'no':>7}"
            f"{row['perplexity']:12.3f}{row['increase']:+10.2%}{row['kl']:9.5f}{row['agreement']:8.3f}"
            f"{row['remote_dpt']:12.3f}{row['remote_peak_traffic']:8.3f}{row['kept_weight']:8.3f}{row['emptied']:9.4f}"
        )
    print("\nlost at cap's peak, as a share of what cap loses: perplexity (KL)")
    ratios = result["lost_at_equal_peak"]
    names = list(dict.fromkeys(ratio["rule"] for ratio in ratios))
    print(f"{'cap p':>6}{'renorm':>8}" + "".join(f"{name:>22}" for name in names) + "   priced loses the least")
    for p, renormalise in dict.fromkeys((ratio["p"], ratio["renormalise"]) for ratio in ratios):
        found = {r["rule"]: r for r in ratios if (r["p"], r["renormalise"]) == (p, renormalise)}
        cells = [f"{found[name]['increase']:.2f} ({found[name]['kl']:.2f})" for name in names]
        worst = max(found[name][what] for name in FLOORS for what in ("increase", "kl"))
        floored = max(found["priced, floor 0.5"][what] for what in ("increase", "kl"))
        verdict = "yes" if worst < 1 else "with the floor" if floored < 1 else "NO"
        print(
            f"{p:6.1f}{'yes' if renormalise else 'no':>8}" + "".join(f"{cell:>22}" for cell in cells) + f"   {verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny-qwen3-moe", "tiny-mixtral"])
    parser.add_argument("--topology", help="default: 8, or 4 for a model of fewer than 16 experts")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to fit on, and to measure on")
    parser.add_argument("--only", choices=("speed", "quality"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.models:
        experts = spec_of(load_model(name)).num_experts
        topology = Topology.parse(options.topology or ("8" if experts >= 16 else "4"))
        results[name] = {"topology": topology.to_json()}
        if options.only != "quality":
            results[name]["speed"] = speed(load_model(name), str(topology))
            show_speed(name, str(topology), results[name]["speed"])
        if options.only != "speed":
            results[name]["quality"] = quality(name, topology, options.tokens)
            show_quality(name, topology, results[name]["quality"])
    if options.only != "quality":
        results["olmoe-layer"] = {"speed": speed(olmoe_layer(), "8")}
        show_speed("a layer of OLMoE-1B-7B's shape", "8", results["olmoe-layer"]["speed"])
    print(json.dumps({"benchmark": "pruning_live", "coterie": coterie.__version__, "models": results}))


if __name__ == "__main__":
    main()
