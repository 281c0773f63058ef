"""Token ids on disk to batches: every row is a window of one domain, domains are mixed within a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SIZE_POWER = 0.8  # a domain is drawn in proportion to (its tokens) ** SIZE_POWER: small ones a little more often


def concatenate(documents: Sequence[Sequence[int]], eos: int) -> NDArray[np.uint16]:
    """All documents in one row, an `eos` after each; [tokens] uint16."""
    return np.array([token for document in documents for token in (*document, eos)], dtype=np.uint16)


def domain_shares(sizes: Sequence[int], power: float = SIZE_POWER) -> NDArray[np.float64]:
    """Probability of each domain, [domains], from its size in tokens."""
    weights = np.asarray(sizes, dtype=np.float64) ** power
    return weights / weights.sum()


def batch(
    tokens_by_domain: Mapping[str, NDArray[np.uint16]], rows: int, length: int, seed: int, step: int
) -> NDArray[np.int64]:
    """One training batch; the same (seed, step) gives the same batch, so that a training can be resumed.

    Returns:
        [rows, length + 1] token ids: inputs and, shifted by one, targets.

    Raises:
        ValueError: when a domain is shorter than one window.
    """
    rng = np.random.default_rng((seed, step))
    domains = list(tokens_by_domain.values())
    short = [name for name, tokens in tokens_by_domain.items() if len(tokens) <= length]
    if short:
        raise ValueError(f"domain {short[0]!r} is not longer than one window of {length} tokens")
    chosen = rng.choice(len(domains), size=rows, p=domain_shares([len(tokens) for tokens in domains]))
    windows = []
    for domain in chosen:
        start = int(rng.integers(len(domains[domain]) - length))
        windows.append(domains[domain][start : start + length + 1])
    return np.stack(windows).astype(np.int64)
