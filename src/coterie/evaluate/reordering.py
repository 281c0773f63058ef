"""Whether a reordered checkpoint still computes what the original does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import data
from coterie.errors import CheckpointError
from coterie.evaluate.compare import divergence
from coterie.evaluate.logits import scored_logits
from coterie.evaluate.text import encode_text
from coterie.evaluate.windows import Window
from coterie.models.load import load_model, load_tokenizer

TOLERANCE = 1e-5  # of the largest logit, in float32
_DOMAINS = ("prose", "code")
_WINDOW = 128


@dataclass(frozen=True)
class Agreement:
    """How far a reordered checkpoint is from the original on a few windows of text.

    Attributes:
        tokens: predictions compared.
        relative: in float32, the largest difference of two logits, as a share of the largest logit.
        kl: where the weights are not float32, the mean KL(original || reordered) in their own type, nats; else None.
        kl_max: the largest of the same.
        dtype: that type.
    """

    tokens: int
    relative: float
    kl: float | None
    kl_max: float | None
    dtype: str

    def to_json(self) -> Mapping[str, Any]:
        """The figures, ready for JSON."""
        return dict(vars(self))


def verify_reordering(source: Path, out: Path) -> Agreement:
    """Compare two checkpoints on a window of each of two shipped texts; only one model is in memory at a time.

    Args:
        source: the original's folder, with its tokenizer.
        out: the reordered one's.

    Raises:
        CheckpointError: when they differ by more than `TOLERANCE` in float32, or a model does not fit the memory.
    """
    torch = importlib.import_module("torch")
    tokenizer = load_tokenizer(source)
    texts = [encode_text(tokenizer, name, data.text(name)[:8192], _WINDOW - 1) for name in _DOMAINS]

    def logits(folder: Path, dtype: Any) -> tuple[Any, Any]:
        model = load_model(folder, dtype)
        parts = [scored_logits(model, torch.tensor(text.ids), [Window(0, len(text.ids), 1)]) for text in texts]
        return torch.cat(parts), model.dtype

    expected_RV, _ = logits(source, torch.float32)
    got_RV, _ = logits(out, torch.float32)
    relative = float((got_RV - expected_RV).abs().max() / expected_RV.abs().max())
    if not relative <= TOLERANCE:
        raise CheckpointError(
            f"the reordered checkpoint's logits differ by {relative:.1e} of the largest (limit {TOLERANCE:.0e}) in "
            "float32; nothing was written"
        )
    own_RV, dtype = logits(source, None)
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return Agreement(len(got_RV), relative, None, None, name)
    kl_R, _ = divergence(own_RV, logits(out, None)[0])
    return Agreement(len(got_RV), relative, float(kl_R.mean()), float(kl_R.max()), name)
