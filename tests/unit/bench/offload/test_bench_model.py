"""The bench store is one like any other."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.spec import MoESpec

pytestmark = pytest.mark.needs("transformers")


def test_sizes_are_those_that_were_asked_for() -> None:
    from coterie.bench.offload.bench_model import bench_shape

    coarse = bench_shape(MoESpec("tiny-mixtral", 6, 8, 2))
    assert coarse.coarse
    assert 60e6 <= coarse.layout.record_bytes <= 100e6
    assert 4e9 <= coarse.layout.total_bytes <= 6e9
    fine = bench_shape(MoESpec("tiny-qwen3-moe", 4, 64, 8))
    assert not fine.coarse
    assert 5e6 <= fine.layout.record_bytes <= 10e6
    many = bench_shape(MoESpec("gpt-oss", 24, 32, 4))
    assert many.layout.total_bytes <= 5e9


def test_the_store_is_sound_and_its_experts_differ(store: Any, shape: Any) -> None:
    layout = store.layout
    assert layout == shape.layout
    data = store.experts_file.read_bytes()
    records = set()
    for layer in range(layout.num_layers):
        for expert in range(layout.num_experts):
            start = layout.offset(layer, expert)
            for block in range(layout.blocks):
                first, nbytes = layout.span(block, block + 1)
                store.check_block(layer, expert, block, data[start + first : start + first + nbytes])
            records.add(zlib.crc32(data[start : start + layout.record_bytes]))
    assert len(records) == layout.num_records
    assert not list(store.skeleton.glob("*.tmp"))


@pytest.mark.parametrize("experts", [8, 32])
def test_outputs_are_a_resident_models(experts: int, tmp_path: Path) -> None:
    """Offloaded at a small budget, and by Transformers' own experts with the records put into them."""
    import torch

    from coterie.bench.offload.bench_model import BenchShape, make_bench_store
    from coterie.models.layers import find_moe_layers

    made = make_bench_store(tmp_path / "store", BenchShape(2, experts, 2, 128, 64))
    ids = torch.randint(3, 4096, (2, 7), generator=torch.Generator().manual_seed(3))
    model, resident = coterie.offload(made.folder, "20%"), coterie.offload(made.folder, "100%")
    with torch.inference_mode():
        found, expected = model(input_ids=ids).logits, resident(input_ids=ids).logits
        assert torch.equal(found, expected)
        own = _own_experts(made, resident, find_moe_layers(resident))
        plain = own(input_ids=ids).logits
    assert (plain.float() - expected.float()).abs().max() <= 0.05 * expected.float().abs().max()
    assert expected.float().std() > 0
    model.close()


def _own_experts(store: Any, model: Any, layers: Any) -> Any:
    """The same model with its own experts modules filled from the store."""
    import torch

    layout = store.layout
    raw = torch.frombuffer(bytearray(store.experts_file.read_bytes()), dtype=torch.bfloat16)
    for layer in layers:
        experts: Any = layer.experts
        del experts.forward
        gate_up, down = [], []
        for expert in range(layout.num_experts):
            start = layout.offset(layer.index, expert) // 2
            record = raw[start : start + layout.width * 3 * layout.hidden_size].view(layout.width, 3, -1)
            gate_up.append(torch.cat([record[:, 0], record[:, 1]]))
            down.append(record[:, 2].t())
        experts.gate_up_proj = torch.nn.Parameter(torch.stack(gate_up), requires_grad=False)
        experts.down_proj = torch.nn.Parameter(torch.stack(down), requires_grad=False)
    return model


def test_a_store_that_is_there_is_used_again_if_it_fits(store: Any, shape: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    from coterie.bench.offload.bench_model import make_bench_store

    before = store.experts_file.stat().st_mtime_ns
    assert make_bench_store(store.folder, shape).layout == store.layout
    assert store.experts_file.stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"the routing needs random-mixtral-4x8-top2.*; name another folder"):
        make_bench_store(store.folder, replace(shape, layers=4))


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    shape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.bench.offload.run import bench_store

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ConfigError, match=r"1,000 .* are free .*free some space"), bench_store(shape):
        pass
    assert not list(tmp_path.rglob("experts.bin")), "the temporary folder is gone"
