"""The bench: paired figures of a changed model, the same whether reference predictions are kept or computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from coterie.evaluate.change import Change
from coterie.study import measure
from coterie.study.measure import Bench, bootstrap, window_ids

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


@contextmanager
def _louder(model: Any, sequences: Sequence[int] | None) -> Iterator[None]:
    import torch

    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        yield
        model.lm_head.weight.div_(2)


LOUDER = Change("louder", _louder)


def _ids() -> Any:
    import torch

    return torch.randint(3, 64, (5, 12), generator=torch.Generator().manual_seed(1))


def test_an_unchanged_model_loses_nothing(model: Any) -> None:
    measured = Bench(model, _ids(), batch=2).measure([])
    assert measured.increase == 0
    assert measured.kl == pytest.approx(0, abs=1e-7)
    assert measured.interval() == (0, 0)


def test_figures_are_those_of_the_models_own_loss(model: Any) -> None:
    import torch

    ids = _ids()
    bench = Bench(model, ids, batch=2)
    measured = bench.measure([LOUDER])
    with _louder(model, None), torch.inference_mode():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert bench.num_tokens == 5 * 11
    assert np.log(measured.perplexity) == pytest.approx(loss, rel=1e-5)
    assert measured.increase == pytest.approx(measured.perplexity / bench.perplexity - 1, rel=1e-6)


def test_keeping_reference_predictions_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Bench(model, _ids(), batch=2).measure([LOUDER])
    monkeypatch.setattr(measure, "_CACHE_BYTES", 0)
    anew = Bench(model, _ids(), batch=2).measure([LOUDER])
    np.testing.assert_array_equal(kept.kl_WS, anew.kl_WS)
    np.testing.assert_array_equal(kept.nll_WS, anew.nll_WS)


def test_the_interval_holds_the_mean_and_shrinks_with_windows() -> None:
    difference = np.random.default_rng(0).normal(0.1, 0.05, (400, 8))
    low, high = bootstrap(difference)
    few_low, few_high = bootstrap(difference[:40])
    assert low < np.expm1(difference.mean()) < high
    assert high - low < few_high - few_low


class _Tokenizer:
    is_fast = False
    bos_token_id = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_windows_come_from_the_asked_part_of_each_text() -> None:
    texts = {"a": "".join(map(chr, range(100, 120))), "b": "short"}
    ids, names = window_ids(_Tokenizer(), texts, 4, (0.5, 1.0))
    assert ids.tolist() == [list(range(110, 114)), list(range(114, 118))]
    assert names == ["a", "a"]
    assert window_ids(_Tokenizer(), texts, 4, (0.0, 1.0), limit=2)[1] == ["a", "b"]
