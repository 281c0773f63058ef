"""Expert stores: what is written, that it can be taken up again, and that nothing damaged is read."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coterie.checkpoint import pack_store as packing
from coterie.checkpoint.eight_bits import in_eight_bits
from coterie.checkpoint.expert_records import ExpertRecords
from coterie.checkpoint.expert_store import StoreHeader, open_store
from coterie.checkpoint.pack_store import pack_store
from coterie.checkpoint.safetensors_io import read_headers
from coterie.checkpoint.store_layout import ALIGNMENT, StoreLayout
from coterie.errors import CheckpointError, ConfigError
from coterie.spec import MoESpec

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 4, 72, 64
SPEC = MoESpec("toy", LAYERS, EXPERTS, 2, layer_ids=(0, 1))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with Mixtral's names, and a few tensors that are no experts'."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    folder.mkdir()
    tensors: dict[str, Any] = {"model.embed_tokens.weight": rng.random((9, HIDDEN), np.float32)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = rng.random((EXPERTS, HIDDEN), np.float32)
        for expert in range(EXPERTS):
            for part, shape in (("w1", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH)), ("w3", (WIDTH, HIDDEN))):
                tensors[f"{block}.experts.{expert}.{part}.weight"] = rng.random(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def pack(folder: Path, out: Path, order_LEI: Any = None, bits: int | None = None, **options: Any) -> int:
    tensors = read_headers(folder)
    records = ExpertRecords(tensors, "mixtral", (0, 1), (LAYERS, EXPERTS, WIDTH, HIDDEN))
    layout = records.layout
    if bits is not None:
        layout, options["encode"] = replace(layout, dtype="I8"), partial(in_eight_bits, dtype=layout.dtype)
    header = StoreHeader(SPEC, "0123", None, None, layout)
    config = json.loads((folder / "config.json").read_text())
    return pack_store(out, folder, tensors, records, header, order_LEI, config, {}, **options)


def some_order() -> Any:
    rng = np.random.default_rng(1)
    return np.stack([[rng.permutation(WIDTH) for _ in range(EXPERTS)] for _ in range(LAYERS)])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_record_holds_gate_up_and_down_of_each_neuron_in_order(
    ordered: bool, checkpoint: Path, tmp_path: Path
) -> None:
    order = some_order() if ordered else None
    assert pack(checkpoint, tmp_path / "store", order) == 0
    store, tensors = open_store(tmp_path / "store"), load_file(checkpoint / "model.safetensors")
    layout, data = store.layout, store.experts_file.read_bytes()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            start = layout.offset(layer, expert)
            record = np.frombuffer(data, np.float32, WIDTH * 3 * HIDDEN, start).reshape(WIDTH, 3, HIDDEN)
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            own = np.arange(WIDTH) if order is None else order[layer, expert]
            for neuron in range(WIDTH):
                for part, row in enumerate(("w1", "w3")):
                    assert np.array_equal(record[neuron, part], tensors[f"{name}{row}.weight"][own[neuron]])
                assert np.array_equal(record[neuron, 2], tensors[f"{name}w2.weight"][:, own[neuron]])
            for block in range(layout.blocks):
                first, nbytes = layout.span(block, block + 1)
                piece = data[start + first : start + first + nbytes]
                assert zlib.crc32(piece) == store.checksums_LEB[layer, expert, block]
                store.check_block(layer, expert, block, piece)


def test_the_skeleton_holds_everything_else(checkpoint: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "store")
    skeleton = tmp_path / "store" / "model"
    rest, all_of = load_file(skeleton / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert set(rest) == {name for name in all_of if ".experts." not in name}
    assert all(np.array_equal(rest[name], all_of[name]) for name in rest)
    assert (skeleton / "tokenizer.json").is_file()
    assert json.loads((skeleton / "config.json").read_text()) == {"model_type": "mixtral"}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("width", [1, 24, 288, 2880, 14336])
@pytest.mark.parametrize("hidden", [32, 256, 2880, 4096])
def test_blocks_are_aligned_and_cover_an_expert(width: int, hidden: int, dtype: str) -> None:
    layout = StoreLayout(1, 2, width, hidden, dtype)
    spans = [layout.span(block, block + 1) for block in range(layout.blocks)]
    assert 1 <= layout.blocks <= 16
    assert all(start % ALIGNMENT == nbytes % ALIGNMENT == 0 < nbytes for start, nbytes in spans)
    assert sum(nbytes for _, nbytes in spans) == layout.record_bytes >= width * layout.neuron_bytes
    assert layout.record_bytes < width * layout.neuron_bytes + ALIGNMENT
    assert layout.span(0, layout.blocks) == (0, layout.record_bytes)
    for neurons in (0, 1, width // 2, width):
        assert layout.blocks_of(neurons) == len(range(0, neurons, layout.block_neurons))


_KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
import test_expert_store as here
from pathlib import Path
def progress(what, done, total):
    if done >= 3 * total // 8:
        os.kill(os.getpid(), signal.SIGKILL)
here.pack(Path({model!r}), Path({out!r}), here.some_order(), {bits}, progress=progress)
"""


@pytest.mark.parametrize("bits", [None, 8])
def test_what_kill_9_interrupts_is_taken_up_again(bits: int | None, checkpoint: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "store", tmp_path / "whole"
    script = _KILLED.format(here=str(Path(__file__).parent), model=str(checkpoint), out=str(out), bits=bits)
    path = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="not finished; run the same coterie pack again"):
        open_store(out)
    files = ("experts.bin", "checksums.bin", *(["scales.bin"] if bits else []))
    for name in files:  # the write that the kill cut short
        with (out / name).open("ab") as file:
            file.write(b"torn")
    assert pack(checkpoint, out, some_order(), bits) == 3
    pack(checkpoint, whole, some_order(), bits)
    assert {file.name for file in out.iterdir()} == {*files, "store.json", "model"}
    for name in (*files, "store.json", "model/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert not (out / "packing.json").exists()


def test_half_of_one_model_is_not_joined_to_another(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(ZeroDivisionError):
        pack(checkpoint, out, progress=lambda *_: 1 / 0)
    os.utime(checkpoint / "model.safetensors", (1, 1))
    with pytest.raises(ConfigError, match="unfinished store of another model"):
        pack(checkpoint, out)


def test_a_disk_that_is_full_says_how_far_it_came(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = tmp_path / "store", os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device; 2 of 8 experts are packed: free some space"):
        pack(checkpoint, out)
    monkeypatch.undo()
    assert pack(checkpoint, out) == 2
    open_store(out)


def test_too_little_space_is_seen_before_the_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(ConfigError, match=r"the store takes .* bytes .* more, 5 .* are free"):
        pack(checkpoint, tmp_path / "store")


def test_other_folders_are_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match=r"holds thesis\.txt; name a new folder"):
        pack(checkpoint, tmp_path / "mine")
    pack(checkpoint, tmp_path / "store")
    with pytest.raises(ConfigError, match="holds a finished store already"):
        pack(checkpoint, tmp_path / "store")
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        pack(checkpoint, tmp_path / "nowhere" / "store")


def _damage(folder: Path, name: str, how: str) -> None:
    file = folder / name
    data = file.read_bytes()
    changed = {"cut": data[:-1], "flip": bytes([data[0] ^ 1]) + data[1:], "gone": b"", "text": b"{}"}[how]
    file.write_bytes(changed)


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("experts.bin", "cut", "truncated: it has .* bytes instead of"),
        ("checksums.bin", "flip", "damaged, so blocks cannot be checked"),
        ("checksums.bin", "cut", "truncated: it has .* bytes instead of"),
        ("store.json", "cut", "truncated or no JSON|does not describe"),
        ("store.json", "text", "does not describe an expert store"),
    ],
)
def test_damaged_stores_are_refused(name: str, how: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "store")
    if (name, how) == ("store.json", "cut"):
        text = (tmp_path / "store" / name).read_text()
        (tmp_path / "store" / name).write_text(text[: len(text) // 2])
    else:
        _damage(tmp_path / "store", name, how)
    with pytest.raises(CheckpointError, match=message):
        open_store(tmp_path / "store")


def test_what_is_no_store_or_a_newer_one_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no expert store; make one with coterie pack"):
        open_store(checkpoint)
    pack(checkpoint, tmp_path / "store")
    header = tmp_path / "store" / "store.json"
    header.write_text(header.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(CheckpointError, match="schema 9 of expert stores, this version reads 1"):
        open_store(tmp_path / "store")


def test_a_corrupted_block_is_named(checkpoint: Path, tmp_path: Path) -> None:
    pack(checkpoint, tmp_path / "store")
    store = open_store(tmp_path / "store")
    with pytest.raises(CheckpointError, match="corrupted in layer 1, expert 2, block 0"):
        store.check_block(1, 2, 0, b"\0" * store.layout.block_bytes)


def test_two_types_of_experts_are_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="stored as F16 and F32; a store holds one type"):
        ExpertRecords(read_headers(checkpoint), "mixtral", (0, 1), (LAYERS, EXPERTS, WIDTH, HIDDEN))
