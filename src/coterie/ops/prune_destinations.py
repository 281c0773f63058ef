"""Destination pruning inside a forward pass: the rules of `coterie.pruning`, for all tokens of a layer at once.

Every shape depends on shapes alone and nothing waits for the device, so the functions can be captured in a CUDA
graph. They compute in float32 (float64 for float64 weights) and add every sum in the references' order: in float64
they agree with them to the last tie; in float32 a share within rounding of a bound may fall on its other side. `sum`
and `cumsum` are left alone where a bound decides or weights come out: their order, and how exactly they add, is the
device's own, and every device and `prune_destinations_triton` are to decide alike.

Inside, arrays are [K, T]: the long axis is contiguous, and each of a token's K slots stands for its slot's whole
device. Slots on one device carry equal values, so no device needs a column of its own and cost does not grow with
their number. Weights must not be negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from coterie.pruning.reference import TOLERANCE

_HUGE = 1e30  # above every a and every a/c; added to where it belongs, since masks are slow on CPUs


@dataclass(frozen=True)
class Links:
    """What it costs to reach a device, as tensors beside the model.

    Attributes:
        cost_HG: [G + 1, G] float, cost from a home (row h + 1) to another device; 1 to itself, where it is not used;
            row 0 is for no home: every device costs 1.
        order_HG: [G + 1, G] float, place of each device by (cost, device): who comes first among equal a/c.
        uniform: every device but home costs 1, so neither table is read.
    """

    cost_HG: Tensor
    order_HG: Tensor
    uniform: bool

    @classmethod
    def of(cls, cost_GG: ArrayLike, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Links:
        """From a cost matrix [G, G] (`Topology.cost_matrix`), for weights that are computed with in `dtype`."""
        cost = np.array(cost_GG, dtype=np.float64)
        np.fill_diagonal(cost, 1.0)
        rows = np.vstack([np.ones(len(cost)), cost])
        order = rows.argsort(axis=1, kind="stable").argsort(axis=1)
        return cls(
            torch.tensor(rows, dtype=dtype, device=device),
            torch.tensor(order, dtype=dtype, device=device),
            uniform=bool((rows == 1).all()),
        )


@dataclass(frozen=True)
class _Visits:
    """The devices that tokens visit, slot by slot; slots on one device are equal in all but `share`.

    Attributes:
        a_KT: weight a of the slot's device.
        cost_KT: c of the slot's device (1 at home), None where every remote device costs 1.
        at_home_KT: whether the slot's device is home, None where there is no home.
        order_KT: place of the slot's device among the token's devices of equal a/c, the same for no two devices.
    """

    a_KT: Tensor
    cost_KT: Tensor | None
    at_home_KT: Tensor | None
    order_KT: Tensor


def cap(
    device_TK: Tensor,
    weight_TK: Tensor,
    home_T: Tensor | None,
    links: Links,
    p: float,
    before_TK: Tensor | None = None,
) -> Tensor:
    """CAP's rule for each token: which slots stay kept.

    Source: CAP §VI, eq. 6, with the second pass of `pruning.destinations.Cap`.

    Args:
        device_TK: [T, K] int64, device of each chosen expert.
        weight_TK: [T, K] float, routing weights; unread where not kept before.
        home_T: [T] int64, the token's own device or -1 for none; None: no token has a home.
        links: cost of reaching each device.
        p: share of a token's weight that may be dropped, in [0, 1); 0 drops nothing.
        before_TK: [T, K] bool, slots kept so far; None: all.

    Returns:
        [T, K] bool.
    """
    assert 0 <= p < 1, "a share of the weight"
    if p == 0:
        return _all_before(device_TK, before_TK)
    visits = _visits(device_TK, weight_TK, home_T, links, before_TK)
    need = 1.0 - p
    place_KT = _places_to_keep(visits)
    kept_KT, kept_T = _fill(visits.a_KT, place_KT, torch.zeros_like(visits.a_KT[0]), need)
    remote_KT = kept_KT if visits.at_home_KT is None else kept_KT & ~visits.at_home_KT
    goes_KT = _unnecessary(visits.a_KT, remote_KT, _places_to_drop(visits, place_KT), kept_T, need - TOLERANCE)
    return _written(kept_KT & ~goes_KT, before_TK)


def priced(
    device_TK: Tensor,
    weight_TK: Tensor,
    home_T: Tensor | None,
    links: Links,
    theta_G: Tensor,
    floor: float = 0.0,
    before_TK: Tensor | None = None,
) -> Tensor:
    """The priced rule for each token: which slots stay kept.

    Source: `pruning.destinations.Priced`.

    Args:
        device_TK: as for `cap`, like the arguments not named here.
        weight_TK: as there.
        home_T: as there.
        links: as there.
        theta_G: [G] float, least share of a token's weight that is worth one unit of cost on each device.
        floor: least share of its weight that a token keeps.
        before_TK: as there.

    Returns:
        [T, K] bool.
    """
    visits = _visits(device_TK, weight_TK, home_T, links, before_TK)
    price_KT = _look_up(theta_G.to(visits.a_KT.dtype), device_TK.t())
    kept_KT = visits.a_KT >= (price_KT if visits.cost_KT is None else price_KT * visits.cost_KT)
    if visits.at_home_KT is not None:
        kept_KT = kept_KT | visits.at_home_KT
    if floor > 0:
        first_KT = _first_of_device(visits.order_KT, before_TK)
        held_T = _sum_in_order(visits.a_KT * (kept_KT & first_KT))
        kept_KT = kept_KT | _fill(visits.a_KT * ~kept_KT, _places_to_keep(visits), held_T, floor)[0]
    return _written(kept_KT, before_TK)


def naive(weight_TK: Tensor, p: float, before_TK: Tensor | None = None) -> Tensor:
    """Naive pruning of each token: which slots stay kept when the lowest weights go while their share is within p.

    Source: CAP §VIII-D; `pruning.destinations.Naive`.

    Args:
        weight_TK: as for `cap`, like the other arguments.
        p: as there.
        before_TK: as there.

    Returns:
        [T, K] bool.
    """
    assert 0 <= p < 1, "a share of the weight"
    if p == 0:
        return _all_before(weight_TK, before_TK)
    share_KT = _shares(weight_TK, before_TK)
    if before_TK is not None:
        share_KT = share_KT.masked_fill(~before_TK.t(), torch.inf)  # these come last, and are never within p
    slot_K1 = torch.arange(len(share_KT), device=share_KT.device, dtype=share_KT.dtype)[:, None]
    place_KT = _places((torch.lt, share_KT), (torch.gt, slot_K1))
    dropped_KT = _running_sums(_in_order(share_KT, place_KT))
    count_T = (dropped_KT <= p + TOLERANCE).sum(0)
    return _written(place_KT >= count_T, before_TK)


def apply(weight_TK: Tensor, kept_TK: Tensor, renormalise: bool) -> Tensor:
    """The routing weights after pruning: zero for dropped slots, whose expert ids stay valid.

    Args:
        weight_TK: [T, K] float, the weights as the router gave them.
        kept_TK: [T, K] bool.
        renormalise: rescale a token's kept weights so that they sum to what all K summed to. A token that keeps
            nothing, or only zeros, is left as it is.

    Returns:
        [T, K], dtype of `weight_TK`; bit for bit `weight_TK` where everything is kept.
    """
    if not renormalise:
        return weight_TK * kept_TK
    full_TK = weight_TK.to(_compute_dtype(weight_TK))
    kept_weight_TK = full_TK * kept_TK
    all_T, kept_T = _sum_in_order(full_TK.t()), _sum_in_order(kept_weight_TK.t())
    scale_T = torch.where(kept_T > 0, all_T / kept_T, torch.ones_like(kept_T))
    return (kept_weight_TK * scale_T[:, None]).to(weight_TK.dtype)


def kept_share(weight_TK: Tensor, kept_TK: Tensor) -> Tensor:
    """Share of each token's routing weight that is kept, [T] float; equal shares where all weights are zero."""
    return (_shares(weight_TK, None) * kept_TK.t()).sum(0)


def visits_per_device(device_TK: Tensor, kept_TK: Tensor, num_devices: int) -> Tensor:
    """Which devices each token visits, [T, G] bool."""
    visited_TG = torch.zeros(len(device_TK), num_devices, dtype=torch.int64, device=device_TK.device)
    return visited_TG.scatter_add(1, device_TK, kept_TK.to(torch.int64)) > 0


# ---- the parts, all [K, T] ------------------------------------------------------------------------------------------


def _compute_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _all_before(like_TK: Tensor, before_TK: Tensor | None) -> Tensor:
    return torch.ones_like(like_TK, dtype=torch.bool) if before_TK is None else before_TK.clone()


def _written(kept_KT: Tensor, before_TK: Tensor | None) -> Tensor:
    kept_TK = kept_KT.t().contiguous()
    return kept_TK if before_TK is None else kept_TK & before_TK


def _sum_in_order(terms_KT: Tensor) -> Tensor:
    """Sum over the first axis, one term after the other: `sum` may add in another order."""
    return reduce(torch.add, terms_KT.unbind(0))


def _running_sums(terms_KT: Tensor) -> Tensor:
    """Sums of the first terms, [K, T], each rounded: `cumsum` adds in float64 on CPUs and in other orders on GPUs."""
    return torch.stack(list(accumulate(terms_KT.unbind(0), torch.add)))


def _shares(weight_TK: Tensor, before_TK: Tensor | None) -> Tensor:
    """Each slot's share of its token's weight, [K, T]; equal shares where all are zero, 0 where not kept before."""
    weight_KT = weight_TK.t().to(_compute_dtype(weight_TK)).contiguous()
    before_KT: Tensor | None = None
    count_T: Tensor | int = len(weight_KT)
    if before_TK is not None:
        before_KT = before_TK.t()
        weight_KT = weight_KT.masked_fill(~before_KT, 0)
        count_T = before_KT.sum(0).clamp(min=1)
    total_T = _sum_in_order(weight_KT)
    empty_T = (total_T == 0).to(weight_KT.dtype)  # adding 0 to the others is exact
    return (weight_KT + (empty_T if before_KT is None else empty_T * before_KT)) / (total_T + empty_T * count_T)


def _look_up(table: Tensor, index_KT: Tensor) -> Tensor:
    """Entries of a flat table; several times faster on CPUs than `table[index_KT]`."""
    return torch.index_select(table.reshape(-1), 0, index_KT.reshape(-1)).view(index_KT.shape)


def _visits(
    device_TK: Tensor, weight_TK: Tensor, home_T: Tensor | None, links: Links, before_TK: Tensor | None
) -> _Visits:
    share_KT = _shares(weight_TK, before_TK)
    device_KT = device_TK.t().contiguous()
    if links.uniform or home_T is None:
        cost_KT, order_KT = None, device_KT.to(share_KT.dtype)
    else:
        pair_KT = device_KT + (home_T + 1) * links.cost_HG.shape[1]
        cost_KT = _look_up(links.cost_HG, pair_KT).to(share_KT.dtype)
        order_KT = _look_up(links.order_HG, pair_KT).to(share_KT.dtype)
    at_home_KT = None if home_T is None else device_KT == home_T
    return _Visits(_on_devices(share_KT, order_KT), cost_KT, at_home_KT, order_KT)


def _on_devices(share_KT: Tensor, order_KT: Tensor) -> Tensor:
    """Each slot's device's weight a, [K, T], added in the order of slots."""
    a_KT = torch.zeros_like(share_KT)
    for share_T, order_T in zip(share_KT.unbind(0), order_KT.unbind(0), strict=True):
        a_KT.addcmul_(_compared(torch.eq, order_T, order_KT), share_T)
    return a_KT


def _compared(compare: Callable[..., Tensor], x_T: Tensor, x_KT: Tensor) -> Tensor:
    """compare(x_T, x_KT) as 1 or 0 in their own dtype: on CPUs several times faster than bool."""
    return compare(x_T, x_KT, out=torch.empty_like(x_KT))


def _places(*keys: tuple[Callable[..., Tensor], Tensor]) -> Tensor:
    """How many slots come before each, [K, T] int64; slots of one device share a place, and places may stay free.

    Args:
        keys: (gt for falling or lt for rising, [K, T] or [K, 1] values): the first that differs decides.
    """
    (first_compare, first_KT), *others = keys
    place_KT = torch.zeros_like(first_KT)
    for slot in range(len(first_KT)):
        before: Tensor | None = None
        for compare, x_KT in reversed(others):
            differs = _compared(compare, x_KT[slot], x_KT)
            before = differs if before is None else _compared(torch.eq, x_KT[slot], x_KT).mul_(before).add_(differs)
        place_KT += _compared(first_compare, first_KT[slot], first_KT)
        if before is not None:
            place_KT.addcmul_(_compared(torch.eq, first_KT[slot], first_KT), before)
    return place_KT.to(torch.int64)


def _places_to_keep(visits: _Visits) -> Tensor:
    """Places in the order of keeping: home, then falling a/c, then order."""
    ratio_KT = visits.a_KT if visits.cost_KT is None else visits.a_KT / visits.cost_KT
    if visits.at_home_KT is not None:
        ratio_KT = torch.add(ratio_KT, visits.at_home_KT, alpha=_HUGE)
    return _places((torch.gt, ratio_KT), (torch.lt, visits.order_KT))


def _places_to_drop(visits: _Visits, place_to_keep_KT: Tensor) -> Tensor:
    """Places in the order of trying to drop: falling c, then rising a, then falling order."""
    if visits.cost_KT is None:  # with equal costs the one order is the other's reverse
        return len(place_to_keep_KT) - 1 - place_to_keep_KT
    return _places((torch.gt, visits.cost_KT), (torch.lt, visits.a_KT), (torch.gt, visits.order_KT))


def _in_order(values_KT: Tensor, place_KT: Tensor) -> Tensor:
    """Values by place, 0 where a place is free; slots of one device write equal values to one place."""
    return torch.zeros_like(values_KT).scatter(0, place_KT, values_KT)


def _fill(a_KT: Tensor, place_KT: Tensor, start_T: Tensor, need: float) -> tuple[Tensor, Tensor]:
    """Take devices in order while less than `need` is held: which slots are taken [K, T], and the weight held [T]."""
    held_NT = _running_sums(torch.cat([start_T[None], _in_order(a_KT, place_KT)]))  # before each place, and at the end
    taken_T = (held_NT[:-1] < need).sum(0)
    return place_KT < taken_T, held_NT.gather(0, taken_T[None])[0]


def _unnecessary(a_KT: Tensor, remote_KT: Tensor, place_KT: Tensor, kept_T: Tensor, least: float) -> Tensor:
    """Slots whose devices can go one after the other while `least` is held, [K, T] bool.

    Args:
        a_KT: weight of each slot's device.
        remote_KT: slots whose device is kept and may go.
        place_KT: the order in which devices are tried.
        kept_T: weight held at first.
        least: weight to hold.
    """
    # what must stay weighs too much to go; a free place weighs nothing and may go
    weight_KT = _in_order(torch.add(a_KT, ~remote_KT, alpha=_HUGE), place_KT)
    goes = []
    for a_T in weight_KT.unbind(0):
        left_T = kept_T - a_T
        goes.append(left_T >= least)
        kept_T = torch.where(goes[-1], left_T, kept_T)
    return torch.stack(goes).gather(0, place_KT) & remote_KT


def _first_of_device(order_KT: Tensor, before_TK: Tensor | None) -> Tensor:
    """Slots that are the first of their token to be kept on their device, [K, T] bool."""
    before_KT = torch.ones_like(order_KT, dtype=torch.bool) if before_TK is None else before_TK.t()
    first_KT = before_KT.clone()
    for slot in range(len(order_KT) - 1):
        first_KT[slot + 1 :] &= (order_KT[slot + 1 :] != order_KT[slot]) | ~before_KT[slot]
    return first_KT
