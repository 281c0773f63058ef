"""The budget is a ceiling on the process's real memory, as the kernel counts it, a long prompt included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import coterie

pytestmark = pytest.mark.needs("transformers")

_SCRIPT = """
import json, sys
import torch, coterie

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def measure(budget, widths):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    model = coterie.offload(sys.argv[1], budget, widths)
    ids = torch.randint(3, 260, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=8, do_sample=False)
    stats = model.stats()
    model.close()
    return {"process": peak(), "experts": stats.peak_expert_bytes, "read": stats.loaded_bytes}

def nothing(layer, ids, weights):
    return torch.zeros_like(ids)

measure(sys.argv[2], None)  # whatever is allocated once
without = measure(sys.argv[2], nothing)
print(json.dumps({"without": without, "with": [measure(budget, None) for budget in sys.argv[2:]]}))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers of 16 experts of 3 MiB: 96 MiB."""
    import torch
    import transformers

    from coterie.models.backend import quiet

    folder = tmp_path_factory.mktemp("peak")
    config = transformers.MixtralConfig(
        vocab_size=260, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=16, num_experts_per_tok=2, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.MixtralForCausalLM(config).save_pretrained(folder / "model")
    coterie.pack(folder / "model", folder / "store")
    return folder / "store"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's count of a process's peak memory")
def test_experts_take_no_more_of_the_process_than_the_budget(store: Path) -> None:
    path = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(store), "10%", "40%"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(ended.stdout)
    mib, total = 2**20, 96 * 2**20
    small, large = told["with"]
    activations = 12 * mib  # of an expert that all 300 tokens choose: gate and up, apart and joined, and their product
    for share, run in ((0.1, small), (0.4, large)):
        taken = run["process"] - told["without"]["process"]
        assert run["read"] >= 0.9 * total, "a long prompt runs about every expert"
        assert run["experts"] <= share * total
        assert 0.8 * share * total < taken < share * total + activations
    grown = large["process"] - small["process"]
    assert abs(grown - 0.3 * total) < 5 * mib, "activations are the same"
