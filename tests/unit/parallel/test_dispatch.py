"""Dispatch and combine where something is special: nothing to send, nothing remote, other types, ranks out of step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from coterie.errors import RankError
from coterie.placement.placement import Placement
from coterie.spec import MoESpec
from coterie.topology import Topology

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs("transformers")  # the extra that brings torch

EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 2, 16, 16
HEADER = 3 * 8


def placement(topology: str = "3") -> Placement:
    """Expert e on device e // 2."""
    return Placement(np.arange(EXPERTS)[None], Topology.parse(topology), MoESpec("toy", 1, EXPERTS, TOP_K))


def weights_of(which: list[int], dtype: Any = None) -> Any:
    from coterie.ops.gated_ffn import ExpertWeights

    made = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=made).to(dtype or torch.float32)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=made).to(dtype or torch.float32)

    def gate(both: Any) -> Any:
        first, second = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(first) * second

    return ExpertWeights(gate_up[which], down[which], None, None, False, False, gate)


def run(tokens: list[list[list[int]]], dtype: Any = None, topology: str = "3", two_hop: bool = False) -> list[Any]:
    """(output, handle, hidden states, routing weights) of every rank; `tokens`: the experts of each rank's tokens."""
    from coterie.parallel.experts import route
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement, experts_of_device

    placed = placement(topology)
    layer = LayerPlacement.of(placed, 0)

    def work(comms: Any) -> Any:
        made = torch.Generator().manual_seed(comms.rank)
        ids_TK = torch.tensor(tokens[comms.rank], dtype=torch.int64).view(-1, TOP_K)
        hidden_TH = torch.randn(len(ids_TK), HIDDEN, generator=made).to(dtype or torch.float32)
        weights_TK = torch.rand(len(ids_TK), TOP_K, generator=made)
        own = weights_of(experts_of_device(placed, 0, comms.rank), dtype)
        return *route(hidden_TH, ids_TK, weights_TK, layer, own, comms, two_hop=two_hop), hidden_TH, weights_TK

    return run_ranks(3, work)


def single(hidden_TH: Any, ids: list[list[int]], weights_TK: Any) -> Any:
    """What one process computes."""
    from coterie.ops.gated_ffn import gated_ffn

    every = weights_of(list(range(EXPERTS)), hidden_TH.dtype)
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, TOP_K)
    return gated_ffn(every, hidden_TH, ids_TK, weights_TK, torch.full_like(ids_TK, WIDTH))


@pytest.mark.parametrize("two_hop", [False, True])
def test_outputs_are_those_of_one_process(two_hop: bool) -> None:
    tokens = [[[0, 5], [2, 3], [1, 0]], [[4, 1]], [[3, 0], [0, 2]]]
    for rank, (output, _, hidden_TH, weights_TK) in enumerate(run(tokens, two_hop=two_hop)):
        torch.testing.assert_close(output, single(hidden_TH, tokens[rank], weights_TK), atol=1e-5, rtol=1e-5)


def test_tokens_whose_experts_are_at_home_send_nothing_but_counts() -> None:
    for rank, (_, handle, *_) in enumerate(run([[[0, 1]], [[2, 3], [3, 2]], [[5, 4]]])):
        assert handle.dispatch_bytes() == handle.combine_bytes() == [0, 0, 0]
        assert handle.metadata_bytes() == [0 if other == rank else HEADER for other in range(3)]


def test_a_token_travels_once_to_a_device_with_two_of_its_experts() -> None:
    (output, handle, hidden_TH, weights_TK), (_, other, *_), _ = run([[[2, 3]], [], []])
    assert handle.sent == (0, 1, 0)
    assert handle.dispatch_bytes() == [0, 4 * HIDDEN, 0]
    assert other.combine_bytes() == [4 * HIDDEN, 0, 0]
    assert handle.metadata_bytes() == [0, HEADER + TOP_K * 8, HEADER]
    torch.testing.assert_close(output, single(hidden_TH, [[2, 3]], weights_TK), atol=1e-5, rtol=1e-5)


def test_no_rank_has_tokens() -> None:
    for output, handle, *_ in run([[], [], []]):
        assert output.shape == (0, HIDDEN)
        assert sum(handle.sent) == 0


def test_a_token_without_experts_gets_zero() -> None:
    (output, *_), _, _ = run([[[-1, -1], [4, -1]], [], []])
    assert not output[0].any()
    assert output[1].any()


def test_bfloat16_travels_as_bfloat16_and_is_summed_in_float32() -> None:
    tokens = [[[0, 5], [2, 3]], [[4, 1]], []]
    for rank, (output, handle, hidden_TH, weights_TK) in enumerate(run(tokens, torch.bfloat16)):
        assert output.dtype == torch.bfloat16
        assert handle.format.payload_bytes == 2 * HIDDEN
        expected = single(hidden_TH, tokens[rank], weights_TK)
        torch.testing.assert_close(output, expected, atol=0.1, rtol=0.02)


def test_float64_loses_nothing() -> None:
    tokens = [[[0, 5]], [[4, 1]], [[3, 0]]]
    for rank, (output, _, hidden_TH, weights_TK) in enumerate(run(tokens, torch.float64)):
        torch.testing.assert_close(output, single(hidden_TH, tokens[rank], weights_TK.double()), atol=1e-12, rtol=0)


def test_the_handle_cannot_be_changed() -> None:
    _, handle, *_ = run([[[0, 1]], [], []])[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.sent = (9, 9, 9)


def test_ranks_at_different_layers_are_out_of_step() -> None:
    from coterie.parallel.dispatch import dispatch
    from coterie.parallel.in_memory import run_ranks
    from coterie.parallel.layer_placement import LayerPlacement

    spec = MoESpec("toy", 2, EXPERTS, TOP_K)
    placed = Placement(np.tile(np.arange(EXPERTS), (2, 1)), Topology.parse("2"), spec)

    def work(comms: Any) -> Any:
        layer = LayerPlacement.of(placed, comms.rank)
        empty = torch.empty((0, TOP_K))
        return dispatch(torch.empty((0, HIDDEN)), empty.long(), empty, layer, comms)

    with pytest.raises(RankError, match=r"rank \d is at MoE layer \d, rank \d at \d"):
        run_ranks(2, work)


def test_an_error_of_one_rank_ends_those_that_wait_for_it() -> None:
    from coterie.parallel.comms import share
    from coterie.parallel.in_memory import run_ranks

    def work(comms: Any) -> Any:
        if comms.rank == 1:
            raise ValueError("no more")
        return share(comms, comms.rank)

    with pytest.raises(ValueError, match="no more"):
        run_ranks(3, work)


def test_what_is_shared_arrives_everywhere() -> None:
    from coterie.parallel.comms import share
    from coterie.parallel.in_memory import run_ranks

    said = run_ranks(3, lambda comms: share(comms, {"rank": comms.rank, "text": "ä" * comms.rank}))
    assert said == [[{"rank": rank, "text": "ä" * rank} for rank in range(3)]] * 3
