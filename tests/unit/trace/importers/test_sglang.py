"""SGLang's recordings: physical ids, unused slots, ranks, and what is refused."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import BackendUnavailable, TraceError
from coterie.trace.open import open_trace

L, E, SLOTS, K = 4, 8, 10, 2
MAP = np.stack([np.roll(np.append(np.arange(E), [0, 5]), layer) for layer in range(L)])
needs_torch = pytest.mark.needs("torch")


def physical(tokens: int, seed: int = 0, dense=(0,)) -> np.ndarray:
    """[L, tokens, 8] physical ids, of distinct logical experts."""
    ids = np.full((L, tokens, 8), -1, dtype=np.int32)
    rng = np.random.default_rng(seed)
    for layer in range(L):
        for token in range(tokens if layer not in dense else 0):
            ids[layer, token, :K] = [
                int(np.flatnonzero(MAP[layer] == logical)[-1]) for logical in rng.choice(E, K, replace=False)
            ]
    return ids


def logical(ids: np.ndarray) -> np.ndarray:
    return np.stack([MAP[layer][ids[layer, :, :K]] for layer in range(1, L)])


def record(ids: np.ndarray, number: int = 1, rank: int = 0, **more) -> dict:
    import torch

    tokens = ids.shape[1]
    described = {"forward_mode": 1, "extend_seq_lens": [tokens], "positions": list(range(tokens))}
    return {
        "forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "input_ids": [1] * tokens,
        "topk_ids_of_layer": torch.from_numpy(ids), "misc_objects": [],
        "global_physical_count": torch.zeros((L, SLOTS), dtype=torch.int32), **described, **more,
    }  # fmt: skip


def dump(folder: Path, records: list[dict], name: str = "r_0.pt", changed: dict | None = None) -> Path:
    import torch

    torch.save(
        {"records": records, "last_physical_to_logical_map": torch.from_numpy(MAP), **(changed or {})}, folder / name
    )
    return folder / name


def test_without_torch_the_install_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with zipfile.ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("t/data.pkl", b"")
    with pytest.raises(BackendUnavailable, match=r"pip install 'coterie\[torch\]'"):
        open_trace(tmp_path / "t.pt")


@needs_torch
def test_physical_ids_become_logical_and_unused_columns_go(tmp_path):
    ids = physical(9)
    trace = open_trace(dump(tmp_path, [record(ids)]))
    assert np.array_equal(trace.expert_ids, logical(ids))
    assert (trace.spec.num_experts, trace.spec.top_k, trace.spec.layer_ids) == (E, K, (1, 2, 3))
    assert trace.spec.num_model_layers == L
    assert trace.kept is None
    assert trace.home_ids is None
    assert "num_experts" not in trace.provenance["inferred"]


@needs_torch
def test_a_ranks_share_of_a_batch_is_refused(tmp_path):
    """The tokens of a prompt all have experts; rows without are of tokens that other ranks routed."""
    ids = physical(9)
    ids[:, 5:] = -1
    with pytest.raises(TraceError, match="experts for 5 of 9 tokens and does not say which"):
        open_trace(dump(tmp_path, [record(ids)]))


@needs_torch
def test_tokens_with_fewer_experts_keep_fewer_and_padding_goes(tmp_path):
    ids = physical(9)
    ids[2, 3, 1] = -1
    ids[:, 7:] = -1
    trace = open_trace(dump(tmp_path, [record(ids, extend_seq_lens=[7])]))
    assert trace.num_tokens == 7
    assert trace.provenance["dropped"] == {"warm_up": 0, "padding": 2}
    assert np.argwhere(~trace.kept).tolist() == [[1, 3, 1]]


@needs_torch
def test_passes_are_ordered_by_number_and_requests_followed(tmp_path):
    prompts, decoded = physical(5), physical(2, 1)
    records = [
        record(decoded, 8, forward_mode=2, extend_seq_lens=None, positions=[3, 2]),
        record(prompts, 7, extend_seq_lens=[3, 2], positions=[0, 1, 2, 0, 1]),
        record(physical(0), 9, forward_mode=4, extend_seq_lens=None, positions=[]),
    ]
    trace = open_trace(dump(tmp_path, records[1:2] + records[:1] + records[2:]))
    assert trace.step.tolist() == [7] * 5 + [8] * 2
    assert trace.sequence_ids.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert trace.phase.tolist() == [0] * 5 + [1] * 2
    assert np.array_equal(trace.expert_ids, np.concatenate([logical(prompts), logical(decoded)], axis=1))


@needs_torch
def test_unknown_forward_modes_leave_sequences_open(tmp_path):
    trace = open_trace(dump(tmp_path, [record(physical(5)), record(physical(4), 2, forward_mode=5)]))
    assert trace.sequence_ids is None
    assert trace.phase is None
    assert trace.step.tolist() == [1] * 5 + [2] * 4


@needs_torch
def test_ranks_that_share_attention_count_once(tmp_path):
    ids = physical(6)
    for rank in (1, 0):
        dump(tmp_path, [record(ids, rank=rank), record(physical(3, 2), 2, rank)], f"r_{rank}.pt")
    trace = open_trace(tmp_path)
    assert trace.num_tokens == 9
    assert trace.provenance["dropped"]["repeated_by_rank"] == 9
    assert trace.home_ids is None


@needs_torch
def test_ranks_with_tokens_of_their_own_are_homes(tmp_path):
    first, second = physical(6), physical(4, 5)
    dump(tmp_path, [record(first, 1, 0), record(second, 2, 0)], "r_0.pt")
    dump(tmp_path, [record(second, 1, 1), record(second, 2, 1)], "r_1.pt")
    trace = open_trace(tmp_path)
    assert trace.step.tolist() == [1] * 10 + [2] * 8
    assert trace.home_ids.tolist() == [0] * 6 + [1] * 4 + [0] * 4 + [1] * 4
    assert np.array_equal(trace.expert_ids[:, :10], np.concatenate([logical(first), logical(second)], axis=1))
    assert np.unique(trace.sequence_ids).size == 4


@needs_torch
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids_of_layer": None}, "holds loads .mode per_pass., which say nothing of company; record with"),
        ({"topk_ids_of_layer": 3, "global_physical_count": 1}, "mode per_pass"),
        ({"forward_pass_id": None}, "forward_pass_id None"),
        ({"rank": -1}, "rank -1"),
    ],
)
def test_records_that_hold_no_decisions_are_refused(tmp_path, change, message):
    with pytest.raises(TraceError, match=message):
        open_trace(dump(tmp_path, [record(physical(5), **change)]))


def with_id(value: int) -> np.ndarray:
    ids = physical(5)
    ids[1, 2, 2] = value
    return ids


@needs_torch
@pytest.mark.parametrize(
    ("passes", "more", "message"),
    [
        ([with_id(SLOTS)], {}, "physical id 10; ids run from 0 to 9.*--disable-shared-experts-fusion"),
        ([with_id(-7)], {}, "physical id -7"),
        ([physical(5)[:2]], {}, r"topk_ids_of_layer is \[2, 5, 8\] int32"),
        ([physical(5), physical(5)[:, :, :4]], {}, "another shape or expert map"),
        ([physical(5).astype(np.float32)], {}, "float32"),
        ([physical(5, dense=range(L))], {}, "no routed token"),
        ([], {}, "no routed token"),
        ([], {"records": [3]}, "is a int, no record"),
        ([physical(5)], {"last_physical_to_logical_map": None}, "no usable last_physical_to_logical_map"),
        ([], {"records": None, "logical_count": 1}, "holds loads .mode stat."),
        ([], {"records": None}, "no recording of SGLang"),
    ],
)
def test_dumps_that_cannot_be_are_refused(tmp_path, passes, more, message):
    records = [record(ids, number) for number, ids in enumerate(passes)]
    source = dump(tmp_path, records, changed=more)
    with pytest.raises(TraceError, match=message) as refused:
        open_trace(source)
    assert source.name not in str(refused.value).partition(f"{source}: ")[2]  # its path was just said


@needs_torch
def test_one_pass_twice_is_two_recordings(tmp_path):
    with pytest.raises(TraceError, match="are the same pass of the same rank; import recordings apart"):
        open_trace(dump(tmp_path, [record(physical(5)), record(physical(4))]))


class Explosive:
    def __reduce__(self):
        return (Path("exploded").touch, ())


@needs_torch
def test_a_pickle_that_would_run_code_is_refused_unrun(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    torch.save({"records": [Explosive()]}, tmp_path / "t.pt")
    with pytest.raises(TraceError, match=r"t\.pt holds more than tensors and plain values: refused"):
        open_trace(tmp_path / "t.pt")
    assert not (tmp_path / "exploded").exists()


@needs_torch
def test_a_compressed_archive_is_refused(tmp_path):
    source = dump(tmp_path, [record(physical(5))])
    with zipfile.ZipFile(source) as plain, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(TraceError, match=r"z\.pt is compressed"):
        open_trace(tmp_path / "z.pt")


@needs_torch
def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"a folder without \.pt files"):
        open_trace(tmp_path, "sglang")
