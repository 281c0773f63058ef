"""What is read from a store at a budget, and what it costs in perplexity, where widths follow what is resident.

A shipped model is packed and decodes text token by token (teacher-forced, KV cache) through `coterie.offload`. Systems:
`plan`: a `value` plan; `cached`: the same, and what is resident runs too (`use_cached`); `skip`: whole experts, skipped
on a miss where they weigh under F/K (`skip_misses`, BigMoeOnEdge's rule). The strength of each (the plan's threshold,
or F) is what reaches the allowed increase of perplexity on the first halves of the shipped texts, interpolated between
a few; the profile is of the first halves, too. Then the second halves are read once, with that strength. Bytes are a
share of full offload, which reads every chosen expert whole. The first tokens warm the cache and are not counted.

    python benchmarks/offload_quality.py [MODEL] [--budgets 0.1 0.2 0.3] [--increase 0.015] [--tokens 4096]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from coterie import data
from coterie.models.load import load_model, load_tokenizer
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.context import FULL, make_profile, spread_windows

WINDOW = 128
STRENGTHS = {"plan": (0.15, 0.25, 0.4), "cached": (0.2, 0.3, 0.45), "skip": (0.3, 0.5, 0.7)}


@dataclass(frozen=True)
class Point:
    """One run: perplexity increase, bytes read and weights computed over full offload's."""

    strength: float
    increase: float
    standard_error: float
    bytes_share: float
    computed_share: float


class Bench:
    """A store, and windows of text with the unchanged model's losses."""

    def __init__(self, name: str, folder: Path, tokens: int, warm: int) -> None:
        model, tokenizer = load_model(name, "float32"), load_tokenizer(name)
        texts = {each: data.text(each) for each in data.text_names()}
        halves = [{k: t[: len(t) // 2] for k, t in texts.items()}, {k: t[len(t) // 2 :] for k, t in texts.items()}]
        self.profile, self.store = make_profile(model, tokenizer, halves[0], FULL), folder / "store"
        model.save_pretrained(folder / "model")
        coterie.pack(folder / "model", self.store, profile=self.profile)
        self.warm = warm // WINDOW
        count = (tokens + warm) // WINDOW
        self.ids_HWN = [self._mixed(spread_windows(tokenizer, half, WINDOW, count)[0]) for half in halves]
        whole = coterie.offload(self.store, "100%")
        self.base_HWN = [losses(whole, ids_WN) for ids_WN in self.ids_HWN]
        whole.close()

    @staticmethod
    def _mixed(ids_WN: Any) -> Any:
        """Texts in turn, as a server would see them."""
        return ids_WN[np.random.default_rng(0).permutation(len(ids_WN))]

    def measure(self, half: int, budget: float, system: str, strength: float) -> Point:
        """Decode one half at a budget."""
        model = self._model(budget, system, strength)
        losses(model, self.ids_HWN[half][: self.warm])
        before = model.stats()
        found_WN = losses(model, self.ids_HWN[half][self.warm :])
        stats = model.stats().since(before)
        model.close()
        more_W = (found_WN - self.base_HWN[half][self.warm :]).mean(1)
        return Point(
            strength, math.expm1(float(more_W.mean())), float(more_W.std() / len(more_W) ** 0.5), stats.bytes_share,
            stats.computed_bytes / stats.chosen_bytes,
        )  # fmt: skip

    def _model(self, budget: float, system: str, strength: float) -> Any:
        if system == "skip":
            return coterie.offload(self.store, budget, skip_misses=strength)
        plan = plan_widths(self.profile, "value", threshold=strength)
        return coterie.offload(self.store, budget, plan, use_cached=system == "cached")


def losses(model: Any, ids_WN: Any) -> Any:
    """[W, N - 1] each token's loss, one token at a time."""
    found = []
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ids_N in ids_WN:
            kept, row = None, []
            for at in range(len(ids_N) - 1):
                out = model(input_ids=ids_N[None, at : at + 1], past_key_values=kept, use_cache=True)
                kept = out.past_key_values
                row.append(-out.logits[0, -1].double().log_softmax(-1)[ids_N[at + 1]])
            found.append(torch.stack(row))
    return torch.stack(found)


def strength_at(increase: float, points: list[Point]) -> float:
    """The strength that costs so much, between those measured; beyond them the nearest."""
    points = sorted(points, key=lambda point: point.increase)
    costs, logs = [point.increase for point in points], [math.log(point.strength) for point in points]
    return float(np.exp(np.interp(increase, costs, logs)))


def run(bench: Bench, budgets: list[float], increase: float, systems: list[str]) -> list[Mapping[str, Any]]:
    """Every system at every budget, printed and returned."""
    rows = []
    for budget in budgets:
        for system in systems:
            points = [bench.measure(0, budget, system, strength) for strength in STRENGTHS[system]]
            chosen = bench.measure(1, budget, system, strength_at(increase, points))
            rows.append(
                {"budget": f"{budget:.0%}", "system": system, **vars(chosen), "first_half": [vars(p) for p in points]}
            )
            cost = f"{chosen.increase:+9.2%} +- {chosen.standard_error:.2%}"
            shares = f"{chosen.bytes_share:10.3f} {chosen.computed_share:10.3f}"
            print(f"{budget:5.0%} {system:7} {chosen.strength:8.3f} {cost}{shares}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-mixtral")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.1, 0.2, 0.3])
    parser.add_argument("--increase", type=float, default=0.015)
    parser.add_argument("--tokens", type=int, default=4096, help="of each half")
    parser.add_argument("--warm", type=int, default=1024, help="more tokens of each half that only warm the cache")
    parser.add_argument("--systems", nargs="+", choices=tuple(STRENGTHS), default=tuple(STRENGTHS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.model, Path(folder), arguments.tokens, arguments.warm)
        print(f"{arguments.model}: second halves, strength from the first for {arguments.increase:+.1%}")
        print(" budget system strength  perplexity               bytes   computed", flush=True)
        rows = run(bench, arguments.budgets, arguments.increase, arguments.systems)
    versions = {"coterie": coterie.__version__, "torch": torch.__version__}
    print(json.dumps({"benchmark": "offload_quality", "model": arguments.model, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
