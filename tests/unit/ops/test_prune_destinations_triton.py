"""The Triton form of pruning, under Triton's interpreter, against the torch form: bit for bit, bounds and ties too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.topology import Topology

pytestmark = [pytest.mark.needs("triton"), pytest.mark.needs("torch")]

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which reads it then

NO_THETAS = np.zeros((1, 1))  # they are given beside the rule


def decisions(
    topology: str, top_k: int, tokens: int, *, parts: bool = False, home: bool = True, before: bool = False
) -> list[Any]:
    """All arguments of `prune` but the rule.

    Weights are random, or 23rds: of these sums end where bounds are and go as rounding goes, and many are equal.
    """
    import torch

    from coterie.ops.prune_destinations import Links

    parsed = Topology.parse(topology)
    devices = parsed.num_devices
    rng = np.random.default_rng([devices, top_k, tokens])
    ids_TK = rng.random((tokens, 3 * devices + top_k)).argsort(1)[:, :top_k]
    weight_TK = rng.random(ids_TK.shape) ** 3
    if parts:
        weight_TK = rng.multinomial(23, [1 / top_k] * top_k, tokens).astype(float)
    return [
        torch.tensor(ids_TK), torch.tensor(weight_TK, dtype=torch.float32),
        torch.tensor(rng.integers(0, devices, 3 * devices + top_k)),
        torch.tensor(rng.integers(-1, devices, tokens)) if home else None, Links.of(parsed.cost_matrix()),
        torch.tensor(rng.choice([0.0, 2 / 23, 5 / 23, 1.0], devices), dtype=torch.float32),
        torch.tensor(rng.random(ids_TK.shape) < 0.8) if before else None,
    ]  # fmt: skip


def require_equal(rule: Any, given: list[Any], renormalise: bool = False) -> Any:
    """Both forms, compared; what is kept."""
    from coterie.ops import prune_destinations_triton, prune_layer

    got = prune_destinations_triton.prune(rule, *given, renormalise=renormalise)
    expected = prune_layer.prune(rule, *given, renormalise=renormalise)
    for name in ("kept_TK", "device_TK", "weight_TK"):
        left, right = getattr(got, name), getattr(expected, name)
        assert left.dtype == right.dtype
        assert left.equal(right), name
    return got.kept_TK


@pytest.mark.parametrize("bound", [n / 23 - less for n in (7, 16) for less in (0, 1e-6)])
@pytest.mark.parametrize("topology", ["4", "2x4,inter=2"])
def test_sums_that_end_at_a_bound_are_rounded_alike(bound: float, topology: str) -> None:
    given = decisions(topology, 6, 160, parts=True, before=topology == "4")
    for rule in (Cap(bound), Naive(bound), Priced(NO_THETAS, bound), Priced(NO_THETAS, 1 - bound)):
        kept_TK = require_equal(rule, given)
        assert kept_TK.any()
        assert not kept_TK.all()


@pytest.mark.parametrize(
    ("topology", "top_k", "tokens"),
    [("1", 1, 1), ("8", 1, 70), ("8", 2, 33), ("2x2,inter=5", 3, 40), ("8", 8, 65), ("8x8,inter=5", 16, 20)],
)
def test_shapes(topology: str, top_k: int, tokens: int) -> None:
    for home, before in ((True, False), (False, True)):
        given = decisions(topology, top_k, tokens, home=home, before=before)
        for rule in (Cap(0.0), Cap(0.3), Naive(0.0), Naive(0.3), Priced(NO_THETAS), Priced(NO_THETAS, 0.6)):
            require_equal(rule, given, renormalise=before)


def test_renormalised_weights_and_zero_weights() -> None:
    given = decisions("2x4,inter=5", 8, 50)
    given[1][:9] = 0.0
    for rule in (Cap(0.4), Naive(0.4), Priced(NO_THETAS, 0.5)):
        assert not require_equal(rule, given, renormalise=True).all()
        given[1] = given[1].half().float()
        require_equal(rule, [given[0], given[1].half(), *given[2:]], renormalise=True)


def test_without_tokens_and_with_views() -> None:
    given = decisions("4", 4, 12)
    assert require_equal(Cap(0.3), [given[0][:0], given[1][:0], given[2], given[3][:0], *given[4:]]).shape == (0, 4)
    require_equal(Cap(0.3), [given[0][::2], given[1][::2], given[2], given[3][::2], *given[4:]])
    require_equal(Cap(0.3), [given[0][:, 1:], given[1][:, 1:], *given[2:]])


def test_what_it_does_not_take_is_refused() -> None:
    from coterie.ops.prune_destinations_triton import prune

    with pytest.raises(ConfigError, match=r"top-17 routing; .* at most 16 .* kernel='torch'"):
        prune(Cap(0.2), *decisions("4", 17, 2))
    given = decisions("4", 2, 2)
    given[1] = given[1].double()
    with pytest.raises(ConfigError, match=r"float64; .* kernel='torch'"):
        prune(Cap(0.2), *given)


_COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from coterie.ops.prune_destinations_triton import CAP, NAIVE, PRICED, _kernel

dtypes = {"ids": "*i64", "device": "*i64", "home": "*i64", "new_device": "*i64", "before": "*u8", "kept": "*u8"}
dtypes |= {"weight": "*bf16", "new_weight": "*bf16", "cost": "*fp32", "order": "*fp32", "theta": "*fp32"}
kinds = {name + "_ptr": dtype for name, dtype in dtypes.items()}
kinds |= {"tokens": "i32", "devices": "i32", "bound": "fp32", "least": "fp32"}
for arch in (80, 90):
    for rule, top_k, padded, block in ((CAP, 8, 8, 32), (NAIVE, 6, 8, 32), (PRICED, 16, 16, 8), (CAP, 1, 1, 32)):
        constants = {"RULE": rule, "HOME": True, "BEFORE": rule == NAIVE, "FLOOR": rule == PRICED, "RENORMALISE": True}
        constants |= {"TOP_K": top_k, "K": padded, "M": block}
        signature = {name: kinds.get(name, "constexpr") for name in _kernel.arg_names}
        values = {(_kernel.arg_names.index(name),): value for name, value in constants.items()}
        built = triton.compile(ASTSource(_kernel, signature, values), target=GPUTarget("cuda", arch, 32))
        inexact = re.findall(r"(?:div\\.(?:full|approx)|fma|ftz)[\\w.]*", built.asm["ptx"])
        print(arch, rule, len(built.asm["cubin"]) > 0, *inexact)
"""


def test_it_compiles_for_gpus_to_exact_arithmetic(tmp_path: Path) -> None:
    """To code of the A100 and H100, which takes no GPU; divisions are exact, and nothing is fused or flushed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{arch} {rule} True" for arch in (80, 90) for rule in (1, 2, 3, 1)]
