"""Times real dispatch and combine on replayed routing, with real experts or with their modelled time.

Shapes: S steps, L replayed layers, G ranks, T tokens of this rank in a step, K top-k, R visits received, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import ConfigError
from coterie.ops.gated_ffn import ExpertWeights
from coterie.parallel.comms import Comms, share
from coterie.parallel.copy_choice import copy_choices
from coterie.parallel.dispatch import Received, combine, dispatch
from coterie.parallel.experts import run_experts
from coterie.parallel.layer_placement import LayerPlacement
from coterie.parallel.replay import Replay
from coterie.placement.placement import Placement

Experts = Callable[[Received], Tensor]
"""What a device does with the visits it received: [R, H] sums."""


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one layer's experts, as far as their time depends on them.

    Attributes:
        hidden_size: H.
        width: neurons of an expert.
        dtype: of states and weights.
    """

    hidden_size: int
    width: int
    dtype: torch.dtype


def random_experts(shape: ExpertShape, count: int, seed: int = 0, device: torch.device | str = "cpu") -> Experts:
    """Real experts with random weights: as many as a device holds in one layer, used for every layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        values: Tensor = torch.randn(size, generator=generator) * shape.hidden_size**-0.5
        return values.to(device, shape.dtype)

    def gate(both: Tensor) -> Any:
        left, right = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(left) * right

    weights = ExpertWeights(
        normal(count, 2 * shape.width, shape.hidden_size), normal(count, shape.hidden_size, shape.width), None, None,
        transposed=False, interleaved=False, gate=gate,
    )  # fmt: skip
    return lambda received: run_experts(weights, received)


def emulated_experts(base_s: float, pair_s: float) -> Experts:
    """Experts that return every token's own state, weighted, after the time that real ones would take.

    The time is `base_s + pair_s * pairs`; the process sleeps it through, so that more devices than cores can take
    theirs at once. An emulation: say so beside its figures.
    """

    def run(received: Received) -> Tensor:
        started = time.perf_counter()
        here_RK = received.ids_RK >= 0
        pairs = int(here_RK.sum())
        shares_R = torch.where(here_RK, received.weights_RK, 0).sum(1, keepdim=True)
        outputs_RH = received.hidden_RH.to(torch.float32) * shares_R.to(torch.float32)
        left = started + (base_s + pair_s * pairs if pairs else 0.0) - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return outputs_RH

    return run


@dataclass(frozen=True)
class StepTimes:
    """What steps took.

    Attributes:
        seconds_S: [S] from a common start to the slowest rank's end.
        compute_S: [S] the sum over layers of the slowest rank's experts.
        sent_bytes_G: [G] what each rank sent to others, all steps together: states, sums, ids, weights and counts.
        copies: copies of tokens that travelled between ranks, all steps together.
    """

    seconds_S: NDArray[np.float64]
    compute_S: NDArray[np.float64]
    sent_bytes_G: NDArray[np.int64]
    copies: int

    @property
    def communication_share(self) -> float:
        """The share of the time in which the slowest rank's experts did not run, median over steps."""
        return float(np.median(1 - self.compute_S / self.seconds_S))


class Stage:
    """One rank's part in timing: its tokens' states, and the exchange of what was measured.

    All ranks make the same calls in the same order.
    """

    def __init__(self, comms: Comms, hidden_size: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.comms, self._hidden_size, self._dtype = comms, hidden_size, dtype
        self._generator = torch.Generator().manual_seed(seed + comms.rank)

    def states(self, tokens: int) -> Tensor:
        """Random states of so many tokens, [T, H], where this rank computes."""
        states = torch.randn((tokens, self._hidden_size), generator=self._generator)
        return states.to(self.comms.device, self._dtype)

    def now(self) -> float:
        """Seconds, once this rank's device has done what it was given."""
        if self.comms.device.type == "cuda":
            torch.cuda.synchronize(self.comms.device)
        return time.perf_counter()

    def time_steps(self, replay: Replay, placement: Placement, experts: Experts, steps: Sequence[int]) -> StepTimes:
        """Run these steps one after another; every rank gets the same figures.

        Args:
            replay: the routing; this rank takes its own tokens of it.
            placement: where experts live; copies are chosen by the rule that it was made for, in every step anew.
            experts: what to do with received visits.
            steps: which steps of the replay.

        Raises:
            RankError: when a rank ended or did not answer in time.
        """
        layers = [LayerPlacement.of(placement, layer, self.comms.device) for layer in replay.layers]
        hidden_TH = self.states(replay.batch)
        before = list(self.comms.sent_bytes_G)
        seconds, compute_SL, copies, overhead = [], [], 0, 0
        for step in steps:
            inputs, choices = self._inputs(replay, step), copy_choices(placement, replay.layers, self.comms.rank)
            overhead -= sum(self.comms.sent_bytes_G)
            share(self.comms, None)  # all start together
            overhead += sum(self.comms.sent_bytes_G)
            started = self.now()
            compute_L = []
            for layer, choose, (ids_TK, weights_TK) in zip(layers, choices, inputs, strict=True):
                received, handle = dispatch(hidden_TH, choose(ids_TK), weights_TK, layer, self.comms)
                began = self.now()
                outputs_RH = experts(received)
                compute_L.append(self.now() - began)
                combine(outputs_RH, handle)
                copies += sum(handle.sent) - handle.sent[self.comms.rank]
            seconds.append(self.now() - started)
            compute_SL.append(compute_L)
        sent = sum(self.comms.sent_bytes_G) - sum(before) - overhead
        said = share(self.comms, [seconds, compute_SL, sent, copies])
        return StepTimes(
            np.max([each[0] for each in said], axis=0), np.max([each[1] for each in said], axis=0).sum(axis=1),
            np.array([each[2] for each in said], dtype=np.int64), sum(each[3] for each in said),
        )  # fmt: skip

    def _inputs(self, replay: Replay, step: int) -> list[tuple[Tensor, Tensor]]:
        """Ids (-1 where pruned) and weights of the tokens here in a step, layer by layer."""
        rank, part = self.comms.rank, slice(step * replay.batch, (step + 1) * replay.batch)
        ids = np.where(replay.kept_LGTK[:, rank, part], replay.ids_LGTK[:, rank, part], -1)
        weights = replay.weights_LGTK[:, rank, part]
        device = self.comms.device
        return [
            (torch.tensor(i, device=device), torch.tensor(w, device=device)) for i, w in zip(ids, weights, strict=True)
        ]


def require_ranks(comms: Comms, num_devices: int, what: str) -> None:
    """Raise unless there is one rank for each device.

    Raises:
        ConfigError: naming both numbers.
    """
    if comms.size != num_devices:
        raise ConfigError(
            f"{comms.size} ranks and {what} of {num_devices} devices; start one rank for each device "
            f"(torchrun --nproc-per-node {num_devices} on one machine)"
        )
