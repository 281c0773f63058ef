"""The gated feed-forward network of `ops.gated_ffn`, in Triton: grouped by expert, every slot as wide as it wants.

Experimental: right under Triton's interpreter, and it compiles for Ampere and Hopper, but it has not run on a GPU yet;
`benchmarks/gated_ffn_gpu.py` checks and times it there.

Slots are sorted by expert and, within it, by falling width, and cut into tiles of rows. A tile runs as many neurons as
its widest row; the others are masked, and since the widths of a tile are neighbours in the sort, little is wasted. The
first kernel writes the activations of the neurons that run, the second multiplies them with down. The grid is the
largest that the number of slots can need, and tiles without work return at once: nothing waits for the device, and
nothing in the shapes depends on the data, so a CUDA graph can hold it.

Shapes: T tokens, K top-k, S = T x K slots, E experts, I neurons, H hidden size; a tile has M rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.errors import CheckpointError
from coterie.ops.gated_ffn import ExpertWeights, weighted_sum

SILU, CLAMPED = 0, 1  # silu(gate) * up; gpt-oss's clamped swiglu
_NEURONS, _INNER = 64, 32  # neurons or outputs of a block, and how many terms of a sum it takes at a time


def gated_ffn(
    weights: ExpertWeights, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, widths_TK: Tensor
) -> Tensor:
    """Every token's chosen experts, each as wide as wanted, weighted and summed in the order of slots.

    Widths that are multiples of 16 read whole cache lines; others are right too. No gradients.

    Source: CRISP §4.2.2.

    Args:
        weights: the layer's experts; silu, or gpt-oss's clamped swiglu.
        hidden_TH: [T, H] the experts' input, of the weights' dtype.
        ids_TK: [T, K] integers from 0 to E - 1, not checked.
        weights_TK: [T, K] float, their routing weights.
        widths_TK: [T, K] integers from 0 to I, not checked; an expert of width 0 is skipped.

    Returns:
        [T, H], dtype of `hidden_TH`.

    Raises:
        CheckpointError: for experts with another activation.
    """
    tokens, top_k = ids_TK.shape
    kind, alpha, limit = activation_of(weights)
    hidden_size, slots = hidden_TH.shape[1], tokens * top_k
    output_SH = torch.zeros(slots, hidden_size, dtype=hidden_TH.dtype, device=hidden_TH.device)
    if slots == 0:
        return output_SH
    rows = 16 if slots <= 16 * weights.num_experts else 64
    slot_S, width_S, tiles = _tiles(ids_TK, widths_TK, weights.num_experts, rows)
    neurons_SI = torch.empty(slots, weights.width, dtype=hidden_TH.dtype, device=hidden_TH.device)
    gate_up, down = weights.gate_up.detach(), weights.down.detach()
    if weights.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)  # [E, 2I, H] and [E, H, I], views
    step, up = (2, 1) if weights.interleaved else (1, weights.width)
    x_TH = hidden_TH.detach().contiguous()
    # no bias: a stand-in that is not read
    bias = gate_up if weights.gate_up_bias is None else weights.gate_up_bias.detach()
    down_bias = down if weights.down_bias is None else weights.down_bias.detach()
    _gate_up_kernel[(tiles.shape[1], triton.cdiv(weights.width, _NEURONS))](
        x_TH, gate_up, bias, neurons_SI, slot_S, tiles, tiles.shape[1], hidden_size, weights.width, top_k,
        gate_up.stride(0), step * gate_up.stride(1), gate_up.stride(2), up * gate_up.stride(1),
        bias.stride(0), step, up, alpha, limit,
        KIND=kind, BIASED=weights.gate_up_bias is not None, M=rows, N=_NEURONS, STEP=_INNER,
    )  # fmt: skip
    _down_kernel[(tiles.shape[1], triton.cdiv(hidden_size, _NEURONS))](
        neurons_SI, down, down_bias, output_SH, slot_S, width_S, tiles, tiles.shape[1], hidden_size, weights.width,
        down.stride(0), down.stride(1), down.stride(2), down_bias.stride(0),
        BIASED=weights.down_bias is not None, M=rows, N=_NEURONS, STEP=_INNER,
    )  # fmt: skip
    return weighted_sum(output_SH.view(tokens, top_k, hidden_size), weights_TK).to(hidden_TH.dtype)


def activation_of(weights: ExpertWeights) -> tuple[int, float, float]:
    """(SILU or CLAMPED, alpha, limit) of a module's experts.

    Raises:
        CheckpointError: for another activation.
    """
    experts: Any = getattr(weights.gate, "__self__", None)
    own = type(getattr(experts, "act_fn", None)).__name__
    if getattr(weights.gate, "__name__", "") == "_default_apply_gate" and own in ("SiLU", "SiLUActivation"):
        return SILU, 0.0, 0.0
    if type(experts).__name__ == "GptOssExperts":
        return CLAMPED, float(experts.alpha), float(experts.limit)
    raise CheckpointError(
        f"{type(experts).__name__} has the activation {own}; the Triton kernel computes silu and gpt-oss's own: use "
        "kernel='torch'"
    )


def _tiles(ids_TK: Tensor, widths_TK: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """How slots are cut into tiles.

    Returns:
        slot_S: the slots in their sorted order; those of width 0 come last and are in no tile.
        width_S: the widths in the same order.
        tiles: [4, number] int32: expert, first row, rows, widest row's width; zeros for a tile without work.
    """
    width_S = widths_TK.reshape(-1).to(torch.int64)
    expert_S = torch.where(width_S > 0, ids_TK.reshape(-1).to(torch.int64), experts)
    slot_S = torch.argsort(expert_S * 2**32 - width_S, stable=True)
    width_S = width_S[slot_S]
    count_E = torch.zeros(experts + 1, dtype=torch.int64, device=width_S.device)
    count_E = count_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))[:experts]
    tiles_E = (count_E + rows - 1) // rows
    end_E = tiles_E.cumsum(0)
    number = len(width_S) // rows + min(experts, len(width_S))  # no way of spreading the slots needs more
    tile_N = torch.arange(number, device=width_S.device)
    expert_N = torch.searchsorted(end_E, tile_N, right=True)
    works_N = expert_N < experts
    expert_N = expert_N.clamp(max=experts - 1)
    inside_N = (tile_N - (end_E - tiles_E)[expert_N]) * rows
    first_N = ((count_E.cumsum(0) - count_E)[expert_N] + inside_N) * works_N
    rows_N = (count_E[expert_N] - inside_N).clamp(max=rows)
    tiles = torch.stack([expert_N, first_N, rows_N, width_S[first_N]]) * works_N
    return slot_S.to(torch.int32), width_S.to(torch.int32), tiles.to(torch.int32).contiguous()


@triton.jit
def _gate_up_kernel(
    x_ptr, gate_ptr, bias_ptr, neurons_ptr, slot_ptr, tiles_ptr, num_tiles, hidden, width, top_k,
    expert_stride, neuron_stride, hidden_stride, up_offset, bias_expert, bias_step, bias_up, alpha, limit,
    KIND: tl.constexpr, BIASED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile)
    rows = tl.load(tiles_ptr + 2 * num_tiles + tile)
    widest = tl.load(tiles_ptr + 3 * num_tiles + tile)
    if block * N >= widest:
        return
    row_M = first + tl.arange(0, M)
    in_tile_M = tl.arange(0, M) < rows
    token_M = tl.load(slot_ptr + row_M, mask=in_tile_M, other=0).to(tl.int64) // top_k
    neuron_N = block * N + tl.arange(0, N)
    runs_N = neuron_N < widest
    gate_MN = tl.zeros((M, N), dtype=tl.float32)
    up_MN = tl.zeros((M, N), dtype=tl.float32)
    base_N = gate_ptr + expert * expert_stride + neuron_N.to(tl.int64) * neuron_stride
    for start in range(0, hidden, STEP):
        at_H = start + tl.arange(0, STEP)
        in_H = at_H < hidden
        x_MH = tl.load(
            x_ptr + token_M[:, None] * hidden + at_H[None, :], mask=in_tile_M[:, None] & in_H[None, :], other=0.0
        )
        at_HN = base_N[None, :] + at_H[:, None].to(tl.int64) * hidden_stride
        inside_HN = in_H[:, None] & runs_N[None, :]
        gate_MN = tl.dot(x_MH, tl.load(at_HN, mask=inside_HN, other=0.0), gate_MN, input_precision="ieee")
        up_MN = tl.dot(x_MH, tl.load(at_HN + up_offset, mask=inside_HN, other=0.0), up_MN, input_precision="ieee")
    if BIASED:
        at_N = bias_ptr + expert * bias_expert + neuron_N * bias_step
        gate_MN += tl.load(at_N, mask=runs_N, other=0.0).to(tl.float32)[None, :]
        up_MN += tl.load(at_N + bias_up, mask=runs_N, other=0.0).to(tl.float32)[None, :]
    if KIND == 1:  # CLAMPED
        gate_MN = tl.minimum(gate_MN, limit)
        up_MN = tl.minimum(tl.maximum(up_MN, -limit), limit)
        value_MN = gate_MN * tl.sigmoid(alpha * gate_MN) * (up_MN + 1)
    else:
        value_MN = gate_MN * tl.sigmoid(gate_MN) * up_MN
    tl.store(
        neurons_ptr + row_M[:, None].to(tl.int64) * width + neuron_N[None, :],
        value_MN.to(neurons_ptr.dtype.element_ty),
        mask=in_tile_M[:, None] & runs_N[None, :],
    )


@triton.jit
def _down_kernel(
    neurons_ptr, down_ptr, bias_ptr, output_ptr, slot_ptr, width_ptr, tiles_ptr, num_tiles, hidden, width,
    expert_stride, hidden_stride, neuron_stride, bias_expert,
    BIASED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile)
    rows = tl.load(tiles_ptr + 2 * num_tiles + tile)
    widest = tl.load(tiles_ptr + 3 * num_tiles + tile)
    if widest == 0:
        return
    row_M = first + tl.arange(0, M)
    in_tile_M = tl.arange(0, M) < rows
    width_M = tl.load(width_ptr + row_M, mask=in_tile_M, other=0)
    at_N = block * N + tl.arange(0, N)
    in_N = at_N < hidden
    total_MN = tl.zeros((M, N), dtype=tl.float32)
    base_N = down_ptr + expert * expert_stride + at_N.to(tl.int64) * hidden_stride
    for start in range(0, widest, STEP):
        neuron_K = start + tl.arange(0, STEP)
        # beyond a row's width the first kernel may have written a neighbour's neurons, or nothing
        value_MK = tl.load(
            neurons_ptr + row_M[:, None].to(tl.int64) * width + neuron_K[None, :],
            mask=neuron_K[None, :] < width_M[:, None], other=0.0,
        )  # fmt: skip
        down_KN = tl.load(
            base_N[None, :] + neuron_K[:, None].to(tl.int64) * neuron_stride,
            mask=(neuron_K < widest)[:, None] & in_N[None, :], other=0.0,
        )  # fmt: skip
        total_MN = tl.dot(value_MK, down_KN, total_MN, input_precision="ieee")
    if BIASED:
        total_MN += tl.load(bias_ptr + expert * bias_expert + at_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
    slot_M = tl.load(slot_ptr + row_M, mask=in_tile_M, other=0).to(tl.int64)
    tl.store(
        output_ptr + slot_M[:, None] * hidden + at_N[None, :],
        total_MN.to(output_ptr.dtype.element_ty),
        mask=in_tile_M[:, None] & in_N[None, :],
    )
