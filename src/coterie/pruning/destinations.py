"""The rules that say which devices a token may skip, one layer's tokens at a time.

A device visited for little routing weight over an expensive link is a bad bargain: `cap` weighs one against the
other within each token, `priced` asks of each visit what the busiest device charges for it, and `naive`, the
baseline, drops experts without asking where they live. `reference.py` states each rule in plain Python.

What is compiled is imported when it runs: inside vLLM the rules run in torch, and Numba must not be loaded (see
`vllm_plugin`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError

NO_HOME = -1


@dataclass(frozen=True)
class LayerTokens:
    """What a rule needs to know of some tokens in one layer; T tokens, K slots, G devices.

    Attributes:
        device_TK: [T, K] int64, the device of each chosen expert.
        weight_TK: [T, K] float64, routing weights as the router gave them; unread where not kept.
        before_TK: [T, K] bool, which slots are kept so far; a rule only ever drops.
        home_T: [T] int64, the device where the token is, or -1: there is no home and every device costs 1.
        cost_GG: [G, G] float64, cost of reaching a device (column) from a home (row); 0 only to itself.
    """

    device_TK: NDArray[np.int64]
    weight_TK: NDArray[np.float64]
    before_TK: NDArray[np.bool_]
    home_T: NDArray[np.int64]
    cost_GG: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        ids_TK: NDArray[Any],
        weights_TK: ArrayLike,
        kept_TK: NDArray[np.bool_] | None,
        device_E: NDArray[np.int64],
        home_T: ArrayLike,
        cost_GG: ArrayLike,
    ) -> LayerTokens:
        """From expert ids [T, K] and the device of each expert [E]; `kept_TK` None means all kept."""
        return cls(
            np.asarray(device_E, dtype=np.int64)[ids_TK],
            np.ascontiguousarray(weights_TK, dtype=np.float64),
            np.ones(ids_TK.shape, dtype=np.bool_) if kept_TK is None else np.ascontiguousarray(kept_TK, dtype=np.bool_),
            np.ascontiguousarray(home_T, dtype=np.int64),
            np.ascontiguousarray(cost_GG, dtype=np.float64),
        )


class PruningRule(Protocol):
    """Decides, for each token of a layer, which of its experts stay."""

    @property
    def name(self) -> str:
        """The rule's name on the command line."""
        ...

    def prune_layer(self, layer: int, tokens: LayerTokens) -> NDArray[np.bool_]:
        """Which slots stay kept in MoE layer `layer`, [T, K]; never one that was not kept before."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Name and parameters, ready for JSON: enough to prune the same way again."""
        ...


def _check_threshold(p: float) -> None:
    if not 0 <= p < 1:
        raise ConfigError(f"p = {p:g} is not within 0 and 1 (1 excluded): it is the share of weight to drop, e.g. 0.2")


@dataclass(frozen=True)
class Cap:
    """Keep the devices with most weight for their cost until 1-p of the token's weight is kept.

    Weights are divided by the sum over the token's kept slots (equal shares if all are zero). The home comes first
    and always stays; then devices by falling a/c, ties by lower cost, then lower device, while less than 1-p is
    kept. Then kept remote devices that turned out unnecessary go, tried by falling c, then rising a, then falling
    device, as long as at least 1-p-1e-6 stays. All experts on a dropped device are dropped; p = 0 drops nothing.

    Source: CAP §VI, eq. 6. The second pass is an addition: the greedy order can leave a light device in front of a
    heavy one that suffices without it.

    Attributes:
        p: share of a token's weight that may be dropped, in [0, 1).
    """

    p: float
    name: str = field(default="cap", init=False)

    def __post_init__(self) -> None:
        _check_threshold(self.p)

    def prune_layer(self, layer: int, tokens: LayerTokens) -> NDArray[np.bool_]:
        """Which slots stay kept, [T, K]; the rule is the same in every layer."""
        from coterie.pruning import kernels

        if self.p == 0:
            return tokens.before_TK.copy()
        return kernels.cap_tokens(
            tokens.device_TK, tokens.weight_TK, tokens.before_TK, tokens.home_T, tokens.cost_GG, self.p
        )

    def describe(self) -> dict[str, Any]:
        """Name and p."""
        return {"rule": self.name, "p": self.p}


@dataclass(frozen=True)
class Naive:
    """Drop a token's lowest-weighted experts while their share of its weight stays within p (to 1e-6).

    The baseline: it asks neither where an expert lives nor whether dropping it saves a visit. Of equal weights the
    later slot goes first; p = 0 drops nothing.

    Source: CAP §VI and §VIII-D (naive pruning).

    Attributes:
        p: share of a token's weight that may be dropped, in [0, 1).
    """

    p: float
    name: str = field(default="naive", init=False)

    def __post_init__(self) -> None:
        _check_threshold(self.p)

    def prune_layer(self, layer: int, tokens: LayerTokens) -> NDArray[np.bool_]:
        """Which slots stay kept, [T, K]; the rule is the same in every layer."""
        from coterie.pruning import kernels

        if self.p == 0:
            return tokens.before_TK.copy()
        return kernels.naive_tokens(tokens.weight_TK, tokens.before_TK, self.p)

    def describe(self) -> dict[str, Any]:
        """Name and p."""
        return {"rule": self.name, "p": self.p}


@dataclass(frozen=True)
class Priced:
    """Keep a remote device only where the token's weight on it pays the price of the visit.

    A step ends with its busiest device, so a visit to an idle one is free and dropping it wins nothing. Device d is
    kept iff it is home or `a_d >= theta[layer, d] * c_d`: one threshold within the node (c = 1) and one across. With
    theta the Lagrange price of a unit of cost on d, this drops least weight for the traffic it saves. `fitting.py`
    finds the thetas.

    Source: beyond CAP, whose weights a and costs c (§VI) it uses.

    Attributes:
        theta_LG: [L, G], the least share of a token's weight that is worth one unit of cost, by layer and device.
        floor: least share of its weight that a token keeps; below it devices return in CAP's order. 0: no floor.
    """

    theta_LG: NDArray[np.float64]
    floor: float = 0.0
    name: str = field(default="priced", init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"a floor of {self.floor:g} is not within 0 and 1; it is a share of a token's weight")

    def prune_layer(self, layer: int, tokens: LayerTokens) -> NDArray[np.bool_]:
        """Which slots stay kept in MoE layer `layer`, [T, K]."""
        from coterie.pruning import kernels

        theta_G = np.ascontiguousarray(self.theta_LG[layer], dtype=np.float64)
        return kernels.priced_tokens(
            tokens.device_TK, tokens.weight_TK, tokens.before_TK, tokens.home_T, tokens.cost_GG, theta_G, self.floor
        )

    def describe(self) -> dict[str, Any]:
        """Name, floor and thetas."""
        return {"rule": self.name, "floor": self.floor, "theta": self.theta_LG.tolist()}
