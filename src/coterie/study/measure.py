"""Quality of a changed model on fixed windows of text, paired token by token with the unchanged one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluate.change import Change, changed
from coterie.evaluate.compare import divergence
from coterie.evaluate.logits import choose_batch, evaluating, negative_log_likelihoods, require_numbers, scored_logits
from coterie.evaluate.text import encode_text
from coterie.evaluate.windows import Window
from coterie.progress import Progress, silent

_CACHE_BYTES = 2 << 30
_RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Measured:
    """A changed model on the windows of a `Bench`.

    Attributes:
        nll_WS: [W, S] float64, negative log-likelihood of every scored token, nats.
        base_WS: [W, S] float64, the same of the unchanged model.
        kl_WS: [W, S] float32, KL(unchanged || changed), nats.
    """

    nll_WS: NDArray[np.float64]
    base_WS: NDArray[np.float64]
    kl_WS: NDArray[np.float32]

    @property
    def rise_WS(self) -> NDArray[np.float64]:
        """[W, S] how much the change raises the loss of every scored token, nats."""
        return self.nll_WS - self.base_WS

    @property
    def perplexity(self) -> float:
        """Perplexity of the changed model."""
        return math.exp(self.nll_WS.mean())

    @property
    def increase(self) -> float:
        """Relative increase of perplexity over the unchanged model: 0.01 is 1%."""
        return math.expm1(float((self.nll_WS - self.base_WS).mean()))

    @property
    def kl(self) -> float:
        """Mean divergence, nats a token."""
        return float(self.kl_WS.mean(dtype=np.float64))

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95% bootstrap interval of `increase`, windows resampled."""
        return bootstrap(self.nll_WS - self.base_WS, seed)

    def to_json(self) -> dict[str, Any]:
        """Figures, ready for JSON."""
        return {
            "perplexity": self.perplexity, "perplexity_increase": self.increase,
            "interval_95": list(self.interval()), "kl": self.kl,
        }  # fmt: skip


def bootstrap(difference_WS: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95% interval of expm1 of the mean difference; windows are resampled, not tokens, which depend on each other."""
    means_W = difference_WS.mean(axis=1)
    picks = np.random.default_rng(seed).integers(len(means_W), size=(_RESAMPLES, len(means_W)))
    low, high = np.quantile(means_W[picks].mean(axis=1), (0.025, 0.975))
    return math.expm1(low), math.expm1(high)


class Bench:
    """Windows of text, and what the unchanged model predicts in them."""

    def __init__(self, model: Any, ids_WN: Any, batch: int | None = None, progress: Progress = silent) -> None:
        """Run the unchanged model.

        Args:
            model: a causal language model.
            ids_WN: [W, N] token ids, windows without overlap; all but each window's first token are scored.
            batch: windows to run at once; None: as memory allows.
            progress: told of every batch.
        """
        self.model, self.ids_WN, self.progress = model, ids_WN, progress
        num_windows, length = ids_WN.shape
        vocabulary = model.config.vocab_size
        self._batch = choose_batch(vocabulary, length, batch)
        # kept only where small: most studies measure the same windows dozens of times
        self._keep = num_windows * length * vocabulary * model.dtype.itemsize <= _CACHE_BYTES
        self._reference: dict[int, Any] = {}
        parts = []
        with evaluating(model):
            for start in range(0, num_windows, self._batch):
                logits_RV = self._logits(start)
                if self._keep:
                    self._reference[start] = logits_RV.to(model.dtype)
                parts.append(self._nll(logits_RV, start, "the unchanged model"))
                progress("the unchanged model", min(start + self._batch, num_windows), num_windows)
        self.base_WS = np.concatenate(parts)

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return int(self.base_WS.size)

    @property
    def perplexity(self) -> float:
        """Perplexity of the unchanged model."""
        return math.exp(self.base_WS.mean())

    def measure(self, changes: Sequence[Change], label: str = "measuring") -> Measured:
        """Run the model with changes applied, on every window."""
        nll, kl = [], []
        num_windows, length = self.ids_WN.shape
        with evaluating(self.model):
            for start in range(0, num_windows, self._batch):
                rows = range(start, min(start + self._batch, num_windows))
                expected_RV = self._reference[start] if self._keep else self._logits(start)
                with changed(self.model, changes, rows):
                    logits_RV = self._logits(start)
                nll.append(self._nll(logits_RV, start, label))
                kl.append(divergence(expected_RV, logits_RV.to(expected_RV.device))[0].reshape(len(rows), length - 1))
                self.progress(label, rows.stop, num_windows)
        return Measured(np.concatenate(nll), self.base_WS, np.concatenate(kl))

    def _windows(self, start: int) -> list[Window]:
        """Windows of a batch, as places in the windows laid end to end."""
        length = self.ids_WN.shape[1]
        stop = min(start + self._batch, len(self.ids_WN))
        return [Window(row * length, (row + 1) * length, row * length + 1) for row in range(start, stop)]

    def _logits(self, start: int) -> Any:
        return scored_logits(self.model, self.ids_WN.reshape(-1), self._windows(start))

    def _nll(self, logits_RV: Any, start: int, who: str) -> NDArray[np.float64]:
        windows = self._windows(start)
        targets_R = self.ids_WN[start : start + self._batch, 1:].reshape(-1)
        nll_R = negative_log_likelihoods(logits_RV, targets_R)
        require_numbers(nll_R, who, "the study's text", windows)
        nll_WS: NDArray[np.float64] = nll_R.numpy().reshape(len(windows), -1)
        return nll_WS


def window_ids(
    tokenizer: Any, texts: Mapping[str, str], length: int, parts: tuple[float, float], limit: int | None = None
) -> tuple[Any, list[str]]:
    """Windows of several texts, without overlap; texts shorter than a window give none.

    Args:
        tokenizer: the model's tokenizer.
        texts: for each name a text.
        length: tokens of a window.
        parts: which part of every text to use, as shares: (0, 0.5) is the first half.
        limit: at most so many windows, taken evenly from all.

    Returns:
        ids [W, length], and for each window its text's name.

    Raises:
        ConfigError: when no text is long enough.
    """
    import torch

    rows, names = [], []
    for name, text in texts.items():
        ids = encode_text(tokenizer, name, text).ids
        first, last = (int(share * len(ids)) for share in parts)
        for start in range(first, last - length + 1, length):
            rows.append(ids[start : start + length])
            names.append(name)
    if not rows:
        raise ConfigError(f"no text has {length} tokens in its part {parts}; give longer texts or a shorter window")
    if limit is not None and limit < len(rows):
        chosen = np.linspace(0, len(rows) - 1, limit).round().astype(int)
        rows, names = [rows[index] for index in chosen], [names[index] for index in chosen]
    return torch.tensor(rows), names
