"""One small random trace, written in every format: each importer must give it back, and refuse what is not whole."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import TraceError
from coterie.spec import MoESpec
from coterie.trace.importers.registry import FORMATS, detect, importer
from coterie.trace.open import import_trace, open_trace
from coterie.trace.routing_trace import RoutingTrace

L, K, E, SEQUENCES = 5, 3, 16, (11, 9, 17)
T = sum(SEQUENCES)
DENSE = (0, 3)  # in a model of 7 layers
MOE = (1, 2, 4, 5, 6)
SPEC = MoESpec("tiny", L, E, K)


@dataclass(frozen=True)
class Known:
    ids_LTK: np.ndarray
    weights_LTK: np.ndarray
    sequence_T: np.ndarray
    position_T: np.ndarray


def known() -> Known:
    rng = np.random.default_rng(7)
    scores = rng.random((L, T, E)).astype(np.float32)
    ids = np.argsort(-scores, axis=2)[:, :, :K].astype(np.uint8)
    ids[0, 0, :] = [E - 1, 0, 1]  # so that the largest id is there
    weights = np.sort(rng.random((L, T, K)).astype(np.float32), axis=2)[:, :, ::-1]
    sequence = np.repeat(np.arange(len(SEQUENCES)), SEQUENCES)
    position = np.concatenate([np.arange(size) for size in SEQUENCES])
    return Known(ids, np.ascontiguousarray(weights), sequence, position)


def in_model_layers(ids_LTK: np.ndarray, fill: int) -> np.ndarray:
    full = np.full((L + len(DENSE), *ids_LTK.shape[1:]), fill, dtype=ids_LTK.dtype)
    full[list(MOE)] = ids_LTK
    return full


def npz_ltk(folder: Path, trace: Known) -> Path:
    starts = np.concatenate([[0], np.cumsum(SEQUENCES)])
    np.savez_compressed(folder / "t.npz", expert_ids=trace.ids_LTK, gate_weights=trace.weights_LTK, seq_starts=starts)
    return folder / "t.npz"


def npz_tlk(folder: Path, trace: Known) -> Path:
    ids, weights = (np.ascontiguousarray(a.transpose(1, 0, 2)) for a in (trace.ids_LTK, trace.weights_LTK))
    np.savez(folder / "t.npz", expert_ids=ids.astype(np.int64), probs=weights, example=trace.sequence_T)
    return folder / "t.npz"


def jsonl(folder: Path, trace: Known) -> Path:
    lines = [
        json.dumps(
            {
                "layer": MOE[layer],
                "token_idx": int(trace.position_T[token]),
                "req_id": f"r{trace.sequence_T[token]}",
                "topk_ids": trace.ids_LTK[layer, token].tolist(),
                "topk_weights": trace.weights_LTK[layer, token].tolist(),
            }
        )
        for token in range(T)
        for layer in range(L)
    ]
    shuffled: list[str] = []  # within each request: requests are numbered as they appear
    for request in range(len(SEQUENCES)):
        group = [line for line in lines if json.loads(line)["req_id"] == f"r{request}"]
        random.Random(0).shuffle(group)
        shuffled += group
    (folder / "t.jsonl").write_text("\n".join(shuffled) + "\n")
    return folder / "t.jsonl"


def jsonl_gz(folder: Path, trace: Known) -> Path:
    plain = jsonl(folder, trace)
    (folder / "t.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    return folder / "t.jsonl.gz"


def requests(trace: Known) -> list[np.ndarray]:
    full_TLK = in_model_layers(trace.ids_LTK, 0).transpose(1, 0, 2)
    return [np.ascontiguousarray(full_TLK[trace.sequence_T == sequence]) for sequence in range(len(SEQUENCES))]


def vllm_folder(folder: Path, trace: Known) -> Path:
    (folder / "t").mkdir()
    for number, ids in enumerate(requests(trace)):
        np.save(folder / "t" / f"request-{number}.npy", ids)
    return folder / "t"


def encoded(ids: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(ids))
    return base64.b64encode(file.getvalue()).decode()


def responses(trace: Known) -> list[dict]:
    return [
        {"id": f"cmpl-{n}", "choices": [{"index": 0, "text": "x", "routed_experts": encoded(ids[4:])}],
         "prompt_routed_experts": encoded(ids[:4])}
        for n, ids in enumerate(requests(trace))
    ]  # fmt: skip


def vllm_jsonl(folder: Path, trace: Known) -> Path:
    (folder / "t.jsonl").write_text("\n".join(json.dumps(response) for response in responses(trace)))
    return folder / "t.jsonl"


def vllm_json(folder: Path, trace: Known) -> Path:
    (folder / "t.json").write_text(json.dumps(responses(trace), indent=1))
    return folder / "t.json"


def sglang(folder: Path, trace: Known) -> Path:
    import torch

    shuffle = np.random.default_rng(3)
    physical_to_logical = np.stack([shuffle.permutation(np.append(np.arange(E), [2, 5])) for _ in range(L + 2)])
    records = []
    for number, sequence in enumerate(range(len(SEQUENCES))):
        ids = trace.ids_LTK[:, trace.sequence_T == sequence]
        physical = np.full((L + len(DENSE), ids.shape[1], 8), -1, dtype=np.int32)
        for row, layer in enumerate(MOE):
            slots = {logical: slot for slot, logical in enumerate(physical_to_logical[layer].tolist())}
            physical[layer, :, :K] = np.vectorize(slots.get)(ids[row])
        records.append(
            {
                "forward_pass_id": number + 40, "rank": 0, "gatherer_key": "primary", "forward_mode": 1,
                "input_ids": [5] * ids.shape[1], "positions": list(range(ids.shape[1])),
                "extend_seq_lens": [ids.shape[1]], "misc_objects": [],
                "topk_ids_of_layer": torch.from_numpy(physical),
                "global_physical_count": torch.zeros((L + 2, E + 2), dtype=torch.int32),
            }
        )  # fmt: skip
    dump = {"records": records, "last_physical_to_logical_map": torch.from_numpy(physical_to_logical)}
    torch.save(dump, folder / "expert_distribution_recorder_1.5_0.pt")
    return folder / "expert_distribution_recorder_1.5_0.pt"


WRITERS = {
    "npz-LTK": (npz_ltk, "npz"),
    "npz-TLK": (npz_tlk, "npz"),
    "jsonl": (jsonl, "jsonl"),
    "jsonl.gz": (jsonl_gz, "jsonl"),
    "vllm-folder": (vllm_folder, "vllm"),
    "vllm-jsonl": (vllm_jsonl, "vllm"),
    "vllm-json": (vllm_json, "vllm"),
    "sglang": (sglang, "sglang"),
}
params = [pytest.param(*WRITERS[n], id=n, marks=[pytest.mark.needs("torch")] if n == "sglang" else []) for n in WRITERS]
every_format = pytest.mark.parametrize(("write", "name"), params)


def partition(labels: np.ndarray) -> list[int]:
    """Labels renumbered by first appearance."""
    order: dict[int, int] = {}
    return [order.setdefault(int(label), len(order)) for label in labels]


def check_equals(trace: RoutingTrace, expected: Known, name: str) -> None:
    assert np.array_equal(trace.expert_ids, expected.ids_LTK)
    assert trace.expert_ids.dtype == np.uint8
    assert trace.spec.num_experts == E
    assert trace.kept is None
    assert trace.sequence_ids is not None
    assert partition(trace.sequence_ids) == partition(expected.sequence_T)
    if name in ("npz", "jsonl"):
        assert trace.weights is not None
        assert np.allclose(trace.weights, expected.weights_LTK)
        assert trace.weight_ordered
    else:
        assert trace.weights is None
        assert not trace.weight_ordered
    if name != "npz":
        assert trace.spec.layer_ids == MOE
        assert trace.positions is not None
        assert trace.positions.tolist() == expected.position_T.tolist()
    assert trace.provenance["format"] == name
    assert trace.provenance["dropped"] == {"warm_up": 0, "padding": 0}


@every_format
def test_gives_the_trace_back(tmp_path, write, name):
    check_equals(open_trace(write(tmp_path, known())), known(), name)


@every_format
def test_import_writes_a_native_file(tmp_path, write, name):
    source = write(tmp_path, known())
    before = sorted(tmp_path.rglob("*"))
    written = import_trace(source, tmp_path / "out.safetensors", name)
    check_equals(written, known(), name)
    check_equals(RoutingTrace.load(tmp_path / "out.safetensors"), known(), name)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "out.safetensors"])


@every_format
def test_exactly_one_importer_recognises_it(tmp_path, write, name):
    path = write(tmp_path, known())
    assert detect(path).name == name
    assert [each for each in FORMATS if importer(each).sniff(path)] == [name]


@every_format
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 0.9, 0.999])
def test_a_truncated_source_is_one_clear_error_and_writes_nothing(tmp_path, write, name, share):
    path = write(tmp_path, known())
    victim = max(path.iterdir()) if path.is_dir() else path
    content = victim.read_bytes()
    victim.write_bytes(content[: int(len(content) * share)])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TraceError) as caught:
        import_trace(path, tmp_path / "out.safetensors", name)
    assert str(caught.value).startswith(str(path))
    assert sorted(tmp_path.rglob("*")) == before


@every_format
def test_another_model_is_refused(tmp_path, write, name):
    path = write(tmp_path, known())
    with pytest.raises(TraceError, match=r"5 MoE layers and top-3.*other has 5 and top-2"):
        open_trace(path, spec=MoESpec("other", L, E, 2))
    with pytest.raises(TraceError, match="6 and top-3"):
        open_trace(path, spec=MoESpec("other", 6, E, K))


@every_format
def test_an_id_beyond_the_experts_named_is_refused(tmp_path, write, name):
    with pytest.raises(TraceError, match=r"expert id 15 in layer 0, token 0|it says 16 experts"):
        open_trace(write(tmp_path, known()), spec=MoESpec("tiny", L, E - 1, K))


@every_format
def test_the_callers_model_is_taken(tmp_path, write, name):
    trace = open_trace(write(tmp_path, known()), spec=SPEC)
    assert trace.spec.model == "tiny"
    assert "num_experts" not in trace.provenance["inferred"]


@every_format
def test_progress_ends_at_the_total(tmp_path, write, name):
    calls: dict[str, list[tuple[int, int]]] = {}
    open_trace(
        write(tmp_path, known()), progress=lambda what, done, total: calls.setdefault(what, []).append((done, total))
    )
    assert all(done <= total for stage in calls.values() for done, total in stage)
    if name not in ("jsonl",):  # which tells every few thousand lines
        assert calls
        assert all(stage[-1][0] == stage[-1][1] for stage in calls.values())


@every_format
def test_warm_up_and_padding_rows_are_dropped_and_counted(tmp_path, write, name):
    trace = known()
    ids, weights = trace.ids_LTK.copy(), trace.weights_LTK
    ids[:, 1:9] = ids[:, :1]  # nine equal rows at the beginning: 8 * 5 * log2(C(16, 3)) = 365 bits
    noisy = Known(ids, weights, trace.sequence_T, trace.position_T)
    imported = open_trace(write(tmp_path, noisy), num_experts=None if name == "sglang" else E)
    assert imported.provenance["dropped"] == {"warm_up": 9, "padding": 0}
    assert np.array_equal(imported.expert_ids, ids[:, 9:])
    assert imported.sequence_ids is not None
    assert partition(imported.sequence_ids) == partition(trace.sequence_T[9:])
