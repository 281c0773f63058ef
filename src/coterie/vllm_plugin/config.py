"""What the plugin is to do: the YAML file that `COTERIE_CONFIG` names, read and checked without torch or vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import ConfigError, unknown_name
from coterie.files import parse_json, read_text
from coterie.ops.prune_choice import RULES
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.topology import Topology
from coterie.units import parse_fraction

ENVIRONMENT = "COTERIE_CONFIG"
DEFAULT_TOKENS = 1_000_000
_KEYS = ("prune", "devices", "placement", "report", "record", "interval")
_PRUNE_KEYS = ("rule", "p", "prices", "renormalise")
_RECORD_KEYS = ("folder", "tokens")


@dataclass(frozen=True)
class PruneConfig:
    """How to prune.

    Attributes:
        rule: "cap", "naive" or "priced".
        p: share of a token's weight that may be dropped, for the first two.
        thetas: for "priced", [L][G].
        floor: for "priced", the least share of its weight that a token keeps.
        renormalise: rescale kept weights to the sum of all K; None: as the model's router does with its top-k.
    """

    rule: str
    p: float | None = None
    thetas: tuple[tuple[float, ...], ...] | None = None
    floor: float = 0.0
    renormalise: bool | None = None


@dataclass(frozen=True)
class RecordConfig:
    """What to record.

    Attributes:
        folder: where each rank writes its trace.
        tokens: recording ends after so many.
    """

    folder: Path
    tokens: int = DEFAULT_TOKENS


@dataclass(frozen=True)
class PluginConfig:
    """The file's contents, checked.

    Attributes:
        source: the file.
        prune: how to prune, or None: not at all.
        devices: the devices that experts lie on in order; None: those of the placement or of expert parallelism.
        placement: where experts live, for a checkpoint that is not baked on one process; or None.
        report: where each rank writes its counts, or None.
        record: what to record, or None.
        interval: seconds between two writings of the counts.
    """

    source: Path
    prune: PruneConfig | None = None
    devices: Topology | None = None
    placement: Placement | None = None
    report: Path | None = None
    record: RecordConfig | None = None
    interval: float = 10.0


def configured() -> PluginConfig | None:
    """What `COTERIE_CONFIG` asks for; None when it is unset or empty.

    Raises:
        ConfigError: see `read_config`.
    """
    name = os.environ.get(ENVIRONMENT)
    return read_config(Path(name)) if name else None


def read_config(path: Path) -> PluginConfig:
    """Read and check a file.

    Files that it names are found from its folder.

    Raises:
        ConfigError: when it cannot be read, holds an unknown key or a wrong value, or asks for nothing.
        InfeasiblePlacement: when the placement cannot be used.
    """
    import yaml

    try:
        data = yaml.safe_load(read_text(path, ConfigError))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML ({' '.join(str(error).split())}); see docs/engines/vllm.md") from None
    fields = _mapping(data, str(path), _KEYS)
    if "prune" not in fields and "record" not in fields:
        raise ConfigError(f"{path} asks for nothing; give prune, record or both (or unset {ENVIRONMENT})")
    placement = _file(fields, "placement", path)
    config = PluginConfig(
        path,
        _prune(fields["prune"], path) if "prune" in fields else None,
        _devices(fields["devices"], path) if "devices" in fields else None,
        None if placement is None else Placement.load(placement),
        _report(fields, path),
        _record(fields["record"], path) if "record" in fields else None,
        _number(fields.get("interval", 10.0), "interval", path, 0, 86_400),
    )
    if config.placement is not None and config.devices is not None:
        raise ConfigError(f"{path} gives a placement and devices; a placement brings its own devices: leave them out")
    if config.prune is None and (config.report is not None or placement is not None or config.devices is not None):
        raise ConfigError(
            f"{path} gives devices, a placement or a report, which are for prune; add it or leave them out"
        )
    return config


def _prune(data: Any, path: Path) -> PruneConfig:
    fields = _mapping(data, f"prune in {path}", _PRUNE_KEYS)
    rule = fields.get("rule", "cap")
    if rule not in RULES:
        raise unknown_name("pruning rule", str(rule), RULES)
    renormalise = fields.get("renormalise")
    if renormalise is not None and not isinstance(renormalise, bool):
        raise ConfigError(f"renormalise = {renormalise!r} in {path}; it is true or false, or left out")
    if rule == "priced":
        prices = _file(fields, "prices", path)
        if prices is None or "p" in fields:
            raise ConfigError(
                f"the rule priced in {path} takes prices: a file, and no p; coterie trace prune --rule priced --json "
                "writes one"
            )
        thetas, floor = _read_prices(prices)
        return PruneConfig(rule, None, thetas, floor, renormalise)
    if "p" not in fields or "prices" in fields:
        raise ConfigError(f"the rule {rule} in {path} takes p, e.g. 0.2, and no prices")
    p = _share(fields["p"], path)
    (Cap if rule == "cap" else Naive)(p)  # checks the range
    return PruneConfig(rule, p, renormalise=renormalise)


def _read_prices(path: Path) -> tuple[tuple[tuple[float, ...], ...], float]:
    """Thetas [L][G] and the floor, out of what `coterie trace prune --rule priced --json` says."""
    data = parse_json(read_text(path, ConfigError), path, ConfigError)
    rule = data.get("rule") if isinstance(data, dict) else None
    told = rule if isinstance(rule, dict) else data if isinstance(data, dict) else {}
    try:
        thetas = tuple(tuple(map(float, row)) for row in told["theta"])
        floor = float(told.get("floor", 0.0))
    except (KeyError, TypeError, ValueError):
        thetas, floor = (), 0.0
    if told.get("rule") != "priced" or not thetas or len({len(row) for row in thetas}) != 1:
        raise ConfigError(f"{path} holds no prices; coterie trace prune --rule priced --json writes them")
    try:
        Priced(np.array(thetas), floor)  # checks the range
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return thetas, floor


def _record(data: Any, path: Path) -> RecordConfig:
    fields = _mapping(data, f"record in {path}", _RECORD_KEYS)
    folder = _file(fields, "folder", path)
    if folder is None or not folder.is_dir():
        raise ConfigError(f"record in {path} needs a folder that exists, not {folder or 'none'}; create it")
    tokens = fields.get("tokens", DEFAULT_TOKENS)
    if isinstance(tokens, float) and not tokens.is_integer():
        raise ConfigError(f"tokens = {tokens!r} in {path}; it is a whole number, at least 1")
    return RecordConfig(folder, int(_number(tokens, "tokens", path, 1, 10**10)))


def _report(fields: Mapping[str, Any], path: Path) -> Path | None:
    report = _file(fields, "report", path)
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise ConfigError(f"report = {report} in {path} is no file in a folder that exists; name one, like counts.json")
    return report


def _devices(value: Any, path: Path) -> Topology:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"devices = {value!r} in {path}; it is a number, or a topology like 2x8,inter=5")
    text = str(value)
    return Topology.parse(str(path.parent / text) if text.endswith((".yaml", ".yml")) else text)


def _mapping(data: Any, what: str, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{what} holds no keys; write lines like '{next(iter(known))}: ...' (docs/engines/vllm.md)")
    for key in data:
        if key not in known:
            raise unknown_name(f"key of {what}:", str(key), known)
    return data


def _file(fields: Mapping[str, Any], key: str, path: Path) -> Path | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} = {value!r} in {path}; it is the name of a file or folder")
    return (path.absolute().parent / value).absolute()


def _share(value: Any, path: Path) -> float:
    if isinstance(value, str):
        return parse_fraction(value)
    return _number(value, "p", path, 0, 1)


def _number(value: Any, name: str, path: Path, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} = {value!r} in {path}; it is a number from {low:g} to {high:g}")
    return float(value)
