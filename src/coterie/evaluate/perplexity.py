"""Perplexity and bits per byte of a text, by sliding window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from coterie.evaluate.change import Change, changed, describe
from coterie.evaluate.logits import (
    choose_batch,
    evaluating,
    negative_log_likelihoods,
    require_numbers,
    scored_logits,
    targets,
)
from coterie.evaluate.text import EncodedText
from coterie.evaluate.windows import count_windows, in_batches, sliding_windows
from coterie.progress import Progress, silent


@dataclass(frozen=True)
class Likelihood:
    """How well a model predicts a text.

    Attributes:
        nats: summed negative log-likelihood of the scored tokens.
        num_tokens: tokens scored.
        num_bytes: UTF-8 bytes of text that they stand for.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood of a token; infinite when that overflows."""
        mean = self.nats / self.num_tokens
        return math.exp(mean) if mean < math.log(1.7e308) else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits, per UTF-8 byte of text: comparable across tokenizers."""
        return self.nats / math.log(2) / self.num_bytes

    def __add__(self, other: Self) -> Self:
        return type(self)(self.nats + other.nats, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)


def perplexity(
    model: Any,
    text: EncodedText,
    window: int,
    stride: int,
    *,
    changes: Sequence[Change] = (),
    batch: int | None = None,
    progress: Progress = silent,
) -> Likelihood:
    """How well a model, with changes applied, predicts a text.

    Args:
        model: a causal language model.
        text: at least `window` tokens.
        window: tokens of a window.
        stride: tokens from one window's end to the next.
        changes: what to apply to the model.
        batch: windows to run at once; None for as many as keep the logits within 256 MiB, at most 16.
        progress: told of every batch, in windows.

    Raises:
        CheckpointError: when the model gives NaN.
    """
    import torch

    ids_T = torch.tensor(text.ids)
    size = choose_batch(model.config.vocab_size, window, batch)
    total = count_windows(len(text.ids), window, stride)
    nats, done = 0.0, 0
    with evaluating(model):
        for windows in in_batches(sliding_windows(len(text.ids), window, stride), size):
            with changed(model, changes, range(done, done + len(windows))):
                logits_RV = scored_logits(model, ids_T, windows)
            nll_R = negative_log_likelihoods(logits_RV, targets(ids_T, windows))
            require_numbers(nll_R, f"the model with {describe(changes)}", text.name, windows)
            nats += float(nll_R.sum())
            done += len(windows)
            progress(f"perplexity of {text.name}", done, total)
    return Likelihood(nats, len(text.ids) - 1, text.num_bytes)
