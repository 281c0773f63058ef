"""How long experts take that run in part: the grouped form on a CPU, for one token and for a batch.

One token is bound by reading weights, so half the width should be half the time; a batch is bound by arithmetic. Two
experts of Mixtral-8x7B's shape (hidden size 4,096, 14,336 neurons, bf16, random weights) take turns, so that a token's
weights do not come from a cache. "mixed": 64 experts of OLMoE-1B-7B's shape (2,048 and 1,024, top-8), where every slot
has its own width among the sixteenths up to twice the share less one: many small groups.

    python benchmarks/gated_ffn.py [--seconds 2]

Times are the best of several runs with one thread, on this machine; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers.integrations.moe import _default_apply_gate

from coterie.ops.gated_ffn import ExpertWeights, gated_ffn

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
TOKENS = (1, 64)


def experts(num: int, hidden: int, width: int) -> ExpertWeights:
    """Random experts with silu, gate and up one after the other, bf16."""
    gate = MethodType(_default_apply_gate, SimpleNamespace(act_fn=torch.nn.SiLU()))
    gate_up = torch.empty(num, 2 * width, hidden, dtype=torch.bfloat16).normal_(std=0.02)
    down = torch.empty(num, hidden, width, dtype=torch.bfloat16).normal_(std=0.02)
    return ExpertWeights(gate_up, down, None, None, False, False, gate)


def milliseconds(run: Callable[[], Any], seconds: float) -> float:
    """The least time of one run, tried for about so many seconds and at least three times."""
    with torch.inference_mode():
        run()
        best, tries, started = float("inf"), 0, time.perf_counter()
        while tries < 3 or time.perf_counter() - started < seconds:
            before = time.perf_counter()
            run()
            best, tries = min(best, time.perf_counter() - before), tries + 1
    return best * 1e3


def one_width(weights: ExpertWeights, tokens: int, share: float, seconds: float) -> float:
    """Milliseconds for each of the experts on all tokens, mean over the experts."""
    hidden = torch.randn(tokens, weights.down.shape[1]).bfloat16()
    ones, width = torch.ones(tokens, 1), int(share * weights.width)

    def run() -> None:
        for expert in range(weights.num_experts):
            ids = torch.full((tokens, 1), expert)
            gated_ffn(weights, hidden, ids, ones, torch.full_like(ids, width))

    return milliseconds(run, seconds) / weights.num_experts


def mixed(weights: ExpertWeights, tokens: int, share: float, seconds: float, top_k: int = 8) -> float:
    """Milliseconds for a layer whose slots differ in width."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, weights.down.shape[1]).bfloat16()
    ids = torch.rand(tokens, weights.num_experts, generator=random).argsort(1)[:, :top_k]
    low = max(0, 2 * round(share * 16) - 16)  # the mean of low..16 or 0..high is the share
    high = 16 if share >= 0.5 else 2 * round(share * 16)
    widths = torch.randint(low, high + 1, ids.shape, generator=random) * (weights.width // 16)
    return milliseconds(lambda: gated_ffn(weights, hidden, ids, torch.ones(ids.shape), widths), seconds)


def main() -> None:
    """Measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="about so long for each figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    wide = experts(2, 4096, 14336)
    for tokens in TOKENS:
        results[f"Mixtral's expert, {tokens} tokens"] = {
            str(share): one_width(wide, tokens, share, seconds) for share in SHARES
        }
    del wide
    fine = experts(64, 2048, 1024)
    for tokens in TOKENS:
        results[f"OLMoE's layer mixed, {tokens} tokens"] = {
            str(share): mixed(fine, tokens, share, seconds) for share in SHARES
        }
    print(f"{'milliseconds (share of full width)':36}" + "".join(f"{share:>18.3f}" for share in SHARES))
    for name, row in results.items():
        cells = (f"{value:.2f} ({value / row['1.0']:.2f}x)" for value in row.values())
        print(f"{name:36}" + "".join(f"{cell:>18}" for cell in cells))
    print(json.dumps({"milliseconds": results, "threads": 1}))


if __name__ == "__main__":
    main()
