"""Times cases on one emulated machine: in turns, round after round, with what links carried counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.bench.parallel.cases import Case
from coterie.bench.parallel.network import Network
from coterie.bench.parallel.replay_file import save_replay
from coterie.bench.parallel.workers import Workers
from coterie.parallel.choice import Choice, choose
from coterie.parallel.measured import Point, with_measured
from coterie.parallel.replay import Replay
from coterie.placement.copies import rule_of
from coterie.placement.placement import Placement
from coterie.placement.step_time import StepModel
from coterie.progress import Progress, silent
from coterie.topology import Topology

HIDDEN_SIZE, TOP_K = 2048, 6  # DeepSeek-V2-Lite's, as is
LINK_TOKENS = (1, 8, 24, 64)
HEADER_BYTES = 24  # that dispatch tells every other rank in every layer
STEPS_A_ROUND = 1


@dataclass(frozen=True)
class Timings:
    """What one case took.

    Attributes:
        seconds_R: [R] seconds of each round's steps, a step's mean.
        compute_R: [R] the same of the busiest devices' experts.
        predicted_R: [R] what the model predicts for the same steps.
        sent_bytes: that ranks handed to the network, a step's mean, all ranks.
        as_predicted: whether every rank sent exactly the bytes that routing and placement say.
        wire_bytes: that interfaces counted, a step's mean, all ranks; headers and acknowledgements included.
        link_overheads: what interfaces counted beyond what ranks sent, as a share: the least and the most of the links
            of ranks and, with two nodes, of both directions of the uplink.
    """

    seconds_R: NDArray[np.float64]
    compute_R: NDArray[np.float64]
    predicted_R: NDArray[np.float64]
    sent_bytes: float
    as_predicted: bool
    wire_bytes: float
    link_overheads: tuple[float, float]


class Bench:
    """One emulated machine with its workers: calibrated, and asked for times.

    Attributes:
        topology: with measured links, and modelled experts once they are set.
    """

    def __init__(self, network: Network, team: Workers, topology: Topology, folder: Path) -> None:
        self._network, self._team, self._folder = network, team, folder
        self._files: dict[int, tuple[Any, str]] = {}
        self.topology = topology

    def calibrate_links(self, repeats: int) -> None:
        """Measure the links as they are shaped now."""
        answer = self._team.ask({
            "do": "links", "topology": self.topology.to_json(), "tokens": LINK_TOKENS, "repeats": repeats,
            "hidden_size": HIDDEN_SIZE,
        })[0]  # fmt: skip
        found = {name: [Point(*point) for point in points] for name, points in answer.items()}
        inter_cost = self.topology.inter_cost  # what placement and pruning use stays as the machine has it
        measured = with_measured(self.topology, found, {"links": "emulated: rates set by tc"})
        self.topology = Topology.from_json({**measured.to_json(), "inter_cost": inter_cost})

    def model(self) -> StepModel:
        """The step-time model of the machine as calibrated."""
        return StepModel.of(self.topology, HIDDEN_SIZE, TOP_K)

    def tune(self, cases: Sequence[Case], fit: Replay, rounds: int, best: int) -> Choice:
        """Choose among candidates by times on the earlier half."""
        earlier = [Case(case.placement, case.where, "none", 0.0, fit) for case in cases]
        model = self.model()
        predicted = [
            float(np.mean([time.total for time in fit.predict(model, case.where.device_of_expert())]))
            for case in earlier
        ]

        def timer(indices: Sequence[int]) -> NDArray[np.float64]:
            return np.stack([each.seconds_R for each in self.time([earlier[i] for i in indices], rounds)], axis=1)

        return choose([case.placement for case in cases], predicted, timer, best)

    def time(self, cases: Sequence[Case], rounds: int, progress: Progress = silent) -> list[Timings]:
        """Time cases in turns; every other round goes through them backwards."""
        compute = [self.topology.compute_base_s or 0.0, self.topology.compute_pair_s or 0.0]
        found: list[list[dict[str, Any]]] = [[] for _ in cases]
        for number in range(rounds):
            order = range(len(cases)) if number % 2 == 0 else range(len(cases) - 1, -1, -1)
            for done, index in enumerate(order):
                case = cases[index]
                steps = [(STEPS_A_ROUND * number + i) % case.replay.num_steps for i in range(STEPS_A_ROUND)]
                item = {
                    "replay": self._file(case.replay), "placement": self._file(case.where), "steps": steps,
                    "compute": compute,
                }  # fmt: skip
                before = self._counted()
                row = self._team.ask({"do": "time", "items": [item]})[0]["rows"][0]
                found[index].append({**row, "steps": steps, "wire": self._counted() - before})
                progress("timing", number * len(cases) + done + 1, rounds * len(cases))
        return [self._timings(case, rows) for case, rows in zip(cases, found, strict=True)]

    def _timings(self, case: Case, rows: list[dict[str, Any]]) -> Timings:
        model, where_LE, num_devices = self.model(), case.where.where(), case.replay.num_devices
        predicted, exact, links = [], True, np.zeros((2, len(self._counted())))
        for row in rows:
            times = case.replay.predict(model, where_LE, row["steps"], rule_of(case.where.method))
            predicted.append(np.mean([time.total for time in times]))
            bytes_GG = np.sum([_bytes_between(case.replay, model, case.where, step) for step in row["steps"]], axis=0)
            exact &= bool(np.array_equal(bytes_GG.sum(axis=1), row["sent"]))
            links += [self._on_links(bytes_GG), row["wire"]]
        steps = STEPS_A_ROUND * len(rows)
        return Timings(
            np.array([np.mean(row["seconds"]) for row in rows]), np.array([np.mean(row["compute"]) for row in rows]),
            np.array(predicted), sum(sum(row["sent"]) for row in rows) / steps, exact,
            sum(float(row["wire"][:num_devices].sum()) for row in rows) / steps,
            (float((links[1] / links[0]).min() - 1), float((links[1] / links[0]).max() - 1)),
        )  # fmt: skip

    def _counted(self) -> NDArray[np.int64]:
        """Bytes that interfaces have counted so far: what each rank sent and, with two nodes, each node."""
        return np.array([*self._network.sent_bytes(), *self._network.uplink_bytes()], dtype=np.int64)

    def _on_links(self, bytes_GG: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes between ranks as bytes on links, in the order of `_counted`."""
        node_G = self.topology.node_of_device()
        nodes = range(self.topology.num_nodes if self.topology.num_nodes > 1 else 0)
        up = [bytes_GG[np.ix_(node_G == node, node_G != node)].sum() for node in nodes]
        return np.array([*bytes_GG.sum(axis=1), *up], dtype=np.int64)

    def _file(self, thing: Any) -> str:
        """The file in which workers find a replay or a placement, written when first asked for."""
        if id(thing) not in self._files:
            path = self._folder / f"{len(list(self._folder.iterdir()))}"  # workers remember what they have read
            if isinstance(thing, Replay):
                name = save_replay(thing, path.with_suffix(".npz"))
            else:
                name = str(path.with_suffix(".json"))
                thing.save(name)
            self._files[id(thing)] = (thing, name)  # the thing is kept, so that its id stays its own
        return self._files[id(thing)][1]


def _bytes_between(replay: Replay, model: StepModel, placement: Placement, step: int) -> NDArray[np.int64]:
    """Bytes from rank (row) to rank (column) in a step, [G, G]: copies out, sums back, and what dispatch announces."""
    total_GG = np.zeros((replay.num_devices, replay.num_devices), dtype=np.int64)
    for counts in replay.counts(step, placement.where(), placement.topology, rule_of(placement.method)):
        total_GG += counts.copies_GG * model.dispatch_bytes + counts.copies_GG.T * model.combine_bytes + HEADER_BYTES
    np.fill_diagonal(total_GG, 0)
    return total_GG
