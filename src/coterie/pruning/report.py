"""What pruning did to a trace, by part and by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.pruning.destinations import LayerTokens
from coterie.pruning.traffic import kept_weight, remote_dpt, remote_peak_traffic, remote_visits


@dataclass(frozen=True)
class PartReport:
    """What pruning did to one part of a trace; arrays are [L].

    Attributes:
        num_tokens: tokens in the part.
        kept_weight: mean share of a token's routing weight that is still kept.
        emptied: share of the tokens that lost their last expert.
        remote_dpt: remote devices per token, after pruning.
        remote_peak_traffic: remote visits per token to the busiest device, after pruning.
        unpruned_remote_dpt: the same before.
        unpruned_remote_peak_traffic: the same before.
    """

    num_tokens: int
    kept_weight: NDArray[np.float64]
    emptied: NDArray[np.float64]
    remote_dpt: NDArray[np.float64]
    remote_peak_traffic: NDArray[np.float64]
    unpruned_remote_dpt: NDArray[np.float64]
    unpruned_remote_peak_traffic: NDArray[np.float64]

    def mean(self, name: str) -> float:
        """Mean over the layers of the attribute `name`."""
        return float(getattr(self, name).mean())

    def to_json(self) -> dict[str, Any]:
        """Means over layers, and the per-layer values under "layers"."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        means = {name: self.mean(name) for name in arrays}
        return {
            "num_tokens": self.num_tokens, **means, "layers": {name: value.tolist() for name, value in arrays.items()}
        }  # fmt: skip


@dataclass(frozen=True)
class PruneReport:
    """The rule as fitted, and what it did to the part it was fitted on and to the rest.

    Attributes:
        rule: its name and parameters.
        split_by: whether the parts are whole sequences ("sequence") or not ("token").
        fit: the earlier part.
        heldout: the later part, which no parameter has seen.
    """

    rule: Mapping[str, Any]
    split_by: str
    fit: PartReport
    heldout: PartReport

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {
            "rule": dict(self.rule), "split_by": self.split_by,
            "fit": self.fit.to_json(), "heldout": self.heldout.to_json(),
        }  # fmt: skip


@dataclass
class Tally:
    """Sums over the tokens of one part, layer by layer; arrays are [L] or [L, G]."""

    num_layers: int
    num_devices: int
    tokens_L: NDArray[np.int64] = field(init=False)
    weight_L: NDArray[np.float64] = field(init=False)
    emptied_L: NDArray[np.int64] = field(init=False)
    before_LG: NDArray[np.int64] = field(init=False)
    after_LG: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_L, self.emptied_L = np.zeros((2, self.num_layers), dtype=np.int64)
        self.weight_L = np.zeros(self.num_layers)
        self.before_LG, self.after_LG = np.zeros((2, self.num_layers, self.num_devices), dtype=np.int64)

    def add(self, layer: int, tokens: LayerTokens, kept_TK: NDArray[np.bool_]) -> None:
        """Count some tokens of a layer; `kept_TK` is what pruning kept of them."""
        self.tokens_L[layer] += len(kept_TK)
        self.weight_L[layer] += kept_weight(tokens, kept_TK).sum()
        self.emptied_L[layer] += np.count_nonzero(tokens.before_TK.any(axis=1) & ~kept_TK.any(axis=1))
        self.before_LG[layer] += remote_visits(tokens, tokens.before_TK)
        self.after_LG[layer] += remote_visits(tokens, kept_TK)

    def report(self) -> PartReport:
        """The sums as means over the tokens."""
        count = int(self.tokens_L[0])

        def each(measure: Callable[[NDArray[np.int64], int], float], visits_LG: NDArray[np.int64]) -> Any:
            return np.array([measure(visits_G, count) for visits_G in visits_LG])

        return PartReport(
            count, self.weight_L / count, self.emptied_L / count,
            each(remote_dpt, self.after_LG), each(remote_peak_traffic, self.after_LG),
            each(remote_dpt, self.before_LG), each(remote_peak_traffic, self.before_LG),
        )  # fmt: skip
