"""Experts computed piece by piece while the rest of them is read."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest

from coterie.errors import CheckpointError

pytestmark = pytest.mark.needs("transformers")


@pytest.fixture
def link() -> Any:
    return importlib.import_module("coterie.offloading.link")


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def test_pieces_add_up_to_the_whole() -> None:
    """Groups of several widths, one masked within; a gate, and biases that must be added once."""
    import torch

    from coterie.offloading.pieces import PiecewiseExpert
    from coterie.offloading.visit import Visit
    from coterie.ops.neuron_records import Biases, run_record

    chance = torch.Generator().manual_seed(1)
    record = torch.randn(10, 3, 6, generator=chance)
    biases = Biases(torch.randn(2, 2, 10, generator=chance), torch.randn(2, 6, generator=chance))
    hidden, ids = torch.randn(24, 6, generator=chance), torch.ones(24, 1, dtype=torch.int64)
    widths = torch.tensor([[3], [10], [9], [7]] * 6)

    def gate(both: Any) -> Any:
        first, second = both.chunk(2, dim=-1)
        return torch.relu(first) * second

    visit = Visit(0, None, [[1, 5, 24]], 1)  # type: ignore[arg-type]
    visit.group(hidden, ids, widths, (2, 10))
    whole = {
        index: visit.work.outputs(index, lambda _, width, x, own: run_record(record, width, gate, x, own, biases, 1))
        for index in visit.groups_of[1]
    }
    for step in (1, 4, 7, 10, 16):
        job, pieces = PiecewiseExpert(visit, 1, step), 0
        while not job.done:
            job.compute(lambda first, end, x, own: run_record(record, end, gate, x, own, biases, 1, first))
            pieces += 1
        assert pieces == -(-10 // step)
        found = job.outputs
        assert found.keys() == whole.keys()
        for index, output in found.items():
            assert torch.allclose(output, whole[index], atol=1e-5)
            assert step < 10 or torch.equal(output, whole[index])


def test_pieces_of_bf16_are_added_in_float32() -> None:
    import torch

    from coterie.offloading.pieces import PiecewiseExpert
    from coterie.offloading.visit import Visit

    visit = Visit(0, None, [[0, 8, 1]], 1)  # type: ignore[arg-type]
    visit.group(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([[0]]), torch.tensor([[512]]), (1, 512))
    job = PiecewiseExpert(visit, 0, 1)
    while not job.done:  # in bf16 such a sum stops growing at 256
        job.compute(lambda first, end, x, own: torch.ones_like(x))
    assert job.outputs[0].dtype == torch.bfloat16
    assert job.outputs[0].eq(512).all()


@pytest.mark.parametrize(("budget", "schedule"), [("7%", "fifo"), ("30%", "johnson"), ("100%", "widest-first")])
def test_outputs_do_not_depend_on_what_was_waited_for(
    budget: str, schedule: str, small: Any, offload: Any, prompts: Any, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads, so that parts end in any order, and pieces of 4 of 16 blocks."""
    import torch

    monkeypatch.setattr(link, "_READ_BYTES", 4 * 16 * 3 * 64 * 4)
    resident, expected = offload("100%"), []
    for ids in (prompts, prompts[:1, :5], prompts[:, 3:4]):
        expected.append((ids, logits(resident, ids)))
    model = offload(budget, schedule=schedule, threads=3, check=True, ahead=True)
    for ids, found in expected * 2:
        assert torch.equal(logits(model, ids), found)
        assert (found - logits(small.model, ids)).abs().max() <= 1e-5 * found.abs().max()


def test_the_first_piece_computes_while_the_second_is_read(
    offload: Any, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from coterie.models.layers import find_moe_layers
    from coterie.offloading.runtime import Runtime

    monkeypatch.setattr(link, "_READ_BYTES", 8 * 16 * 3 * 64 * 4)
    read, compute, computed, done = link.Link._read_retrying, Runtime._compute, threading.Event(), []

    def gated_read(self: Any, each: Any, *where: Any) -> None:
        assert each.first == 0 or computed.wait(20), "the first piece did not compute before the second was there"
        read(self, each, *where)

    def told_compute(runtime: Any, visit: Any, job: Any) -> None:
        done.append((job.first, job.end))
        compute(runtime, visit, job)
        computed.set()

    monkeypatch.setattr(link.Link, "_read_retrying", gated_read)
    monkeypatch.setattr(Runtime, "_compute", told_compute)
    model = offload("50%", threads=1)
    with torch.inference_mode():
        find_moe_layers(model)[0].experts.forward(torch.randn(1, 64), torch.tensor([[3]]), torch.tensor([[0.6]]))
    assert done == [(0, 128), (128, 256)]
    assert model.stats().computed_bytes == model.stats().loaded_bytes == 256 * 3 * 64 * 4


def test_a_load_knows_how_far_it_has_come(link: Any) -> None:
    load = link.Load(0, 1, 3, 9)
    load.expect(3)
    load.part_ended(5, 7)
    assert (load.here, load.ended) == (3, False)
    assert load.has(3)
    assert not load.has(5)
    with pytest.raises(CheckpointError, match="has not ended"):
        load.wait(0.01, 4)
    load.part_ended(3, 5)
    load.wait(0.01, 7)
    assert load.here == 7
    load.part_ended(7, 9, CheckpointError("corrupted"))
    load.wait(0.01, 7)
    assert load.ended
    for blocks in (8, None):
        with pytest.raises(CheckpointError, match="corrupted"):
            load.wait(0.01, blocks)


def test_reads_end_where_pieces_do(offload: Any, link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A widening from the middle of a piece: its first read ends with the piece."""
    import torch

    from coterie.models.layers import find_moe_layers

    monkeypatch.setattr(link, "_READ_BYTES", 4 * 16 * 3 * 64 * 4)
    reads, read, width = [], link.Link._read_retrying, [96]

    def told_read(self: Any, each: Any, *where: Any) -> None:
        reads.append((each.first, each.end))
        read(self, each, *where)

    monkeypatch.setattr(link.Link, "_read_retrying", told_read)
    model = offload("50%", lambda layer, ids, weights: torch.full_like(ids, width[0]), threads=1)
    forward = find_moe_layers(model)[0].experts.forward
    for width[0] in (96, 224):
        with torch.inference_mode():
            forward(torch.randn(1, 64), torch.tensor([[3]]), torch.tensor([[0.6]]))
    assert reads == [(0, 4), (4, 6), (6, 8), (8, 12), (12, 14)]
