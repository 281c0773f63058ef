"""How far training is, and the learning rate there: by the clock or by tokens."""

from __future__ import annotations

from dataclasses import dataclass

WARM_UP = 0.02


@dataclass(frozen=True)
class Budget:
    """What a training may use: minutes of wall-clock time, or tokens. Exactly one is given.

    With minutes the learning rate reaches zero when the time is up, however fast the machine turns out to be.
    """

    minutes: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.minutes, self.tokens) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(f"minutes = {self.minutes}, tokens = {self.tokens}; give exactly one, above 0")

    def progress(self, seconds: float, tokens: int) -> float:
        """Share of the budget used so far, within [0, 1]."""
        used = seconds / (60 * self.minutes) if self.minutes is not None else tokens / (self.tokens or 1)
        return min(1.0, used)


def learning_rate(peak: float, progress: float, warm_up: float = WARM_UP) -> float:
    """Linear warm-up from zero, then linear decay to zero at progress 1."""
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * (1.0 - progress) / (1.0 - warm_up)
