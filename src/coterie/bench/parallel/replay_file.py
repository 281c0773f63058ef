"""Replayed routing on disk, from the benchmark to its workers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from coterie.parallel.replay import Replay


@cache
def load_replay(file: str) -> Replay:
    """A replay that `save_replay` wrote."""
    with np.load(file) as held:
        return Replay(
            tuple(held["layers"].tolist()), held["ids"].astype(np.int64), held["weights"], held["kept"],
            int(held["batch"]),
        )  # fmt: skip


def save_replay(replay: Replay, file: Path) -> str:
    """Write a replay for workers to read; returns the name."""
    np.savez(
        file, layers=np.array(replay.layers), ids=replay.ids_LGTK.astype(np.int32), weights=replay.weights_LGTK,
        kept=replay.kept_LGTK, batch=np.array(replay.batch),
    )  # fmt: skip
    return str(file)
