"""The training loop: batches, loss, steps, checkpoints, a line of progress now and then."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.batches import batch
from training.head_loss import HeadLoss
from training.models import SEQUENCE
from training.optimizer import MasterAdamW
from training.routing import balance_loss, collect_routing, load_counts
from training.schedule import Budget, learning_rate
from training.settings import Position, Settings

LONGEST_STEP_SECONDS = 10.0


def train(
    model: Any, tokens_by_domain: Mapping[str, NDArray[np.uint16]], budget: Budget, settings: Settings, folder: Path
) -> Position:
    """Train until the budget is used, resuming from `folder` if it holds a checkpoint; the model ends in bf16."""
    optimizer = MasterAdamW.of(model, settings.decay, settings.betas)
    checkpoint = folder / "checkpoint.pt"
    position = load(checkpoint, optimizer) if checkpoint.exists() else Position()
    position.note_balance(settings.balance)
    model.train()
    clock = Clock()
    saved = position.seconds
    with collect_routing(model) as routing, (folder / "log.jsonl").open("a") as log:
        while (progress := budget.progress(position.seconds, position.tokens)) < 1.0:
            loss, balance = backward(model, routing, tokens_by_domain, settings, position.step)
            rate = learning_rate(settings.peak, progress)
            norm = optimizer.step(rate, settings.max_norm)
            position.step += 1
            position.tokens += settings.rows * SEQUENCE
            clock.update(position)
            if position.step % settings.report_steps == 0:
                line = {"loss": round(float(loss), 4), "rate": round(rate, 6), "norm": round(norm, 3)}
                if routing:
                    line |= {"balance": round(float(balance), 3), **_load_figures(load_counts(routing))}
                log.write(json.dumps(asdict(position) | line) + "\n")
                log.flush()
            routing.clear()
            if position.seconds - saved > settings.checkpoint_seconds:
                save(checkpoint, optimizer, position)
                saved = position.seconds
    save(checkpoint, optimizer, position)
    return position


def backward(
    model: Any, routing: list[Any], tokens_by_domain: Mapping[str, NDArray[np.uint16]], settings: Settings, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of one batch; returns (language-model loss, balance loss), detached."""
    windows = torch.from_numpy(batch(tokens_by_domain, settings.rows, SEQUENCE, settings.seed, step))
    hidden = model.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
    loss = HeadLoss.apply(hidden.flatten(0, 1), model.lm_head.weight, windows[:, 1:].flatten())
    balance = balance_loss(routing) if routing else torch.zeros(())
    (loss + settings.balance * balance).backward()
    return loss.detach(), balance.detach()


def save(path: Path, optimizer: MasterAdamW, position: Position) -> None:
    """Write a checkpoint; the old one stays until the new one is complete."""
    partial = path.with_suffix(".partial")
    torch.save({"optimizer": optimizer.state_dict(), "position": asdict(position)}, partial)
    os.replace(partial, path)


def load(path: Path, optimizer: MasterAdamW) -> Position:
    """Restore a checkpoint."""
    state = torch.load(path, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return Position(**state["position"])


class Clock:
    """Adds the time since the last look to a position; a process that was stopped meanwhile was not training."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.monotonic(), time.process_time()

    def update(self, position: Position) -> None:
        """Add what has passed, at most `LONGEST_STEP_SECONDS`."""
        wall, cpu = time.monotonic(), time.process_time()
        position.seconds += min(wall - self.wall, LONGEST_STEP_SECONDS)
        position.cpu_seconds += cpu - self.cpu
        self.wall, self.cpu = wall, cpu


def _load_figures(counts_LE: torch.Tensor) -> dict[str, Any]:
    """Load max/mean of each layer and how many experts this batch left unused."""
    ratios = counts_LE.max(1).values / counts_LE.float().mean(1)
    return {"max_mean": [round(float(ratio), 2) for ratio in ratios], "unused": int((counts_LE == 0).sum())}
