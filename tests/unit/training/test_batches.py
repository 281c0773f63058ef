"""Token windows: where they come from, and that they can be made again."""

import numpy as np
import pytest
from training.batches import batch, concatenate, domain_shares


def test_an_end_token_follows_every_document():
    tokens = concatenate([[5, 6], [], [7]], eos=1)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [5, 6, 1, 1, 7, 1]


def test_shares_follow_a_power_of_the_size():
    np.testing.assert_allclose(domain_shares([16, 1], power=0.5), [0.8, 0.2])
    np.testing.assert_allclose(domain_shares([3, 1], power=1.0), [0.75, 0.25])


def test_rows_are_windows_of_one_domain():
    domains = {"a": np.arange(100, dtype=np.uint16), "b": np.arange(1000, 1050, dtype=np.uint16)}
    rows = batch(domains, rows=200, length=9, seed=3, step=1)
    assert rows.shape == (200, 10)
    assert (np.diff(rows) == 1).all()
    assert rows[rows < 1000].max() < 100
    assert rows.max() < 1050
    assert (rows[:, 0] < 1000).any()
    assert (rows[:, 0] >= 1000).any()


def test_the_last_window_of_a_domain_can_be_drawn():
    rows = batch({"a": np.arange(12, dtype=np.uint16)}, rows=200, length=9, seed=0, step=0)
    assert set(rows[:, 0]) == {0, 1, 2}


def test_a_batch_depends_on_seed_and_step_alone():
    domains = {"a": np.arange(500, dtype=np.uint16)}
    first = batch(domains, 4, 16, seed=0, step=5)
    np.testing.assert_array_equal(first, batch(domains, 4, 16, seed=0, step=5))
    assert (first != batch(domains, 4, 16, seed=0, step=6)).any()
    assert (first != batch(domains, 4, 16, seed=1, step=5)).any()


def test_a_domain_shorter_than_a_window_is_refused_by_name():
    with pytest.raises(ValueError, match="'b' is not longer than one window of 9"):
        batch({"a": np.arange(99, dtype=np.uint16), "b": np.arange(9, dtype=np.uint16)}, 1, 9, 0, 0)
