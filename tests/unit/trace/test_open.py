"""The one door: native files, imports that leave nothing behind, the model's shape, and what is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, TraceError
from coterie.spec import MoESpec
from coterie.trace.open import import_trace, open_trace
from coterie.trace.routing_trace import RoutingTrace

IDS = np.array([[[0, 3], [2, 1], [3, 0]], [[1, 0], [0, 2], [2, 3]]], dtype=np.uint8)  # 2 layers, 3 tokens, top-2


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def npz(folder: Path, **arrays) -> Path:
    np.savez(folder / "t.npz", **({"expert_ids": IDS} | arrays))
    return folder / "t.npz"


def test_a_native_file_is_mapped_as_it_is(tmp_path, scratch):
    trace = RoutingTrace(IDS, MoESpec("m", 2, 4, 2))
    trace.save(tmp_path / "t.safetensors")
    opened = open_trace(tmp_path / "t.safetensors")
    assert np.array_equal(opened.expert_ids, IDS)
    assert opened.spec == trace.spec
    assert open_trace(tmp_path / "t.safetensors", spec=MoESpec("other", 2, 8, 2)).spec.model == "other"
    assert open_trace(tmp_path / "t.safetensors", "coterie", num_experts=5).spec.num_experts == 5
    with pytest.raises(TraceError, match=r"expert id 3 .* 0 to 2"):
        open_trace(tmp_path / "t.safetensors", spec=MoESpec("other", 2, 3, 2))
    with pytest.raises(TraceError, match="top-2, but other has 2 and top-1"):
        open_trace(tmp_path / "t.safetensors", spec=MoESpec("other", 2, 8, 1))


def test_a_native_file_imports_to_a_copy(tmp_path):
    RoutingTrace(IDS, MoESpec("m", 2, 4, 2), provenance={"a": 1}).save(tmp_path / "a.safetensors")
    copied = import_trace(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert copied.provenance == {"a": 1}
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_import_leaves_no_scratch_and_cannot_be_written_to(tmp_path, scratch):
    trace = open_trace(npz(tmp_path, gate_weights=np.ones(IDS.shape, dtype=np.float16)))
    assert list(scratch.iterdir()) == []
    assert np.array_equal(trace.expert_ids, IDS)
    with pytest.raises(ValueError, match="read-only"):
        trace.expert_ids[0, 0, 0] = 1


def test_a_refused_import_leaves_nothing(tmp_path, scratch):
    source = npz(tmp_path, expert_ids=np.full((2, 3, 2), [0, 200], dtype=np.uint8))
    with pytest.raises(TraceError, match="expert id 200"):
        open_trace(source, num_experts=8)
    assert list(scratch.iterdir()) == []


def test_an_interrupted_import_leaves_nothing(tmp_path, scratch):
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    source = npz(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        import_trace(source, tmp_path / "out.safetensors", progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_trace(source, progress=interrupt)
    assert sorted(tmp_path.rglob("*")) == before


def test_experts_are_inferred_aloud_and_only_when_nothing_says_them(tmp_path):
    source = npz(tmp_path)
    guessed = open_trace(source)
    assert guessed.spec.num_experts == 4
    assert "largest id + 1 = 4" in guessed.provenance["inferred"]["num_experts"]
    named = open_trace(source, num_experts=64)
    assert named.spec.num_experts == 64
    assert "num_experts" not in named.provenance["inferred"]
    with pytest.raises(ConfigError, match="8 experts, not the 64"):
        open_trace(source, spec=MoESpec("m", 2, 8, 2), num_experts=64)


def test_many_experts_take_wider_ids(tmp_path):
    ids = IDS.astype(np.int32) * 100
    trace = open_trace(npz(tmp_path, expert_ids=ids))
    assert trace.expert_ids.dtype == np.uint16
    assert trace.spec.num_experts == 301
    assert np.array_equal(trace.expert_ids, ids)


def test_provenance_says_where_it_came_from(tmp_path):
    trace = open_trace(npz(tmp_path, provenance=np.array(json.dumps({"origin": "here", "source": "overwritten"}))))
    provenance = dict(trace.provenance)
    assert provenance.pop("coterie")
    assert provenance == {
        "origin": "here", "source": "t.npz", "format": "npz", "dropped": {"warm_up": 0, "padding": 0},
        "inferred": provenance["inferred"],
    }  # fmt: skip


def test_rows_that_only_fill_are_refused_when_nothing_else_is_there(tmp_path):
    with pytest.raises(TraceError, match=r"all 3 rows are warm-up \(0\) or padding \(3\)"):
        open_trace(npz(tmp_path, expert_ids=np.zeros((2, 3, 2), dtype=np.uint8)), num_experts=4)


def test_tokens_in_messages_are_told_apart_from_rows(tmp_path):
    ids = np.concatenate([np.zeros((2, 1, 2), dtype=np.uint8), IDS], axis=1)
    ids[1, 2] = 3
    with pytest.raises(TraceError, match=r"layer 1, token 1 names an expert twice.*without 1 dropped rows"):
        open_trace(npz(tmp_path, expert_ids=ids))


def test_missing_files_name_what_ships(tmp_path):
    with pytest.raises(TraceError, match=r"dsv2lite-lw does not exist.*did you mean 'dsv2lite-law'"):
        open_trace("dsv2lite-lw")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"layer,token\n", "no known trace format; name one with --format"),
        ("t.npz", b"", "is empty"),
        ("t.json", b'{"a": 1}', "no known trace format"),
        ("t.pkl", b"\x80\x04.", "no known trace format"),
        ("t.safetensors", b"not one", "truncated or no safetensors file"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        open_trace(tmp_path / name)


def test_formats_are_named_and_suggested(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        open_trace(npz(tmp_path), "json")
    with pytest.raises(TraceError, match="line 1 is no JSON"):
        open_trace(npz(tmp_path), "jsonl")
    (tmp_path / "x").write_text("{}")
    with pytest.raises(TraceError, match=r"no \.npz archive"):
        open_trace(tmp_path / "x", "npz")


def test_a_folder_of_two_formats_is_not_guessed(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"")
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(TraceError, match="may be sglang or vllm; name its format"):
        open_trace(tmp_path)


def test_where_nothing_can_be_written(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder"):
        import_trace(npz(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="nowhere is no folder; create it"):
        import_trace(npz(tmp_path), tmp_path / "nowhere" / "t.safetensors")
