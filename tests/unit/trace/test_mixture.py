"""Several traces as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.trace.mixture import mix


def test_every_token_is_there_once_and_sequences_stay_whole(make_trace: Any) -> None:
    traces = [make_trace(tokens=100, sequences=5, seed=1), make_trace(tokens=60, sequences=3, seed=2, kept=0.5)]
    mixture, whose = mix(traces, [slice(0, 80), slice(None)])
    assert (mixture.num_tokens, mixture.num_sequences) == (140, 7)
    for number, (trace, part) in enumerate(zip(traces, (slice(0, 80), slice(None)), strict=True)):
        assert np.array_equal(mixture.expert_ids[:, whose == number], trace.expert_ids[:, part])
    assert mixture.kept is not None
    assert mixture.kept[:, whose == 0].all()
    assert np.array_equal(mixture.kept[:, whose == 1], traces[1].kept)
    changes = np.flatnonzero(np.diff(np.asarray(mixture.sequence_ids)))
    assert len(changes) == 6  # each sequence is one run


def test_every_part_of_the_mixture_has_something_of_each(make_trace: Any) -> None:
    mixture, whose = mix([make_trace(tokens=600), make_trace(tokens=300, seed=3)])
    for fifth in np.array_split(whose, 5):
        assert 0.2 < fifth.mean() < 0.5
    assert mixture.weights is None


def test_traces_without_sequences_are_mixed_in_runs(make_trace: Any) -> None:
    mixture, whose = mix([make_trace(tokens=1000, sequences=0), make_trace(tokens=1000, sequences=0, seed=1)])
    assert mixture.num_sequences == 8
    assert set(whose[:600]) == {0, 1}


def test_other_models_are_refused(make_trace: Any) -> None:
    with pytest.raises(TraceError, match=r"top-4.*top-2"):
        mix([make_trace(), make_trace(top_k=2)])
