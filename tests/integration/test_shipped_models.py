"""The two models that ship: what they promise, and that they have learnt something."""

from __future__ import annotations

from typing import Any

import pytest

from coterie import data
from coterie.families import load_spec
from coterie.models.load import SHIPPED_MODELS, resolve

MAX_BYTES = 25_000_000
SHAPES = {"tiny-mixtral": (8, 2), "tiny-qwen3-moe": (64, 8)}


@pytest.mark.parametrize("name", SHIPPED_MODELS)
@pytest.mark.needs("transformers")
def test_the_folder_is_a_small_checkpoint_with_a_card(name: str) -> None:
    folder = resolve(name)
    spec = load_spec(folder)
    assert (spec.num_experts, spec.top_k) == SHAPES[name]
    assert spec.num_layers >= 4
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("perplexity, dense", "tokens seen", "Top 25% of pairs", "What it is not good for", "licences"):
        assert said in card


@pytest.mark.parametrize("name", SHIPPED_MODELS)
@pytest.mark.needs("transformers")
def test_held_out_text_is_predicted_far_better_than_by_chance(name: str) -> None:
    from coterie.evaluate.quality import evaluate
    from coterie.models.load import load_model, load_tokenizer

    model: Any = load_model(name)
    assert str(model.dtype) == "torch.bfloat16"
    texts = {domain: data.text(domain) for domain in ("encyclopedic", "maths")}
    quality = evaluate(model, load_tokenizer(name), texts, window=256, stride=192, max_tokens=1024).to_json()
    assert quality["perplexity"] < 100  # 4,096 tokens by chance; the cards say 47 and about as much on all texts
