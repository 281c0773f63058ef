"""What a training is done with, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class Settings:
    """What a training is done with.

    Attributes:
        rows: sequences in a batch.
        peak: highest learning rate.
        balance: weight of the load-balancing loss (MoE alone).
        decay: weight decay of matrices.
        betas: of AdamW.
        max_norm: gradients are clipped to this norm.
        seed: of the initial weights and the batches.
        checkpoint_seconds: time between checkpoints.
        report_steps: steps between lines of the log.
    """

    rows: int = 8
    peak: float = 3e-3
    balance: float = 0.02
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 180.0
    report_steps: int = 50

    @classmethod
    def of(cls, name: str) -> Self:
        """The settings of a model: with many small experts, use concentrates more and needs more balancing."""
        return cls(balance=0.06) if name == "tiny-qwen3-moe" else cls(balance=0.01)


@dataclass
class Position:
    """Where a training stands; what a checkpoint holds besides weights.

    Attributes:
        step: steps done.
        tokens: tokens seen.
        seconds: wall-clock time, interruptions apart.
        cpu_seconds: of this process.
        balance_history: (from which step, weight of the load-balancing loss).
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    balance_history: list[tuple[int, float]] = field(default_factory=list)

    def note_balance(self, balance: float) -> None:
        """Remember with which weight the steps from here on are made."""
        if not self.balance_history or self.balance_history[-1][1] != balance:
            self.balance_history.append((self.step, balance))
