"""One evaluation for everything that changes a model: how well it predicts texts, alone and against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from coterie.errors import ConfigError
from coterie.evaluate.change import Change
from coterie.evaluate.compare import PERCENTILES, Comparison, compare, require_same_vocabulary
from coterie.evaluate.perplexity import Likelihood, perplexity
from coterie.evaluate.text import EncodedText, encode_text
from coterie.evaluate.windows import choose_window
from coterie.models.backend import import_transformers
from coterie.progress import Progress, silent


@dataclass(frozen=True)
class Quality:
    """The result of `evaluate`.

    Attributes:
        window: tokens of a window.
        stride: tokens from one window's end to the next.
        domains: for each text its likelihood or, with a reference or a change, its comparison.
    """

    window: int
    stride: int
    domains: Mapping[str, Likelihood | Comparison]

    def to_json(self) -> dict[str, Any]:
        """The figures over all texts together, and for each in `domains`."""
        parts = list(self.domains.values())
        domains = {name: _figures([part]) for name, part in self.domains.items()}
        return {**_figures(parts), "window": self.window, "stride": self.stride, "domains": domains}


def evaluate(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    changes: Sequence[Change] = (),
    reference: Any = None,
    reference_tokenizer: Any = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int | None = None,
    progress: Progress = silent,
) -> Quality:
    """Perplexity and bits per byte of texts and, with a reference or a change, what was lost against it.

    Deterministic: nothing is sampled. Without a reference, a changed model is compared with itself unchanged.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        texts: for each name a text.
        changes: context managers to apply to the model: pruning, widths, anything with an exact inverse.
        reference: a model to compare with, unchanged; it must share the vocabulary.
        reference_tokenizer: its tokenizer, where known, to check that.
        window: tokens of a window; None for what the model reads, up to 1,024.
        stride: tokens from one window's end to the next; None for half a window.
        max_tokens: use only the first so many tokens of each text.
        batch: windows to run at once; None for as many as keep the logits within 256 MiB, at most 16.
        progress: told of every batch.

    Raises:
        ConfigError: for no text, a text shorter than the window, or another vocabulary.
        CheckpointError: when a model gives NaN.
    """
    import_transformers()
    if not texts:
        raise ConfigError("there is no text to evaluate on; give a file or a domain")
    if batch is not None and batch < 1:
        raise ConfigError(f"a batch of {batch} windows is empty; choose at least 1")
    if reference is not None:
        require_same_vocabulary(model.config.vocab_size, reference.config.vocab_size)
        _require_same_tokens(tokenizer, reference_tokenizer)
    window, stride = choose_window(model.config, window, stride)
    encoded = [encode_text(tokenizer, name, text, max_tokens) for name, text in texts.items()]
    for text in encoded:
        _require_length(text, window)
        _require_known_ids(text, model.config.vocab_size)
    domains: dict[str, Likelihood | Comparison] = {}
    for text in encoded:
        if reference is None and not changes:
            domains[text.name] = perplexity(model, text, window, stride, batch=batch, progress=progress)
        else:
            other = model if reference is None else reference
            domains[text.name] = compare(
                model, other, text, window, stride, changes=changes, batch=batch, progress=progress
            )
    return Quality(window, stride, domains)


def _require_length(text: EncodedText, window: int) -> None:
    if len(text.ids) < window:
        raise ConfigError(
            f"text {text.name!r} has {len(text.ids):,} tokens, fewer than the window of {window:,}; "
            "choose a smaller window or give more text"
        )


def _require_known_ids(text: EncodedText, vocabulary: int) -> None:
    largest = max(text.ids)
    if largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer gives the id {largest:,}, the model knows {vocabulary:,} tokens; use the model's tokenizer"
        )


def _require_same_tokens(tokenizer: Any, reference_tokenizer: Any) -> None:
    if reference_tokenizer is None:
        return
    ours, theirs = tokenizer.get_vocab(), reference_tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise ConfigError(
            f"the reference has another vocabulary: {differing:,} of {len(ours):,} tokens differ; "
            "compare models that share a tokenizer"
        )


def _figures(parts: Sequence[Likelihood | Comparison]) -> dict[str, Any]:
    """The figures of some texts together, as JSON."""
    import numpy as np

    ours = reduce(add, [part.model if isinstance(part, Comparison) else part for part in parts])
    figures = {
        "perplexity": finite(ours.perplexity), "bits_per_byte": ours.bits_per_byte,
        "tokens": ours.num_tokens, "bytes": ours.num_bytes,
    }  # fmt: skip
    comparisons = [part for part in parts if isinstance(part, Comparison)]
    if not comparisons:
        return figures
    theirs = reduce(add, [part.reference for part in comparisons])
    kl_R = np.concatenate([part.kl_R for part in comparisons])
    return {
        **figures,
        "reference_perplexity": finite(theirs.perplexity),
        "reference_bits_per_byte": theirs.bits_per_byte,
        "kl": finite(float(kl_R.mean(dtype=np.float64))),
        "kl_percentiles": {f"{q:g}": finite(float(np.percentile(kl_R, q, method="inverted_cdf"))) for q in PERCENTILES},
        "kl_max": finite(float(kl_R.max())),
        "top1_agreement": sum(part.agreeing for part in comparisons) / len(kl_R),
    }


def finite(value: float) -> float | None:
    """A number that JSON can hold; None for an infinite one."""
    return value if value < float("inf") else None
