"""A live model that decides as another did: routers' choices and widths replaced by recorded ones, token by token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie.bench.offload.decisions import Decisions
from coterie.errors import ConfigError
from coterie.models.intercept import intercept

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Replayer:
    """Holds decisions, and gives those of the tokens that the model is about to run.

    `widths` is what `coterie.offload` takes; `intercepting` puts `decide` in place.

    Args:
        decisions: recorded; widths in neurons of the model that runs.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.use(decisions)

    def use(self, decisions: Decisions) -> None:
        """Replay these from now on."""
        self.decisions = decisions
        self._rows: NDArray[np.int64] = np.arange(0)

    def at(self, rows: NDArray[Any]) -> None:
        """The next forward pass runs these tokens of the recording, [T], in its order of batch and sequence."""
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self.decisions):
            raise ConfigError(f"token {int(rows.max())} is to be replayed, {len(self.decisions)} are recorded")
        self._rows = rows

    def decide(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The recorded choice, for `intercept`."""
        ids = torch.from_numpy(self.decisions.ids_TLK[self._rows, layer])
        return ids, torch.from_numpy(self.decisions.weights_TLK[self._rows, layer]).to(weights_TK.dtype)

    def widths(self, layer: int, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The recorded widths."""
        if self.decisions.widths_TLK is None:
            return torch.full_like(ids_TK, self.decisions.width, dtype=torch.int64)
        return torch.from_numpy(self.decisions.widths_TLK[self._rows, layer])

    @contextmanager
    def intercepting(self, model: Any) -> Iterator[None]:
        """Replace the model's decisions while the block runs."""
        with intercept(model, self.decide):
            yield


class Decoder:
    """Runs a model token by token with its cache of keys and values, as generation does.

    Args:
        model: a Transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        named = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in named else "past_key_values"  # its name from Transformers 5.25 on
        self.cache: Any = None

    def step(self, ids_BN: Tensor) -> Tensor:
        """Logits [B, N, V] of the next tokens of every sequence."""
        given = {} if self.cache is None else {self._name: self.cache}
        with torch.inference_mode():
            output = self._model(input_ids=ids_BN, use_cache=True, **given)
        self.cache = getattr(output, self._name, None) or output.past_key_values
        logits: Tensor = output.logits
        return logits


def replay_decode(model: Any, replayer: Replayer, rows_SB: NDArray[Any], seed: int = 0) -> list[float]:
    """Decode with recorded decisions.

    Args:
        model: the model that runs, under `replayer.intercepting`.
        replayer: gives the decisions.
        rows_SB: [S, B] tokens of the recording: in step s, sequence b runs as token rows[s, b] did.
        seed: of the token ids that are fed, which change nothing but the attention's numbers.

    Returns:
        Seconds of every step.
    """
    steps, batch = rows_SB.shape
    ids_SB = torch.randint(3, model.config.vocab_size, (steps, batch), generator=torch.Generator().manual_seed(seed))
    decoder, seconds = Decoder(model), []
    for step in range(steps):
        replayer.at(rows_SB[step])
        began = time.perf_counter()
        decoder.step(ids_SB[step][:, None])
        seconds.append(time.perf_counter() - began)
    return seconds


def replay_prefill(model: Any, replayer: Replayer, rows_T: NDArray[Any], seed: int = 0) -> float:
    """Run a prompt with recorded decisions; seconds.

    Args:
        model: as for `replay_decode`, like the others.
        replayer: as there.
        rows_T: [T] tokens of the recording.
        seed: as there.
    """
    ids_1T = torch.randint(3, model.config.vocab_size, (1, len(rows_T)), generator=torch.Generator().manual_seed(seed))
    replayer.at(rows_T)
    began = time.perf_counter()
    Decoder(model).step(ids_1T)
    return time.perf_counter() - began
