"""Check and time offloading to a GPU; prepared, and not run on one yet.

A random Mixtral-shaped model is packed on the spot. Checks: in float32, outputs at every budget and policy, with every
expert computed a second time from freshly read weights, against all experts resident on the same device (bit for bit)
and against the CPU; and against a plan of narrow experts. Times, in bf16: tokens per second of decoding at each budget
and policy, with the bytes read, those that had to be copied together within the device over them, and the rate of plain
pinned copies beside it.

    python benchmarks/offload_gpu.py --folder DISK [--check-only] [--layers 8 --hidden 4096 --neurons 14336]
    python benchmarks/offload_gpu.py --folder DISK --device host --small    without a GPU: tries the script, on the CPU

The disk should be cold and fast, or, with --buffered, in the page cache: then the link that is timed is PCIe's. Exit
code 1 where a check fails. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

import coterie
from coterie.models.load import load_model

BUDGETS, POLICIES = ("20%", "30%", "50%", "100%"), ("lru-layer", "company")
TOKENS, REPEATS = 64, 3


def packed(folder: Path, name: str, dtype: torch.dtype, sizes: dict[str, int]) -> Path:
    """A random model's store; its checkpoint is removed unless it is small."""
    source, store = folder / f"{name}-model", folder / f"{name}-store"
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=sizes["hidden"], intermediate_size=sizes["neurons"],
        num_hidden_layers=sizes["layers"], num_attention_heads=8, num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(source)
    coterie.pack(source, store)
    return store


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt, on the CPU."""
    with torch.inference_mode():
        return model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()


def checks(store: Path, device: str | None) -> dict[str, Any]:
    """Largest differences, and what failed."""
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(1))
    cpu = logits(load_model(store.parent / store.name.replace("-store", "-model")), ids)
    narrow = lambda layer, ids, weights: torch.where(weights > 0.5, 96, 40) + 0 * ids  # noqa: E731
    failed, worst = [], 0.0
    for widths, name in ((None, "full"), (narrow, "narrow")):
        whole = coterie.offload(store, "100%", widths, device=device, threads=1)
        expected = logits(whole, ids)
        whole.close()
        for budget in ("60%", "80%"):
            for policy in POLICIES:
                model = coterie.offload(store, budget, widths, device=device, threads=1, policy=policy, check=True)
                for _ in range(5):  # races show now and then
                    if not torch.equal(logits(model, ids), expected):
                        failed.append(f"{name} at {budget} by {policy}: other bits than with everything resident")
                model.close()
        if widths is None:
            worst = float((expected - cpu).abs().max() / cpu.abs().max())
            if worst > 1e-4:
                failed.append(f"{worst:.1e} from the CPU's")
    return {"failed": failed, "from_cpu": worst}


def timed(store: Path, device: str | None, buffered: bool) -> list[dict[str, Any]]:
    """Decoding at each budget and policy, medians."""
    rows = []
    for budget in BUDGETS:
        for policy in POLICIES:
            model = coterie.offload(store, budget, policy=policy, device=device, direct=not buffered)
            ids = torch.randint(3, 512, (1, 16), generator=torch.Generator().manual_seed(2)).to(model.device)
            rates = []
            with torch.inference_mode():
                model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
                before = model.stats()
                for _ in range(REPEATS):
                    wait(device)
                    began = time.perf_counter()
                    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
                    wait(device)
                    rates.append(TOKENS / (time.perf_counter() - began))
            stats = model.stats().since(before)
            rows.append(
                {"budget": budget, "policy": policy, "tokens_per_s": statistics.median(rates), "all": rates,
                 "read_gb_per_s": stats.loaded_bytes / 1e9 / max(1e-9, stats.load_seconds),
                 "bytes_share": stats.bytes_share, "miss_ratio": stats.miss_ratio,
                 "gathered_over_read": stats.gathered_bytes / max(1, stats.loaded_bytes)}
            )  # fmt: skip
            model.close()
            row = rows[-1]
            print(f"{budget:>5} {policy:>10}  {row['tokens_per_s']:8.2f} tokens/s  {row['miss_ratio']:6.1%} missed")
    return rows


def wait(device: str | None) -> None:
    """Until everything issued has ended."""
    if device is not None:
        torch.cuda.synchronize(device)


def copy_rate(device: str | None) -> float | None:
    """GB/s of pinned copies of 256 MiB to the device."""
    if device is None:
        return None
    source = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(source, device=device)
    times = []
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        into.copy_(source, non_blocking=True)
        wait(device)
        times.append(time.perf_counter() - began)
    return 2**28 / 1e9 / statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or host")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--neurons", type=int, default=7168)
    parser.add_argument("--small", action="store_true", help="a model of a few megabytes")
    parser.add_argument("--buffered", action="store_true", help="read through the page cache")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    device = None if options.device == "host" else options.device
    small = {"layers": 2, "hidden": 64, "neurons": 256}
    sizes = small if options.small else {name: getattr(options, name) for name in small}
    folder = options.folder / "coterie-offload-gpu"
    folder.mkdir()
    try:
        result: dict[str, Any] = {"checks": checks(packed(folder, "check", torch.float32, small), device)}
        print(
            "\n".join(result["checks"]["failed"]) or f"checks passed; {result['checks']['from_cpu']:.1e} from the CPU's"
        )
        if not options.check_only:
            result["rows"] = timed(packed(folder, "timed", torch.bfloat16, sizes), device, options.buffered)
            result["copy_gb_per_s"] = copy_rate(device)
    finally:
        shutil.rmtree(folder)
    versions = {name: version(name) for name in ("torch", "transformers")} | {"coterie": coterie.__version__}
    where = "host" if device is None else torch.cuda.get_device_name(device)
    print(json.dumps({**result, "device": where, "sizes": sizes, "buffered": options.buffered, "versions": versions}))
    return 1 if result["checks"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
