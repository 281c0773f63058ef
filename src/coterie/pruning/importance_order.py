"""The order in which an expert's neurons stand, most important first, and what each is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, unknown_name
from coterie.profile.model_profile import ModelProfile

LEARNT = "learnt"  # by descent (`calibration/learning.py`): what a neuron is worth, comparable across layers as it is
PREFERRED = (LEARNT, "first_order_rms_down", "first_order", "rms_down", "mean_abs_down", "mean_abs")
LAYERS = ("equal", "loss")
LOSS, BOTH = "first_order", "first_order_rms_down"  # mean squared change of the loss; its root, averaged with another


@dataclass(frozen=True)
class NeuronOrder:
    """Neurons by falling importance.

    Attributes:
        variant: of importance.
        order_LEI: [L, E, I] uint16 (uint32 for wider experts): neuron r of the reordered expert is neuron order[r] of
            the profiled one; of equally important ones the lower comes first.
        value_LEI: [L, E, I] float32, falling: importance at a routing weight of 1, divided by its layer's mean.
        layers: how layers compare: "equal", by "loss", or as "learnt".
        scale_L: [L], what each layer's values were multiplied by; their mean is 1.
        unseen: experts that no token of the profile chose.
    """

    variant: str
    order_LEI: NDArray[np.integer[Any]]
    value_LEI: NDArray[np.float32]
    layers: str
    scale_L: NDArray[np.float64]
    unseen: int


def neuron_order(profile: ModelProfile, variant: str | None = None, layers: str | None = None) -> NeuronOrder:
    """The order of neurons by a profile's importance.

    Nothing is known of an expert that no token chose: its neurons stay in order, and are worth what those at the same
    rank of the layer's other experts are worth on average.

    Source: CRISP §3.2.2 for the order. That one threshold serves all layers goes beyond it: values are divided by their
    layer's mean and, with "loss", multiplied by the root of the mean squared change of the loss that a neuron of the
    layer makes, since some layers matter more than others. `first_order` is a mean square and has the routing weight in
    it, by which a value is multiplied again: it is divided by the expert's mean squared weight, and the root taken;
    `first_order_rms_down` has half of that in it. `learnt` is such a value already.

    Args:
        profile: of a model.
        variant: a name in `profile.importance`; None: the first of `PREFERRED` that is there.
        layers: "equal" or "loss"; None: by loss where the profile was made with gradients. `learnt` has none.

    Raises:
        ConfigError: when the profile has no such variant, none at all, or no gradients to tell the loss by.
    """
    known = profile.importance
    if variant is not None and variant not in known:
        raise unknown_name("variant of importance in this profile", variant, known)
    name = variant or next((name for name in PREFERRED if name in known), next(iter(known), None))
    if name is None:
        raise ConfigError("the profile holds no importance of neurons; make it again with coterie profile")
    if name == LEARNT:
        return _learnt(profile, layers)
    scale_L = _layer_scale(profile, layers)
    importance_LEI = known[name].astype(np.float64)
    order_LEI = np.argsort(-importance_LEI, axis=2, kind="stable")
    falling_LEI = np.take_along_axis(importance_LEI, order_LEI, 2)
    if name == LOSS:
        falling_LEI = np.sqrt(falling_LEI / _squared_weights(profile)[:, :, None])
    elif name == BOTH:
        falling_LEI = falling_LEI / _squared_weights(profile)[:, :, None] ** 0.25
    value_LEI = np.ones_like(falling_LEI)
    seen_LE = profile.load_LE > 0
    for layer, seen_E in enumerate(seen_LE):
        mean = falling_LEI[layer, seen_E].mean() if seen_E.any() else 0.0
        if mean > 0:
            value_LEI[layer, seen_E] = falling_LEI[layer, seen_E] / mean
            value_LEI[layer, ~seen_E] = value_LEI[layer, seen_E].mean(0)
    value_LEI *= scale_L[:, None, None]
    by = layers or ("loss" if LOSS in known else "equal")
    unseen = int((~seen_LE).sum())
    return NeuronOrder(name, _small(order_LEI), value_LEI.astype(np.float32), by, scale_L, unseen)


def _learnt(profile: ModelProfile, layers: str | None) -> NeuronOrder:
    """The order of what was learnt: values as they are."""
    if layers is not None:
        raise ConfigError(
            f"the {LEARNT} importance tells how layers compare by itself; leave layers out, or name another variant"
        )
    value_LEI = profile.importance[LEARNT]
    order_LEI = np.argsort(-value_LEI.astype(np.float64), axis=2, kind="stable")
    falling_LEI = np.take_along_axis(value_LEI, order_LEI, 2)
    unseen = int((profile.load_LE == 0).sum())
    return NeuronOrder(LEARNT, _small(order_LEI), falling_LEI, LEARNT, np.ones(len(value_LEI)), unseen)


def _small(order_LEI: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    return order_LEI.astype(np.uint16 if order_LEI.shape[2] <= 2**16 else np.uint32)


def _squared_weights(profile: ModelProfile) -> NDArray[np.float64]:
    """[L, E] mean squared routing weight of the sampled tokens that chose an expert; the layer's where none did."""
    shape = profile.load_LE.shape
    mean_LE = np.ones(shape)
    for layer, ids_SK in enumerate(profile.sample_ids_LSK.astype(np.int64)):
        square = profile.sample_weights_LSK[layer].astype(np.float64).ravel() ** 2
        uses_E = np.bincount(ids_SK.ravel(), minlength=shape[1])
        sum_E = np.bincount(ids_SK.ravel(), square, minlength=shape[1])
        of_layer = float(square.mean()) if square.any() else 1.0
        mean_LE[layer] = np.where(sum_E > 0, sum_E / np.maximum(uses_E, 1), of_layer)
    return mean_LE


def _layer_scale(profile: ModelProfile, layers: str | None) -> NDArray[np.float64]:
    """How much a neuron of each layer matters, [L], with mean 1."""
    known = profile.importance
    if layers is not None and layers not in LAYERS:
        raise unknown_name("way to compare layers", layers, LAYERS)
    if layers == "loss" and LOSS not in known:
        raise ConfigError(f"layers compare by loss only in a profile with {LOSS}; profile with gradients, or say equal")
    if layers == "equal" or LOSS not in known:
        return np.ones(profile.spec.num_layers)
    seen_LE = (profile.load_LE > 0)[:, :, None]
    neurons_L = np.maximum(seen_LE.sum((1, 2)), 1) * profile.width
    root_L = np.sqrt((known[LOSS].astype(np.float64) * seen_LE).sum((1, 2)) / neurons_L)
    scale_L: NDArray[np.float64] = root_L / root_L.mean() if root_L.all() else np.ones_like(root_L)
    return scale_L
