"""What profiling a model found: company, and how much each neuron and each member of a pair matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec import MoESpec


@dataclass(frozen=True)
class ModelProfile:
    """What `coterie profile` measures on calibration text. Source: CRISP §3.2, §3.3.

    Attributes:
        spec: the model's routing.
        identity: which weights it is of (`models/identity.py`); the same for a model and its reordered copy.
        width: neurons of one expert, I.
        num_tokens: tokens profiled, padding apart.
        load_LE: [L, E] int64, tokens that chose an expert.
        pairs_LEE: [L, E, E] int64, symmetric, diagonal 0: uses of a combination. For K = 2 the pair of the token's
            experts, above that its anchor pairs (highest weight with each other).
        importance: for each variant [L, E, I] float32, not negative: a mean over the tokens that chose the expert
            (zero where none did).
        dominance: for each method [L, E, E] float32: how much is lost by masking expert i where j is its company, in
            a unit of the method's own; NaN where it was not measured.
        sample_ids_LSK: [L, S, K] integers: decisions of S tokens spread evenly over the text, by falling weight.
        sample_weights_LSK: [L, S, K] float32: their weights, normalised over K.
        provenance: model, text, versions, seeds: ready for JSON.
    """

    spec: MoESpec
    identity: str
    width: int
    num_tokens: int
    load_LE: NDArray[np.int64]
    pairs_LEE: NDArray[np.int64]
    importance: Mapping[str, NDArray[np.float32]]
    dominance: Mapping[str, NDArray[np.float32]]
    sample_ids_LSK: NDArray[np.integer[Any]]
    sample_weights_LSK: NDArray[np.float32]
    provenance: Mapping[str, Any] = field(default_factory=dict)
