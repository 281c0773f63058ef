"""Whose word counts on the model's shape."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace.importers.base import Layout
from coterie.trace.importers.reconcile import reconcile


def layout(**more) -> Layout:
    return Layout(3, 10, 2, {"expert_ids": np.uint8}, **more)


SPEC = MoESpec("m", 3, 8, 2, layer_ids=(1, 2, 4), num_model_layers=5)


def test_the_caller_overrides_the_source_which_overrides_the_ids():
    said = layout(spec=MoESpec("said", 3, 6, 2))
    assert reconcile(said, 4, SPEC, None)[0] == SPEC
    assert reconcile(said, 4, None, None)[0].model == "said"
    assert reconcile(said, 4, None, 7)[0].num_experts == 7
    spec, inferred = reconcile(layout(), 4, None, None)
    assert spec.num_experts == 5
    assert set(inferred) == {"num_experts"}
    assert reconcile(layout(num_experts=6), 4, None, None)[1] == {}


def test_layer_numbers_complete_the_spec_or_are_held_against_it():
    assert reconcile(layout(layer_ids=(1, 2, 4)), 4, MoESpec("m", 3, 8, 2), None)[0].layer_ids == (1, 2, 4)
    assert reconcile(layout(layer_ids=(0, 1, 2)), 4, SPEC, None)[0].layer_ids == (1, 2, 4)
    with pytest.raises(TraceError, match=r"its layers are \[1, 2, 3\], but the MoE layers of m are \[1, 2, 4\]"):
        reconcile(layout(layer_ids=(1, 2, 3)), 4, SPEC, None)


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="8 experts, not the 9"):
        reconcile(layout(), 4, SPEC, 9)
    with pytest.raises(TraceError, match="says 6 experts, but m has 8"):
        reconcile(layout(num_experts=6), 4, SPEC, None)
    with pytest.raises(TraceError, match="top_k = 2 is more than num_experts = 1"):
        reconcile(layout(), 0, None, None)
    with pytest.raises(TraceError, match="num_experts = 7 is not divisible by num_groups = 2"):
        reconcile(layout(spec=MoESpec("m", 3, 8, 2, num_groups=2)), 0, None, 7)
