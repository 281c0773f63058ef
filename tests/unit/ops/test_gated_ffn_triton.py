"""The Triton kernel, under Triton's interpreter, against the plain masked computation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from coterie.errors import CheckpointError

pytestmark = [pytest.mark.needs("triton"), pytest.mark.needs("transformers")]

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which reads it then

EXPERTS, HIDDEN, WIDTH = 5, 40, 80


def made(kind: str, dtype: Any = None, seed: int = 0) -> Any:
    """Random experts: "silu" as most families have them, "transposed", or "gpt_oss"."""
    import torch
    from transformers.integrations.moe import _default_apply_gate
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from coterie.ops.gated_ffn import ExpertWeights

    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Any:
        return torch.randn(shape, generator=random).mul(0.2).to(dtype or torch.float32)

    if kind == "gpt_oss":
        config = SimpleNamespace(
            intermediate_size=WIDTH, hidden_size=HIDDEN, num_local_experts=EXPERTS, swiglu_alpha=1.7, swiglu_limit=0.9
        )
        module = GptOssExperts(config)
        for parameter in module.parameters():
            parameter.data = tensor(*parameter.shape)
        return ExpertWeights.of(module)
    owner = SimpleNamespace(act_fn=torch.nn.SiLU())
    gate = MethodType(_default_apply_gate, owner)
    if kind == "transposed":
        gate_up, down = tensor(EXPERTS, HIDDEN, 2 * WIDTH), tensor(EXPERTS, WIDTH, HIDDEN)
    else:
        gate_up, down = tensor(EXPERTS, 2 * WIDTH, HIDDEN), tensor(EXPERTS, HIDDEN, WIDTH)
    return ExpertWeights(gate_up, down, None, None, kind == "transposed", False, gate)


def decisions(tokens: int, top_k: int, widths: list[int], seed: int = 1) -> tuple[Any, Any, Any, Any]:
    import torch

    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=random)
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=random)
    return hidden, ids, weights, torch.tensor(widths)[torch.randint(0, len(widths), ids.shape, generator=random)]


@pytest.mark.parametrize("kind", ["silu", "transposed", "gpt_oss"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "widths"),
    [(1, 1, [32]), (1, 2, [0, 16]), (7, 3, [0, 16, 48, 80]), (3, 2, [0]), (6, 3, [1, 17, 80]), (45, 2, [16, 80])],
)
def test_it_computes_what_the_plain_form_does(kind: str, tokens: int, top_k: int, widths: list[int]) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn_reference
    from coterie.ops.gated_ffn_triton import gated_ffn

    weights, given = made(kind), decisions(tokens, top_k, widths)
    with torch.no_grad():
        expected = gated_ffn_reference(weights, *given)
        torch.testing.assert_close(gated_ffn(weights, *given), expected, rtol=1e-5, atol=1e-5)


def test_large_tiles_and_one_busy_expert() -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn_reference
    from coterie.ops.gated_ffn_triton import gated_ffn

    weights, (hidden, ids, factors, widths) = made("silu"), decisions(70, 2, [0, 16, 64, 80])
    ids[:, 0] = 3
    assert ids.numel() > 16 * EXPERTS
    expected = gated_ffn_reference(weights, hidden, ids, factors, widths)
    torch.testing.assert_close(gated_ffn(weights, hidden, ids, factors, widths), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_as_near_as_the_grouped_form() -> None:
    """In float16: the interpreter of Triton (3.9 for one) multiplies the bits of bfloat16 numbers as integers."""
    import torch

    from coterie.ops import gated_ffn as plain
    from coterie.ops.gated_ffn_triton import gated_ffn

    weights, (hidden, *given) = made("silu", torch.float16), decisions(9, 3, [0, 16, 80])
    hidden = hidden.half()
    got, expected = gated_ffn(weights, hidden, *given), plain.gated_ffn(weights, hidden, *given)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=0.003, atol=0.003 * float(expected.abs().max()))


def test_no_tokens() -> None:
    from coterie.ops.gated_ffn_triton import gated_ffn

    assert gated_ffn(made("silu"), *(part[:0] for part in decisions(2, 2, [16]))).shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tiles_hold_every_slot_that_runs_once_and_by_expert(rows: int) -> None:
    import torch

    from coterie.ops.gated_ffn_triton import _tiles

    for tokens in (1, 5, 33):
        _, ids, _, widths = decisions(tokens, 3, [0, 16, 32], seed=tokens)
        slot, width, tiles = _tiles(ids, widths, EXPERTS, rows)
        held = []
        for expert, first, count, widest in tiles.t().tolist():
            inside = slot[first : first + count].long() if widest else slot[:0].long()
            assert len(inside) <= rows
            assert (ids.reshape(-1)[inside] == expert).all()
            assert widths.reshape(-1)[inside].tolist() == width[first : first + len(inside)].tolist()
            assert not len(inside) or int(widths.reshape(-1)[inside].max()) == widest
            held += inside.tolist()
        assert sorted(held) == torch.nonzero(widths.reshape(-1)).flatten().tolist()


def test_another_activation_is_refused() -> None:
    from dataclasses import replace

    import torch

    from coterie.ops.gated_ffn_triton import activation_of

    weights = made("silu")
    weights.gate.__self__.act_fn = torch.nn.GELU()
    with pytest.raises(CheckpointError, match="activation GELU"):
        activation_of(weights)
    with pytest.raises(CheckpointError, match="activation NoneType"):
        activation_of(replace(weights, gate=lambda both: both))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from coterie.ops.gated_ffn_triton import _down_kernel, _gate_up_kernel

for kernel, constants in (
    (_gate_up_kernel, {"KIND": 1, "BIASED": True, "M": 16, "N": 64, "STEP": 32}),
    (_down_kernel, {"BIASED": False, "M": 64, "N": 64, "STEP": 32}),
):
    kinds = {name: "i32" for name in kernel.arg_names} | {name: "constexpr" for name in constants}
    kinds |= {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    kinds |= {name: "*i32" for name in ("slot_ptr", "width_ptr", "tiles_ptr") if name in kinds}
    kinds |= {name: "fp32" for name in ("alpha", "limit") if name in kinds}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, kinds, values), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(built.asm["cubin"]))
"""


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """To machine code of the H100, which takes no GPU: the interpreter accepts much that the compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["_gate_up_kernel", "_down_kernel"]
