"""Running a model over a text: which pieces, how many tokens, from which seed, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import CheckpointError, ConfigError
from coterie.models.load import load_model, load_tokenizer
from coterie.models.run_text import TextRun, record_text
from coterie.trace.routing_trace import RoutingTrace

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]
TEXT = "".join(chr(97 + (index * index) % 26) for index in range(400))


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Any:
    return load_model(tiny_checkpoint("qwen3_moe"))


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint) -> Any:
    return load_tokenizer(tiny_checkpoint("qwen3_moe"))


def recorded(model, tokenizer, tmp_path, run: TextRun, text: str = TEXT, **options) -> RoutingTrace:
    return record_text(model, tokenizer, text, run, tmp_path / "t.safetensors", source="test", **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_consecutive_windows(model, tokenizer, tmp_path, batch):
    trace = recorded(model, tokenizer, tmp_path, TextRun(tokens=90, length=20, batch=batch))
    assert np.bincount(trace.sequence_ids).tolist() == [20, 20, 20, 20, 10]
    assert trace.positions.tolist() == [*range(20)] * 4 + [*range(10)]
    assert trace.provenance["run"] == {"tokens": 90, "length": 20, "batch": batch, "generate": False, "seed": 0}
    assert trace.provenance["source"] == "test"
    alone = recorded(model, tokenizer, tmp_path, TextRun(tokens=10, length=10), TEXT[80:])
    np.testing.assert_array_equal(trace.expert_ids[:, 80:], alone.expert_ids)


def test_windows_begin_as_the_tokenizer_says(model, tokenizer, tmp_path):
    class Beginning:
        bos_token_id, pad_token_id, eos_token_id = 1, 0, 2

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1] * add_special_tokens + tokenizer(text, add_special_tokens=False)["input_ids"]}

    trace = recorded(model, Beginning(), tmp_path, TextRun(tokens=40, length=10), TEXT[:36])
    first = trace.expert_ids[:, trace.positions == 0]
    assert np.bincount(trace.sequence_ids).tolist() == [10] * 4
    assert (first == first[:, :1]).all()


def test_generation_depends_on_the_seed_alone(model, tokenizer, tmp_path):
    import torch

    run = TextRun(tokens=60, length=20, batch=2, generate=True, seed=5)
    state = torch.random.get_rng_state()
    first = recorded(model, tokenizer, tmp_path, run)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    again = recorded(model, tokenizer, tmp_path, run)
    other = recorded(model, tokenizer, tmp_path, TextRun(60, 20, 2, True, seed=6))
    np.testing.assert_array_equal(first.expert_ids, again.expert_ids)
    assert first.expert_ids.shape != other.expert_ids.shape or (first.expert_ids != other.expert_ids).any()
    assert 60 <= first.num_tokens < 60 + 2 * 20
    prefill = first.phase == 0
    assert np.bincount(first.sequence_ids[prefill]).tolist() == [10] * first.num_sequences
    assert np.bincount(first.sequence_ids).max() == 20


def test_progress_ends_full(model, tokenizer, tmp_path):
    seen = []
    run = TextRun(tokens=50, length=20, batch=2)
    recorded(model, tokenizer, tmp_path, run, progress=lambda *told: seen.append(told))
    assert seen == [("recording", 40, 50), ("recording", 50, 50)]


@pytest.mark.parametrize("generate", [False, True])
def test_a_text_that_is_too_short(model, tokenizer, tmp_path, generate):
    run = TextRun(tokens=300, length=20, generate=generate)
    with pytest.raises(ConfigError, match=r"the text has 40 tokens and at least \d+ are needed"):
        recorded(model, tokenizer, tmp_path, run, TEXT[:40])
    assert not list(tmp_path.iterdir())


def test_a_sequence_longer_than_the_model_takes(model, tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="the model's limit is 512"):
        recorded(model, tokenizer, tmp_path, TextRun(tokens=600, length=513))


def test_a_foreign_tokenizer(model, tmp_path):
    class Foreign:
        bos_token_id = pad_token_id = eos_token_id = None

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [5, 260]}

    with pytest.raises(CheckpointError, match="gives the id 260, the model has 260 embeddings"):
        recorded(model, Foreign(), tmp_path, TextRun(tokens=2))


@pytest.mark.parametrize(("name", "value"), [("tokens", 0), ("length", 1), ("batch", 0)])
def test_impossible_runs(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value}; it must be at least"):
        TextRun(**{name: value})
