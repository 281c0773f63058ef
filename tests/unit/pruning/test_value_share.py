"""Shares of neurons at a threshold, against counting them one by one and against the plans that run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.pruning.value_share import ValueShares
from coterie.pruning.width_budget import byte_share
from coterie.pruning.width_planning import plan_widths


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_shares_are_those_of_plans(make_profile: Any, top_k: int) -> None:
    profile = make_profile(2, 8, top_k, 40)
    value_LEI = np.random.default_rng(1).lognormal(0, 1, (2, 8, 40)).astype(np.float32)
    profile = replace(profile, importance={"learnt": value_LEI})
    shares = ValueShares(profile)
    for threshold in (0.05, 0.2, 0.7, 50.0):
        expected = byte_share(plan_widths(profile, threshold=threshold, step=1), profile).mean
        assert shares.share(np.log(value_LEI), float(np.log(threshold))) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("share", [0.1, 0.42, 0.9, 1.0])
def test_thresholds_meet_their_share(make_profile: Any, share: float) -> None:
    profile = make_profile(2, 8, 2, 40)
    log_value_LEI = np.random.default_rng(2).normal(0, 1, (2, 8, 40))
    shares = ValueShares(profile)
    found = shares.share(log_value_LEI, shares.threshold(log_value_LEI, share))
    assert share - 2e-4 <= found <= share
