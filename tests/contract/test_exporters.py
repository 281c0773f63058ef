"""What every exporter must do, whichever the engine."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.engines.base import Exporter, export_file
from coterie.engines.registry import EXPORTERS, get_exporter
from coterie.engines.validate import validate
from coterie.errors import ConfigError, InfeasiblePlacement
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

SPEC = MoESpec("some model", 5, 12, 3, layer_ids=(1, 2, 3, 5, 6), num_model_layers=8, hidden_size=64)
UNPLACED = replace(SPEC, layer_ids=(), num_model_layers=0)

every_exporter = pytest.mark.parametrize("exporter", EXPORTERS.values(), ids=list(EXPORTERS))


def _placement(spec: MoESpec = SPEC, topology: Topology | None = None) -> Placement:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(rows, topology or Topology(2, 2), spec)


def _path(exporter: Exporter, folder: Path) -> Path:
    return folder / f"map{exporter.suffixes[0] if exporter.suffixes else '.txt'}"


@every_exporter
def test_what_is_written_is_sound_and_recognised(exporter: Exporter, tmp_path: Path) -> None:
    path = _path(exporter, tmp_path)
    exported = export_file(exporter, _placement(), path)
    assert exported.path == path
    assert exported.notes
    report = validate(path, SPEC, Topology(2, 2))
    assert report.format == exporter.name
    assert report.problems == ()
    assert report.notes == ()
    assert validate(path).valid


@every_exporter
def test_same_placement_same_bytes(exporter: Exporter, tmp_path: Path) -> None:
    path = _path(exporter, tmp_path)
    export_file(exporter, _placement(), path)
    first = path.read_bytes()
    export_file(exporter, _placement(), path, SPEC)
    assert path.read_bytes() == first


@every_exporter
def test_a_config_can_say_where_the_layers_are(exporter: Exporter, tmp_path: Path) -> None:
    path = _path(exporter, tmp_path)
    export_file(exporter, _placement(UNPLACED), path, SPEC)
    assert validate(path, SPEC).valid
    if exporter.needs_layer_ids:
        with pytest.raises(InfeasiblePlacement, match=r"give --model config\.json"):
            export_file(exporter, _placement(UNPLACED), path)
    else:
        export_file(exporter, _placement(UNPLACED), path)
    if exporter.needs_model_layers:
        with pytest.raises(InfeasiblePlacement, match="a row for dense layers"):
            export_file(exporter, _placement(replace(SPEC, num_model_layers=0)), path)
    dense_free = replace(UNPLACED, num_model_layers=5)
    export_file(exporter, _placement(dense_free), path)
    assert validate(path, replace(dense_free, layer_ids=(0, 1, 2, 3, 4))).valid


@every_exporter
@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, num_experts=16), replace(SPEC, top_k=2),
        replace(SPEC, num_layers=4, layer_ids=(1, 2, 3, 5)), replace(SPEC, layer_ids=(1, 2, 3, 4, 5)),
    ],
    ids=["experts", "top-k", "layers", "places"],
)  # fmt: skip
def test_another_model_is_refused_and_nothing_is_written(exporter: Exporter, tmp_path: Path, other: MoESpec) -> None:
    path = _path(exporter, tmp_path)
    with pytest.raises(InfeasiblePlacement, match="the placement is for"):
        export_file(exporter, _placement(), path, other)
    assert os.listdir(tmp_path) == []


@every_exporter
@pytest.mark.parametrize(
    ("topology", "copies"),
    [
        (Topology(1, 5), 3),
        (Topology(1, 2, slots_per_device=(5, 7)), 0),
        (Topology(1, 3, slots_per_device=(3, 3, 6)), 0),
    ],
    ids=["indivisible", "unequal", "unequal though divisible"],
)
def test_uneven_ranks(exporter: Exporter, tmp_path: Path, topology: Topology, copies: int) -> None:
    path = _path(exporter, tmp_path)
    if exporter.even_ranks:
        remedy = f", or on these with --redundant {copies}" if copies else ""
        with pytest.raises(InfeasiblePlacement, match=f"number of experts; .* on 1, 2, 3, 4, 6, 12 devices{remedy}$"):
            export_file(exporter, _placement(topology=topology), path)
        assert os.listdir(tmp_path) == []
    else:
        export_file(exporter, _placement(topology=topology), path)
        assert validate(path, SPEC, topology).valid


@every_exporter
@pytest.mark.parametrize(("expert", "message"), [(12, "holds expert 12"), (-1, "holds expert -1"), (None, "lacks")])
def test_a_placement_damaged_in_memory_is_refused(
    exporter: Exporter, tmp_path: Path, expert: int | None, message: str
) -> None:
    placement = _placement()
    row = placement.physical_to_logical_map[2]
    row[0] = row[1] if expert is None else expert
    with pytest.raises(InfeasiblePlacement, match=f"layer 2 {message}"):
        export_file(exporter, placement, _path(exporter, tmp_path))
    assert os.listdir(tmp_path) == []


@every_exporter
def test_a_missing_folder_is_one_clear_error(exporter: Exporter, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        export_file(exporter, _placement(), _path(exporter, tmp_path / "nowhere"))


@every_exporter
def test_an_exporter_that_writes_something_else_is_caught(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = _placement()
    swapped.physical_to_logical_map[0] = swapped.physical_to_logical_map[0][::-1]
    text = exporter.export(swapped, SPEC)
    monkeypatch.setattr(type(exporter), "export", lambda self, placement, spec: text)
    with pytest.raises(AssertionError, match="wrote another placement"):
        export_file(exporter, _placement(), _path(exporter, tmp_path))
    assert os.listdir(tmp_path) == []


@every_exporter
def test_one_layer_too_few_is_found(exporter: Exporter, tmp_path: Path) -> None:
    short = replace(SPEC, num_layers=4, layer_ids=SPEC.layer_ids[:4], num_model_layers=7)
    path = _path(exporter, tmp_path)
    export_file(exporter, _placement(short), path)
    assert validate(path, short).valid
    assert not validate(path, SPEC).valid


@every_exporter
def test_a_truncated_file_never_passes(exporter: Exporter, tmp_path: Path) -> None:
    path = _path(exporter, tmp_path)
    export_file(exporter, _placement(), path)
    text = path.read_text()
    for cut in range(1, len(text) - 2, 7):
        path.write_text(text[:cut])
        try:
            report = validate(path, SPEC)
        except InfeasiblePlacement:
            continue
        assert not report.valid, text[:cut]


def test_names() -> None:
    assert set(EXPORTERS) == {"sglang", "vllm-ascend", "tensorrt-llm", "json"}
    assert get_exporter("sglang").name == "sglang"
    with pytest.raises(ConfigError, match="unknown serving engine 'sglan'; did you mean 'sglang'"):
        get_exporter("sglan")
