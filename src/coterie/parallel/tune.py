"""Tuning on the machine that will serve: predict all candidates, time the promising ones on replayed routing, pick.

Every rank runs this together with the others; what rank 0 alone computes, the placements, it shares.

Source: CAP §VII, step 4; §VIII-C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import coterie
from coterie.parallel.candidates import Candidate
from coterie.parallel.choice import Choice, choose
from coterie.parallel.comms import Comms, share
from coterie.parallel.processes import agreed
from coterie.parallel.replay import Replay
from coterie.parallel.timing import Experts, ExpertShape, Stage, emulated_experts, random_experts, require_ranks
from coterie.placement.copies import rule_of
from coterie.placement.placement import Placement
from coterie.placement.step_time import StepModel
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.topology import Topology


@dataclass(frozen=True)
class TuneSetting:
    """How much is timed.

    Attributes:
        rounds: in which all timed candidates take turns.
        best: candidates besides the baselines that are timed.
        emulate: sleep the time that the topology says experts take, instead of computing random ones.
    """

    rounds: int = 5
    best: int = 3
    emulate: bool = False


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        choice: all candidates, and the pick.
        placement: the pick, with what was found in its method.
        about: what was timed and how, ready for JSON.
    """

    choice: Choice
    placement: Placement
    about: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for JSON."""
        return {
            "pick": self.choice.rows[self.choice.pick].name, "beats_linear": self.choice.beats_linear,
            "candidates": [row.to_json() for row in self.choice.rows], **self.about,
        }  # fmt: skip


def tune(
    comms: Comms, make: Callable[[], Sequence[Candidate]], replay: Replay, topology: Topology, shape: ExpertShape,
    spec: MoESpec, setting: TuneSetting, progress: Progress = silent,
) -> Tuned:  # fmt: skip
    """Pick the fastest placement; every rank gets the same.

    Args:
        comms: the group, one rank for each device.
        make: makes the candidates, "linear" among them; called on rank 0 alone.
        replay: the routing to time, the same on every rank.
        topology: calibrated.
        shape: of the experts.
        spec: of the model that candidates are for.
        setting: how much to time.
        progress: told of the rounds.

    Raises:
        ConfigError: when there is not one rank for each device, or the topology is not calibrated.
        RankError: when a rank ended or did not answer in time.
    """
    require_ranks(comms, topology.num_devices, "a topology")
    model = StepModel.of(topology, shape.hidden_size, replay.ids_LGTK.shape[3], shape.dtype.itemsize)
    candidates = share_candidates(comms, make, spec)
    stage = Stage(comms, shape.hidden_size, shape.dtype)
    steps = [number % replay.num_steps for number in range(setting.rounds)]
    predicted = [
        float(np.mean([time.total for time in replay.predict(model, place.where(), steps, rule_of(place.method))]))
        for place in (each.placement for each in candidates)
    ]
    experts = _experts(comms, topology, shape, candidates, setting)

    def timer(indices: Sequence[int]) -> NDArray[np.float64]:
        chosen = [candidates[index].placement for index in indices]
        return time_in_turns(stage, replay, chosen, experts, steps, progress)

    choice = choose([each.name for each in candidates], predicted, timer, setting.best)
    about = {
        "batch": replay.batch, "layers": list(replay.layers), "rounds": setting.rounds,
        "experts": "emulated: the time of the topology, slept through" if setting.emulate else "random weights",
        "expert_shape": {"hidden_size": shape.hidden_size, "width": shape.width, "dtype": str(shape.dtype)[6:]},
        "topology": topology.to_json(), "versions": {"coterie": coterie.__version__, "torch": str(torch.__version__)},
    }  # fmt: skip
    picked = candidates[choice.pick].placement
    method = {**picked.method, "tuned": {"pick": candidates[choice.pick].name, "beats_linear": choice.beats_linear}}
    return Tuned(choice, replace(picked, method=method), about)


def time_in_turns(
    stage: Stage, replay: Replay, placements: Sequence[Placement], experts: Experts, steps: Sequence[int],
    progress: Progress = silent,
) -> NDArray[np.float64]:  # fmt: skip
    """Seconds of each step with each placement, [steps, placements]; every other round goes backwards.

    One step of each comes first, unmeasured.
    """
    for placement in placements:
        stage.time_steps(replay, placement, experts, steps[:1])
    seconds = np.empty((len(steps), len(placements)))
    for number, step in enumerate(steps):
        order = range(len(placements)) if number % 2 == 0 else range(len(placements) - 1, -1, -1)
        for index in order:
            seconds[number, index] = stage.time_steps(replay, placements[index], experts, [step]).seconds_S[0]
        progress("timing", number + 1, len(steps))
    return seconds


def share_candidates(comms: Comms, make: Callable[[], Sequence[Candidate]], spec: MoESpec) -> list[Candidate]:
    """Rank 0's candidates, on every rank.

    Raises:
        CoterieError: what `make` raised, told by rank 0.
    """
    made = agreed(comms, lambda: list(make()) if comms.rank == 0 else [])
    plain = [
        [name, placed.physical_to_logical_map.tolist(), placed.topology.to_json(), dict(placed.method)]
        for name, placed in ((each.name, each.placement) for each in made)
    ]
    said = share(comms, plain)[0]
    if comms.rank == 0:
        return made
    return [
        Candidate(name, Placement(np.asarray(map_LP), Topology.from_json(topology), spec, method))
        for name, map_LP, topology, method in said
    ]


def _experts(
    comms: Comms, topology: Topology, shape: ExpertShape, candidates: Sequence[Candidate], setting: TuneSetting
) -> Experts:
    if setting.emulate:
        return emulated_experts(topology.compute_base_s or 0.0, topology.compute_pair_s or 0.0)
    most = max(int(each.placement.slots_per_device[comms.rank]) for each in candidates)
    return random_experts(shape, most, comms.rank, comms.device)
