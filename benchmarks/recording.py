"""What recording costs a running model: the same work with and without `coterie.record`, in alternating pairs.

Recording adds, for each MoE layer and forward call, two small copies and a hook; for each forward call, a note of its
mask and cache; and, every few thousand tokens, checking and writing what was copied. The copies grow with tokens x
top-k, the layer's own work with tokens x top-k x width x hidden size: the share is largest where a model is small and a
call holds few tokens. Decoding one sequence with a tiny model is the worst case, and is measured here.

The machine may be shared, so that timings jump: runs are short and pairs many, they alternate in order (plain first,
recorded first), and the figure is the median of the pairs' ratios, with the quartiles as spread. CPU time is shown
beside it; it is less moved by what else runs. What is left to do at the end of the block (checking and writing what is
in the buffers, a file of some 10 ms at least) is timed by itself and added as a share of the recorded runs' time.

    OMP_NUM_THREADS=1 python benchmarks/recording.py [--model MODEL] [--pairs 40]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from coterie.errors import CheckpointError
from coterie.models.load import load_model
from coterie.models.record import recorder

DEFAULT = "tiny-qwen3-moe"
TARGET = 0.05


def random_model() -> Any:
    """A model of the shipped one's shape with random weights."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=64, norm_topk_prob=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def workloads(model: Any) -> dict[str, Callable[[], object]]:
    """Some tenths of a second of work each: names and what to run."""
    rng = np.random.default_rng(0)
    ids = torch.tensor(rng.integers(3, model.config.vocab_size, (4, 256)))
    mask = torch.ones_like(ids)
    mask[1, 200:] = mask[3, 128:] = 0

    def generate(batch: int, tokens: int) -> None:
        model.generate(
            input_ids=ids[:batch, :32], attention_mask=torch.ones(batch, 32, dtype=torch.long), do_sample=False,
            min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip

    return {
        "prefill, 4 padded rows of 256": lambda: model(input_ids=ids, attention_mask=mask, use_cache=False),
        "generate, 1 row, 24 tokens": lambda: generate(1, 24),
        "generate, 4 rows, 16 tokens": lambda: generate(4, 16),
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(model: Any, work: Callable[[], object], pairs: int, path: Path) -> dict[str, Any]:
    ratios, seconds = [], []
    with recorder(model, path=path) as recording:

        def recorded() -> tuple[float, float]:
            with recording.attached():
                return timed(work)

        timed(work)
        recorded()
        for index in range(pairs):
            first_is_plain = index % 2 == 0
            plain, with_it = (timed(work), recorded()) if first_is_plain else (recorded(), timed(work))[::-1]
            ratios.append([with_it[0] / plain[0], with_it[1] / plain[1]])
            seconds.append(plain)
        left = timed(recording.trace)  # the same work as the end of the block
    share = np.array(left) / np.sum(seconds, axis=0)
    quartiles_QM = np.quantile(np.array(ratios) - 1, (0.25, 0.5, 0.75), axis=0) + share
    named = [dict(zip(("q25", "median", "q75"), values, strict=True)) for values in quartiles_QM.T.tolist()]
    return {
        "seconds": float(np.median(seconds, axis=0)[0]),
        "end_share": share.tolist(),
        **dict(zip(("wall", "cpu"), named, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT, help="folder, shipped model or hub id")
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    try:
        model, name = load_model(options.model), options.model
    except CheckpointError:
        if options.model != DEFAULT:
            raise
        model, name = random_model(), f"random weights, shape of {DEFAULT}"
    print(f"{name}, {torch.get_num_threads()} threads, {options.pairs} pairs; slow-down: median (quartiles), target 5%")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for label, work in workloads(model).items():
            row = rows[label] = measure(model, work, options.pairs, Path(folder) / "trace.safetensors")
            shown = [
                f"{row[kind]['median']:+7.2%} ({row[kind]['q25']:+.2%} {row[kind]['q75']:+.2%})"
                for kind in ("wall", "cpu")
            ]
            print(f"  {label:32}{row['seconds']:7.2f} s   wall {shown[0]}   cpu {shown[1]}", flush=True)
    worst = {kind: max(row[kind]["median"] for row in rows.values()) for kind in ("wall", "cpu")}
    print(
        json.dumps(
            {
                "benchmark": "recording",
                "model": name,
                "pairs": options.pairs,
                "target": TARGET,
                "worst_medians": worst,
                "met": worst["cpu"] < TARGET,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
