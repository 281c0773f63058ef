"""Which of several placements to use: predict all, time the promising ones, take the fastest.

Source: CAP §VII, step 4. The paper times every placement of the spectrum; here a prediction says which are worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BASELINES = ("linear", "eplb")
CONSISTENT = 0.75

Timer = Callable[[Sequence[int]], NDArray[np.float64]]
"""Times these candidates in turn, round after round: indices [N] -> seconds of each round [R, N]."""


@dataclass(frozen=True)
class Timed:
    """One candidate.

    Attributes:
        name: what to call it.
        predicted_s: seconds of a step by the step-time model.
        measured_s: the median over rounds, seconds; None where it was not timed.
        ratio: its time over linear's, the median over rounds; None where it was not timed.
        spread: the middle half of those ratios, from and to; None where it was not timed.
    """

    name: str
    predicted_s: float
    measured_s: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {
            "name": self.name, "predicted_s": self.predicted_s, "measured_s": self.measured_s,
            "ratio_to_linear": self.ratio, "ratio_middle_half": None if self.spread is None else list(self.spread),
        }  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What was found.

    Attributes:
        rows: every candidate, in the order given.
        pick: the index of the one to use.
        beats_linear: whether the pick is faster than linear beyond chance; if not, the pick is linear.
    """

    rows: tuple[Timed, ...]
    pick: int
    beats_linear: bool


def choose(names: Sequence[str], predicted_s: Sequence[float], timer: Timer, best: int = 3) -> Choice:
    """Time the baselines and the `best` others that are predicted fastest, and pick the fastest of all.

    Rounds are compared within themselves, since a busy machine slows whole rounds down. A candidate beats linear when
    it is faster in the median round and in at least `CONSISTENT` of the rounds; where none does, linear stays.

    Args:
        names: of the candidates, "linear" among them.
        predicted_s: seconds of a step that the model predicts for each.
        timer: times candidates.
        best: how many candidates besides the baselines to time.
    """
    linear = list(names).index("linear")
    timed = shortlist(names, predicted_s, best)
    seconds_RN = timer(timed)
    ratios_RN = seconds_RN / seconds_RN[:, timed.index(linear)][:, None]
    rows = [Timed(name, float(seconds)) for name, seconds in zip(names, predicted_s, strict=True)]
    for column, index in enumerate(timed):
        low, middle, high = np.percentile(ratios_RN[:, column], (25, 50, 75))
        measured = float(np.median(seconds_RN[:, column]))
        rows[index] = Timed(names[index], rows[index].predicted_s, measured, float(middle), (float(low), float(high)))
    fastest = timed[int(np.argmin(np.median(ratios_RN, axis=0)))]
    faster_R = ratios_RN[:, timed.index(fastest)] < 1
    beats = bool(np.median(ratios_RN[:, timed.index(fastest)]) < 1 and faster_R.mean() >= CONSISTENT)
    return Choice(tuple(rows), fastest if beats else linear, beats)


def shortlist(names: Sequence[str], predicted_s: Sequence[float], best: int) -> list[int]:
    """The baselines, and the `best` others with the least predicted time; as indices, the baselines first."""
    baselines = [index for index, name in enumerate(names) if name in BASELINES]
    others = [index for index in np.argsort(predicted_s, kind="stable").tolist() if index not in baselines]
    return baselines + others[:best]
