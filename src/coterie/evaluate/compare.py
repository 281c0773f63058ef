"""How far a model's predictions are from a reference's, token by token on the same windows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError
from coterie.evaluate.change import Change, changed, describe
from coterie.evaluate.logits import (
    choose_batch,
    evaluating,
    log_probabilities,
    negative_log_likelihoods,
    require_numbers,
    scored_logits,
    targets,
)
from coterie.evaluate.perplexity import Likelihood
from coterie.evaluate.text import EncodedText
from coterie.evaluate.windows import count_windows, in_batches, sliding_windows
from coterie.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two models on one text.

    Attributes:
        model: how well the model predicts the text.
        reference: how well the reference does.
        kl_R: [scored tokens] float32, KL(reference || model) of the next-token distributions, nats.
        agreeing: tokens for which both have the same most likely token.
    """

    model: Likelihood
    reference: Likelihood
    kl_R: NDArray[np.float32]
    agreeing: int


def compare(
    model: Any,
    reference: Any,
    text: EncodedText,
    window: int,
    stride: int,
    *,
    changes: Sequence[Change] = (),
    batch: int | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compare a model, with changes applied, with an unchanged reference.

    Both run on one batch of windows before the next is begun, so memory does not grow with the text, except for one
    float of divergence a token.

    Args:
        model: a causal language model.
        reference: another with the same vocabulary, or the same object.
        text: at least `window` tokens.
        window: tokens of a window.
        stride: tokens from one window's end to the next.
        changes: what to apply to the model, not to the reference.
        batch: windows to run at once; None for as many as keep the logits within 256 MiB, at most 16.
        progress: told of every batch, in windows.

    Raises:
        ConfigError: when the vocabularies differ.
        CheckpointError: when one of the models gives NaN.
    """
    import numpy as np
    import torch

    ids_T = torch.tensor(text.ids)
    size = choose_batch(model.config.vocab_size, window, batch)
    total = count_windows(len(text.ids), window, stride)
    nats, reference_nats, agreeing, done = 0.0, 0.0, 0, 0
    divergences: list[Any] = []
    with ExitStack() as stack:
        for each in (model, reference):
            stack.enter_context(evaluating(each))
        for windows in in_batches(sliding_windows(len(text.ids), window, stride), size):
            expected_RV = scored_logits(reference, ids_T, windows)
            with changed(model, changes, range(done, done + len(windows))):
                logits_RV = scored_logits(model, ids_T, windows)
            require_same_vocabulary(logits_RV.shape[1], expected_RV.shape[1])
            nll_R = negative_log_likelihoods(logits_RV, targets(ids_T, windows))
            expected_R = negative_log_likelihoods(expected_RV, targets(ids_T, windows))
            require_numbers(expected_R, "the reference", text.name, windows)
            require_numbers(nll_R, f"the model with {describe(changes)}", text.name, windows)
            nats += float(nll_R.sum())
            reference_nats += float(expected_R.sum())
            kl_R, equal = divergence(expected_RV, logits_RV.to(expected_RV.device))
            divergences.append(kl_R)
            agreeing += equal
            done += len(windows)
            progress(f"comparison on {text.name}", done, total)
    scored = len(text.ids) - 1
    return Comparison(
        Likelihood(nats, scored, text.num_bytes),
        Likelihood(reference_nats, scored, text.num_bytes),
        np.concatenate(divergences),
        agreeing,
    )


def divergence(reference_RV: Any, logits_RV: Any) -> tuple[NDArray[np.float32], int]:
    """KL(reference || model) of every row in nats, and the rows whose most likely tokens are the same.

    Args:
        reference_RV: [R, V] the reference's logits.
        logits_RV: [R, V] the model's.
    """
    import torch

    parts = []
    for (_, logq_rV), (_, logp_rV) in zip(log_probabilities(reference_RV), log_probabilities(logits_RV), strict=True):
        terms_rV = torch.where(logq_rV > -torch.inf, logq_rV.exp() * (logq_rV - logp_rV), 0.0)
        parts.append(terms_rV.sum(dim=1).clamp(min=0))  # rounding can leave a few times 1e-8 below zero
    equal = int((reference_RV.argmax(dim=1) == logits_RV.argmax(dim=1)).sum())
    return torch.cat(parts).cpu().numpy(), equal


def require_same_vocabulary(model: int, reference: int) -> None:
    """Refuse to compare distributions over different tokens.

    Raises:
        ConfigError: when the sizes differ.
    """
    if model != reference:
        raise ConfigError(
            f"the reference has a vocabulary of {reference:,} tokens, the model one of {model:,}; "
            "compare models that share a tokenizer"
        )
