"""The two halves, their windows, and what is told of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths import context as module
from coterie.study.widths.context import spread_windows

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


class _Tokenizer:
    is_fast = False
    bos_token_id = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def test_short_texts_give_what_they_have_and_long_ones_the_rest() -> None:
    texts = {"long": "".join(map(chr, range(100, 180))), "short": "abcd" * 2, "tiny": "abc"}
    ids, names = spread_windows(_Tokenizer(), texts, 4, 10)
    assert (names.count("short"), names.count("long"), len(names)) == (2, 8, 10)
    starts = [int(row[0]) for row, name in zip(ids, names, strict=True) if name == "long"]
    assert (starts[0], starts[-1]) == (100, 176)
    assert len(set(starts)) == 8


def test_texts_shorter_than_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="no text has 64 tokens"):
        spread_windows(_Tokenizer(), {"a": "short"}, 64, 10)


def test_nothing_measured_was_profiled(context: Any) -> None:
    for name, first in context.first.items():
        assert abs(len(first) - len(context.second[name])) <= 1
    assert context.profile.num_tokens <= 2 * 600
    assert set(context.names) == {"words", "more"}
    assert context.bench.ids_WN.shape == (6, 32)
    assert context.calibration.ids_WN.shape == (4, 32)


def test_a_plan_has_the_bytes_that_ran(context: Any) -> None:
    point = context.evaluate(plan_widths(context.profile, "uniform", bytes=0.5))
    assert point.bytes == 0.5
    assert point.measured.nll_WS.shape == (6, 31)
    full = context.evaluate(plan_widths(context.profile, "value", threshold=0), context.calibration)
    assert full.bytes == 1
    assert full.measured.increase == pytest.approx(0, abs=1e-5)


def test_the_model_is_as_before(context: Any) -> None:
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    context.evaluate(plan_widths(context.profile, "crisp"))
    assert all((tensor == before[name]).all() for name, tensor in context.model.state_dict().items())


def test_tokens_trained_come_from_the_card_or_the_record(tmp_path: Path) -> None:
    assert module._tokens_trained(tmp_path) is None
    (tmp_path / "training.json").write_text(json.dumps({"position": {"tokens": 12}}))
    assert module._tokens_trained(tmp_path) == 12
    (tmp_path / "README.md").write_text("| tokens seen | 3.84 M: 1,874 steps |")
    assert module._tokens_trained(tmp_path) == 3_840_000


def test_the_subject_tells_the_size(context: Any) -> None:
    assert context.subject.endswith(f"{context.facts['parameters'] / 1e6:.1f} million parameters")
