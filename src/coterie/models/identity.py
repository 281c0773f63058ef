"""Which weights a model has, in a short text that does not depend on the order of neurons inside experts."""

from __future__ import annotations

import hashlib
from typing import Any

from coterie.models.layers import find_moe_layers, spec_of

ORDER_KEY = "coterie_neuron_order"  # in a reordered checkpoint's config.json: `order_digest` of the order it is in


def identity_of(model: Any) -> str:
    """A digest of the routing's shape and every router's weights.

    Reordering neurons leaves routers as they are, so a model and its reordered copy have the same identity; another
    revision, trained further, has another.

    Args:
        model: a Transformers model with its weights loaded.
    """
    import torch

    shape = {key: value for key, value in spec_of(model).to_json().items() if key != "model"}
    digest = hashlib.sha256(repr(sorted(shape.items())).encode())
    for layer in find_moe_layers(model):
        for name, tensor in sorted(layer.router.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def order_digest(order_LEI: Any) -> str:
    """A digest of an order of neurons, [L, E, I] integers."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(order_LEI, dtype=np.int32).tobytes()).hexdigest()[:16]
