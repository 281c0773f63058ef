"""Baking a placement against `cp -r`, side by side, on a synthetic checkpoint with Qwen3-30B-A3B's tensor names.

Baking copies all data but the routers' in the kernel, as cp does, and writes other names before it. So its bound is
cp's time; what it adds is Python's start, the headers (18,867 tensors), and some system calls a router. Experts are
narrower than the model's, so that the whole has the size asked for; values are random bytes.

Each run starts with the source out of the page cache (`--warm`: in it) and ends when the copy is on the disk (fsync).
Pairs alternate in order (cp first, bake first); the figure is the median of the pairs' ratios. Both write to the same
folder, which needs three times the size; all is removed afterwards.

    python benchmarks/bake.py [--gib 4] [--pairs 5] [--folder DIR] [--warm]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

import coterie
from coterie.families import load_spec
from coterie.placement.placement import Placement
from coterie.topology import Topology

LAYERS, EXPERTS, HIDDEN, SHARDS = 48, 128, 2048, 16
TARGET_SPEED, TARGET_BYTES = 0.8, 2**30
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS, "num_experts_per_tok": 8, "hidden_size": HIDDEN, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "intermediate_size": 6144, "norm_topk_prob": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (1000, HIDDEN)
    yield "lm_head.weight", (1000, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (128,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (8, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("down", (HIDDEN, width)), ("gate", (width, HIDDEN)), ("up", (width, HIDDEN))):
                yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", shape


def make_checkpoint(folder: Path, nbytes: int) -> int:
    """Write the checkpoint; its tensors."""
    folder.mkdir()
    width = max(1, round((nbytes - LAYERS * EXPERTS * HIDDEN * 2) / (LAYERS * EXPERTS * 3 * HIDDEN * 2)))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "moe_intermediate_size": width}, indent=2))
    tensors = list(shapes(width))
    noise = np.random.default_rng(0).bytes(2**24)
    weight_map = {}
    for shard, part in enumerate(np.array_split(np.arange(len(tensors)), SHARDS)):
        file = folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, offset = {}, 0
        for name, shape in (tensors[index] for index in part):
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            weight_map[name], offset = file.name, offset + size
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            while offset > 0:
                out.write(noise[: min(offset, len(noise))])
                offset -= len(noise)
            out.flush()
            os.fsync(out.fileno())
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(tensors)


def random_placement(source: Path, out: Path) -> None:
    spec, rng = load_spec(source), np.random.default_rng(1)
    Placement(np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)]), Topology.parse("8"), spec).save(out)


def run(command: list[str], source: Path, out: Path, warm: bool) -> tuple[float, int]:
    """Seconds until the copy is on the disk, and the most memory the process took, bytes."""
    for file in source.iterdir():
        with file.open("rb") as stream:
            if warm:
                while stream.read(2**24):
                    pass
            else:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with {process.returncode}")
    for file in out.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    seconds = time.perf_counter() - begun
    shutil.rmtree(out)
    return seconds, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; the system's temporary folder")
    parser.add_argument("--warm", action="store_true", help="with the source in the page cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="coterie-bake-") as scratch:
        folder = Path(scratch)
        source, placement = folder / "source", folder / "placement.json"
        tensors = make_checkpoint(source, int(options.gib * 2**30))
        random_placement(source, placement)
        nbytes = sum(file.stat().st_size for file in source.iterdir())
        cache = "in" if options.warm else "out of"
        print(f"{nbytes / 2**30:.2f} GiB, {tensors:,} tensors in {SHARDS} files; source {cache} the page cache")
        commands = {
            "cp": ["cp", "-r", str(source), str(folder / "cp")],
            "bake": [sys.executable, "-m", "coterie", "bake", str(source), "--placement", str(placement),
                     "--out", str(folder / "bake")],
        }  # fmt: skip
        rows: list[dict[str, float]] = []
        peak = 0
        print("\n  pair       cp     bake   cp / bake   bake's memory")
        for pair in range(options.pairs):
            row = {}
            for name in ("cp", "bake") if pair % 2 == 0 else ("bake", "cp"):
                row[name], taken = run(commands[name], source, folder / name, options.warm)
                peak = max(peak, taken) if name == "bake" else peak
            rows.append(row)
            ratio = row["cp"] / row["bake"]
            print(
                f"  {pair + 1:4} {row['cp']:6.2f} s {row['bake']:6.2f} s {ratio:11.2f} {peak / 2**20:11.0f} MiB",
                flush=True,
            )
    ratios = [row["cp"] / row["bake"] for row in rows]
    print(
        json.dumps(
            {
                "benchmark": "bake", "coterie": coterie.__version__, "bytes": nbytes, "tensors": tensors,
                "warm": options.warm, "pairs": rows, "speed_of_cp": median(ratios), "worst": min(ratios),
                "peak_bytes": peak, "target_speed": TARGET_SPEED, "target_bytes": TARGET_BYTES,
                "met": median(ratios) >= TARGET_SPEED and peak < TARGET_BYTES,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
