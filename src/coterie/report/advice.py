"""Whether placing experts pays on given devices and engine, with what, and what it takes to use it.

Candidates are fitted on the earliest tokens; later ones choose the best, others judge whether it is worth using, and
the change that is expected is measured on the latest, which decide nothing. Copies of experts are used where they beat
the best placement without them, since they take memory; they are measured under the rule by which the engine chooses
among them. Where an engine loads copies and nothing without them, the best with copies is recommended, gain or not.

Source: algorithms §2 (a step takes what its busiest part takes); CAP §VII, step 4, which times what this predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.errors import ConfigError
from coterie.models.expert_shape import ExpertSizes
from coterie.parallel.replay import Replay
from coterie.placement.balance import linear
from coterie.placement.candidates import Setting
from coterie.placement.driver import STANDARD_ERRORS, choose, describe_trace, spaced_points
from coterie.placement.metrics import average, full_metrics, measure
from coterie.placement.placement import Placement
from coterie.placement.step_time import StepModel
from coterie.report.advice_copies import LINEAR, best_of, found_of_copies, is_copied, memory, without_copies
from coterie.report.advice_engines import EVERYWHERE
from coterie.trace.routing_trace import TokenSelector
from coterie.trace.splits import split

WORTH = 0.01
BATCH = 64
DECIDING_SHARE = 0.3  # of what is not held out: half chooses the best candidate, half judges it
SPECTRUM_POINTS = 8


@dataclass(frozen=True)
class Situation:
    """What is to be served, and how.

    Attributes:
        backend: the engine's way to exchange tokens, by the engine's name for it.
        sizes: of the model's experts, where its config is known.
        batch: tokens of each rank in a step, for predicting its time.
        refused: why the engine loads no placement with, or without, this many slots for copies; by that number.
    """

    backend: str = "deepep"
    sizes: ExpertSizes | None = None
    batch: int = BATCH
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def selective(self) -> bool:
        """Whether tokens go only to the devices that they visit."""
        return self.backend not in EVERYWHERE


@dataclass(frozen=True)
class Advice:
    """What was found.

    Attributes:
        placement: the recommended one, measured on the latest tokens; linear where nothing is worth it.
        found: everything, ready for JSON.
    """

    placement: Placement
    found: Mapping[str, Any]


def advise(setting: Setting, situation: Situation, heldout: float = 0.2) -> Advice:
    """The placement to use, what it is expected to change, and why, or why none is worth it.

    Where the topology is calibrated and the hidden size known, candidates are compared by the predicted time of a
    step, else by the objective. Where every token goes to every rank, communication is the same for all and only the
    experts' time or B counts. One is recommended where it beats linear by more than 1% and by more than two standard
    errors of the difference between layers.

    Args:
        setting: trace, topology, objective, seed; with slots for copies, whether these are worth their memory, under
            the setting's dispatch rule.
        situation: what is to be served, and how.
        heldout: share of the tokens, the latest sequences, that only measure.

    Raises:
        ConfigError: for a batch that cannot be.
    """
    if situation.batch < 1:
        raise ConfigError(f"batch = {situation.batch}; a batch is at least 1")
    outer = split(setting.trace, heldout)
    inner = split(setting.trace, DECIDING_SHARE, outer.first)
    deciding = split(setting.trace, 0.5, inner.second)  # the best of several flatters itself where it was chosen
    model = _model(setting, situation)
    devices = _candidates(setting, inner.first, model is not None)
    scores = {name: _scores(setting, situation, model, rows, deciding.first) for name, rows in devices.items()}
    plain, copied = best_of(scores, setting.redundant, situation.refused)

    def judged(base: str, mine: str) -> tuple[float, float]:
        return _gain(*(_scores(setting, situation, model, devices[name], deciding.second) for name in (base, mine)))

    needed = copied is not None and 0 in situation.refused  # nothing else is loaded: there is nothing to beat
    best = copied if copied is not None and (needed or _worth(*judged(plain, copied))) else plain
    gain, error = judged(LINEAR, best)
    worth = best != LINEAR and _worth(gain, error)
    pick = best if worth or needed else LINEAR
    shown = (LINEAR, "eplb", "cap", plain, *([f"eplb+{setting.redundant}", copied] if copied else []), pick)
    unseen = {
        name: average(measure(setting.trace, devices[name], setting.topology, outer.second, setting.dispatch))
        for name in dict.fromkeys(each for each in shown if each in devices)
    }
    found = {
        "recommended": pick,
        "gain": worth,
        "use": worth or needed,
        "reason": _reason(setting, situation, gain, error, worth=worth, needed=needed),
        "compared_by": _compared_by(situation, model),
        "validation": {"best": best, "gain": gain, "standard_error": error,
                       "scores": {name: float(score.mean()) for name, score in scores.items()}},
        "expected": {name: {**values, **_times(setting, model, devices[name], outer.second, situation.batch)}
                     for name, values in unseen.items()},
        "memory": memory(setting, situation.sizes),
        "copies": found_of_copies(setting, situation.refused, plain, copied, pick, judged, needed=needed),
        "trace": {**describe_trace(setting.trace), "fit_tokens": inner.num_first, "choice_tokens": deciding.num_first,
                  "judging_tokens": deciding.num_second, "heldout_tokens": outer.num_second},
        "topology": setting.topology.to_json(), "backend": situation.backend, "batch": situation.batch,
        "seed": setting.seed, "coterie": coterie.__version__,
    }  # fmt: skip
    return Advice(_placement(setting, pick, devices[pick], outer.first, outer.second, heldout), found)


def _worth(gain: float, error: float) -> bool:
    return gain > WORTH and gain > STANDARD_ERRORS * error


def _model(setting: Setting, situation: Situation) -> StepModel | None:
    """The step-time model, or None where the topology or the hidden size does not allow one."""
    sizes, spec = situation.sizes, setting.trace.spec
    hidden = sizes.spec.hidden_size if sizes is not None else spec.hidden_size
    try:
        return StepModel.of(setting.topology, hidden, spec.top_k)
    except ConfigError:
        return None


def _candidates(setting: Setting, fitting: TokenSelector, spectrum: bool) -> dict[str, NDArray[Any]]:
    """The methods' default picks, and with a step-time model the points of our spectrum, fitted on these tokens.

    With slots for copies also EPLB's and ours with copies, [L, E, G], named METHOD+slots.
    """
    plain = without_copies(setting)
    slots_G = plain.topology.slots(setting.trace.spec.num_experts)
    devices: dict[str, NDArray[Any]] = {LINEAR: np.tile(linear(slots_G), (setting.trace.num_layers, 1))}
    if setting.topology.num_devices == 1:
        return devices
    for method in ("eplb", "cap", "coterie"):
        candidates, point = choose(plain, method, fitting)
        devices[method] = candidates.placement(point)
        if method == "coterie" and spectrum:
            balances = candidates.path.means(candidates.fit.values("balance"))
            for number, at in enumerate(spaced_points(balances, SPECTRUM_POINTS)):
                devices[f"coterie-{number}"] = candidates.placement(at)
    for method in ("eplb", "coterie") if setting.redundant else ():
        candidates, point = choose(setting, method, fitting)
        devices[f"{method}+{setting.redundant}"] = candidates.placement(point)
    return devices


def _scores(
    setting: Setting, situation: Situation, model: StepModel | None, device_LE: NDArray[Any], tokens: TokenSelector
) -> NDArray[np.float64]:
    """What every layer costs, [L]: predicted seconds, or the objective; only computing where traffic is fixed."""
    if model is not None:
        times_LX = _layer_times(setting, model, device_LE, tokens, situation.batch)
        counted_L: NDArray[np.float64] = times_LX.sum(axis=1) if situation.selective else times_LX[:, 0]
        return counted_L
    layers = measure(setting.trace, device_LE, setting.topology, tokens, setting.dispatch)
    objective = setting.objective
    weight = 1.0 if situation.selective else 0.0
    return np.array([weight * objective.cost(layer) + objective.balance * layer.balance for layer in layers])


def _layer_times(
    setting: Setting, model: StepModel, device_LE: NDArray[Any], tokens: TokenSelector, batch: int
) -> NDArray[np.float64]:
    """Seconds of experts and of exchanges in every layer of a step, [L, 2], the mean over the steps of these tokens."""
    num_devices = setting.topology.num_devices
    count = np.arange(setting.trace.num_tokens)[tokens].size
    replay = Replay.of(setting.trace, num_devices, max(1, min(batch, count // num_devices)), tokens)
    times = [
        [
            (time.compute, time.communication)
            for time in map(model.layer, replay.counts(step, device_LE, setting.topology, setting.dispatch))
        ]
        for step in range(replay.num_steps)
    ]
    mean: NDArray[np.float64] = np.mean(times, axis=0)
    return mean


def _times(
    setting: Setting, model: StepModel | None, device_LE: NDArray[Any], tokens: TokenSelector, batch: int
) -> dict[str, float]:
    if model is None:
        return {}
    compute, communication = _layer_times(setting, model, device_LE, tokens, batch).sum(axis=0)
    return {
        "step_s": float(compute + communication), "compute_s": float(compute), "communication_s": float(communication),
        "bytes_per_token": _bytes(setting, model, device_LE, tokens),
    }  # fmt: skip


def _bytes(setting: Setting, model: StepModel, device_LE: NDArray[Any], tokens: TokenSelector) -> float:
    remote = average(measure(setting.trace, device_LE, setting.topology, tokens, setting.dispatch))["remote_dpt"]
    return remote * (model.dispatch_bytes + model.combine_bytes)


def _gain(base_L: NDArray[np.float64], mine_L: NDArray[np.float64]) -> tuple[float, float]:
    """How much lower the mean over layers is, as a share, and its standard error over layers."""
    difference_L = (base_L - mine_L) / (float(base_L.mean()) or 1.0)
    return float(difference_L.mean()), float(difference_L.std() / np.sqrt(difference_L.size))


def _compared_by(situation: Situation, model: StepModel | None) -> str:
    if model is not None:
        return "predicted time of a step" if situation.selective else "predicted time of the experts"
    return "the objective: visits, peak traffic and B" if situation.selective else "B"


def _reason(setting: Setting, situation: Situation, gain: float, error: float, *, worth: bool, needed: bool) -> str:
    everywhere = (
        f"with the backend {situation.backend} every token goes to every rank, so that placement saves no traffic"
    )
    if needed:
        return (
            f"{situation.refused[0]}; {setting.redundant} copies make them even, and on tokens that it was not fitted "
            f"on it costs {abs(gain):.1%} {'less' if gain > 0 else 'more'} than linear, which is not loaded"
        )
    if setting.topology.num_devices == 1:
        return "no gain here: on one device nothing travels, and there is nothing to place"
    refused = situation.refused.get(0)
    if refused is not None and not worth:
        return f"no gain here: {refused}"
    if worth:
        said = f"{gain:.1%} less than linear on tokens that it was not fitted on"
        return said if situation.selective else f"{everywhere}, but evens out loads: {said}"
    if not situation.selective:
        return f"no gain here: {everywhere}, and no placement's loads are more even than linear's beyond chance"
    if gain <= 0:
        beside = " as any other"
    else:
        beside = f"; the best other is {gain:.1%} better, and chance alone makes {STANDARD_ERRORS * error:.1%}"
    return f"no gain here: linear is already as good{beside}"


def _placement(
    setting: Setting, name: str, device_LE: NDArray[Any], fitting: TokenSelector, unseen: TokenSelector,
    heldout: float,
) -> Placement:  # fmt: skip
    own = setting if is_copied(name) else without_copies(setting)
    about = {
        "name": "coterie" if name.startswith("coterie") else name.partition("+")[0], "advised": name,
        "heldout": heldout, "seed": setting.seed, "keep_groups": own.keep_groups,
        **({"redundant": own.redundant, "dispatch": own.dispatch} if own.redundant else {}),
        "objective": setting.objective.to_json(), "trace": describe_trace(setting.trace),
        "coterie": coterie.__version__,
    }  # fmt: skip
    metrics = {
        part: full_metrics(setting.trace, device_LE, own.topology, tokens, own.dispatch)
        for part, tokens in (("fit", fitting), ("heldout", unseen))
    }
    make = Placement.from_hosts if own.redundant else Placement.from_devices
    return make(device_LE, own.topology, setting.trace.spec, about, metrics)
