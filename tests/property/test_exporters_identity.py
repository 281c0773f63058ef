"""Export, then read: the placement comes back, whatever the model, the devices and the dense layers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engines.base import export_file, find_problems
from coterie.engines.documents import parse_document
from coterie.engines.registry import EXPORTERS
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    nodes, per_node, per_device = draw(st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3)))
    model_layers = draw(st.integers(1, 7))
    layer_ids = sorted(draw(st.sets(st.integers(0, model_layers - 1), min_size=1)))
    experts = nodes * per_node * per_device
    top_k = draw(st.integers(1, experts))
    name = draw(st.text(max_size=8))
    spec = MoESpec(name, len(layer_ids), experts, top_k, layer_ids=tuple(layer_ids), num_model_layers=model_layers)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.stack([rng.permutation(experts) for _ in layer_ids])
    return Placement(rows, Topology(nodes, per_node), spec)


@settings(max_examples=60, deadline=None)
@given(placement=placements(), name=st.sampled_from(sorted(EXPORTERS)))
def test_export_then_read_is_the_identity(tmp_path_factory: Any, placement: Placement, name: str) -> None:
    exporter, spec = EXPORTERS[name], placement.spec
    path = Path(tmp_path_factory.getbasetemp()) / "map.json"
    export_file(exporter, placement, path)
    document = parse_document(path.read_text(encoding="utf-8"), path)
    assert [known for known in EXPORTERS if EXPORTERS[known].recognises(document)] == [name]
    file, problems = find_problems(exporter, document, spec, placement.topology.num_devices)
    assert problems == []
    rows = exporter.moe_rows(file, spec)
    assert np.array_equal([row.experts for row in rows], placement.physical_to_logical_map)


def _leaves(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) that holds a whole number."""
    found = []
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            found += _leaves(value)
        elif type(value) is int:
            found.append((document, key))
    return found


WRONG = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.integers(-3, -1), st.just(10**6))


@settings(max_examples=150, deadline=None)
@given(placement=placements(), name=st.sampled_from(["sglang", "vllm-ascend", "tensorrt-llm"]), data=st.data())
def test_one_wrong_number_anywhere_is_found(placement: Placement, name: str, data: st.DataObject) -> None:
    exporter, spec = EXPORTERS[name], placement.spec
    document = copy.deepcopy(parse_document(exporter.export(placement, spec), "x"))
    leaves = [(box, key) for box, key in _leaves(document) if key != "layer_updates_per_iter"]
    box, key = data.draw(st.sampled_from(leaves))
    box[key] = data.draw(WRONG)
    assert find_problems(exporter, document, spec, placement.topology.num_devices)[1]


@settings(max_examples=100, deadline=None)
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "physical_to_logical_map", "layer_list", "moe_layer_count", "device_list", "device_expert",
                        "device_id", "device_count", "layer_id", "num_slots", "initial_global_assignments",
                        "slots_per_device", "layer_ids",
                    ]
                )
                | st.integers(0, 3),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).filter(lambda value: isinstance(value, dict)),
    name=st.sampled_from(sorted(EXPORTERS)),
)  # fmt: skip
def test_no_document_breaks_a_reader(document: dict[Any, Any], name: str) -> None:
    exporter = EXPORTERS[name]
    if name == "json":
        document["kind"] = "coterie.expert_map"
    if exporter.recognises(document):
        spec = MoESpec("m", 2, 4, 1, layer_ids=(1, 2), num_model_layers=3)
        assert find_problems(exporter, document, spec, 2)[1]
        find_problems(exporter, document, None, None)
