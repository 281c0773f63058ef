"""Destination pruning in Triton: `ops.prune_layer` in one kernel, from expert ids to pruned weights.

Experimental: it gives what the torch form gives, bit for bit, under Triton's interpreter, and it compiles for Ampere
and Hopper, but it has not run on a GPU yet; `benchmarks/prune_gpu.py` checks and times it there.

A program takes a block of tokens and holds their slots as [M, K]; what comes before what is a sum over pairs of slots,
[M, K, K], so nothing is sorted. Sums that a bound decides take one slot or place after the other, each rounded, as the
torch form does; divisions are exactly rounded, which `/` is not here. Nothing waits for the device, and shapes and grid
depend on shapes alone, so a CUDA graph can hold it.

Shapes: T tokens, K top-k (padded to a power of two inside the kernel), E experts, G devices; a block has M tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.errors import ConfigError
from coterie.ops.prune_destinations import Links
from coterie.ops.prune_layer import Pruned
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.pruning.reference import TOLERANCE

MAX_TOP_K = 16
ALL, CAP, NAIVE, PRICED = 0, 1, 2, 3
_PAIRS, _TOKENS = 2048, 32  # pairs of slots, and tokens, that a program takes at most


def require_supported(top_k: int, dtype: torch.dtype) -> None:
    """Refuse decisions that the kernel does not take.

    Raises:
        ConfigError: for more than `MAX_TOP_K` experts a token, or weights in float64.
    """
    if top_k > MAX_TOP_K:
        raise ConfigError(
            f"top-{top_k} routing; the Triton kernel prunes at most {MAX_TOP_K} experts a token: use kernel='torch'"
        )
    if dtype == torch.float64:
        raise ConfigError("routing weights in float64; the Triton kernel computes in float32: use kernel='torch'")


def prune(
    rule: Cap | Naive | Priced,
    ids_TK: Tensor,
    weight_TK: Tensor,
    device_E: Tensor,
    home_T: Tensor | None,
    links: Links,
    theta_G: Tensor | None = None,
    before_TK: Tensor | None = None,
    *,
    renormalise: bool = False,
) -> Pruned:
    """A layer's decisions, pruned by any rule; results as by `ops.prune_layer.prune`, without gradients.

    Source: as for the functions of `ops.prune_destinations`.

    Args:
        rule: the rule, with its strength; the thetas of `Priced` are read from `theta_G`.
        ids_TK: [T, K] int64, the chosen experts, not checked.
        weight_TK: [T, K] float16, bfloat16 or float32, routing weights, not negative.
        device_E: [E] int64, the device of each expert.
        home_T: [T] int64, the token's own device or -1 for none; None: no token has a home.
        links: cost of reaching each device, in float32.
        theta_G: [G] float32, for `Priced`.
        before_TK: [T, K] bool, slots kept so far; None: all.
        renormalise: rescale a token's kept weights to the sum of all K.

    Returns:
        Weights, what is kept, and devices.

    Raises:
        ConfigError: for more than `MAX_TOP_K` experts a token, or weights in float64.
    """
    tokens, top_k = ids_TK.shape
    require_supported(top_k, weight_TK.dtype)
    ids_TK, weight_TK = ids_TK.contiguous(), weight_TK.detach().contiguous()
    kept_TK, new_device_TK = (torch.empty_like(ids_TK, dtype=dtype) for dtype in (torch.bool, torch.int64))
    pruned = Pruned(torch.empty_like(weight_TK), kept_TK, new_device_TK)
    if tokens == 0:
        return pruned
    kind, bound, least = _strength(rule)
    assert kind != PRICED or theta_G is not None, "priced needs thetas"
    padded = triton.next_power_of_2(top_k)
    block = min(_TOKENS, _PAIRS // padded**2)
    # what is absent has a stand-in that is not read
    with torch.cuda.device(ids_TK.get_device()):  # a model may be spread over several; -1, a CPU: does nothing
        _kernel[(triton.cdiv(tokens, block),)](
            ids_TK, weight_TK, device_E, links.cost_HG, links.order_HG, links.cost_HG if theta_G is None else theta_G,
            ids_TK if home_T is None else home_T.contiguous(),
            ids_TK if before_TK is None else before_TK.contiguous().view(torch.uint8),
            pruned.weight_TK, pruned.kept_TK.view(torch.uint8), pruned.device_TK,
            tokens, links.cost_HG.shape[1], bound, least,
            RULE=kind, HOME=home_T is not None, BEFORE=before_TK is not None, FLOOR=kind == PRICED and bound > 0,
            RENORMALISE=renormalise, TOP_K=top_k, K=padded, M=block,
        )  # fmt: skip
    return pruned


def _strength(rule: Cap | Naive | Priced) -> tuple[int, float, float]:
    """The kernel's rule, its bound, and for `Cap` the weight that the second pass must leave.

    Each is rounded to float32 once, after float64 arithmetic, as torch does with Python's numbers.
    """
    if isinstance(rule, Priced):
        return PRICED, float(rule.floor), 0.0
    if rule.p == 0:
        return ALL, 0.0, 0.0
    if isinstance(rule, Cap):
        return CAP, 1.0 - rule.p, 1.0 - rule.p - TOLERANCE
    return NAIVE, rule.p + TOLERANCE, 0.0


@triton.jit(do_not_specialize=["tokens", "devices"])
def _kernel(
    ids_ptr, weight_ptr, device_ptr, cost_ptr, order_ptr, theta_ptr, home_ptr, before_ptr,
    new_weight_ptr, kept_ptr, new_device_ptr, tokens, devices, bound, least,
    RULE: tl.constexpr, HOME: tl.constexpr, BEFORE: tl.constexpr, FLOOR: tl.constexpr, RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    slot_K = tl.arange(0, K)
    real_MK = (row_M < tokens)[:, None] & (slot_K < TOP_K)[None, :]
    at_MK = row_M.to(tl.int64)[:, None] * TOP_K + slot_K[None, :]
    device_MK = tl.load(device_ptr + tl.load(ids_ptr + at_MK, mask=real_MK, other=0))
    weight_MK = tl.load(weight_ptr + at_MK, mask=real_MK, other=0.0).to(tl.float32)
    before_MK = real_MK
    if BEFORE:
        before_MK = real_MK & (tl.load(before_ptr + at_MK, mask=real_MK, other=0) != 0)
    if RULE == 0:  # ALL
        kept_MK = before_MK
    elif RULE == 2:  # NAIVE
        kept_MK = _naive(_shares(weight_MK, before_MK, TOP_K), before_MK, real_MK, slot_K, bound, TOP_K)
    else:
        home_M = tl.zeros((M,), dtype=tl.int64) - 1
        if HOME:
            home_M = tl.load(home_ptr + row_M, mask=row_M < tokens, other=-1)
        pair_MK = (home_M[:, None] + 1) * devices + device_MK  # without a home the first row: all cost 1
        cost_MK, order_MK = tl.load(cost_ptr + pair_MK), tl.load(order_ptr + pair_MK)
        at_home_MK = device_MK == home_M[:, None]
        share_MK = _shares(weight_MK, before_MK, TOP_K)
        a_MK = _on_devices(share_MK, order_MK, TOP_K)
        ratio_MK = tl.where(at_home_MK, 1e30, tl.div_rn(a_MK, cost_MK))
        place_MK = _places(ratio_MK, -order_MK, -order_MK, real_MK)
        if RULE == 1:  # CAP
            kept_MK, held_M = _fill(a_MK, place_MK, tl.zeros((M,), dtype=tl.float32), bound, TOP_K)
            drop_MK = _places(cost_MK, -a_MK, order_MK, real_MK)
            remote_MK = kept_MK & ~at_home_MK
            goes_MK = _unnecessary(a_MK, remote_MK, drop_MK, held_M, least, TOP_K)
            kept_MK = kept_MK & ~goes_MK
        else:  # PRICED
            kept_MK = (a_MK >= tl.load(theta_ptr + device_MK) * cost_MK) | at_home_MK
            if FLOOR:
                first_MK = _first_of_device(order_MK, before_MK, slot_K)
                held_M = _sum_in_order(tl.where(kept_MK & first_MK, a_MK, 0.0), TOP_K)
                back_MK, held_M = _fill(tl.where(kept_MK, 0.0, a_MK), place_MK, held_M, bound, TOP_K)
                kept_MK = kept_MK | back_MK
        kept_MK = kept_MK & before_MK
    new_MK = weight_MK * kept_MK.to(tl.float32)
    if RENORMALISE:
        all_M, left_M = _sum_in_order(weight_MK, TOP_K), _sum_in_order(new_MK, TOP_K)
        scale_M = tl.div_rn(tl.where(left_M > 0, all_M, 1.0), tl.where(left_M > 0, left_M, 1.0))
        new_MK = new_MK * scale_M[:, None]
    tl.store(new_weight_ptr + at_MK, new_MK.to(new_weight_ptr.dtype.element_ty), mask=real_MK)
    tl.store(kept_ptr + at_MK, kept_MK.to(tl.uint8), mask=real_MK)
    tl.store(new_device_ptr + at_MK, device_MK, mask=real_MK)


# ---- the parts, named as in the torch form ---------------------------------------------------------------------------


@triton.jit
def _slot(x_MK, slot):
    """One slot's values, [M]; what is added to them is exactly zero."""
    return tl.sum(tl.where((tl.arange(0, x_MK.shape[1]) == slot)[None, :], x_MK, 0.0), axis=1)


@triton.jit
def _sum_in_order(x_MK, TOP_K: tl.constexpr):
    total_M = _slot(x_MK, 0)
    for slot in range(1, TOP_K):
        total_M += _slot(x_MK, slot)
    return total_M


@triton.jit
def _shares(weight_MK, before_MK, TOP_K: tl.constexpr):
    weight_MK = tl.where(before_MK, weight_MK, 0.0)
    total_M = _sum_in_order(weight_MK, TOP_K)
    count_M = tl.maximum(tl.sum(before_MK.to(tl.int32), axis=1), 1).to(tl.float32)
    empty_M = total_M == 0
    part_MK = tl.where(empty_M[:, None], before_MK.to(tl.float32), weight_MK)
    return tl.div_rn(part_MK, tl.where(empty_M, count_M, total_M)[:, None])


@triton.jit
def _on_devices(share_MK, order_MK, TOP_K: tl.constexpr):
    a_MK = tl.zeros_like(share_MK)
    for slot in range(TOP_K):
        same_MK = order_MK == _slot(order_MK, slot)[:, None]
        a_MK += tl.where(same_MK, _slot(share_MK, slot)[:, None], 0.0)
    return a_MK


@triton.jit
def _places(x_MK, y_MK, z_MK, real_MK):
    """How many slots come before each: by falling x, then falling y, then falling z; -1 where there is no slot."""
    x_MJ1, x_M1K = x_MK[:, :, None], x_MK[:, None, :]
    y_MJ1, y_M1K = y_MK[:, :, None], y_MK[:, None, :]
    z_before_MJK = (y_MJ1 == y_M1K) & (z_MK[:, :, None] > z_MK[:, None, :])
    before_MJK = (x_MJ1 > x_M1K) | ((x_MJ1 == x_M1K) & ((y_MJ1 > y_M1K) | z_before_MJK))
    return tl.where(real_MK, tl.sum((before_MJK & real_MK[:, :, None]).to(tl.int32), axis=1), -1)


@triton.jit
def _at_place(x_MK, place_MK, place):
    """The value at a place, [M], 0 where it is free; slots of one device share a place and have equal values."""
    return tl.max(tl.where(place_MK == place, x_MK, 0.0), axis=1)


@triton.jit
def _fill(a_MK, place_MK, held_M, need, TOP_K: tl.constexpr):
    taken_M = held_M.to(tl.int32) * 0
    for place in range(TOP_K):
        takes_M = held_M < need
        held_M = tl.where(takes_M, held_M + _at_place(a_MK, place_MK, place), held_M)
        taken_M += takes_M.to(tl.int32)
    return place_MK < taken_M[:, None], held_M


@triton.jit
def _unnecessary(a_MK, remote_MK, place_MK, held_M, least, TOP_K: tl.constexpr):
    weight_MK = tl.where(remote_MK, a_MK, 0.0)  # what must stay is left out below
    goes_MK = tl.zeros_like(place_MK)
    for place in range(TOP_K):
        left_M = held_M - _at_place(weight_MK, place_MK, place)
        goes_M = left_M >= least
        held_M = tl.where(goes_M, left_M, held_M)
        goes_MK += ((place_MK == place) & goes_M[:, None]).to(tl.int32)
    return (goes_MK > 0) & remote_MK


@triton.jit
def _first_of_device(order_MK, before_MK, slot_K):
    same_MJK = (order_MK[:, :, None] == order_MK[:, None, :]) & before_MK[:, :, None]
    earlier_MJK = same_MJK & (slot_K[:, None] < slot_K[None, :])[None, :, :]
    return before_MK & (tl.sum(earlier_MJK.to(tl.int32), axis=1) == 0)


@triton.jit
def _naive(share_MK, before_MK, real_MK, slot_K, most, TOP_K: tl.constexpr):
    share_MK = tl.where(before_MK, share_MK, float("inf"))  # these come last, and are never within `most`
    slot_MK = slot_K[None, :].to(tl.float32) + tl.zeros_like(share_MK)
    place_MK = _places(-share_MK, slot_MK, slot_MK, real_MK)
    dropped_M = tl.zeros((share_MK.shape[0],), dtype=tl.float32)
    count_M = dropped_M.to(tl.int32)
    for place in range(TOP_K):
        dropped_M += _at_place(share_MK, place_MK, place)
        count_M += (dropped_M <= most).to(tl.int32)
    return before_MK & (place_MK >= count_M[:, None])
