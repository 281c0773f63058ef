"""Loads and co-activation against loops that are obviously right."""

import numpy as np
import pytest

from coterie.profile.coactivation import coactivation_counts, jaccard
from coterie.profile.load import expert_load, imbalance, trace_load
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace

IDS = np.array([[0, 1, 2], [1, 2, 3], [2, 0, 4]], dtype=np.uint8)
KEPT = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 1]], dtype=bool)


def test_load_counts_kept_entries_only():
    assert expert_load(IDS, None, 6).tolist() == [2, 2, 3, 1, 1, 0]
    assert expert_load(IDS, KEPT, 6).tolist() == [2, 2, 1, 1, 1, 0]


def test_load_reads_a_read_only_uint16_array():
    ids = IDS.astype(np.uint16)
    ids.flags.writeable = False
    assert expert_load(ids, None, 6).sum() == ids.size


def test_trace_load_takes_a_selection_of_tokens_and_tells_progress():
    trace = RoutingTrace(np.stack([IDS, IDS[::-1]]), MoESpec("m", 2, 6, 3), kept=np.stack([KEPT, KEPT[::-1]]))
    heard = []
    load_LE = trace_load(trace, slice(0, 1), lambda what, done, total: heard.append((done, total)))
    assert load_LE.tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0]]
    assert heard == [(1, 2), (2, 2)]
    assert trace_load(trace, np.array([0, 2]))[0].tolist() == [2, 1, 1, 0, 1, 0]


def test_imbalance_is_max_over_mean_over_all_experts():
    assert imbalance(np.array([4, 4, 4, 4])) == 1.0
    assert imbalance(np.array([8, 0, 0, 0])) == 4.0
    assert imbalance(np.zeros(3, dtype=np.int64)) == 1.0


def test_coactivation_by_hand():
    counts = coactivation_counts(IDS, KEPT, 6)
    expected = np.zeros((6, 6), dtype=int)
    for i, j in ((0, 1), (0, 2), (1, 2), (1, 3), (0, 4)):
        expected[i, j] = expected[j, i] = 1
    np.fill_diagonal(expected, [2, 2, 1, 1, 1, 0])
    assert np.array_equal(counts, expected)


def test_jaccard_by_hand():
    p = jaccard(coactivation_counts(IDS, None, 6))
    assert p[0, 2] == pytest.approx(2 / 3)  # tokens 0 and 2 have both, tokens 0 to 2 have either
    assert p[1, 3] == pytest.approx(1 / 2)
    assert p[3, 4] == 0
    assert (p[5] == 0).all()
    assert (np.diagonal(p) == 0).all()
