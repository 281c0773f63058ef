"""Every study on a tiny random model, top-2 and above: it runs, tells JSON, and shows it."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from coterie.report.page import Page

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers"), pytest.mark.needs("plotly")]

NAMES = (
    "frequency_damage", "roles", "skew", "dominance", "tiers_quality", "asymmetric", "transfer", "memory",
)  # fmt: skip
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "the", "of", "in", "on", "for", "and")


def _text(seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, 700))


@pytest.fixture(scope="module")
def contexts(tiny_checkpoint: Any) -> Callable[[str], Any]:
    from coterie.study.widths.context import StudySize, make_context

    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            texts = {name: _text(seed) for seed, name in enumerate(("code", "maths", "prose"))}
            size = StudySize(32, 600, 6, 3)
            made[family] = make_context(str(tiny_checkpoint(family)), texts=texts, quick=True, size=size)
        return made[family]

    return make


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", NAMES)
def test_every_study_tells_and_shows(name: str, family: str, contexts: Callable[[str], Any]) -> None:
    study: ModuleType = importlib.import_module(f"coterie.study.widths.{name}")
    result = json.loads(json.dumps(study.run(contexts(family)), allow_nan=False))
    page = Page("tiny")
    study.show(page, result)
    html = page.html()
    assert "The paper" in html
    assert not re.search(r"\b(nan|None)\b", re.sub("<script>.*?</script>", "", html, flags=re.DOTALL))


def test_narrowing_nothing_changes_nothing(contexts: Callable[[str], Any]) -> None:
    from coterie.study.widths import tiers_quality

    whole = tiers_quality.run(contexts("mixtral"))["cold_widths"][-1]
    assert whole["auxiliary_width"] == whole["bytes"] == whole["bytes_of_cold"] == 1
    assert whole["kept_on_cold"]["value"] == pytest.approx(1, abs=1e-4)


def test_top_2_reads_what_the_formula_says(contexts: Callable[[str], Any]) -> None:
    from coterie.study.widths import memory

    found = memory.run(contexts("mixtral"))
    low, high = found["formula"]["interval_95"]
    assert low - 0.03 < found["measured"] < high + 0.03


def test_half_width_is_confined_to_members(contexts: Callable[[str], Any]) -> None:
    import torch

    from coterie.study.widths.selective import half_width_where

    member_LEE = np.zeros((2, 4, 4), bool)
    member_LEE[1, 2, 0] = member_LEE[1, 0, 2] = True
    rule = half_width_where(member_LEE, 8, [1])
    ids, weights = torch.tensor([[0, 2, 3], [1, 2, 0]]), torch.tensor([[0.2, 0.7, 0.1], [0.7, 0.2, 0.1]])
    assert rule(0, ids, weights).tolist() == [[8] * 3] * 2
    # token 0: its anchor 2 is with 0 and 3, of which the first is a member; token 1: its anchor 1 is with 2 and 0
    assert rule(1, ids, weights).tolist() == [[4, 6, 8], [8, 8, 8]]


def test_leaving_an_expert_out_touches_its_pair_alone(contexts: Callable[[str], Any]) -> None:
    from coterie.study.widths.selective import leave_out, rise_in

    context = contexts("mixtral")
    rows = np.arange(3)
    counts_EE = context.uses.counts()[rows].sum(0)[0]
    first, second = (int(at) for at in np.unravel_index(counts_EE.argmax(), counts_EE.shape))
    assert rise_in(context.bench, leave_out(0, first, second), rows) != 0
    unused = np.argwhere(np.triu(counts_EE == 0, 1))
    for pair in unused[:1]:
        assert rise_in(context.bench, leave_out(0, int(pair[0]), int(pair[1])), rows) == pytest.approx(0, abs=1e-3)


def test_uses_of_every_scored_position_are_kept(contexts: Callable[[str], Any]) -> None:
    context = contexts("qwen3_moe")
    uses, top_k = context.uses, context.profile.spec.top_k
    assert (np.triu(uses.counts().sum(0)).sum((1, 2)) == context.bench.num_tokens * (top_k - 1)).all()
    assert (np.diff(uses.weights_LWSK, axis=3) <= 0).all()
    assert uses.weights_LWSK.sum(3) == pytest.approx(1, abs=1e-5)
