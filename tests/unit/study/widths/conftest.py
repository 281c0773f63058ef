"""Made-up points, and a context of a tiny random model on a little text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.study.measure import Measured
from coterie.study.widths.context import Point, StudySize

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "the", "of", "in", "on", "for", "and")


@pytest.fixture(scope="session")
def make_point() -> Callable[..., Point]:
    """Makes a point with so many bytes whose tokens lose so many nats each, the same in every window unless noisy."""

    def make(share: float, loss: float, noise_W: Any = (0.0, 0.0, 0.0, 0.0)) -> Point:
        rise_WS = loss + np.asarray(noise_W, np.float64)[:, None] + np.zeros((len(noise_W), 5))
        base_WS = np.full(rise_WS.shape, 3.0)
        return Point(share, Measured(base_WS + rise_WS, base_WS, np.abs(rise_WS).astype(np.float32)))

    return make


@pytest.fixture(scope="session")
def context(tiny_checkpoint: Any) -> Any:
    """A tiny random Mixtral, ready to be studied quickly."""
    from coterie.study.widths.context import make_context

    rng = np.random.default_rng(0)
    texts = {name: " ".join(rng.choice(WORDS, 400)) for name in ("words", "more")}
    size = StudySize(window=32, profile_characters=600, windows=6, calibration_windows=4)
    return make_context(str(tiny_checkpoint("mixtral")), texts=texts, quick=True, size=size)
