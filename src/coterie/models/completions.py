"""Texts continued by a model, a batch at a time, greedily or by chance."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.models.backend import quiet


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        tokens: how many to generate, at most.
        temperature: 0: always the likeliest token; else what logits are divided by.
        top_p: the likeliest tokens that together have this probability are sampled from.
        seed: of the chance; the same seed with the same batches gives the same texts.

    Raises:
        ConfigError: for values that cannot be.
    """

    tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"{self.tokens} tokens to generate; give 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"a temperature of {self.temperature:g}; give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p = {self.top_p:g}; it must be above 0 and at most 1")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                f"top-p = {self.top_p:g} without a temperature changes nothing; give a temperature above 0"
            )

    def options(self) -> dict[str, Any]:
        """For `generate`; whatever the checkpoint's own generation config says of these."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}  # Transformers' own defaults
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class Completion:
    """What a prompt was continued with.

    Attributes:
        ids: the new tokens, up to the one that ends the text, that one included.
        text: them as text.
        finish: "stop" where the model ended the text, "length" where the limit did.
    """

    ids: list[int]
    text: str
    finish: str


def complete(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], sampling: Sampling, batch: int = 1
) -> Iterator[list[Completion]]:
    """Continue prompts in order, `batch` of them at a time, shorter ones padded on the left.

    Args:
        model: a Transformers model.
        tokenizer: its own.
        prompts: token ids of each.
        sampling: how.
        batch: rows of a batch.

    Yields:
        A batch's completions.

    Raises:
        ConfigError: for a batch below 1.
    """
    torch = importlib.import_module("torch")
    if batch < 1:
        raise ConfigError(f"batches of {batch}; give 1 or more")
    padding, ends, device = padding_of(model, tokenizer), _ends(model), model.device
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), quiet():
            torch.manual_seed(int(np.random.SeedSequence([sampling.seed, start]).generate_state(1)[0]))
            out = model.generate(
                input_ids=ids, attention_mask=mask, pad_token_id=padding, max_new_tokens=sampling.tokens,
                **sampling.options(),
            )  # fmt: skip
        yield [_completion(new, tokenizer, ends) for new in out[:, longest:].tolist()]


def require_positions(model_config: Any, count: int, sampling: Sampling, source: str) -> None:
    """Refuse a prompt that with its continuation is longer than the model can read.

    Raises:
        ConfigError: naming the prompt.
    """
    limit = getattr(model_config, "max_position_embeddings", None)
    if isinstance(limit, int) and count + sampling.tokens > limit:
        raise ConfigError(
            f"{source} has {count:,} tokens and {sampling.tokens:,} are to follow; the model reads {limit:,} at most: "
            "shorten it, or generate fewer"
        )


def padding_of(model: Any, tokenizer: Any) -> int:
    """A token to pad with; the mask hides it."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id)
    return next((each for each in known if isinstance(each, int)), 0)


def _ends(model: Any) -> set[int]:
    """The tokens that `generate` stops at."""
    found = model.generation_config.eos_token_id
    return set(found) if isinstance(found, list) else {found} if isinstance(found, int) else set()


def _completion(new: list[int], tokenizer: Any, ends: set[int]) -> Completion:
    end = next((index for index, token in enumerate(new) if token in ends), None)
    ids = new if end is None else new[: end + 1]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return Completion(ids, text, "length" if end is None else "stop")
