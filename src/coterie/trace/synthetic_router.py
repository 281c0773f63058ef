"""A statistical model of a router: what its logits are made of, and the kernel that draws from it.

The logit of expert e for token t in one layer is

    popularity · b_e  +  company · Σ_d scale_d · z_td · u_ed  +  Gumbel noise

with b and u standard normal, drawn for each layer, and z the token's topics, shared by its layers as a hidden state
is. Topics fall in importance (`scale_d²` ~ d^-decay, summing to one), so a few of them move many experts together and
many move few: that is the company experts keep. A token's topics are part its sequence's, part a drift along the
sequence, and part its own. The K highest logits are chosen; their weights are a softmax of all logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coterie.errors import ConfigError

_EMBEDDINGS, _SEQUENCE, _DRIFT, _OWN, _NOISE = range(5)  # independent random streams of one seed


@dataclass(frozen=True)
class RoutingModel:
    """How skewed and how sociable experts are; the unit of every strength is the scale of the Gumbel noise.

    Attributes:
        name: what provenance calls it.
        fitted_to: the traces it was fitted to.
        popularity: spread of the experts' own biases.
        company: spread of the part of a logit that topics explain.
        num_topics: latent topics of a token.
        decay: how fast topics fall in importance.
        sequence_share: share of a token's topic variance that its whole sequence has.
        drift_share: share that drifts along the sequence; the rest is the token's own.
        drift_correlation: correlation of the drifting part between neighbouring tokens.
        weight_scale: logits are multiplied by it before the softmax that makes routing weights.
        normalized: whether a token's weights sum to one; otherwise they are a softmax over all experts.
    """

    name: str
    fitted_to: str
    popularity: float
    company: float
    num_topics: int
    decay: float
    sequence_share: float
    drift_share: float
    drift_correlation: float
    weight_scale: float
    normalized: bool

    def __post_init__(self) -> None:
        if self.num_topics < 1:
            raise ConfigError(f"num_topics = {self.num_topics} in {self.name}; a model needs at least 1")
        if min(self.sequence_share, self.drift_share) < 0 or self.sequence_share + self.drift_share > 1:
            shares = f"sequence_share = {self.sequence_share:g} and drift_share = {self.drift_share:g}"
            raise ConfigError(f"{shares} in {self.name}; shares are at least 0 and together at most 1")
        if not 0 <= self.drift_correlation < 1:
            raise ConfigError(f"drift_correlation = {self.drift_correlation:g} in {self.name}; it is within 0 and 1")

    @property
    def own_share(self) -> float:
        """Share of a token's topic variance that no other token has."""
        return max(0.0, 1 - self.sequence_share - self.drift_share)  # rounding may fall below zero


class TopicStream:
    """The topics of successive tokens, a piece at a time; the pieces' sizes change nothing."""

    def __init__(self, model: RoutingModel, seed: int) -> None:
        self._model, self._seed = model, seed
        self._drift_rng, self._own_rng = (np.random.default_rng([seed, stream]) for stream in (_DRIFT, _OWN))
        self._drift_D = np.zeros(model.num_topics, dtype=np.float32)
        scale_D = np.arange(1, model.num_topics + 1, dtype=np.float64) ** (-model.decay / 2)
        self._scale_D = scale_D / np.sqrt((scale_D**2).sum())

    def next(self, sequence_ids: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.float32]:
        """Topics of the next tokens, [T, D] float32, for their sequence ids and positions, both [T]."""
        model, shape = self._model, (len(sequence_ids), self._model.num_topics)
        drift_TD = self._drift_rng.standard_normal(shape, dtype=np.float32)
        follow_drift(drift_TD, positions == 0, np.float32(model.drift_correlation), self._drift_D)
        own_TD = self._own_rng.standard_normal(shape, dtype=np.float32)
        distinct, index_T = np.unique(sequence_ids, return_inverse=True)
        sequence_SD = np.stack(
            [np.random.default_rng([self._seed, _SEQUENCE, int(s)]).standard_normal(shape[1]) for s in distinct]
        )
        topics_TD = np.sqrt(model.sequence_share) * sequence_SD[index_T.ravel()]
        topics_TD += np.sqrt(model.drift_share) * drift_TD + np.sqrt(model.own_share) * own_TD
        scaled: NDArray[np.float32] = (topics_TD * (model.company * self._scale_D)).astype(np.float32)
        return scaled


def route_layer(
    model: RoutingModel, seed: int, layer: int, topics_TD: NDArray[np.float32], first: int, num_experts: int, top_k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw one layer's decisions for some tokens.

    Args:
        model: the router.
        seed: the trace's seed.
        layer: MoE layer; it sets the experts' biases and embeddings.
        topics_TD: [T, D] from `TopicStream`.
        first: index of the first of these tokens in the trace; it sets their noise.
        num_experts: E.
        top_k: K.

    Returns:
        [T, K] int32 expert ids and [T, K] float32 weights, by falling weight.
    """
    # drawn anew for every piece: E x D numbers cost little beside T x E of them, and none need be held
    rng = np.random.default_rng([seed, _EMBEDDINGS, layer])
    bias_E = (model.popularity * rng.standard_normal(num_experts)).astype(np.float32)
    embedding_DE = rng.standard_normal((topics_TD.shape[1], num_experts), dtype=np.float32)
    key = np.random.SeedSequence([seed, _NOISE, layer]).generate_state(1, np.uint64)[0]
    ids_TK = np.empty((len(topics_TD), top_k), dtype=np.int32)
    weights_TK = np.empty(ids_TK.shape, dtype=np.float32)
    scale = np.float32(model.weight_scale)
    choose_experts(topics_TD, embedding_DE, bias_E, key, np.uint64(first), scale, ids_TK, weights_TK)
    if model.normalized:
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
    return ids_TK, weights_TK


def _follow_drift(drift_TD: Any, starts_T: Any, correlation: Any, state_D: Any) -> None:
    """Turn white noise into an AR(1) process that starts anew with each sequence, in place."""
    fresh = np.float32(np.sqrt(1 - correlation * correlation))
    for t in range(drift_TD.shape[0]):
        for d in range(drift_TD.shape[1]):
            if not starts_T[t]:
                drift_TD[t, d] = correlation * state_D[d] + fresh * drift_TD[t, d]
            state_D[d] = drift_TD[t, d]


def _mix(x: Any) -> Any:
    """SplitMix64's finalizer: 64 well-mixed bits of any 64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_mix_compiled = njit(nogil=True, inline="always")(_mix)


def _choose_experts(
    topics_TD: Any, embedding_DE: Any, bias_E: Any, key: Any, first: Any, scale: Any, ids_TK: Any, weights_TK: Any
) -> None:
    """Noisy logits, the K highest of them, and their softmax over all experts; noise depends on the token alone."""
    step = np.uint64(0x9E3779B97F4A7C15)
    num_experts = len(bias_E)
    logit_E = np.empty(num_experts, dtype=np.float32)
    for t in range(topics_TD.shape[0]):
        logit_E[:] = bias_E
        for d in range(topics_TD.shape[1]):
            for e in range(num_experts):
                logit_E[e] += topics_TD[t, d] * embedding_DE[d, e]
        state = _mix_compiled(key + (first + np.uint64(t)) * step)
        for e in range(num_experts):
            state += step
            # 23 bits: the midpoints of so many cells are exact in float32, so the logarithm never sees 0 or 1
            uniform = (np.float32(_mix_compiled(state) >> np.uint64(41)) + np.float32(0.5)) * np.float32(2.0**-23)
            logit_E[e] -= np.log(-np.log(uniform))
        highest = logit_E.max()
        total = np.float32(0)
        for e in range(num_experts):
            total += np.exp(scale * (logit_E[e] - highest))
        for k in range(ids_TK.shape[1]):
            best = 0
            for e in range(1, num_experts):
                if logit_E[e] > logit_E[best]:
                    best = e
            ids_TK[t, k] = best
            weights_TK[t, k] = np.exp(scale * (logit_E[best] - highest)) / total
            logit_E[best] = -np.inf


# called, not decorated: numba has no types to check a decorator by
follow_drift = njit(cache=True, nogil=True)(_follow_drift)
choose_experts = njit(cache=True, nogil=True)(_choose_experts)
