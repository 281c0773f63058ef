"""What an exporter is, and the one way a file leaves: refused, or written after it was read back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from coterie.engines.documents import parse_document
from coterie.engines.maps import EngineFile, LayerRow, map_problems
from coterie.errors import InfeasiblePlacement
from coterie.files import write_text
from coterie.placement.copies import rule_of
from coterie.placement.placement import Placement
from coterie.spec import MoESpec


class Exporter(Protocol):
    """One engine's file format; implementations are stateless.

    Attributes:
        name: what users call it on the command line.
        title: what to call it in messages.
        suffixes: endings the engine expects of the file's name; empty when it does not care.
        reads_yaml: whether the engine reads YAML, and with it JSON; else it reads JSON only.
        even_ranks: whether the engine gives every rank the same number of slots.
        min_devices: fewer ranks than this and the engine ignores or refuses the file.
        needs_layer_ids: whether the file names layers by their place in the whole model.
        needs_model_layers: whether the file has a row for dense layers too.
        dispatch: how the engine chooses among an expert's copies, the nearest of Coterie's rules; several where flags
            decide, what is best first; empty where no engine reads the file.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    reads_yaml: bool
    even_ranks: bool
    min_devices: int
    needs_layer_ids: bool
    needs_model_layers: bool
    dispatch: tuple[str, ...]

    def export(self, placement: Placement, spec: MoESpec) -> str:
        """The file's text; `spec` is the model's, with all that the engine needs."""
        ...

    def launch_flags(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """Command line arguments that make the engine use the file."""
        ...

    def launch_notes(self, placement: Placement, spec: MoESpec, path: Path) -> list[str]:
        """What else must hold for the placement to take effect, one line each."""
        ...

    def recognises(self, document: Any) -> bool:
        """Whether a parsed file is meant to be this engine's, sound or not."""
        ...

    def read(self, document: Any) -> EngineFile:
        """The file's layers by the engine's own rule, and what is wrong with its form; never raises."""
        ...

    def layer_problems(self, file: EngineFile, spec: MoESpec) -> list[str]:
        """What of the file's layers does not fit the model."""
        ...

    def moe_rows(self, file: EngineFile, spec: MoESpec) -> list[LayerRow]:
        """Of a sound file, the rows that the model's MoE layers use, in order."""
        ...


@dataclass(frozen=True)
class Exported:
    """A written file and how to start the engine with it.

    Attributes:
        path: the file.
        flags: command line arguments for the engine.
        notes: what else must hold, one line each.
    """

    path: Path
    flags: tuple[str, ...]
    notes: tuple[str, ...]


def export_file(exporter: Exporter, placement: Placement, path: str | Path, spec: MoESpec | None = None) -> Exported:
    """Write `placement` as one engine's file, whole or not at all.

    Before it is written the text is read back by the engine's rule and compared with the placement.

    Args:
        exporter: the engine.
        placement: where the experts live.
        path: the file to write.
        spec: the model's own spec, from its config.json; None to rely on what the placement says of the model.

    Raises:
        InfeasiblePlacement: when the engine would refuse or misread the file, or `spec` is of another model.
    """
    path = Path(path)
    spec = _matching_spec(placement, spec)
    require_exportable(exporter, placement, spec, path)
    text = exporter.export(placement, spec)
    _check_reads_back(exporter, text, placement, spec)
    write_text(path, text)
    flags, notes = exporter.launch_flags(placement, spec, path), exporter.launch_notes(placement, spec, path)
    placed_for = rule_of(placement.method)
    if placement.num_copies and exporter.dispatch and placed_for not in exporter.dispatch:
        notes.append(
            f"the copies were placed for tokens that choose them by the rule {placed_for}; {exporter.title} looks at "
            f"one expert at a time: for it place with --dispatch {exporter.dispatch[0]}"
        )
    return Exported(path, tuple(flags), tuple(notes))


def require_exportable(exporter: Exporter, placement: Placement, spec: MoESpec, path: Path) -> None:
    """Raise InfeasiblePlacement for what the engine would refuse, ignore or misread."""
    title, devices = exporter.title, placement.topology.num_devices
    slots = placement.slots_per_device.tolist()
    if exporter.suffixes and path.suffix not in exporter.suffixes:
        raise InfeasiblePlacement(
            f"{title} reads {path} only with the ending {' or '.join(exporter.suffixes)}; choose another --out"
        )
    if devices < exporter.min_devices:
        raise InfeasiblePlacement(
            f"{title} takes no placement for {devices} device; place for at least {exporter.min_devices}"
        )
    if exporter.even_ranks and len(set(slots)) > 1:
        whole = [count for count in range(1, spec.num_experts + 1) if spec.num_experts % count == 0]
        even = -spec.num_experts % devices
        raise InfeasiblePlacement(
            f"{title} gives every rank the same number of experts; this placement gives {min(slots)} to {max(slots)}; "
            f"place again without slots_per_device on {', '.join(map(str, whole))} devices"
            + (f", or on these with --redundant {even}" if even else "")
        )
    rows = [
        LayerRow(f"layer {layer}", row.tolist(), slots) for layer, row in enumerate(placement.physical_to_logical_map)
    ]
    problems = map_problems(rows, spec.num_experts, devices, even=exporter.even_ranks)
    if problems:
        raise InfeasiblePlacement(f"the placement is damaged: {problems[0]}")
    if (exporter.needs_layer_ids and not spec.layer_ids) or (exporter.needs_model_layers and not spec.num_model_layers):
        what = "has a row for dense layers too" if exporter.needs_model_layers else "names layers by their place"
        raise InfeasiblePlacement(
            f"{title}'s file {what}, and the placement does not say which of the model's layers are MoE; "
            "give --model config.json"
        )


def find_problems(
    exporter: Exporter, document: Any, spec: MoESpec | None, num_devices: int | None
) -> tuple[EngineFile, list[str]]:
    """An engine file's layers and everything that is wrong with it, one line each.

    Args:
        exporter: the engine.
        document: the parsed file.
        spec: the model, or None when it is not known.
        num_devices: the devices, or None when nobody says.
    """
    file = exporter.read(document)
    problems = list(file.problems)
    if file.rows or not problems:
        experts = spec.num_experts if spec else None
        problems += map_problems(file.rows, experts, num_devices, even=exporter.even_ranks)
    if spec is not None and file.rows:
        problems += exporter.layer_problems(file, spec)
    return file, problems


def _matching_spec(placement: Placement, spec: MoESpec | None) -> MoESpec:
    """The spec to export with, after checking that it is of the placement's model."""
    own = placement.spec
    if not own.layer_ids and own.num_model_layers == own.num_layers:  # no dense layers, so the places are known
        own = replace(own, layer_ids=tuple(range(own.num_layers)))
    if spec is None:
        return own
    placement.require_model(spec, "the given config.json")
    if own.layer_ids and spec.layer_ids and own.layer_ids != spec.layer_ids:
        raise InfeasiblePlacement(
            f"the placement is for MoE layers {_span(own.layer_ids)} of {own.model}, the given config.json has them at "
            f"{_span(spec.layer_ids)}; use the config.json of the model that was traced"
        )
    return spec


def _span(layer_ids: tuple[int, ...]) -> str:
    return f"{layer_ids[0]} to {layer_ids[-1]} ({len(layer_ids)})"


def _check_reads_back(exporter: Exporter, text: str, placement: Placement, spec: MoESpec) -> None:
    devices, slots = placement.topology.num_devices, placement.slots_per_device.tolist()
    document = parse_document(text, "the exported text")
    assert exporter.recognises(document), f"{exporter.name} does not recognise its own file"
    file, problems = find_problems(exporter, document, spec, devices)
    assert not problems, f"{exporter.name} wrote a file with problems: {problems[0]}"
    rows = exporter.moe_rows(file, spec)
    same = [row.experts for row in rows] == placement.physical_to_logical_map.tolist()
    assert same, f"{exporter.name} wrote another placement"
    assert all(row.slots_per_device in (None, slots) for row in rows), f"{exporter.name} wrote other devices"
