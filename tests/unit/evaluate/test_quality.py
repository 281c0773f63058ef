"""Perplexity, divergence and agreement against plain computations; changes are applied and undone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from coterie.errors import CheckpointError, ConfigError
from coterie.evaluate.change import Change, changed
from coterie.evaluate.compare import compare
from coterie.evaluate.perplexity import Likelihood, perplexity
from coterie.evaluate.quality import Quality, evaluate
from coterie.evaluate.text import EncodedText, encode_text

pytestmark = pytest.mark.needs("transformers")
WINDOW, STRIDE = 24, 10


def plain_log_probabilities(model: Any, ids: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[T - 1, V] the distributions of tokens 1 .. T-1, each from a forward pass of its own."""
    import torch

    rows = []
    for token in range(1, len(ids)):
        end = WINDOW
        while token >= end:
            end = min(end + STRIDE, len(ids))
        context = torch.tensor([ids[end - WINDOW : token]])
        with torch.no_grad():
            rows.append(model(input_ids=context).logits[0, -1].double().log_softmax(0).numpy())
    return np.array(rows)


def only_the_first_expert(model: Any, sequences: Any) -> Any:
    """A change: every token's second expert gets no weight."""
    from coterie.models.intercept import intercept

    def decide(layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
        weights = weights.clone()
        weights[:, 1] = 0
        return ids, weights

    return intercept(model, decide)


@pytest.fixture(scope="module")
def encoded(tokenizer: Any, text: str) -> EncodedText:
    return encode_text(tokenizer, "toy", text, max_tokens=75)


@pytest.mark.parametrize("batch", [1, 4, None])
def test_perplexity_equals_a_plain_computation(model: Any, encoded: EncodedText, batch: int | None) -> None:
    plain = plain_log_probabilities(model, encoded.ids)
    nats = -sum(plain[token - 1, encoded.ids[token]] for token in range(1, len(encoded.ids)))
    result = perplexity(model, encoded, WINDOW, STRIDE, batch=batch)
    assert result.num_tokens == len(encoded.ids) - 1 == 75
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nats / 75), rel=1e-5)


def test_bits_per_byte_is_bits_over_utf8_bytes() -> None:
    result = Likelihood(nats=math.log(2) * 24, num_tokens=4, num_bytes=6)
    assert result.bits_per_byte == pytest.approx(4)
    assert result.perplexity == pytest.approx(2**6)
    assert (result + Likelihood(math.log(2) * 6, 6, 4)).bits_per_byte == pytest.approx(3)
    assert Likelihood(1e6, 1, 1).perplexity == math.inf


def test_a_model_is_nothing_away_from_itself(model: Any, encoded: EncodedText) -> None:
    same = compare(model, model, encoded, WINDOW, STRIDE)
    assert same.kl_R.shape == (75,)
    assert not same.kl_R.any()
    assert same.agreeing == 75
    assert same.model == same.reference == perplexity(model, encoded, WINDOW, STRIDE)


@pytest.mark.parametrize("batch", [1, 3])
def test_divergence_equals_a_plain_computation(model: Any, models: Any, encoded: EncodedText, batch: int) -> None:
    other = models(seed=1)
    ours, theirs = plain_log_probabilities(model, encoded.ids), plain_log_probabilities(other, encoded.ids)
    result = compare(model, other, encoded, WINDOW, STRIDE, batch=batch)
    np.testing.assert_allclose(result.kl_R, (np.exp(theirs) * (theirs - ours)).sum(axis=1), rtol=1e-4, atol=1e-5)
    assert result.agreeing == (ours.argmax(axis=1) == theirs.argmax(axis=1)).sum()


def test_a_change_shows_and_is_undone(model: Any, tokenizer: Any, text: str) -> None:
    before = evaluate(model, tokenizer, {"a": text}, window=WINDOW).to_json()
    result = evaluate(model, tokenizer, {"a": text}, changes=[Change("first", only_the_first_expert)], window=WINDOW)
    figures = result.to_json()
    assert figures["reference_perplexity"] == before["perplexity"]
    assert figures["kl"] > 0.01
    assert figures["top1_agreement"] < 1
    assert abs(figures["perplexity"] - before["perplexity"]) > 0.01
    assert figures["kl"] <= figures["kl_percentiles"]["99"] <= figures["kl_percentiles"]["99.9"] <= figures["kl_max"]
    assert evaluate(model, tokenizer, {"a": text}, window=WINDOW).to_json() == before
    with changed(model, [Change("first", only_the_first_expert)]):
        inside = evaluate(model, tokenizer, {"a": text}, window=WINDOW).to_json()
    assert inside["perplexity"] == figures["perplexity"]


def test_changes_nest_and_are_undone_on_errors(model: Any) -> None:
    log = []

    def logged(name: str) -> Change:
        @contextmanager
        def apply(model: Any, sequences: Any) -> Iterator[None]:
            log.append(f"+{name}")
            try:
                yield
            finally:
                log.append(f"-{name}")

        return Change(name, apply)

    with pytest.raises(ValueError, match="inside"), changed(model, [logged("a"), logged("b")]):
        raise ValueError("inside")
    assert log == ["+a", "+b", "-b", "-a"]


def test_memory_is_bounded_by_running_both_models_batch_by_batch(model: Any, models: Any, encoded: EncodedText) -> None:
    calls = []
    other = models(seed=1)
    handles = [
        each.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name, each in (("model", model), ("reference", other))
    ]
    compare(model, other, encoded, WINDOW, STRIDE, batch=2)
    for handle in handles:
        handle.remove()
    assert calls == ["reference", "model"] * 4  # 7 windows


def test_domains_and_their_sum(model: Any, models: Any, tokenizer: Any, text: str) -> None:
    texts = {"a": text, "b": text[:200]}
    options: dict[str, Any] = {"reference": models(seed=1), "window": WINDOW}
    both = evaluate(model, tokenizer, texts, **options).to_json()
    parts = [evaluate(model, tokenizer, {name: texts[name]}, **options).to_json() for name in texts]
    for part, name in zip(parts, texts, strict=True):
        assert {**part, "domains": None} == {**both["domains"][name], "window": 24, "stride": 12, "domains": None}
    tokens = [part["tokens"] for part in parts]
    assert both["tokens"] == sum(tokens)
    for key in ("kl", "top1_agreement"):
        assert both[key] == pytest.approx(np.average([part[key] for part in parts], weights=tokens))
    log = np.average([math.log(part["perplexity"]) for part in parts], weights=tokens)
    assert both["perplexity"] == pytest.approx(math.exp(log))


def test_evaluation_is_deterministic_and_without_dropout(model: Any, tokenizer: Any, text: str) -> None:
    training = copy.deepcopy(model)
    training.config.attention_dropout = 0.5
    for layer in training.model.layers:
        layer.self_attn.attention_dropout = 0.5
    training.train()
    result: Quality = evaluate(training, tokenizer, {"a": text}, window=WINDOW)
    assert result == evaluate(model, tokenizer, {"a": text}, window=WINDOW)
    assert training.training


@pytest.mark.parametrize("target", ["model", "reference"])
def test_nan_is_named(model: Any, tokenizer: Any, text: str, target: str) -> None:
    import torch

    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[encode_text(tokenizer, "a", text).ids[40]] = torch.nan
    given = (broken, None) if target == "model" else (model, broken)
    who = "the model with no change" if target == "model" else "the reference"
    with pytest.raises(CheckpointError, match=rf"{who} gives NaN .* tokens of 'a', first token \d+;"):
        evaluate(given[0], tokenizer, {"a": text}, reference=given[1], window=WINDOW)


def test_a_masked_vocabulary_is_no_nan(model: Any, encoded: EncodedText) -> None:
    import torch

    unused = max(set(range(300)) - set(encoded.ids))
    masked = copy.deepcopy(model)
    masked.lm_head.register_forward_hook(
        lambda _, args, out: out.index_fill(-1, torch.tensor([unused]), -torch.inf)  # the probability 0
    )
    assert not compare(masked, masked, encoded, WINDOW, STRIDE).kl_R.any()
    assert np.isfinite(compare(model, masked, encoded, WINDOW, STRIDE).kl_R).all()
    assert np.isinf(compare(masked, model, encoded, WINDOW, STRIDE).kl_R).all()


def test_bad_input_is_one_clear_error(model: Any, models: Any, tokenizer: Any, tokenizers: Any, text: str) -> None:
    def fails(message: str, texts: dict[str, str] | None = None, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            evaluate(model, tokenizer, {"a": text} if texts is None else texts, **options)

    fails(r"'a' has 51 tokens, fewer than the window of 1,024", max_tokens=50)
    fails(r"no text to evaluate on", {})
    fails(r"window of 4096 tokens is more than the 2048 that the model reads", window=4096)
    fails(r"window of 1 tokens predicts nothing", window=1)
    fails(r"stride of 24 tokens does not fit a window of 24", window=24, stride=24)
    fails(r"stride of 0 tokens", window=24, stride=0)
    fails(r"batch of 0 windows is empty", window=24, batch=0)
    fails(r"the reference has a vocabulary of 310 tokens, the model one of 300", reference=models(vocabulary=310))
    renamed = copy.deepcopy(tokenizer)
    renamed.add_tokens(["extra"])
    fails(r"the reference has another vocabulary", reference=model, reference_tokenizer=renamed)
    small = models(vocabulary=60)
    with pytest.raises(ConfigError, match=r"gives the id \d+, the model knows 60 tokens"):
        evaluate(small, tokenizer, {"a": text}, window=24)
