"""Where learning what neurons are worth stands: plain arrays, to be put aside and taken up again exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.profile.profile_file import read_arrays, write_arrays

RATE, WARM_UP = 0.05, 10  # of a logarithm a step, at most; steps until then
_KEEP_FIRST, _KEEP_SECOND, _KEEP_AVERAGE = 0.9, 0.99, 0.95
_FLOOR = 3e-3  # of the gradient's size over all neurons: those with far less hardly move
_KIND, _VERSION = "learning_in_progress", 1
Values = NDArray[np.float32]


@dataclass
class LearningState:
    """What a step of learning changes.

    Attributes:
        log_value_LEI: [L, E, I], what is learnt.
        first_LEI: Adam's mean gradient.
        second_LEI: Adam's mean squared gradient.
        average_LEI: a moving average of `log_value_LEI`, less noisy than its last value.
        best_LEI: the average that did best on the text put aside.
        step: steps done.
        best_step: when `best_LEI` was found; 0: where learning began.
        tried: (step, KL of its average on the text put aside).
    """

    log_value_LEI: Values
    first_LEI: Values
    second_LEI: Values
    average_LEI: Values
    best_LEI: Values
    step: int = 0
    best_step: int = 0
    tried: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def beginning(cls, log_value_LEI: Values) -> Self:
        """Nothing learnt yet."""
        zero = np.zeros_like(log_value_LEI)
        return cls(log_value_LEI.copy(), zero, zero.copy(), log_value_LEI.copy(), log_value_LEI.copy())

    def descend(self, gradient_LEI: Values, steps: int) -> None:
        """One step of Adam; the rate rises for ten steps and falls to nothing at `steps` along a cosine."""
        self.step += 1
        self.first_LEI += (1 - _KEEP_FIRST) * (gradient_LEI - self.first_LEI)
        self.second_LEI += (1 - _KEEP_SECOND) * (gradient_LEI**2 - self.second_LEI)
        first_LEI = self.first_LEI / (1 - _KEEP_FIRST**self.step)
        root_LEI = np.sqrt(self.second_LEI / (1 - _KEEP_SECOND**self.step))
        size = float(np.sqrt(np.mean(root_LEI**2, dtype=np.float64))) or 1.0
        rate = RATE * min(1.0, self.step / WARM_UP) * (1 + math.cos(math.pi * (self.step - 1) / steps)) / 2
        self.log_value_LEI -= (rate * first_LEI / (root_LEI + _FLOOR * size)).astype(np.float32)
        keep = min(_KEEP_AVERAGE, self.step / (self.step + 1))
        self.average_LEI += np.float32(1 - keep) * (self.log_value_LEI - self.average_LEI)

    def judge(self, kl: float) -> None:
        """Take note of what the average does on the text put aside."""
        if not self.tried or kl < min(found for _, found in self.tried):
            self.best_LEI[...], self.best_step = self.average_LEI, self.step
        self.tried.append((self.step, kl))

    def stale(self, patience: int) -> bool:
        """Whether the last `patience` looks at the text put aside found nothing better."""
        return len(self.tried) - 1 - [step for step, _ in self.tried].index(self.best_step) >= patience

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write it, whole or not at all."""
        told = {"settings": dict(settings), "step": self.step, "best_step": self.best_step, "tried": self.tried}
        write_arrays(path, _KIND, _VERSION, dict(self._arrays()), told)

    def load(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Take up what `save` wrote for a run of the same settings; this must be its beginning.

        Raises:
            ConfigError: when the file is damaged, or of another model, text or setting.
        """
        remedy = f"delete {path}, or choose another output"
        try:
            arrays, told = read_arrays(path, _KIND, _VERSION)
            theirs = told["settings"]
            differing = [name for name, value in settings.items() if theirs.get(name) != value]
            if differing:
                name = differing[0]
                raise ConfigError(
                    f"{path} is of another run ({name} was {theirs.get(name)!r} and is {settings[name]!r}); repeat "
                    f"that run to finish it, or {remedy}"
                )
            for name, mine in self._arrays():
                mine[...] = arrays[name]
            self.step, self.best_step = int(told["step"]), int(told["best_step"])
            self.tried = [(int(step), float(kl)) for step, kl in told["tried"]]
        except (TraceError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"cannot go on from {path}: {error}; {remedy}") from error

    def _arrays(self) -> Iterator[tuple[str, Values]]:
        for name in ("log_value_LEI", "first_LEI", "second_LEI", "average_LEI", "best_LEI"):
            yield name, getattr(self, name)
