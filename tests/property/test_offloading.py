"""The runtime at random: never more memory than the budget, and outputs as one token at a time computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coterie.checkpoint.expert_records import ExpertRecords
from coterie.checkpoint.expert_store import ExpertStore, StoreHeader, open_store
from coterie.checkpoint.pack_store import pack_store
from coterie.checkpoint.safetensors_io import read_headers
from coterie.policies.cache import ExpertCache
from coterie.policies.eviction import CacheShape
from coterie.policies.registry import POLICIES, make_policy
from coterie.policies.schedule import SCHEDULES
from coterie.spec import MoESpec

pytestmark = pytest.mark.needs("torch")

LAYERS, EXPERTS, WIDTH, HIDDEN, TOP_K = 2, 6, 80, 64, 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """Experts of 5 blocks of 16 neurons; the layout is Mixtral's."""
    folder, rng = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.random((9, HIDDEN), np.float32)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for part, shape in (("w1", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH)), ("w3", (WIDTH, HIDDEN))):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
                tensors[name] = rng.normal(0, 0.2, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    headers = read_headers(folder)
    records = ExpertRecords(headers, "mixtral", range(LAYERS), (LAYERS, EXPERTS, WIDTH, HIDDEN))
    header = StoreHeader(MoESpec("toy", LAYERS, EXPERTS, TOP_K), "0123", None, None, records.layout)
    out: Path = folder.parent / "store"
    pack_store(out, folder, headers, records, header, None, {}, {})
    return open_store(out)


@given(data=st.data())
@settings(max_examples=25)
def test_memory_stays_within_the_budget_and_outputs_are_exact(data: Any, store: ExpertStore) -> None:
    import torch

    from coterie.offloading.link import Link
    from coterie.offloading.memory import ExpertMemory
    from coterie.offloading.runtime import Runtime
    from coterie.offloading.width_choice import WidthChoice

    layout = store.layout
    shape = CacheShape(LAYERS, EXPERTS, layout.blocks)
    budget = data.draw(st.integers(layout.blocks, shape.total_blocks), "budget")
    policy = make_policy(data.draw(st.sampled_from(sorted(POLICIES)), "policy"), shape)
    schedule = data.draw(st.sampled_from(sorted(SCHEDULES)), "schedule")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    widths: list[Any] = []
    cache, link = ExpertCache(shape, budget, policy), _Watched.of(Link)(store)
    link.cache, link.limit = cache, budget
    most = (lambda *_: widths[-1] + (WIDTH - widths[-1]) // 2) if data.draw(st.booleans(), "use cached") else None
    factor, ran = data.draw(st.sampled_from([None, 0, 0.7, 1]), "skip"), list[Any]()
    choice = WidthChoice(WIDTH, layout.block_neurons, lambda *_: widths[-1], most, factor)
    runtime = Runtime(
        store, cache, ExpertMemory(layout, poison=True), link, [_gate] * LAYERS, choice, schedule,
        ahead=data.draw(st.booleans(), "ahead"), check=True, observe=lambda *told: ran.append(told),
    )  # fmt: skip
    experts = torch.from_numpy(np.fromfile(store.experts_file, np.float32).copy())
    records = experts.view(LAYERS, EXPERTS, -1)[:, :, : WIDTH * 3 * HIDDEN].reshape(LAYERS, EXPERTS, WIDTH, 3, HIDDEN)
    try:
        for visit in range(8):
            layer, tokens = visit % LAYERS, int(rng.integers(1, 7))
            hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
            ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)))[:, :TOP_K].copy())
            weights = torch.from_numpy(rng.random((tokens, TOP_K)).astype(np.float32))
            widths.append(torch.from_numpy(rng.integers(0, WIDTH + 1, (tokens, TOP_K))))
            found = runtime.run(layer, hidden, ids, weights)
            expected = _plain(records[layer], hidden, ids, weights, ran[-1][3])
            if most is None and not factor:
                assert torch.equal(ran[-1][3], widths[-1])
            if not factor:
                assert (ran[-1][3] >= widths[-1]).all()
            if most is not None:
                assert (ran[-1][3] <= most()).all()
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
            assert cache.used_blocks <= budget
            assert cache.used_blocks == cache.reserved_LE.sum()
            assert (cache.arrived_LE[layer] == cache.reserved_LE[layer]).all(), "nothing of it is left under way"
            assert not cache.pinned_LE[layer].any()
    finally:
        runtime.close()
    assert runtime.stats().peak_expert_bytes <= budget * layout.block_bytes


@given(data=st.data())
@settings(max_examples=25)
def test_what_depends_on_the_cache_reads_no_more(data: Any, store: ExpertStore) -> None:
    """From one state of the cache, with what is resident used or skipped on a miss, and without."""
    import torch

    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    name, factor = data.draw(st.sampled_from(sorted(POLICIES)), "policy"), data.draw(st.sampled_from([0, 0.7, 1]), "F")
    budget, tokens = data.draw(st.integers(20, 50), "budget"), data.draw(st.integers(1, 3), "tokens")
    plain, used, skips = (_Run(store, name, budget, *of) for of in ((False, None), (True, None), (False, factor)))
    try:
        for visit in range(9):
            layer = visit % LAYERS
            hidden = torch.from_numpy(rng.normal(size=(tokens, HIDDEN)).astype(np.float32))
            ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)))[:, :TOP_K].copy())
            weights = torch.from_numpy(rng.random((tokens, TOP_K)).astype(np.float32))
            widths = torch.from_numpy(rng.integers(0, WIDTH + 1, (tokens, TOP_K)))
            for each in (plain, used, skips):
                each.widths.append(widths)
            before_E = skips.cache.reserved_LE[layer].copy()
            outputs = [each.runtime.run(layer, hidden, ids, weights) for each in (plain, used, skips)]
            # what ran does not change what is resident: the two stay in step
            assert (plain.cache.reserved_LE == used.cache.reserved_LE).all()
            assert used.runtime.stats().loaded_bytes == plain.runtime.stats().loaded_bytes
            light = weights / weights.sum(1, keepdim=True) * TOP_K < factor
            ran = skips.ran[-1]
            assert torch.equal(ran[~light], widths[~light])
            for token, slot in np.argwhere((ran != widths).numpy()):
                expert = ids[token, slot]
                assert light[token, slot]
                assert ran[token, slot] == 0
                assert widths[token, slot] > before_E[expert] * store.layout.block_neurons
                kept = torch.where(ids == expert, ran, 0).max()  # no wider than the slots that ran ask
                assert skips.cache.reserved_LE[layer, expert] <= max(
                    before_E[expert], -(-int(kept) // store.layout.block_neurons)
                )
            if factor == 0:
                assert torch.equal(outputs[0], outputs[2])
    finally:
        for each in (plain, used, skips):
            each.runtime.close()


class _Run:
    """A runtime without reading ahead, its cache, and the widths that ran."""

    def __init__(self, store: ExpertStore, policy: str, budget: int, use_cached: bool, factor: float | None) -> None:
        from coterie.offloading.link import Link
        from coterie.offloading.memory import ExpertMemory
        from coterie.offloading.runtime import Runtime
        from coterie.offloading.width_choice import WidthChoice

        shape = CacheShape(LAYERS, EXPERTS, store.layout.blocks)
        self.cache, self.widths, self.ran = ExpertCache(shape, budget, make_policy(policy, shape)), [], []
        most = (lambda _, ids, __: ids * 0 + WIDTH) if use_cached else None
        choice = WidthChoice(WIDTH, store.layout.block_neurons, lambda *_: self.widths[-1], most, factor)
        self.runtime = Runtime(
            store, self.cache, ExpertMemory(store.layout, poison=True), Link(store), [_gate] * LAYERS, choice,
            check=True, observe=lambda *told: self.ran.append(told[3]),
        )  # fmt: skip


class _Watched:
    """A link that looks at the cache whenever a read begins."""

    @staticmethod
    def of(link: Any) -> Any:
        class Watched(link):  # type: ignore[misc]
            def fill(self, into: memoryview, offset: int) -> None:
                assert self.cache.used_blocks <= self.limit
                super().fill(into, offset)

        return Watched


def _gate(both: Any) -> Any:
    import torch

    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _plain(records: Any, hidden: Any, ids: Any, weights: Any, widths: Any) -> Any:
    """One slot at a time, neurons beyond its width set to zero."""
    import torch

    total = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for slot in range(ids.shape[1]):
            record = records[ids[token, slot]]
            neurons = torch.nn.functional.silu(record[:, 0] @ hidden[token]) * (record[:, 1] @ hidden[token])
            neurons[widths[token, slot] :] = 0
            total[token] += weights[token, slot] * (neurons @ record[:, 2])
    return total
