"""Offloaded models: what they compute, at any budget and policy, and what they refuse."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.errors import BudgetError, ConfigError
from coterie.policies.registry import POLICIES
from coterie.policies.schedule import SCHEDULES

pytestmark = pytest.mark.needs("transformers")


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def continued(model: Any, ids: Any, **options: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model.generate(ids, max_new_tokens=4, do_sample=False, **options)


@pytest.mark.parametrize(
    ("policy", "budget", "schedule"),
    [
        ("lru", "7%", "fifo"), ("lru-layer", "30%", "johnson"), ("lfu", "60%", "widest-first"),
        ("reuse", "20%", "widest-first"), ("company", "7%", "johnson"),
    ],
)  # fmt: skip
def test_outputs_do_not_depend_on_budget_policy_or_schedule(
    budget: str, policy: str, schedule: str, offload: Any, small: Any, prompts: Any, expected: Any
) -> None:
    import torch

    assert policy in POLICIES
    assert schedule in SCHEDULES
    model = offload(budget, policy=policy, schedule=schedule, ahead=policy in ("reuse", "company"), check=True)
    for ids, found in expected:
        assert torch.equal(logits(model, ids), found)
    assert torch.equal(continued(model, prompts), continued(small.model, prompts))
    stats = model.stats()
    assert 0 < stats.peak_expert_bytes <= stats.budget_bytes
    assert stats.hits + stats.misses > 0
    assert stats.policy == policy
    assert stats.schedule == schedule


@pytest.mark.parametrize(("name", "budget"), [("value", "7%"), ("crisp", "30%"), ("skip", "15%")])
def test_widths_run_as_in_a_resident_model(name: str, budget: str, offload: Any, small: Any, prompts: Any) -> None:
    import torch

    from coterie.pruning.width_planning import plan_widths

    strength = {"value": {"bytes": 0.5}, "skip": {"threshold": 0.8}}
    plan = plan_widths(small.profile, name, **strength.get(name, {}))
    model = offload(budget, plan, check=True)
    with coterie.apply_widths(small.model, plan):
        expected, tokens = logits(small.model, prompts), continued(small.model, prompts)
    found = logits(model, prompts)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.allclose(found, logits(small.model, prompts), rtol=1e-3), "widths changed nothing"
    assert torch.equal(continued(model, prompts), tokens)
    assert model.stats().loaded_bytes < model.stats().chosen_bytes


def test_a_widening_reads_the_suffix_alone(offload: Any, small: Any, prompts: Any) -> None:
    import torch

    wide = [64]
    model = offload("100%", lambda layer, ids, weights: torch.full_like(ids, wide[0]))
    logits(model, prompts)
    experts = model.stats().misses
    assert model.stats().loaded_bytes == experts * 4 * 16 * 3 * 64 * 4  # blocks of 16 neurons
    wide[0] = 80
    logits(model, prompts[:1, :1])
    more = model.stats()
    assert more.misses - experts <= 4
    assert more.loaded_bytes <= (experts * 4 + (more.misses - experts) * 5) * 16 * 3 * 64 * 4
    reread = experts + (more.misses - experts)
    assert reread > experts


def test_memory_is_within_the_budget_at_every_read(offload: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link = importlib.import_module("coterie.offloading.link")
    memory = importlib.import_module("coterie.offloading.memory")
    held, areas, real = [], [], link.Link.fill

    class Watched(memory.ExpertMemory):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            areas.append((self.record(0, 0).data_ptr(), self._layout.total_bytes))

    def fill(self: Any, into: memoryview, offset: int) -> None:
        held.append(_resident(*areas[0]))
        real(self, into, offset)
        held.append(_resident(*areas[0]))

    monkeypatch.setattr(importlib.import_module("coterie.offloading.places"), "ExpertMemory", Watched)
    monkeypatch.setattr(link.Link, "fill", fill)
    model = offload("15%", policy="reuse")
    logits(model, prompts)
    continued(model, prompts)
    assert 0.9 * model.stats().budget_bytes < max(held) <= model.stats().budget_bytes
    model.close()
    assert _resident(*areas[0]) == 0


def _resident(start: int, nbytes: int) -> int:
    """Bytes of an area of memory that have pages, as the kernel tells."""
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_reading_ahead_learns_what_follows_and_takes_back_what_does_not(offload: Any, prompts: Any) -> None:
    import torch

    model, plain = offload("40%", ahead=True, check=True), offload("40%")
    for _ in range(12):
        for ids in (prompts[:1, :1], prompts[:1, 1:2]):
            assert torch.equal(logits(model, ids), logits(plain, ids))
    stats = model.stats()
    assert 0 < stats.ahead_bytes <= stats.loaded_bytes
    assert stats.peak_expert_bytes <= stats.budget_bytes
    assert plain.stats().ahead_bytes == 0


@pytest.mark.parametrize("budget", ["10%", "30%", "70%"])
def test_a_prompt_reads_the_next_layer_while_this_one_computes(
    budget: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses every expert: the second layer's reads begin before the first has computed, and none is in vain."""
    import torch

    from coterie.offloading.runtime import Runtime

    link, done = importlib.import_module("coterie.offloading.link").Link, []
    read, compute = link.read, Runtime._compute

    def told_read(self: Any, layer: int, *what: Any) -> Any:
        done.append(("read", layer))
        return read(self, layer, *what)

    def told_compute(runtime: Any, visit: Any, job: Any) -> None:
        done.append(("compute", visit.layer))
        compute(runtime, visit, job)

    monkeypatch.setattr(link, "read", told_read)
    monkeypatch.setattr(Runtime, "_compute", told_compute)
    ids = torch.randint(3, 260, (8, 64), generator=torch.Generator().manual_seed(8))
    found = logits(offload("100%"), ids)
    done.clear()
    model = offload(budget, check=True)
    assert torch.equal(logits(model, ids), found)
    last = max(index for index, what in enumerate(done) if what == ("compute", 0))
    assert ("read", 1) in done[:last], "nothing of the second layer was read before the first had computed"
    stats = model.stats()
    assert 0 < stats.ahead_bytes < stats.loaded_bytes == stats.chosen_bytes
    assert stats.peak_expert_bytes <= stats.budget_bytes


def test_what_is_resident_is_free(offload: Any, prompts: Any, expected: Any) -> None:
    import torch

    wanted, told = [256], list[Any]()
    model = offload(
        "100%", lambda layer, ids, weights: torch.full_like(ids, wanted[0]), use_cached=True, check=True,
        observe=lambda *each: told.append(each),
    )  # fmt: skip
    assert torch.equal(logits(model, prompts), expected[0][1])
    before = model.stats()
    wanted[0] = 0
    assert torch.equal(logits(model, prompts), expected[0][1])
    later = model.stats().since(before)
    assert (later.loaded_bytes, later.hits, later.misses) == (0, 0, 0)
    assert later.computed_bytes == later.chosen_bytes == before.computed_bytes
    assert model.stats().use_cached
    assert [each[0] for each in told] == [0, 1, 0, 1]
    assert all(each[3].eq(256).all() and each[1].shape == each[2].shape == (32, 2) for each in told)


def test_a_second_plan_says_how_much_of_what_is_resident_runs(offload: Any, small: Any, prompts: Any) -> None:
    import torch

    from coterie.pruning.width_planning import plan_widths

    wide, narrow = (plan_widths(small.profile, "value", bytes=share) for share in (0.8, 0.3))
    told: list[Any] = []
    model = offload("100%", narrow, use_cached=wide, check=True, observe=lambda *each: told.append(each))
    logits(offload("100%", narrow, observe=lambda *each: told.append(each)), prompts)
    logits(model, prompts)
    for plain, used in zip(told[:2], told[2:], strict=True):
        assert torch.equal(plain[1], used[1])
        assert (used[3] >= plain[3]).all()


def test_misses_that_weigh_little_are_skipped(offload: Any, prompts: Any, expected: Any) -> None:
    import torch

    assert torch.equal(logits(offload("20%", skip_misses=0.0), prompts), expected[0][1])
    told: list[Any] = []
    model = offload("20%", skip_misses=1.0, check=True, observe=lambda *each: told.append(each))
    with torch.inference_mode():
        model.generate(prompts[:1], max_new_tokens=4, do_sample=False)
    stats = model.stats()
    assert stats.skipped == sum(int((widths == 0).sum()) for *_, widths in told) > 0
    for _, _, weights, widths in told:
        shares = weights / weights.sum(1, keepdim=True)
        assert (shares[widths == 0] < 0.5).all()
    assert stats.skip_misses == 1.0
    nothing = offload("20%", skip_misses=3.0)
    logits(nothing, prompts)
    assert nothing.stats().loaded_bytes == 0
    assert nothing.stats().chosen_bytes > 0


def test_widths_that_cannot_be_are_refused(offload: Any, prompts: Any) -> None:
    import torch

    with pytest.raises(ConfigError, match=r"257 neurons of expert \d cannot run"):
        logits(offload("20%", lambda layer, ids, weights: torch.full_like(ids, 257)), prompts)
    with pytest.raises(ConfigError, match="whole experts have no wider ones; give widths"):
        offload("20%", use_cached=True)
    with pytest.raises(ConfigError, match="skip_misses = -1"):
        offload("20%", skip_misses=-1)


def test_everything_resident_is_read_once(offload: Any, prompts: Any) -> None:
    model = offload("100%")
    logits(model, prompts)
    read = model.stats().loaded_bytes
    logits(model, prompts)
    stats = model.stats()
    assert stats.loaded_bytes == read > 0
    assert stats.bytes_share == 0.5
    assert 0 <= stats.overlap <= 1
    assert stats.to_json()["miss_ratio"] == stats.misses / (stats.hits + stats.misses)
    later = model.stats().since(stats)
    assert (later.hits, later.misses, later.loaded_bytes) == (0, 0, 0)


def test_recording_works_on_an_offloaded_model(offload: Any, small: Any) -> None:
    import numpy as np
    import torch

    texts = [[5, 6, 7, 8, 9, 10]]
    traces = []
    for model in (small.model, offload("20%")):
        with coterie.record(model) as recorder, torch.inference_mode():
            model(input_ids=torch.tensor(texts))
        traces.append(np.asarray(recorder.trace().expert_ids))
    assert np.array_equal(*traces)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ("1%", BudgetError, "too small: the smallest workable one holds one expert, 196,608 bytes"),
        (1000, BudgetError, "1,000 bytes is too small"),
        ("0.1KiB", BudgetError, "too small"),
        ("150%", ConfigError, "not within 0 and 1"),
        ("a lot", ConfigError, "not a number with a unit"),
        (True, ConfigError, "neither bytes nor a share"),
    ],
)
def test_budgets_that_cannot_be(budget: Any, error: type[Exception], message: str, offload: Any) -> None:
    with pytest.raises(error, match=message):
        offload(budget)


def test_a_narrow_plan_needs_no_room_for_a_whole_expert(offload: Any, small: Any, prompts: Any) -> None:
    import torch

    from coterie.pruning.width_planning import plan_widths

    plan, block = plan_widths(small.profile, "uniform", bytes=0.25), 16 * 3 * 64 * 4  # 64 of 256 neurons: 4 blocks
    narrow, roomy = offload(4 * block, plan, check=True), offload("100%", plan)
    assert torch.equal(logits(narrow, prompts), logits(roomy, prompts))
    assert narrow.stats().peak_expert_bytes == 4 * block
    message = r"holds one expert as wide as the plan runs any \(64 of 256 neurons\), 49,152 bytes"
    with pytest.raises(BudgetError, match=message):
        offload(4 * block - 1, plan)
    with pytest.raises(BudgetError, match="holds one expert, 196,608 bytes"):
        offload(4 * block)
    with pytest.raises(
        BudgetError, match="holds one expert, 196,608 bytes"
    ):  # what a function says is not known before
        offload(4 * block, lambda layer, ids, weights: torch.full_like(ids, 64))


def test_a_budget_beyond_the_free_memory_is_refused(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.offloading.places.available_bytes", lambda: 10**6)
    with pytest.raises(BudgetError, match=r"1,000,000 .* of memory are free; choose a smaller one"):
        offload("50%")


def test_names_and_plans_that_do_not_fit(offload: Any, small: Any, make_profile: Any) -> None:
    from coterie.pruning.width_planning import plan_widths

    with pytest.raises(ConfigError, match="unknown eviction policy 'lruu'; did you mean 'lru'"):
        offload("20%", policy="lruu")
    with pytest.raises(ConfigError, match="unknown schedule 'jonson'; did you mean 'johnson'"):
        offload("20%", schedule="jonson")
    with pytest.raises(ConfigError, match="is of the model toy with identity 0123456789abcdef"):
        offload("20%", plan_widths(make_profile(2, 8, 2, 256), "uniform", bytes=0.5))
    other = make_profile(2, 8, 2, 256, seed=4, spec=small.profile.spec, identity=small.profile.identity)
    with pytest.raises(ConfigError, match="pack with the plan's own profile"):
        offload("20%", plan_widths(other, "uniform", bytes=0.5))
    with pytest.raises(ConfigError, match="must be positive"):
        offload("20%", timeout=0)
    with pytest.raises(ConfigError, match="both must be positive"):
        offload("20%", threads=0)


def test_an_emulated_link_is_no_faster_than_it_says(offload: Any, prompts: Any) -> None:
    model = offload("20%", bandwidth=20e6)
    logits(model, prompts)
    stats = model.stats()
    assert stats.loaded_bytes / stats.load_seconds <= 20e6
    assert stats.emulated_bandwidth == 20e6


def test_training_and_use_after_closing_are_refused(offload: Any, prompts: Any) -> None:
    model = offload("20%")
    embedded = model.get_input_embeddings()(prompts).detach().requires_grad_()
    with pytest.raises(ConfigError, match="offloaded experts do not train"):
        model(inputs_embeds=embedded)
    model.close()
    model.close()
    with pytest.raises(ConfigError, match="was closed"):
        logits(model, prompts)


def test_a_timeline_tells_every_load_and_computation(offload: Any, prompts: Any, tmp_path: Path) -> None:
    from coterie.offloading.timeline import Timeline

    timeline = Timeline()
    model = offload("30%", timeline=timeline)
    logits(model, prompts)
    timeline.write(tmp_path / "t.json")
    spans = [each for each in timeline.to_json()["traceEvents"] if each["ph"] == "X"]
    read = sum(each["args"]["bytes"] for each in spans if each["cat"] == "link")
    assert read == model.stats().loaded_bytes
    computed = [each for each in spans if each["cat"] == "compute"]
    assert len(computed) == model.stats().hits + model.stats().misses
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in spans)
    assert (tmp_path / "t.json").read_text().startswith('{"traceEvents"')


def test_threads_end_with_the_model(small: Any) -> None:
    import gc

    before = threading.active_count()
    model = coterie.offload(small.store, "20%", threads=3)
    assert threading.active_count() == before + 3
    del model
    gc.collect()
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="must be positive"):
        coterie.offload(small.store, "20%", timeout=0)
    assert threading.active_count() == before, "none began"
