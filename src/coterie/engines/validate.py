"""Whether a placement or an engine's file is sound and fits the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.engines.base import find_problems
from coterie.engines.documents import is_json, parse_document
from coterie.engines.maps import EngineFile, LayerRow, brief, expert_list, map_problems
from coterie.engines.registry import EXPORTERS
from coterie.errors import ConfigError, CoterieError, InfeasiblePlacement
from coterie.files import read_text
from coterie.placement.placement import KIND, Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

PLACEMENT_FORMAT = "placement"


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        path: the file.
        format: "placement" or an engine's name.
        num_layers: layers it holds (with SGLang, dense ones too).
        num_slots: physical slots of its layers.
        num_experts: logical experts: the model's when it is known, else the largest id plus one.
        num_devices: devices, when the file or the caller says; else None.
        problems: one line for each thing wrong; empty when the file is sound.
        notes: what could not be checked, or is allowed but worth knowing.
    """

    path: str
    format: str
    num_layers: int
    num_slots: int
    num_experts: int
    num_devices: int | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def validate(path: str | Path, spec: MoESpec | None = None, topology: Topology | None = None) -> Report:
    """Check a Coterie placement or an engine's file; its content tells which it is.

    Args:
        path: the file.
        spec: the model it should fit, from its config.json; None to check the file by itself.
        topology: the devices it should fit; None to take what the file says.

    Raises:
        InfeasiblePlacement: when the file cannot be read or is none of the known formats.
    """
    path = Path(path)
    text = read_text(path, InfeasiblePlacement)
    document = parse_document(text, path)
    num_devices = topology.num_devices if topology else None
    if isinstance(document, dict) and document.get("kind") == KIND:
        file, problems = _check_placement(path, document, spec, num_devices)
        return _report(path, PLACEMENT_FORMAT, file, problems, spec, num_devices)
    exporter = next((known for known in EXPORTERS.values() if known.recognises(document)), None)
    if exporter is None:
        raise InfeasiblePlacement(
            f"{path} is no placement and no map of a known engine ({', '.join(EXPORTERS)}); it holds {_what(document)}"
        )
    file, problems = find_problems(exporter, document, spec, num_devices)
    if not (exporter.reads_yaml or is_json(text)):
        problems.insert(0, f"it is YAML; {exporter.title} reads JSON only")
    if exporter.suffixes and path.suffix not in exporter.suffixes:
        file.notes.append(f"{exporter.title} reads it only under a name that ends in {' or '.join(exporter.suffixes)}")
    return _report(path, exporter.name, file, problems, spec, num_devices)


def _check_placement(
    path: Path, document: dict[str, Any], spec: MoESpec | None, num_devices: int | None
) -> tuple[EngineFile, list[str]]:
    """All that is wrong with a Coterie placement, where `Placement.load` stops at the first."""
    file = EngineFile()
    own, topology = None, None
    try:
        own = MoESpec.from_json(_mapping(document, "model"))
        topology = Topology.from_json(_mapping(document, "topology"))
        if topology.slots_per_device is None:
            topology.slots(own.num_experts)  # with fewer experts than devices it cannot be
    except (ConfigError, InfeasiblePlacement) as error:
        file.problems.append(str(error))
    rows = document.get("physical_to_logical_map")
    if not isinstance(rows, list) or not rows:
        file.problems.append(f"physical_to_logical_map is {brief(rows)}; it must be a list with a list for each layer")
        rows = []
    for layer, row in enumerate(rows):
        experts = expert_list(row, f"layer {layer}", file.problems)
        if experts is not None:
            file.rows.append(LayerRow(f"layer {layer}", experts, _slots(topology, len(experts))))
    problems = list(file.problems)
    if file.rows:
        problems += map_problems(file.rows, own.num_experts if own else None, num_devices, even=False)
    if not problems:
        try:
            placement = Placement.load(path)
            if spec is not None:
                placement.require_model(spec, "the given config.json")
                if own and own.layer_ids and own.layer_ids != spec.layer_ids:
                    problems.append(f"its MoE layers are not at the places where {spec.model} has them")
        except CoterieError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
    return file, problems


def _slots(topology: Topology | None, count: int) -> list[int] | None:
    """Slots of every device for a row of so many; None where the topology is not known or has others."""
    if topology is None or count < topology.num_devices:
        return None
    given = topology.slots_per_device
    return None if given is not None and sum(given) != count else topology.slots(count).tolist()


def _mapping(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {brief(value)}; it must be an object")
    return value


def _report(
    path: Path, kind: str, file: EngineFile, problems: list[str], spec: MoESpec | None, num_devices: int | None
) -> Report:
    rows, notes = file.rows, list(file.notes)
    stated = next((len(row.slots_per_device) for row in rows if row.slots_per_device is not None), None)
    devices = num_devices or stated
    if devices is None:
        notes.append("the number of devices is not known: even ranks and copies on one rank were not checked")
    if spec is None:
        notes.append("the model is not known: its layers and experts were not checked")
    slots = max((len(row.experts) for row in rows), default=0)
    largest = max((expert for row in rows for expert in row.experts), default=-1)
    experts = spec.num_experts if spec else largest + 1
    if slots > experts > 0:
        notes.append(f"{slots} slots for {experts} experts: {slots - experts} hold a second copy")
    return Report(str(path), kind, len(rows), slots, experts, devices, tuple(problems), tuple(notes))


def _what(document: Any) -> str:
    if isinstance(document, dict):
        keys = [key for key in document if isinstance(key, str)]
        return f"an object with the keys {brief(keys)}" if keys else "an object without named keys"
    return f"a {type(document).__name__}"
