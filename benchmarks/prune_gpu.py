"""Check and time the Triton form of destination pruning on a GPU. It has not been run there yet.

First it is compared with the torch form on the same device, bit for bit: every rule, with and without homes and slots
that are dropped already, renormalised or not, in every dtype; weights are random, or 23rds, of which many are equal and
sums end at the bounds. The torch form's decisions are compared with its own on the CPU too, and the kernel is captured
in a CUDA graph and replayed on other decisions. Then both are timed, called one operation after the other and as
graphs, for the decisions of a layer of known models.

    python benchmarks/prune_gpu.py [--check-only]
    TRITON_INTERPRET=1 python benchmarks/prune_gpu.py --device cpu --check-only    without a GPU

Times are medians of 20 runs after 5, between device events. Exit code 1 where a check fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton

from coterie.ops import prune_destinations_triton, prune_layer
from coterie.ops.prune_destinations import Links
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.topology import Topology

SEED = 0
CASES = (("1", 1, 1), ("8", 2, 33), ("2x2,inter=5", 3, 200), ("4x8,inter=5", 8, 500), ("8x8,inter=5", 16, 70))
LAYERS = {"Mixtral-8x7B": ("8", 8, 2), "Qwen3-30B-A3B": ("8", 128, 8), "DeepSeek-V3": ("4x8,inter=5", 256, 8)}
TOKENS = (1, 16, 256, 4096)
NO_THETAS = np.zeros((1, 1))  # they are given beside the rule
RULES = {
    "cap": Cap(7 / 23), "cap at a bound": Cap(7 / 23 - 1e-6), "naive": Naive(0.3),
    "naive at a bound": Naive(7 / 23 - 1e-6), "priced": Priced(NO_THETAS),
    "priced with a floor": Priced(NO_THETAS, 16 / 23), "nothing": Cap(0.0),
}  # fmt: skip


def decisions(
    rng: np.random.Generator, topology: str, experts: int, top_k: int, tokens: int, *, parts: bool = False
) -> list[Any]:
    """The arguments of `prune` but the rule, on the CPU: ids, weights, devices, homes, links, thetas, kept before."""
    parsed = Topology.parse(topology)
    ids_TK = rng.random((tokens, experts)).argsort(1)[:, :top_k]
    weight_TK = rng.multinomial(23, [1 / top_k] * top_k, tokens) if parts else rng.random(ids_TK.shape) ** 3
    return [
        torch.tensor(ids_TK), torch.tensor(weight_TK, dtype=torch.float32),
        torch.tensor(rng.integers(0, parsed.num_devices, experts)),
        torch.tensor(rng.integers(-1, parsed.num_devices, tokens)), Links.of(parsed.cost_matrix()),
        torch.tensor(rng.choice([0.0, 2 / 23, 5 / 23, 1.0], parsed.num_devices), dtype=torch.float32), None,
    ]  # fmt: skip


def on_device(given: list[Any], device: str) -> list[Any]:
    """The same arguments elsewhere."""
    links = replace(given[4], cost_HG=given[4].cost_HG.to(device), order_HG=given[4].order_HG.to(device))
    return [None if each is None else links if each is given[4] else each.to(device) for each in given]


def differences(got: prune_layer.Pruned, expected: prune_layer.Pruned) -> int:
    """How many entries of all results differ."""
    pairs = zip(vars(got).values(), vars(expected).values(), strict=True)
    return sum(int((left != right).sum()) for left, right in pairs)


def check(device: str, rng: np.random.Generator) -> dict[str, int]:
    """How many entries differ in every check that is made; those of all shapes together."""
    found: dict[str, int] = {}
    small = device == "cpu"  # the interpreter is slow, and truncates where a GPU rounds to bfloat16
    dtypes = (torch.float32,) if small else (torch.float32, torch.float16, torch.bfloat16)
    for topology, top_k, most in CASES:
        tokens = min(most, 16) if small else most
        for parts in (False, True):
            given = decisions(rng, topology, 4 * top_k + 8, top_k, tokens, parts=parts)
            before_TK = torch.tensor(rng.random((tokens, top_k)) < 0.8)
            for home_T, kept_TK in ((given[3], None), (None, before_TK)):
                for dtype in dtypes:
                    args = [*given[:1], given[1].to(dtype), given[2], home_T, *given[4:6], kept_TK]
                    check_rules(args, device, str(dtype).removeprefix("torch."), found)
    if not small:
        found["CUDA graph, replayed on other decisions"] = check_graph(device, rng)
    return found


def check_rules(args: list[Any], device: str, dtype: str, found: dict[str, int]) -> None:
    """Count the differences of every rule on these arguments."""
    there = on_device(args, device)
    for name, rule in RULES.items():
        for renormalise in (False, True):
            got = prune_destinations_triton.prune(rule, *there, renormalise=renormalise)
            expected = prune_layer.prune(rule, *there, renormalise=renormalise)
            case = f"{name}, {dtype}"
            found[case] = found.get(case, 0) + differences(got, expected)
        if device != "cpu":
            case = f"torch on the GPU and the CPU: {name}, {dtype}"
            kept_TK = prune_layer.prune(rule, *args).kept_TK
            found[case] = found.get(case, 0) + int((kept_TK != expected.kept_TK.cpu()).sum())


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call as a CUDA graph, and what it writes to."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph, output


def check_graph(device: str, rng: np.random.Generator) -> int:
    """Differences of a replayed graph from a direct call on the same decisions."""
    first, second = (on_device(decisions(rng, "2x4,inter=5", 64, 8, 256), device) for _ in range(2))
    graph, output = captured(lambda: prune_destinations_triton.prune(RULES["cap"], *first, renormalise=True))
    for place in (0, 1, 3):  # ids, weights, homes; placement and thetas stay
        first[place].copy_(second[place])
    graph.replay()
    return differences(output, prune_destinations_triton.prune(RULES["cap"], *first, renormalise=True))


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time on the device."""
    times = []
    for number in range(25):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(before.elapsed_time(after))
    return statistics.median(times)


def time_all(device: str, rng: np.random.Generator) -> dict[str, dict[str, float]]:
    """Milliseconds of a layer: {model, tokens and rule: {form: time}}."""
    found = {}
    for name, (topology, experts, top_k) in LAYERS.items():
        for tokens in TOKENS:
            given = on_device(decisions(rng, topology, experts, top_k, tokens), device)
            given[1] = given[1].to(torch.bfloat16)
            for rule_name in ("cap", "naive", "priced", "priced with a floor"):
                row = {}
                for form, module in (("torch", prune_layer), ("triton", prune_destinations_triton)):

                    def run(module: Any = module, rule: Any = RULES[rule_name], given: list[Any] = given) -> Any:
                        return module.prune(rule, *given, renormalise=True)

                    row[f"{form} as a graph"] = milliseconds(captured(run)[0].replay)
                    row[form] = milliseconds(run)
                found[f"{name}, {tokens} tokens, {rule_name}"] = row
    return found


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(SEED)
    with torch.inference_mode():
        checks = check(options.device, rng)
        failed = [name for name, count in checks.items() if count]
        print(f"{len(checks)} checks, {len(failed)} failed")
        for name in failed:
            print(f"FAILED: {name}: {checks[name]} entries differ")
        times = {} if options.check_only else time_all(options.device, rng)
    for name, row in times.items():
        print(f"{name:48}" + "".join(f"  {form} {value:.4f} ms" for form, value in row.items()))
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    about = {"device": device, "versions": versions, "seed": SEED}
    print(json.dumps({**about, "checks": checks, "failed": failed, "milliseconds": times}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
