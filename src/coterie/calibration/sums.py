"""What profiling adds up: plain arrays, so that they can be put aside and taken up again exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.profile.model_profile import ModelProfile
from coterie.spec import MoESpec

SAMPLE_TOKENS = 4096
_NEURON_SUMS = ("abs", "square", "weighted_abs")
_GRADIENT_SUM = "gradient_square"


@dataclass
class Sums:
    """Running sums over tokens. Windows are added whole.

    Attributes:
        windows: windows of the text that are in.
        num_tokens: tokens that are in, those of an earlier profile included.
        nats: summed negative log-likelihood of the tokens after those that are in (0 without gradients).
        ablated: pairs that this run has ablated.
        load_LE: [L, E] int64.
        pairs_LEE: [L, E, E] int64, symmetric.
        neurons: [L, E, I] float64 by name: sums over the expert's tokens of |a|, a^2, w |a| and, with gradients,
            (a dL/da)^2; a: activation, w: routing weight normalised over K.
        roles: [L, E, E] float64 by method: sums over the uses of a pair, for its first member.
        ablation_LEE: [L, E, E] float64, nats a use; NaN where it was not measured.
        sample_at_S: [S] int64, rising: which tokens the sample holds, counted over all.
        sample_ids_LSK: [L, S, K] int32, by falling weight.
        sample_weights_LSK: [L, S, K] float32, normalised over K.
    """

    windows: int
    num_tokens: int
    nats: float
    ablated: int
    load_LE: NDArray[np.int64]
    pairs_LEE: NDArray[np.int64]
    neurons: dict[str, NDArray[np.float64]]
    roles: dict[str, NDArray[np.float64]]
    ablation_LEE: NDArray[np.float64]
    sample_at_S: NDArray[np.int64]
    sample_ids_LSK: NDArray[np.int32]
    sample_weights_LSK: NDArray[np.float32]
    _names: tuple[str, ...] = field(
        default=("load_LE", "pairs_LEE", "ablation_LEE", "sample_at_S", "sample_ids_LSK", "sample_weights_LSK"),
        repr=False,
    )

    @classmethod
    def empty(cls, spec: MoESpec, width: int, tokens: int, *, gradients: bool) -> Self:
        """Nothing yet, with room for a sample of `tokens` tokens."""
        layers, experts, top_k = spec.num_layers, spec.num_experts, spec.top_k
        neurons = (*_NEURON_SUMS, _GRADIENT_SUM) if gradients else _NEURON_SUMS
        sample_at_S = _spread(tokens)
        shape = (layers, sample_at_S.size, top_k)
        return cls(
            windows=0, num_tokens=0, nats=0.0, ablated=0,
            load_LE=np.zeros((layers, experts), np.int64),
            pairs_LEE=np.zeros((layers, experts, experts), np.int64),
            neurons={name: np.zeros((layers, experts, width)) for name in neurons},
            roles={
                name: np.zeros((layers, experts, experts)) for name in (("fisher",) if gradients else ()) + ("weight",)
            },
            ablation_LEE=np.full((layers, experts, experts), np.nan),
            sample_at_S=sample_at_S,
            sample_ids_LSK=np.zeros(shape, np.int32), sample_weights_LSK=np.zeros(shape, np.float32),
        )  # fmt: skip

    @classmethod
    def after(cls, old: ModelProfile, tokens: int) -> Self:
        """The sums that an earlier profile stands for, with room for `tokens` more tokens in the sample.

        The sample is spread evenly over the tokens of both; of an earlier token that was not kept, its nearest in the
        earlier sample stands for it.
        """
        load_LE1 = old.load_LE[:, :, None].astype(np.float64)
        means = {name: values.astype(np.float64) for name, values in old.importance.items()}
        neurons = {"abs": means["mean_abs"] * load_LE1, "square": means["rms"] ** 2 * load_LE1,
                   "weighted_abs": means["weighted_mean_abs"] * load_LE1}  # fmt: skip
        if "first_order" in means:
            neurons[_GRADIENT_SUM] = means["first_order"] * load_LE1
        roles = {
            name: np.nan_to_num(old.dominance[name].astype(np.float64)) * old.pairs_LEE
            for name in ("fisher", "weight") if name in old.dominance
        }  # fmt: skip
        made = cls.empty(old.spec, old.width, old.num_tokens + tokens, gradients=_GRADIENT_SUM in neurons)
        ablation = old.dominance.get("ablation")
        made.num_tokens, made.neurons, made.roles = old.num_tokens, neurons, roles
        made.load_LE, made.pairs_LEE = old.load_LE.astype(np.int64), old.pairs_LEE.astype(np.int64)
        if ablation is not None:
            made.ablation_LEE = ablation.astype(np.float64)
        earlier = np.flatnonzero(made.sample_at_S < old.num_tokens)
        nearest = made.sample_at_S[earlier] * old.sample_ids_LSK.shape[1] // old.num_tokens
        made.sample_ids_LSK[:, earlier] = old.sample_ids_LSK[:, nearest]
        made.sample_weights_LSK[:, earlier] = old.sample_weights_LSK[:, nearest]
        return made

    def sample_slots(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of the next `count` tokens those that the sample keeps, and where in the sample they go."""
        where = np.flatnonzero((self.sample_at_S >= self.num_tokens) & (self.sample_at_S < self.num_tokens + count))
        return self.sample_at_S[where] - self.num_tokens, where

    def arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every array by name."""
        for name in self._names:
            yield name, getattr(self, name)
        for kind, held in (("neurons", self.neurons), ("roles", self.roles)):
            for name, values in held.items():
                yield f"{kind}.{name}", values

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over arrays of `arrays()`'s names and shapes."""
        for name, mine in self.arrays():
            mine[...] = arrays[name]


def _spread(tokens: int) -> NDArray[np.int64]:
    """At most `SAMPLE_TOKENS` of so many tokens, evenly spread."""
    count = min(SAMPLE_TOKENS, tokens)
    return ((2 * np.arange(count) + 1) * tokens) // (2 * count)
