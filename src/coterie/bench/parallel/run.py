"""The parallel benchmark: fit on the earlier half, then on every machine calibrate, tune, and time the later half.

Source: CAP §VIII: Figs. 11, 12 and 14, Table II, on emulated machines whose every rank is a process with its own link.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie.bench.parallel.cases import Case, Routing, at_link_costs, candidates_of, copied, pruned, unpruned
from coterie.bench.parallel.machines import MACHINES, Machine
from coterie.bench.parallel.measure import HIDDEN_SIZE, TOP_K, Bench
from coterie.bench.parallel.network import Network, network
from coterie.bench.parallel.table import ABOUT, checks, rows_of, tuning_row
from coterie.bench.parallel.workers import Workers, workers
from coterie.errors import ConfigError
from coterie.parallel.candidates import Candidate
from coterie.placement.step_time import StepModel
from coterie.progress import Progress, silent
from coterie.topology import Topology
from coterie.trace.open import open_trace

EXPERT_WIDTH = 1408
EXPERT_COUNT = 64
TABLE_II_P = 0.2


@dataclass(frozen=True)
class Setting:
    """How much is timed.

    Attributes:
        trace: a shipped trace's name or a file, with weights, of a model of DeepSeek-V2-Lite's hidden size.
        machines: names of the machines.
        points: of the spectrum.
        thresholds: p of the pruning rules.
        batch: tokens of a rank in a step.
        layers: MoE layers that a step runs, evenly spaced over the model.
        rounds: of one step each, in which all cases take turns.
        best: candidates besides the baselines that tuning times.
        seed: of placements.
        redundant: slots of a layer for copies of experts, in two more lines; 0: none.
    """

    trace: str = "dsv2lite-law"
    machines: tuple[str, ...] = tuple(machine.name for machine in MACHINES)
    points: int = 5
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3)
    batch: int = 64
    layers: int = 4
    rounds: int = 3
    best: int = 3
    seed: int = 0
    redundant: int = 0

    def quick(self) -> Setting:
        """A small part of it: two machines, fewer lines, layers and rounds."""
        chosen = tuple(name for name in self.machines if name in ("A", "cluster B")) or self.machines[:1]
        return replace(self, machines=chosen, points=3, thresholds=(0.2,), layers=2, rounds=2, best=2)


def bench_parallel(setting: Setting, progress: Progress = silent) -> dict[str, Any]:
    """Run it and return the table, what tuning found, and the targets.

    Raises:
        BackendUnavailable: without root, ip or tc.
        ConfigError: for an unknown machine, or a trace of another shape.
        RankError: when a rank ended or did not answer.
    """
    chosen = machines(setting.machines)
    started = time.perf_counter()
    trace = open_trace(setting.trace, progress=progress)
    if (trace.spec.top_k, trace.weights is None) != (TOP_K, False):
        raise ConfigError(
            f"{setting.trace} is routing of {trace.spec.model}, top-{trace.spec.top_k}; this benchmark replays weights "
            f"of a top-{TOP_K} model, such as dsv2lite-law"
        )
    routing = Routing.of(trace, chosen[0].topology.num_devices, setting.batch, setting.layers)
    expert_line = real_experts()
    by_shape: dict[str, list[Candidate]] = {}
    with_copies: dict[str, list[Case]] = {}
    for machine in chosen:
        if str(machine.topology) not in by_shape:
            made = candidates_of(routing, machine.topology, setting.points, setting.seed, progress)
            by_shape[str(machine.topology)] = made
            more = copied(routing, machine.topology, setting.redundant, setting.seed, progress)
            with_copies[str(machine.topology)] = more
    prepared = time.perf_counter() - started
    result: dict[str, Any] = {"rows": [], "tuning": [], "machines": []}
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        for shape, candidates in by_shape.items():
            these = [machine for machine in chosen if str(machine.topology) == shape]
            with network(these[0].topology) as links, workers(links) as team:
                _run_machines(these, candidates, with_copies[shape], routing, setting, (links, team), Path(folder),
                              expert_line, result, progress)  # fmt: skip
    shares = {machine.name: machine.share for machine in chosen}
    return {
        **result, "checks": checks(result["rows"], shares), "about": ABOUT, "setting": asdict(setting),
        "tokens": {"fit": routing.fit.ids_LGTK.shape[1] * routing.fit.ids_LGTK.shape[2],
                   "heldout": routing.heldout.ids_LGTK.shape[1] * routing.heldout.ids_LGTK.shape[2]},
        "trace": {"name": setting.trace, "fingerprint": trace.fingerprint(), "layers": list(routing.heldout.layers)},
        "seconds": {"fitting": prepared, "all": time.perf_counter() - started},
        "experts": {"base_s": expert_line[0], "pair_s": expert_line[1], "width": EXPERT_WIDTH},
        "versions": versions(),
    }  # fmt: skip


def _run_machines(
    these: Sequence[Machine], candidates: Sequence[Candidate], copies: Sequence[Case], routing: Routing,
    setting: Setting, parts: tuple[Network, Workers], folder: Path, expert_line: tuple[float, float],
    result: dict[str, Any], progress: Progress,
) -> None:  # fmt: skip
    """All machines with one number of nodes and devices: the same processes, their links shaped anew for each."""
    links, team = parts
    compute: dict[str, tuple[float, float]] = {}
    for machine in these:
        origin = next(each for each in MACHINES if each.name == (machine.like or machine.name))
        if origin.name not in compute:  # its links tell how fast the experts of both are
            measured = _calibrated(origin, links, team, folder).topology
            compute[origin.name] = scaled_experts(measured, candidates[0], routing, expert_line, origin.share or 0.5)
        bench = _calibrated(machine, links, team, folder)
        base, pair = compute[origin.name]
        bench.topology = replace(bench.topology, compute_base_s=base, compute_pair_s=pair)
        cases = unpruned(candidates, routing)
        choice = bench.tune(cases, routing.fit, max(3, setting.rounds), setting.best)
        pick = candidates[choice.pick]
        cases += [*_lossy(machine, pick, routing, setting), *copies]
        timings = bench.time(cases, setting.rounds, _named(progress, machine.name))
        rows = rows_of(machine.name, bench.topology, cases, timings)
        ours = {**next(row for row in rows if row["placement"] == pick.name), "placement": "ours", "point": pick.name}
        result["rows"] += [*rows, ours]
        result["tuning"].append(tuning_row(machine.name, choice))
        result["machines"].append({
            "class": machine.name, "stands_for": machine.stands_for, "rates": asdict(machine.rates),
            "expert_slowdown": pair / expert_line[1], "topology": bench.topology.to_json(),
        })  # fmt: skip


def _calibrated(machine: Machine, links: Network, team: Workers, folder: Path) -> Bench:
    """The machine's links, shaped and measured."""
    links.shape(machine.rates)
    bench = Bench(links, team, machine.topology, folder)
    bench.calibrate_links(repeats=5)
    return bench


def _lossy(machine: Machine, pick: Candidate, routing: Routing, setting: Setting) -> list[Case]:
    """What is pruned on a machine: rules on one node, all of them on A; two costs of crossing on two nodes."""
    if machine.topology.num_nodes == 1:
        if machine.name == "A":  # Fig. 14 is of node A
            return pruned(pick.placement, routing, setting.thresholds)
        ends = sorted({setting.thresholds[0], setting.thresholds[-1]}) if setting.thresholds else []
        return pruned(pick.placement, routing, ends, ("cap", "priced"))
    return at_link_costs(pick.placement, routing, TABLE_II_P, (1.0, 5.0))


def machines(names: Sequence[str]) -> list[Machine]:
    """The machines of these names, in the order of the list of all.

    Raises:
        ConfigError: for an unknown name, or none.
    """
    known = {machine.name: machine for machine in MACHINES}
    strange = [name for name in names if name not in known]
    if strange or not names:
        what = repr(strange[0]) if strange else "none"
        raise ConfigError(f"no emulated machine {what}; choose from {', '.join(known)}")
    return [machine for machine in MACHINES if machine.name in names]


def scaled_experts(
    topology: Topology, linear: Candidate, routing: Routing, line: tuple[float, float], share: float
) -> tuple[float, float]:
    """The time of experts, as a line over pairs, with which linear spends this share of a step communicating.

    By the step-time model, on the earlier half; the shape of the line is that of the experts timed on this machine.
    """
    model = StepModel.of(
        replace(topology, compute_base_s=line[0], compute_pair_s=line[1]), HIDDEN_SIZE, TOP_K
    )  # fmt: skip
    times = routing.fit.predict(model, linear.placement.device_of_expert())
    communication = float(np.mean([each.communication for each in times]))
    compute = float(np.mean([each.compute for each in times]))
    factor = communication * (1 - share) / (share * compute)
    return line[0] * factor, line[1] * factor


def real_experts() -> tuple[float, float]:
    """The line through times of real experts on one core: DeepSeek-V2-Lite's, as many as a device holds."""
    import torch

    from coterie.parallel.calibrate import COMPUTE_PAIRS, calibrate
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.timing import ExpertShape

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shape = ExpertShape(HIDDEN_SIZE, EXPERT_WIDTH, torch.bfloat16)
        found = run_ranks(
            1, lambda comms: calibrate(comms, Topology(1, 1), shape, EXPERT_COUNT // 8, compute_pairs=COMPUTE_PAIRS,
                                       repeats=3)
        )[0]  # fmt: skip
    finally:
        torch.set_num_threads(before)
    return found.compute_base_s or 0.0, found.compute_pair_s or 0.0


def _named(progress: Progress, name: str) -> Progress:
    return lambda what, done, total: progress(f"{what} {name}", done, total)


def versions() -> dict[str, str]:
    """What it ran with."""
    from importlib.metadata import version

    return {
        "coterie": coterie.__version__, "torch": version("torch"), "numpy": version("numpy"),
        "python": platform.python_version(), "kernel": platform.release(),
    }  # fmt: skip
