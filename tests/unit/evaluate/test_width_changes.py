"""Widths as evaluation applies them, and the narrowest plan within a perplexity allowance."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coterie.errors import BudgetError, ConfigError
from coterie.evaluate.quality import evaluate
from coterie.pruning.fitting import RuleChoice
from coterie.pruning.width_planning import plan_widths
from coterie.spec import MoESpec
from coterie.topology import Topology

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture
def profile(model: Any, make_profile: Any) -> Any:
    """A profile that says it is of the model."""
    from coterie.models.identity import identity_of

    return make_profile(2, 4, 2, 32, identity=identity_of(model))


def quality(model: Any, tokenizer: Any, text: str, *changes: Any) -> dict[str, Any]:
    return evaluate(model, tokenizer, {"a": text}, changes=changes, window=32).to_json()


def test_full_widths_change_nothing(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    from coterie.evaluate.changes import widths

    change = widths(model, plan_widths(profile, "skip", threshold=0))
    assert quality(model, tokenizer, text, change)["kl"] == pytest.approx(0, abs=1e-6)
    assert change.to_json()["measured"]["share"] == pytest.approx(1)


def test_what_is_skipped_is_lost_and_counted(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    import numpy as np
    import torch

    from coterie.evaluate.changes import widths
    from coterie.evaluate.text import encode_text
    from coterie.models.intercept import intercept
    from coterie.pruning.widths import widths as reference

    plan = plan_widths(profile, "skip", threshold=0.8)
    change = widths(model, plan)
    figures = quality(model, tokenizer, text, change)
    assert figures["kl"] > 1e-4
    ids = encode_text(tokenizer, "a", text).ids
    expected: list[Any] = []
    seen = lambda layer, hidden, ids, weights: expected.append(reference(plan, layer, ids, weights))  # noqa: E731
    with torch.no_grad(), widths_in(change, model), intercept(model, seen):
        model(input_ids=torch.tensor([ids[:32]]))
    told = json.loads(json.dumps(change.to_json()))
    assert 0 < told["measured"]["share"] < 1
    assert 0 < np.mean(expected) / 32 < 1
    assert (told["name"], told["policy"], told["asked"]) == ("widths", "skip", {"threshold": 0.8})
    assert "profile" not in told


def widths_in(change: Any, model: Any) -> Any:
    return change.apply(model, None)


def test_the_share_is_that_of_the_decisions(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    """One window, unchanged so far when the first layer decides: its share is what the plain form says."""
    import torch

    from coterie.evaluate.changes import widths
    from coterie.evaluate.text import encode_text
    from coterie.models.intercept import intercept
    from coterie.pruning.widths import widths as reference

    plan = plan_widths(profile, "uniform", bytes=0.5)
    change = widths(model, plan)
    ids = torch.tensor([encode_text(tokenizer, "a", text).ids[:32]])
    shares: list[float] = []

    def see(layer: int, hidden: Any, ids_TK: Any, weights_TK: Any) -> None:
        shares.append(reference(plan, layer, ids_TK, weights_TK).mean() / plan.width)

    with torch.no_grad(), intercept(model, see):
        model(input_ids=ids)
    with torch.no_grad(), widths_in(change, model):
        model(input_ids=ids)
    assert change.to_json()["measured"]["share"] == pytest.approx(sum(shares) / len(shares))
    assert change.to_json()["measured"]["num_tokens"] == 32


def test_with_pruned_destinations(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    from coterie.evaluate.changes import pruning, widths

    def changes() -> list[Any]:
        prune = pruning(model, RuleChoice("cap", 0.4), topology=Topology.parse("2"))
        return [prune, widths(model, plan_widths(profile, "skip", threshold=0.8))]

    alone = [quality(model, tokenizer, text, change)["kl"] for change in changes()]
    both = changes()
    figures = quality(model, tokenizer, text, *both)
    assert figures["kl"] not in alone
    assert [change.to_json()["name"] for change in both] == ["pruning", "widths"]
    assert all(change.to_json()["measured"]["num_tokens"] for change in both)


def test_a_plan_of_another_model(model: Any, profile: Any) -> None:
    from coterie.evaluate.changes import widths

    plan = plan_widths(profile, "crisp")
    with pytest.raises(ConfigError, match="the width plan is of the model toy with identity 0123"):
        widths(model, replace(plan, identity="0123"))
    with pytest.raises(ConfigError, match=r"for toy \(3 MoE layers of 8 experts, top-2\), the model has 2 of 4, top-2"):
        widths(model, replace(plan, spec=MoESpec("toy", 3, 8, 2)))


def test_an_allowance_is_kept_and_used(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    from coterie.evaluate.changes import widths
    from coterie.evaluate.perplexity import perplexity
    from coterie.evaluate.text import encode_text
    from coterie.evaluate.width_allowance import plan_within

    encoded = [encode_text(tokenizer, name, text, 100) for name in "ab"]
    plan_of = lambda share: plan_widths(profile, "skip", bytes=share)  # noqa: E731
    full = perplexity(model, encoded[0], 32, 16).perplexity
    for allowed in (0.02, 1.0):
        plan = plan_within(model, encoded, plan_of, allowed, 32, 16)
        told = json.loads(json.dumps(plan.settings, allow_nan=False))
        changed = perplexity(model, encoded[0], 32, 16, changes=[widths(model, plan)]).perplexity
        assert told["asked"] == {"max_ppl_increase": allowed}
        assert told["allowance"]["full_perplexity"] == pytest.approx(full)
        assert told["allowance"]["increase"] == pytest.approx(changed / full - 1, abs=1e-6)
        assert told["allowance"]["increase"] <= allowed
        tried = told["allowance"]["tried"]
        assert 2 <= len(tried) <= 8
        within = [each["bytes"] for each in tried if each["increase"] <= allowed]
        assert told["expected_bytes"] == min(within)
    assert told["expected_bytes"] < 0.5


def test_an_allowance_that_cannot_be_kept(
    model: Any, tokenizer: Any, text: str, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.evaluate import width_allowance
    from coterie.evaluate.text import encode_text
    from coterie.evaluate.width_allowance import plan_within

    encoded = [encode_text(tokenizer, "a", text, 60)]
    nothing = plan_widths(profile, "skip", threshold=3)
    # a random model may well predict no worse with fewer experts
    monkeypatch.setattr(width_allowance, "_perplexity", lambda *given: 102.0 if given[4] else 100.0)
    with pytest.raises(BudgetError, match=r"policy skip raises perplexity by 2.00%, more than the 1.00% allowed"):
        plan_within(model, encoded, lambda share: nothing, 0.01, 32, 16)
    with pytest.raises(ConfigError, match="a perplexity increase of 0 is not positive"):
        plan_within(model, encoded, lambda share: nothing, 0, 32, 16)


def test_a_policy_that_cannot_read_so_little(model: Any, tokenizer: Any, text: str, profile: Any) -> None:
    """Where the allowance would let everything go, the least that the policy can read is found."""
    from coterie.evaluate.text import encode_text
    from coterie.evaluate.width_allowance import plan_within

    def plan_of(share: float) -> Any:
        if share < 0.6:
            raise BudgetError("too little")
        return plan_widths(profile, "skip", bytes=share)

    plan = plan_within(model, [encode_text(tokenizer, "a", text, 60)], plan_of, 1e9, 32, 16)
    assert 0.59 < plan.settings["expected_bytes"] < 0.62
