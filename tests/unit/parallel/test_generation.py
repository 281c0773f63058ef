"""Generating on ranks (threads here): ranks with more to do, less, or nothing, all in step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.placement.placement import Placement
from coterie.topology import Topology

pytestmark = pytest.mark.needs("transformers")
PROMPTS = ["abc", "x", "a longer prompt than the others", "0123"]


def _on_ranks(folder: Any, prompts: list[str], tokens: int, end: int | None = None) -> list[Any]:
    from coterie.models.layers import spec_of
    from coterie.models.load import build_skeleton, load_tokenizer
    from coterie.parallel.generation import generate
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.load import load_rank
    from coterie.parallel.model import ExpertParallel

    spec = spec_of(build_skeleton(folder))
    placement = Placement(np.tile(np.arange(spec.num_experts)[::-1], (spec.num_layers, 1)), Topology.parse("3"), spec)
    loaded, tokenizer = [load_rank(folder, placement, rank) for rank in range(3)], load_tokenizer(folder)

    def work(comms: Any) -> Any:
        parallel = ExpertParallel(loaded[comms.rank], placement, comms)
        if end is not None:
            parallel.model.generation_config.eos_token_id = [end, 2]
        return generate(parallel, tokenizer, prompts, tokens), parallel.traffic.dispatch_LG.sum()

    return run_ranks(3, work)


def _single(folder: Any, prompts: list[str], tokens: int, end: int | None = None) -> list[tuple[int, ...]]:
    import torch

    from coterie.models.load import load_model, load_tokenizer

    model, tokenizer = load_model(folder), load_tokenizer(folder)
    if end is not None:
        model.generation_config.eos_token_id = [end, 2]
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        found.append(tuple(out[0, ids["input_ids"].shape[1] :].tolist()))
    return found


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_tokens_are_those_of_one_process(prompts: list[str], tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint("deepseek_v2")
    done = _on_ranks(folder, prompts, 8)
    expected = _single(folder, prompts, 8)
    for generation, _ in done:
        assert [each.ids for each in generation.prompts] == expected
        assert [each.rank for each in generation.prompts] == [index % 3 for index in range(len(prompts))]
        assert generation.prompts[0].text.startswith(prompts[0])
    if len(prompts) == 1:
        assert [sent > 0 for _, sent in done] == [True, False, False]


def test_ranks_whose_rows_end_early_go_on_for_the_others(tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint("mixtral")
    end = _single(folder, PROMPTS, 12)[0][2]  # the third token of the first prompt ends rows now
    expected = _single(folder, PROMPTS, 12, end)
    assert len({len(ids) for ids in expected}) > 1
    for generation, _ in _on_ranks(folder, PROMPTS, 12, end):
        assert [each.ids for each in generation.prompts] == expected


def test_prompts_that_cannot_be(tiny_checkpoint: Any) -> None:
    from coterie.models.load import load_tokenizer
    from coterie.parallel.generation import encode

    tokenizer = load_tokenizer(tiny_checkpoint("mixtral"))
    with pytest.raises(ConfigError, match="there is no prompt"):
        encode(tokenizer, [])
    with pytest.raises(ConfigError, match="prompt 2 has no tokens"):
        encode(tokenizer, ["a", ""])
