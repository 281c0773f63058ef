"""How long placing takes, on synthetic traces of the sizes that matter; compiled kernels cached beforehand.

CAP reports 80 s for the first placement and 9.1 s for 7 adjusted ones on eight A100s, for 48 layers x 128 experts and
8,000 tokens (CAP §VIII-G). Here: the same size on this machine's cores, then one as large as DeepSeek-V3, then how
time grows with tokens (searching looks at a bounded sample of them, so it should grow less than linearly).

    python benchmarks/speed.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from coterie.placement.driver import place, prepare, spectrum
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.synthetic import Recipe


def synthetic(folder: Path, layers: int, experts: int, top_k: int, tokens: int) -> RoutingTrace:
    """A synthetic trace on disk, memory-mapped."""
    path = folder / f"{layers}x{experts}x{tokens}.safetensors"
    Recipe(num_layers=layers, num_experts=experts, top_k=top_k, num_tokens=tokens, seed=0).save(path)
    return RoutingTrace.load(path)


def timed(label: str, run: Any) -> dict[str, Any]:
    """Run, print and return seconds, CPU seconds and the process's peak memory so far."""
    started, cpu = time.perf_counter(), time.process_time()
    run()
    row = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    memory = row["peak_memory_bytes"] / 2**30
    print(f"  {label:62}{row['seconds']:8.1f} s{row['cpu_seconds']:8.1f} cpu s{memory:7.2f} GiB", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the large one")
    quick = parser.parse_args().quick
    rows: dict[str, Any] = {}
    print(f"{os.cpu_count()} cores; peak memory is the process's, so it only grows")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spectrum(prepare(synthetic(folder, 2, 16, 2, 2000), Topology(1, 4)), 2)  # compiles, or loads what is cached
        spectrum(prepare(synthetic(folder, 2, 16, 2, 2000), Topology(2, 2)), 2)
        trace = synthetic(folder, 48, 128, 8, 8000)
        label = "48 x 128 experts, 8 devices, 8,000 tokens: eight-point spectrum"
        rows["spectrum_8"] = timed(label, lambda: spectrum(prepare(trace, Topology(1, 8)), 8))
        for tokens in (8_000, 16_000, 32_000, 64_000, 128_000):
            long = synthetic(folder, 8, 128, 8, tokens)
            label = f"8 x 128 experts, 8 devices, {tokens:,} tokens: one placement"
            rows[f"tokens_{tokens}"] = timed(label, lambda long=long: place(prepare(long, Topology(1, 8))))
        if not quick:
            large = synthetic(folder, 61, 256, 8, 100_000)
            label = "61 x 256 experts, 4 x 8 devices, 100,000 tokens: one placement"
            rows["large"] = timed(label, lambda: place(prepare(large, Topology(4, 8))))
    print(json.dumps({"benchmark": "speed", "cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
