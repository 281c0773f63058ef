"""What a model predicts for the scored tokens of a batch of windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coterie.errors import CheckpointError
from coterie.evaluate.windows import Window

LOGIT_BYTES = 256 * 2**20  # a batch of windows keeps its float32 logits below this
_ROW_BYTES = 32 * 2**20  # log-probabilities are computed for so many bytes of rows at a time
_MAX_BATCH = 16


def choose_batch(vocabulary: int, window: int, batch: int | None) -> int:
    """Windows to run at once: what was asked for, or as many as keep the logits small, at most 16."""
    return batch if batch is not None else max(1, min(_MAX_BATCH, LOGIT_BYTES // (4 * vocabulary * window)))


def scored_logits(model: Any, ids_T: Any, windows: Sequence[Window]) -> Any:
    """The logits that predict the scored tokens of the windows, in the order of the text.

    Args:
        model: a causal language model.
        ids_T: [T] int64 tensor, the text.
        windows: windows of equal length.

    Returns:
        [R, V] tensor in the model's dtype: a row for every scored token.
    """
    import torch

    ids_BW = torch.stack([ids_T[window.start : window.end] for window in windows])
    with torch.inference_mode():
        logits_BWV = model(input_ids=ids_BW.to(model.device), use_cache=False).logits
        rows = [
            logits_BWV[number, window.first_scored - window.start - 1 : window.end - window.start - 1]
            for number, window in enumerate(windows)
        ]
        return torch.cat(rows)


def targets(ids_T: Any, windows: Sequence[Window]) -> Any:
    """[R] the scored tokens of the windows, in the order of the text."""
    import torch

    return torch.cat([ids_T[window.first_scored : window.end] for window in windows])


def log_probabilities(logits_RV: Any) -> Iterator[tuple[slice, Any]]:
    """Slices of rows with their float32 log-probabilities, so few at a time that memory stays small."""
    import torch

    rows = max(1, _ROW_BYTES // (4 * logits_RV.shape[1]))
    for start in range(0, logits_RV.shape[0], rows):
        part = slice(start, start + rows)
        yield part, torch.log_softmax(logits_RV[part].float(), dim=-1)


def negative_log_likelihoods(logits_RV: Any, targets_R: Any) -> Any:
    """[R] float64 negative log-likelihood of each target, in nats."""
    import torch

    targets_R = targets_R.to(logits_RV.device)
    parts = [-logp_rV.gather(1, targets_R[part, None])[:, 0].double() for part, logp_rV in log_probabilities(logits_RV)]
    return torch.cat(parts).cpu()


def require_numbers(nll_R: Any, who: str, text: str, windows: Sequence[Window]) -> None:
    """Refuse log-likelihoods that are not finite.

    Raises:
        CheckpointError: naming the model, the text and the first token for which the model gives no probability.
    """
    bad = (~nll_R.isfinite()).nonzero()
    if len(bad):
        positions = [token for window in windows for token in range(window.first_scored, window.end)]
        position = positions[int(bad[0])]
        raise CheckpointError(
            f"{who} gives NaN or infinite logits: {len(bad)} of {len(nll_R)} tokens of {text!r}, first token "
            f"{position}; check the weights, or load it in another dtype"
        )


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode (no dropout) inside the block, and as it was after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
