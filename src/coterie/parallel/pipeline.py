"""CAP's pipeline on one machine: record with pruning on, place, make the spectrum, time it, take the fastest.

Source: CAP §VII (Fig. 8): prune first, since pruning changes which experts keep company; §VIII-G for what it costs.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie.errors import RankError
from coterie.files import replacing_folder
from coterie.models.expert_shape import expert_sizes
from coterie.models.load import load_model, load_tokenizer
from coterie.models.prune import prune_destinations
from coterie.models.run_text import TextRun, record_text
from coterie.parallel.steps import Done, Step, run_steps
from coterie.placement import driver
from coterie.placement.candidates import Setting
from coterie.placement.copies import FEWEST_DEVICES
from coterie.placement.placement import Placement
from coterie.placement.spectrum_files import INDEX, write_spectrum
from coterie.progress import Progress, silent
from coterie.pruning.destinations import Cap
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

TRACE, START, SPECTRUM, CALIBRATED = "trace.safetensors", "start.json", "spectrum", "topology.yaml"
REPORT, RESULT = "tuned.json", "placement.json"


@dataclass(frozen=True)
class CapSetting:
    """What decides the result.

    Attributes:
        model: a folder, a shipped model's name or a hub id.
        topology: as it was given, "8" or a file.
        p: share of a token's weight that pruning may drop.
        run: how much text is run, and how.
        method: whose spectrum, "coterie" or "cap-spectrum".
        points: of the spectrum.
        batch: tokens of a rank in a timed step.
        rounds: of timing.
        best: placements besides linear and EPLB that are timed.
        heldout: share of the tokens that no placement sees; they are timed.
        emulate: sleep the topology's time of experts where ranks share cores.
        seed: of recording and placing.
        redundant: slots of a layer for copies of experts.
        dispatch: the rule by which tokens choose copies.
    """

    model: str
    topology: str
    p: float
    run: TextRun
    method: str = "coterie"
    points: int = 7
    batch: int = 64
    rounds: int = 5
    best: int = 3
    heldout: float = 0.2
    emulate: bool = False
    seed: int = 0
    redundant: int = 0
    dispatch: str = FEWEST_DEVICES

    @property
    def copies(self) -> dict[str, Any]:
        """What `driver.prepare` takes of it about copies; nothing without any."""
        return {"redundant": self.redundant, "dispatch": self.dispatch} if self.redundant else {}


def run_cap(
    folder: Path, setting: CapSetting, text: str, source: str, told: Callable[[Done], None] = lambda done: None,
    progress: Progress = silent,
) -> list[Done]:  # fmt: skip
    """Run the steps that are not done yet in this folder.

    1 record, 2 place (Algorithm 1), 3 spectrum, 4 tune: CAP's order. A topology that was not calibrated is, before 4.

    Args:
        folder: where everything is written.
        setting: what to do.
        text: what the model reads.
        source: what to call the text.
        told: called after each step.
        progress: told how far the running step is.

    Raises:
        ConfigError: for a share, a method, a rule or copies that cannot be, before anything runs.
        InfeasiblePlacement: when the model's experts do not fit the topology, likewise.
        CoterieError: as the steps do.
        RankError: when the timed step's processes fail, with their word for it.
    """
    work = _Work(folder, setting, Topology.parse(setting.topology), Cap(setting.p), text, source, progress)
    spec = expert_sizes(setting.model).spec  # the timed step asks for the sizes too
    driver.require_possible(spec, work.topology, setting.redundant, setting.dispatch, setting.method)
    done = run_steps(folder, work.steps(), told)
    if not (folder / RESULT).is_file():  # the report stands, the placement was removed: what it was made of is there
        picked_placement(folder).save(folder / RESULT)
    return done


@dataclass(frozen=True)
class _Work:
    """What the steps share, and what each does; see `run_cap`."""

    folder: Path
    setting: CapSetting
    topology: Topology
    rule: Cap
    text: str
    source: str
    progress: Progress

    def steps(self) -> list[Step]:
        """All steps, with what decides their outputs."""
        setting = self.setting
        given = {"topology": self.topology.to_json(), "seed": setting.seed}
        model = {"model": _known(setting.model)}
        text = {"text": hashlib.sha256(self.text.encode()).hexdigest()[:16], "run": asdict(setting.run)}
        fitted = {**given, "heldout": setting.heldout, **setting.copies}
        timed = {name: getattr(setting, name) for name in ("batch", "rounds", "best", "emulate")}
        return [
            Step("1-record", TRACE, {**given, **model, **text, "rule": self.rule.describe()}, self._record),
            Step("2-place", START, fitted, self._place),
            Step("3-spectrum", SPECTRUM, {**fitted, "points": setting.points, "method": setting.method}, self._spread),
            Step("4-calibrate", CALIBRATED, {**given, **model}, self._calibrate),
            Step("4-tune", REPORT, {**given, **timed, "result": RESULT}, self._tune),
        ]

    def _record(self, path: Path) -> None:
        rule, topology = self.rule, self.topology
        model, tokenizer = load_model(self.setting.model), load_tokenizer(self.setting.model)

        def around(sequences: Sequence[int]) -> AbstractContextManager[Any]:
            homes = [number % topology.num_devices for number in sequences]
            return prune_destinations(model, None, rule=rule, topology=topology, homes=homes, count=False)

        pruning = {**rule.describe(), "topology": topology.to_json(), "placement": "linear"}
        record_text(
            model, tokenizer, self.text, self.setting.run, path, source=self.source, progress=self.progress,
            pruning=pruning if rule.p else None, around=around if rule.p else lambda sequences: nullcontext(),
        )  # fmt: skip

    def _place(self, path: Path) -> None:
        driver.place(self._prepared(), "cap", heldout=self.setting.heldout).save(path)

    def _spread(self, path: Path) -> None:
        with replacing_folder(path, INDEX) as temporary:
            setting = self.setting
            found = driver.spectrum(self._prepared(), setting.points, setting.method, setting.heldout)
            write_spectrum(found, temporary)

    def _calibrate(self, path: Path) -> None:
        topology = self.topology
        if topology.compute_pair_s is not None:
            topology.save(path)
            return
        shape = f"{topology.num_nodes}x{topology.devices_per_node},inter={topology.inter_cost:g}"
        command = ["calibrate", "--out", str(path), "--model", self.setting.model, "--topology", shape]
        start_ranks(topology.num_devices, command)

    def _tune(self, path: Path) -> None:
        folder, setting = self.folder, self.setting
        command = [
            "tune", "--trace", str(folder / TRACE), "--candidates", str(folder / SPECTRUM), "--model", setting.model,
            "--topology", str(folder / CALIBRATED), "--out", str(folder / RESULT), "--report", str(path),
            "--batch", f"{setting.batch}", "--rounds", f"{setting.rounds}", "--best", f"{setting.best}",
            "--seed", f"{setting.seed}",
        ]  # fmt: skip
        command += ["--emulate-compute"] if setting.emulate else []
        command += [text for name, value in setting.copies.items() for text in (f"--{name}", f"{value}")]
        start_ranks(self.topology.num_devices, command)

    def _prepared(self) -> Setting:
        trace = RoutingTrace.load(self.folder / TRACE)
        setting = self.setting
        return driver.prepare(trace, self.topology, seed=setting.seed, progress=self.progress, **setting.copies)


def picked_placement(folder: Path) -> Placement:
    """The placement that the report in a folder picked, made again from the files beside it."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    name, trace = str(report["pick"]), RoutingTrace.load(folder / TRACE)
    if name in ("linear", "eplb", "cap"):
        topology = Topology.parse(str(folder / CALIBRATED))
        copies = {name: report[name] for name in ("redundant", "dispatch") if name in report}
        setting = driver.prepare(trace, topology, seed=int(report["seed"]), **copies)
        return driver.place(setting, name)
    number = int(name.rpartition("-")[2])
    return Placement.load(folder / SPECTRUM / f"place-{number}.json")


def start_ranks(count: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a verb of this package in so many processes on this machine, under torchrun; returns what rank 0 printed.

    Raises:
        RankError: when it fails; with the line that a rank printed.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{count}",
        "-m", "coterie", *arguments,
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, env={**os.environ, **threads, **(environment or {})}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate()
    except BaseException:  # Ctrl-C: torchrun passes the end on to its ranks
        process.terminate()
        process.wait()
        raise
    if process.returncode:
        said = [line for line in err.splitlines() if line.startswith("coterie: error: ")]
        last = [line for line in err.splitlines() if line.strip()][-1:]
        reason = said[0].removeprefix("coterie: error: ") if said else "".join(last) or f"exit {process.returncode}"
        raise RankError(f"{arguments[0]} on {count} processes failed: {reason}")
    return out


def _known(model: str) -> str:
    """A model as settings name it: a folder by its full path."""
    return str(Path(model).resolve()) if Path(model).exists() else model
