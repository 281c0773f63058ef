"""Headers and indices under other names: the same entries whatever they are written like, and the same bytes back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.checkpoint.expert_axis import ExpertTensor
from coterie.checkpoint.renumber import _FILE_KEY, _rename_header, _rename_keys, new_names

EXPERTS = 12
NAMES = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(EXPERTS)]
FOUND = {name: ExpertTensor(0, expert) for expert, name in enumerate(NAMES)}
TRICKY = st.sampled_from(
    [NAMES[1], f'"{NAMES[2]}":{{', f'"{NAMES[3]}": "x"', "\\", '\\"', "{", '":{', "ü", 'a" : {', NAMES[4] + '":{"dtype']
) | st.text(max_size=8)
FORMATS = st.sampled_from(
    [{"separators": (",", ":")}, {"indent": 2}, {"separators": (" , ", " :\n ")}, {"ensure_ascii": False}]
)


@given(
    seed=st.integers(0, 2**20), held=st.sets(st.sampled_from(NAMES), min_size=1), pad=st.integers(0, 9), form=FORMATS,
    metadata=st.dictionaries(TRICKY, TRICKY, max_size=3), others=st.lists(TRICKY, max_size=3),
)  # fmt: skip
def test_headers_are_renamed_and_come_back(seed, held, pad, form, metadata, others) -> None:
    map_LE = np.random.default_rng(seed).permutation(EXPERTS)[None]
    entries = {f"other.{name}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in others}
    entries |= {name: {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]} for name in sorted(held)}
    header = {"__metadata__": metadata, **entries}
    old = json.dumps(header, **form).encode() + b" " * pad
    names = {name: new for name, new in new_names(FOUND, map_LE).items() if name in held}
    new = _rename_header(old, names, Path("a"), None)
    assert json.loads(new) == {names.get(name, name): entry for name, entry in header.items()}
    assert list(json.loads(new)) == [names.get(name, name) for name in header]
    assert (len(new) - len(old)) % 4096 == 0
    back = {new: name for name, new in names.items()}
    assert _rename_header(new, back, Path("a"), len(old)) == old


@given(seed=st.integers(0, 2**20), form=FORMATS, others=st.dictionaries(TRICKY, TRICKY, max_size=4))
def test_indices_are_renamed_and_come_back(seed, form, others) -> None:
    map_LE = np.random.default_rng(seed).permutation(EXPERTS)[None]
    weight_map = {**{f"other.{name}": file for name, file in others.items()}, **dict.fromkeys(NAMES, "a.safetensors")}
    old = json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}, **form)
    names = new_names(FOUND, map_LE)
    new = _rename_keys(old, _FILE_KEY, names, Path("index"))
    assert json.loads(new)["weight_map"] == {names.get(name, name): file for name, file in weight_map.items()}
    back = {new: name for name, new in names.items()}
    assert _rename_keys(new, _FILE_KEY, back, Path("index")) == old
