"""Check and time the Triton kernel for experts that run in part, on a GPU.

First it is compared with the plain masked computation in float32, then in bf16 and float16 with the grouped form in
float32, for every layout, with widths that differ from slot to slot, multiples of 16 and others; and it is captured in
a CUDA graph and replayed on other decisions. Then it is timed beside the grouped form of `ops.gated_ffn` and
Transformers' own experts at full width (grouped_mm), on layers of the shapes of Mixtral-8x7B and OLMoE-1B-7B.

    python benchmarks/gated_ffn_gpu.py [--check-only]
    TRITON_INTERPRET=1 python benchmarks/gated_ffn_gpu.py --device cpu --check-only    without a GPU

Times are medians of 20 runs after 5, between device events. Exit code 1 where a check fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from coterie.ops import gated_ffn, gated_ffn_triton
from coterie.ops.gated_ffn import ExpertWeights

SHAPES = {"Mixtral-8x7B": (8, 4096, 14336, 2), "OLMoE-1B-7B": (64, 2048, 1024, 8)}  # experts, hidden, neurons, top-k
SHARES = (1.0, 0.5, 0.25)
TOKENS = (1, 16, 256, 4096)
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest output


def experts(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> ExpertWeights:
    """Random experts: "silu", "transposed" or "gpt_oss"."""
    num, hidden, width = shape

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device).mul_(hidden**-0.5).to(dtype)

    if kind == "gpt_oss":
        config = SimpleNamespace(
            intermediate_size=width, hidden_size=hidden, num_local_experts=num, swiglu_alpha=1.702, swiglu_limit=7.0
        )
        module = GptOssExperts(config)
        for parameter in module.parameters():
            parameter.data = tensor(*parameter.shape)
        return ExpertWeights.of(module.requires_grad_(False))
    gate = MethodType(_default_apply_gate, SimpleNamespace(act_fn=torch.nn.SiLU()))
    if kind == "transposed":
        return ExpertWeights(
            tensor(num, hidden, 2 * width), tensor(num, width, hidden), None, None, True, False, gate
        )  # fmt: skip
    return ExpertWeights(tensor(num, 2 * width, hidden), tensor(num, hidden, width), None, None, False, False, gate)


def decisions(weights: ExpertWeights, hidden: int, tokens: int, top_k: int, step: int, share: float = 0.5) -> Any:
    """(hidden, ids, weights, widths), widths multiples of `step` around a share of full width, some zero."""
    device, dtype = weights.down.device, weights.down.dtype
    ids = torch.rand(tokens, weights.num_experts, device=device).argsort(1)[:, :top_k]
    steps = weights.width // step
    low, high = max(0, round((2 * share - 1) * steps)), min(steps, round(2 * share * steps))
    widths = torch.randint(low, high + 1, ids.shape, device=device) * step
    return torch.randn(tokens, hidden, device=device).to(dtype), ids, torch.rand(ids.shape, device=device), widths


def as_float(weights: ExpertWeights) -> ExpertWeights:
    """The same weights in float32."""
    parts = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    gate_up, down, *biases = (None if part is None else part.float() for part in parts)
    assert gate_up is not None and down is not None  # noqa: PT018
    return ExpertWeights(gate_up, down, *biases, weights.transposed, weights.interleaved, weights.gate)


def check(device: str) -> dict[str, float]:
    """The largest difference of every case, as a share of the largest output."""
    found = {}
    small = device == "cpu"
    shape = (6, 48, 96) if small else (6, 320, 768)
    for kind in ("silu", "transposed", "gpt_oss"):
        for dtype in (torch.float32, torch.float16) if small else LIMITS:  # the interpreter cannot multiply bf16
            weights = experts(kind, shape, dtype, device)
            for tokens, step in ((1, 16), (37, 16), (37, 1), (300, 16)):
                hidden, *rest = decisions(weights, shape[1], tokens, 3, step)
                got = gated_ffn_triton.gated_ffn(weights, hidden, *rest).float()
                plain = gated_ffn.gated_ffn_reference if tokens == 1 else gated_ffn.gated_ffn
                expected = plain(as_float(weights), hidden.float(), *rest)
                error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
                name = str(dtype).removeprefix("torch.")
                found[f"{kind} {name} {tokens} tokens, steps of {step}"] = error / LIMITS[dtype]
    if not small:
        found["CUDA graph, replayed on other decisions"] = check_graph(device)
    return found


def check_graph(device: str) -> float:
    """The largest difference of a replayed graph from a direct call, as a share of what is allowed."""
    weights = experts("silu", (8, 320, 768), torch.float32, device)
    first, second = (decisions(weights, 320, 32, 2, 16) for _ in range(2))
    gated_ffn_triton.gated_ffn(weights, *first)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = gated_ffn_triton.gated_ffn(weights, *first)
    for held, other in zip(first, second, strict=True):
        held.copy_(other)
    graph.replay()
    expected = gated_ffn_triton.gated_ffn(weights, *second)
    return float((output - expected).abs().max() / expected.abs().max()) / LIMITS[torch.float32]


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


def time_all(device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a layer: {shape and tokens: {way and share: time}}."""
    found = {}
    for name, (num, hidden, width, top_k) in SHAPES.items():
        weights = experts("silu", (num, hidden, width), torch.bfloat16, device)
        module = SimpleNamespace(
            gate_up_proj=weights.gate_up, down_proj=weights.down, num_experts=num, has_gate=True, has_bias=False,
            has_post_expert_norm=False, is_transposed=False, _is_expert_parallel=False, _apply_gate=weights.gate,
        )  # fmt: skip
        for tokens in TOKENS:
            x, ids, factors, _ = decisions(weights, hidden, tokens, top_k, 16)
            row = {"grouped_mm 1.0": milliseconds(lambda: grouped_mm_experts_forward(module, x, ids, factors))}  # noqa: B023
            for share in SHARES:
                *_, widths = decisions(weights, hidden, tokens, top_k, 16, share)
                given = (weights, x, ids, factors, widths)
                row[f"triton {share}"] = milliseconds(lambda: gated_ffn_triton.gated_ffn(*given))  # noqa: B023
                row[f"torch {share}"] = milliseconds(lambda: gated_ffn.gated_ffn(*given))  # noqa: B023
            found[f"{name}, {tokens} tokens"] = row
    return found


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        checks = check(options.device)
        worst = max(checks, key=lambda name: checks[name])
        print(f"{len(checks)} checks; nearest to its limit: {worst} at {checks[worst]:.2f} of it")
        failed = [name for name, value in checks.items() if not value <= 1]
        for name in failed:
            print(f"FAILED: {name}: {checks[name]:.2f} of what is allowed")
        times = {} if options.check_only else time_all(options.device)
    for name, row in times.items():
        print(f"{name:28}" + "".join(f"  {way} {value:.3f} ms" for way, value in row.items()))
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(json.dumps({"device": device, "checks": checks, "failed": failed, "milliseconds": times}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
