"""Text from a model whose experts are spread over ranks: each rank generates for its own prompts, all in step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.parallel.comms import share
from coterie.parallel.model import ExpertParallel


@dataclass(frozen=True)
class Generated:
    """What became of one prompt.

    Attributes:
        prompt: number of the prompt.
        rank: where its attention ran.
        ids: the new tokens, the end token included.
        text: prompt and new text.
    """

    prompt: int
    rank: int
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Generation:
    """What `generate` returns, the same on every rank.

    Attributes:
        prompts: by number.
        seconds: the slowest rank's, prompts included.
    """

    prompts: tuple[Generated, ...]
    seconds: float


def generate(parallel: ExpertParallel, tokenizer: Any, prompts: Sequence[str], tokens: int) -> Generation:
    """Continue prompts greedily; prompt i runs on rank i mod G, together with that rank's others.

    Every rank calls this with the same prompts. Rows that have ended and padding are not sent to other ranks.

    Args:
        parallel: the model.
        tokenizer: the model's.
        prompts: any number, fewer than ranks too.
        tokens: new tokens, at most, for each.

    Raises:
        ConfigError: when there is no prompt, or one is without tokens.
        RankError: when another rank ended or did not answer in time.
    """
    encoded = encode(tokenizer, prompts)
    comms, pad = parallel.comms, _padding(parallel.model, tokenizer)
    own = range(comms.rank, len(prompts), comms.size)
    started = time.perf_counter()
    new: list[list[int]] = []
    with torch.inference_mode():
        if own:
            new = _continue(parallel, [encoded[index] for index in own], pad, tokens)
        parallel.drain()
    seconds = time.perf_counter() - started
    said = share(comms, {"new": dict(zip(own, new, strict=True)), "seconds": seconds})
    results = []
    for index, ids in enumerate(encoded):
        continued = said[index % comms.size]["new"][str(index)]
        text = tokenizer.decode([*ids, *continued], skip_special_tokens=True)
        results.append(Generated(index, index % comms.size, tuple(continued), text))
    return Generation(tuple(results), max(each["seconds"] for each in said))


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of every prompt.

    Raises:
        ConfigError: when there is no prompt, or one is without tokens.
    """
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT, or --prompts FILE with one a line")
    encoded = [list(tokenizer(prompt, return_token_type_ids=False)["input_ids"]) for prompt in prompts]
    empty = next((index for index, ids in enumerate(encoded) if not ids), None)
    if empty is not None:
        raise ConfigError(f"prompt {empty + 1} has no tokens; give some text")
    return encoded


def _continue(parallel: ExpertParallel, prompts: Sequence[Sequence[int]], pad: int, tokens: int) -> list[list[int]]:
    """The rank's own prompts in one batch, padded on the left; the new tokens of each."""
    model, width = parallel.model, max(map(len, prompts))
    ids_BS = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts], device=model.device)
    mask_BS = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    ends = _end_tokens(model)

    def see_ended(input_ids: Tensor, _: Any, **__: Any) -> Tensor:
        """Called after every step: rows that have ended need no experts any more; generation ends as it would."""
        parallel.ended_B = torch.isin(input_ids[:, width:], ends.to(input_ids.device)).any(-1)
        return torch.zeros_like(parallel.ended_B)

    try:
        out_BS = model.generate(
            input_ids=ids_BS, attention_mask=mask_BS, max_new_tokens=tokens, do_sample=False, num_beams=1,
            pad_token_id=pad, stopping_criteria=[see_ended],
        )  # fmt: skip
    finally:
        parallel.ended_B = None
    return [_until_end(row, ends.tolist()) for row in out_BS[:, width:].tolist()]


def _until_end(row: list[int], ends: list[int]) -> list[int]:
    """A row without the padding behind its end token."""
    stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: stop + 1]


def _end_tokens(model: Any) -> Tensor:
    ends = model.generation_config.eos_token_id
    return torch.tensor([] if ends is None else [ends] if isinstance(ends, int) else list(ends), dtype=torch.int64)


def _padding(model: Any, tokenizer: Any) -> int:
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id)
    return next((each for each in known if isinstance(each, int)), 0)
