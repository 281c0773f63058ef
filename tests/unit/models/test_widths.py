"""Models run with widths: the identity at full width, the exact undo, what is computed, counted and refused."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import BackendUnavailable, ConfigError
from coterie.families import FAMILIES
from coterie.models.identity import ORDER_KEY, identity_of, order_digest
from coterie.pruning.width_plan import WidthPlan

pytestmark = pytest.mark.needs("transformers")

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which reads it then


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Any) -> Any:
    """Loads each family's tiny model once; every test leaves it as it was."""
    from coterie.models.load import load_model

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = load_model(tiny_checkpoint(family)).requires_grad_(False)
        return made[family]

    return get


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts tables in place of the real ones, that give slot k the k-th width of the plan's table "widths"."""

    class Tables:
        def __init__(self, plan: WidthPlan) -> None:
            self.widths_K = plan.tables["widths"]

        @classmethod
        def of(cls, plan: WidthPlan, device: Any) -> Any:
            return cls(plan)

        def widths(self, layer: int, ids: Any, weights: Any) -> Any:
            import torch

            return torch.from_numpy(self.widths_K[: ids.shape[1]]).expand_as(ids)

    monkeypatch.setitem(sys.modules, "coterie.ops.widths", SimpleNamespace(WidthTables=Tables))


def uniform(width: int) -> Any:
    import torch

    return lambda layer, ids, weights: torch.full_like(ids, width)


def width_of(model: Any) -> int:
    from coterie.models.layers import find_moe_layers
    from coterie.ops.gated_ffn import ExpertWeights

    return ExpertWeights.of(find_moe_layers(model)[0].experts).width


def plan_for(model: Any, widths: list[int], **changes: Any) -> WidthPlan:
    from coterie.models.layers import spec_of

    spec, rng, width = spec_of(model), np.random.default_rng(4), width_of(model)
    order = np.stack([rng.permutation(width) for _ in range(spec.num_layers * spec.num_experts)])
    order_LEI = order.reshape(spec.num_layers, spec.num_experts, width)
    fields = {"identity": identity_of(model), "tables": {"widths": np.array(widths)}, **changes}
    return WidthPlan(spec=spec, width=width, order_LEI=order_LEI, policy="test", **fields)


def token_ids(rows: int = 2, columns: int = 9) -> Any:
    import torch

    return torch.from_numpy(np.random.default_rng(3).integers(3, 260, (rows, columns)))


def logits(model: Any, **kwargs: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=token_ids(**kwargs), use_cache=False).logits


def state(model: Any) -> list[Any]:
    """What must be as before: weights, hooks, overridden methods, the config."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = [
        (len(module._forward_pre_hooks), len(module._forward_hooks), "forward" in vars(module), len(vars(module)))
        for module in model.modules()
    ]
    return [tensors, others, model.config.to_dict()]


def require_equal(before: list[Any], after: list[Any]) -> None:
    assert before[1:] == after[1:]
    assert all(tensor.equal(after[0][name]) for name, tensor in before[0].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_full_width_is_the_model_and_leaving_undoes_everything(family: str, load: Any, tables: Any) -> None:
    import torch

    model = load(family)
    before, plain = state(model), logits(model)
    close = {"rtol": 1e-5, "atol": 1e-5 * float(plain.abs().max())}
    full = width_of(model)
    with coterie.apply_widths(model, uniform(full)) as execution:
        torch.testing.assert_close(logits(model), plain, **close)
        torch.testing.assert_close(logits(model, rows=1, columns=1), logits(model, columns=1)[:1], **close)
    assert execution.stats().to_json()["share"] == 1
    with coterie.apply_widths(model, plan_for(model, [full] * 3)):
        torch.testing.assert_close(logits(model), plain, **close)
    with coterie.apply_widths(model, plan_for(model, [full, full // 3, 0])):
        assert (logits(model) - plain).abs().max() > 1e-3
    require_equal(before, state(model))
    assert logits(model).equal(plain)


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe", "gpt_oss"])
def test_a_plan_runs_the_first_neurons_of_its_order(family: str, load: Any, tables: Any) -> None:
    """Against the model with the other neurons' part of down set to zero, in the original order."""
    import copy

    import torch

    from coterie.models.layers import find_moe_layers

    model = load(family)
    width = width_of(model)
    plan = plan_for(model, [width // 3] * 3)
    masked = copy.deepcopy(model)
    for layer in find_moe_layers(masked):
        down = layer.experts.down_proj.transpose(1, 2) if family == "gpt_oss" else layer.experts.down_proj
        for expert, order in enumerate(plan.order_LEI[layer.index]):
            down[expert][:, torch.from_numpy(order[width // 3 :])] = 0
    with coterie.apply_widths(model, plan) as execution:
        got = logits(model)
    expected = logits(masked)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    np.testing.assert_allclose(execution.stats().share, width // 3 / width)


def test_a_model_in_the_plan_s_order_is_not_reordered_again(load: Any, tables: Any) -> None:
    from coterie.models.reorder import reordered

    model = load("qwen3_moe")
    plan = plan_for(model, [16, 8, 8])
    with coterie.apply_widths(model, plan):
        expected = logits(model)
    with reordered(model, plan.order_LEI):
        inside = state(model)
        with coterie.apply_widths(model, plan):
            require_equal([inside[0], [], []], [model.state_dict(), [], []])
            assert logits(model).equal(expected)


def test_orders_that_do_not_belong_together_are_refused(load: Any, tables: Any) -> None:
    from coterie.models.reorder import reordered

    model = load("qwen3_moe")
    before = state(model)
    plan, other = plan_for(model, [8, 8, 8]), plan_for(model, [8, 8, 8]).order_LEI[::-1].copy()
    with (
        reordered(model, other),
        pytest.raises(ConfigError, match=f"in the order {order_digest(other)}, the width plan is for the original"),
        coterie.apply_widths(model, plan),
    ):
        pass
    later = plan_for(model, [8, 8, 8], settings={ORDER_KEY: order_digest(other)})  # profiled after it was reordered
    with reordered(model, other), coterie.apply_widths(model, later):
        logits(model)
    with pytest.raises(ConfigError, match="in the order of the original"), coterie.apply_widths(model, later):
        pass
    require_equal(before, state(model))


def test_plans_of_other_models_blocks_in_blocks_and_errors(load: Any, tables: Any) -> None:
    model = load("qwen3_moe")
    before = state(model)
    plan = plan_for(model, [8, 8, 8])
    with (
        pytest.raises(ConfigError, match="identity 0123, this one has"),
        coterie.apply_widths(model, plan_for(model, [8], identity="0123")),
    ):
        pass
    with (
        coterie.apply_widths(model, plan),
        pytest.raises(ConfigError, match="applied to this model already"),
        coterie.apply_widths(model, uniform(8)),
    ):
        pass
    with pytest.raises(ConfigError, match="99 neurons of expert"), coterie.apply_widths(model, uniform(99)):
        logits(model)
    with pytest.raises(ZeroDivisionError), coterie.apply_widths(model, plan):
        raise ZeroDivisionError
    with (
        coterie.apply_widths(model, plan, count=False) as execution,
        pytest.raises(ConfigError, match="nothing was counted"),
    ):
        execution.stats()
    require_equal(before, state(model))


def test_counts_are_of_what_was_chosen_and_sum_over_blocks(load: Any) -> None:
    from coterie.models.width_counts import WidthCounter

    model, chosen, counter = load("qwen3_moe"), [], WidthCounter()

    def widths(layer: int, ids: Any, weights: Any) -> Any:
        picked = (ids + layer) % 4 * 8  # 0, 8, 16 or 24 of 24
        chosen.append((layer, picked.numpy().copy()))
        return picked

    assert counter.stats().num_tokens == 0
    for _ in range(2):
        with coterie.apply_widths(model, widths, count=counter) as execution:
            logits(model)
    stats = execution.stats()
    assert stats.num_tokens == 36
    for layer in range(3):
        picked = np.concatenate([each for index, each in chosen if index == layer])
        assert stats.share[layer] == pytest.approx(picked.mean() / 24)
        assert stats.skipped[layer] == pytest.approx((picked == 0).mean())
        assert stats.expert_bytes[layer] == pytest.approx(picked.sum(1).mean() * 3 * 32 * 4)
    figures = stats.to_json()
    assert figures["share"] == pytest.approx(stats.share.mean())
    assert figures["layers"]["skipped"] == stats.skipped.tolist()


@pytest.mark.parametrize("outside", ["widths", "pruning"])
def test_widths_see_what_pruning_leaves_and_records_show_it(outside: str, load: Any, tmp_path: Any) -> None:
    from contextlib import ExitStack

    import torch

    model, seen = load("qwen3_moe"), []
    before = state(model)

    def widths(layer: int, ids: Any, weights: Any) -> Any:
        seen.append((layer, weights.clone()))
        return torch.where(weights > 0, 16, 0)

    with ExitStack() as stack:
        contexts = [
            lambda: coterie.apply_widths(model, widths),
            lambda: coterie.prune_destinations(model, p=0.5, topology="4"),
            lambda: coterie.record(model, path=tmp_path / "trace.safetensors"),
        ]
        order = contexts if outside == "widths" else contexts[1:] + contexts[:1]
        entered = [stack.enter_context(each()) for each in order]
        logits(model)
        execution = entered[0 if outside == "widths" else -1]
        pruned = float(torch.cat([weights for _, weights in seen]).eq(0).float().mean())
        assert pruned > 0.1
        assert execution.stats().skipped.mean() == pytest.approx(pruned)
    from coterie.trace.open import open_trace

    trace = open_trace(tmp_path / "trace.safetensors")
    for layer, weights in seen:
        np.testing.assert_allclose(trace.weights[layer], weights.numpy(), rtol=1e-3)
    require_equal(before, state(model))


def test_generation_with_widths(load: Any, tables: Any) -> None:
    import torch

    model = load("mixtral")
    plan = plan_for(model, [48, 16])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with coterie.apply_widths(model, plan) as execution:
        got = model.generate(token_ids(), **options)
        assert execution.stats().num_tokens == 2 * (9 + 3)
        for length in range(9, 13):  # each token is the likeliest after the ones before, all run at once
            with torch.inference_mode():
                last = model(input_ids=got[:, :length], use_cache=False).logits[:, -1]
            assert last.argmax(-1).equal(got[:, length])


@pytest.mark.needs("triton")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_triton_kernel_runs_models_alike(family: str, load: Any) -> None:
    import torch

    model = load(family)

    def widths(layer: int, ids: Any, weights: Any) -> Any:
        return (ids + layer) % 3 * (width_of(model) // 3)

    with coterie.apply_widths(model, widths):
        expected = logits(model)
    with coterie.apply_widths(model, widths, kernel="triton"):
        got = logits(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_kernels_that_are_not_there(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        coterie.apply_widths(load("mixtral"), uniform(8), kernel="tritn").__enter__()
    if importlib.util.find_spec("triton") is not None:
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")
            with pytest.raises(ConfigError, match="runs on GPUs and the model is on the CPU: use kernel='torch'"):
                coterie.apply_widths(load("mixtral"), uniform(8), kernel="triton").__enter__()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    with pytest.raises(BackendUnavailable, match=r"pip install 'coterie\[triton\]'"):
        coterie.apply_widths(load("mixtral"), uniform(8), kernel="triton").__enter__()


def test_in_bfloat16_it_stays_bfloat16(tiny_checkpoint: Any) -> None:
    import torch

    from coterie.models.load import load_model

    model = load_model(tiny_checkpoint("gpt_oss"), torch.bfloat16)
    plain = logits(model)
    with coterie.apply_widths(model, uniform(48)):
        got = logits(model)
    assert got.dtype == torch.bfloat16
    assert (got - plain).abs().max() < 0.03 * plain.abs().max()
