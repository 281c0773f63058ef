"""The windows of text that a model is profiled on, and how well it predicts them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.models.run_text import token_ids

DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class TextWindow:
    """Consecutive tokens, and after each the one that the model should predict.

    Attributes:
        inputs: token ids that the model is given.
        targets: as many ids, one further on.
    """

    inputs: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class TextWindows:
    """Windows of one or several texts.

    Attributes:
        windows: all of `length` tokens but the last, which may be shorter.
        length: tokens of a window.
        sources: for each text its name, digest and the tokens taken, ready for JSON.
    """

    windows: Sequence[TextWindow]
    length: int
    sources: Sequence[Mapping[str, Any]]


def text_windows(
    model: Any, tokenizer: Any, texts: Mapping[str, str], tokens: int, length: int | None, seed: int
) -> TextWindows:
    """Cut texts into windows and choose among them.

    A text is cut into consecutive windows, each begun with the tokenizer's begin token where it has one. If it has more
    than are needed, the seed chooses, and their order stays. Several texts take turns, so that each gives the same
    share.

    Args:
        model: a Transformers model; its `max_position_embeddings` bounds the length.
        tokenizer: its tokenizer.
        texts: the texts by name.
        tokens: tokens to run, in all.
        length: tokens of a window; None: what the model reads, up to 1,024.
        seed: of the choice.

    Raises:
        ConfigError: for numbers that cannot be, no text, or a text that is too short.
        CheckpointError: when the tokenizer is not the model's.
    """
    length = min(_length(model, length), tokens)
    if tokens < 2 or not texts:
        raise ConfigError(f"{tokens} tokens of {len(texts)} texts; profiling needs at least 2 tokens of 1 text")
    count = -(-tokens // length)
    sizes = [length] * (count - 1) + [tokens - length * (count - 1)]
    chosen, sources = [], []
    for number, (name, text) in enumerate(texts.items()):
        mine = sizes[number :: len(texts)]
        chosen.append(_choose(name, *token_ids(model, tokenizer, text), mine, length, [seed, number]))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        sources.append({"name": name, "sha256": digest, "tokens": sum(mine)})
    windows = [chosen[index % len(texts)][index // len(texts)] for index in range(count)]
    return TextWindows(windows, length, sources)


def _length(model: Any, length: int | None) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        return min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if length < 2 or (limit is not None and length > limit):
        raise ConfigError(f"a window of {length} tokens; choose 2 to {limit or 'any number'}, what the model reads")
    return length


def _choose(
    name: str, ids: list[int], prefix: list[int], sizes: Sequence[int], length: int, seed: Sequence[int]
) -> list[TextWindow]:
    """Windows of these sizes, all `length` but perhaps the last, in the order of the text."""
    if not sizes:
        return []
    step = length - len(prefix)
    pieces, rest = divmod(len(ids) - 1, step)  # the last token is only a target
    if sizes[-1] < length and rest + len(prefix) >= sizes[-1]:
        pieces += 1
    if pieces < len(sizes):
        raise ConfigError(
            f"text {name!r} has {len(ids):,} tokens, which is {max(pieces, 0)} windows of {length}, and {len(sizes)} "
            "are needed; give a longer text, more texts, fewer tokens or a smaller window"
        )
    order = np.random.default_rng(seed).choice(pieces, len(sizes), replace=False)
    windows = []
    for start, size in zip(np.sort(order) * step, sizes, strict=True):
        piece = [*prefix, *ids[start : start + size + 1 - len(prefix)]]
        windows.append(TextWindow(piece[:-1], piece[1:]))
    return windows


def window_loss(model: Any, window: TextWindow) -> Any:
    """The summed negative log-likelihood of a window's targets, nats: a float32 tensor without axes."""
    import torch

    logits_1TV = model(input_ids=torch.tensor([list(window.inputs)], device=model.device), use_cache=False).logits
    targets_T = torch.tensor(list(window.targets), device=logits_1TV.device)
    return torch.nn.functional.cross_entropy(logits_1TV[0].float(), targets_T, reduction="sum")
