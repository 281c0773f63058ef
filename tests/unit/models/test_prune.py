"""Pruning live models: the identity, the exact undo, and the offline rules on what the same forward call decided."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import BackendUnavailable, ConfigError, InfeasiblePlacement
from coterie.families import FAMILIES
from coterie.placement.placement import Placement
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.pruning.report import Tally
from coterie.pruning.routed import RoutedTrace
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

pytestmark = pytest.mark.needs("transformers")

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which reads it then

ROWS, WIDTH = 3, 7


@pytest.fixture(scope="module")
def load(tiny_checkpoint: Any) -> Any:
    """Makes the tiny random model of a family."""
    from coterie.models.load import load_model

    return lambda family: load_model(tiny_checkpoint(family))


@pytest.fixture(scope="module")
def qwen(load: Any) -> Any:
    return load("qwen3_moe")


def token_ids(rows: int = ROWS, width: int = WIDTH) -> Any:
    import torch

    return torch.randint(3, 260, (rows, width), generator=torch.Generator().manual_seed(rows))


def logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@contextmanager
def seen(model: Any) -> Iterator[list[tuple[int, np.ndarray, np.ndarray]]]:
    """The decisions (layer, ids, weights) of every call while the block runs."""
    from coterie.models.intercept import intercept

    decisions: list[tuple[int, np.ndarray, np.ndarray]] = []

    def observe(layer: int, hidden: Any, ids: Any, weights: Any) -> None:
        decisions.append((layer, ids.numpy().copy(), weights.double().numpy().copy()))

    with intercept(model, observe):
        yield decisions


def placed(spec: MoESpec, topology: str) -> Placement:
    """Experts on devices at random, another way in each layer."""
    parsed, rng = Topology.parse(topology), np.random.default_rng(5)
    map_LP = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
    return Placement(map_LP, parsed, spec)


def traced(spec: MoESpec, decisions: list[tuple[int, np.ndarray, np.ndarray]], homes: np.ndarray) -> RoutingTrace:
    """One forward call's decisions as a trace; `homes`: of its rows."""
    ids_LTK = np.stack([ids for _, ids, _ in decisions]).astype(np.uint8)
    weights_LTK = np.stack([weights for *_, weights in decisions])
    return RoutingTrace(ids_LTK, spec, weights_LTK, home_ids=np.repeat(homes, ids_LTK.shape[1] // len(homes)))


@pytest.mark.parametrize("family", FAMILIES)
def test_p_zero_is_the_identity_and_leaving_undoes_everything(family: str, load: Any) -> None:
    from coterie.models.layers import spec_of

    model = load(family)
    ids = token_ids()
    plain, before = logits(model, ids), hooks(model)
    for renormalise in (None, True, False):
        with coterie.prune_destinations(model, p=0.0, topology="4", renormalise=renormalise):
            assert logits(model, ids).equal(plain)
    with seen(model) as decided, coterie.prune_destinations(model, p=0.6, topology="4") as pruner, seen(model) as used:
        assert not logits(model, ids).equal(plain)
    assert 0.4 - 1e-6 <= pruner.stats().to_json()["kept_weight"] < 1
    routed = RoutedTrace(traced(spec_of(model), decided, np.arange(ROWS)), pruner.device_LE, pruner.topology)
    for layer, _, weights in used:
        np.testing.assert_array_equal(weights > 0, Cap(0.6).prune_layer(layer, routed.layer(layer)))
    assert hooks(model) == before
    assert logits(model, ids).equal(plain)


def test_an_error_in_the_block_leaves_no_hooks(qwen: Any) -> None:
    before = hooks(qwen)
    with pytest.raises(ZeroDivisionError), coterie.prune_destinations(qwen, p=0.2, topology="4"):
        raise ZeroDivisionError
    assert hooks(qwen) == before


@pytest.mark.parametrize("topology", ["4", "2x2,inter=3", "2"])
@pytest.mark.parametrize(
    "rule", [Cap(0.45), Naive(0.45), Priced(np.full((3, 4), 0.45)), Priced(np.full((3, 4), 0.45), 0.6)]
)
def test_the_model_keeps_what_the_offline_rule_keeps(topology: str, rule: Any, qwen: Any) -> None:
    from coterie.models.layers import spec_of

    spec = spec_of(qwen)
    placement = placed(spec, topology)
    devices = placement.topology.num_devices
    if isinstance(rule, Priced):
        rule = Priced(rule.theta_LG[:, :devices], rule.floor)
    with seen(qwen) as before, coterie.prune_destinations(qwen, placement, rule=rule) as pruner, seen(qwen) as after:
        logits(qwen, token_ids())
    routed = RoutedTrace(
        traced(spec, before, np.arange(ROWS) % devices), placement.device_of_expert(), placement.topology
    )
    tally = Tally(spec.num_layers, devices)
    for layer in range(spec.num_layers):
        tokens = routed.layer(layer)
        expected_TK = rule.prune_layer(layer, tokens)
        assert not expected_TK.all(), "something must be dropped for the comparison to mean anything"
        np.testing.assert_array_equal(after[layer][2] > 0, expected_TK)
        np.testing.assert_array_equal(after[layer][1], before[layer][1])
        tally.add(layer, tokens, expected_TK)
    stats, report = pruner.stats(), tally.report()
    assert stats.num_tokens == ROWS * WIDTH
    for name in ("kept_weight", "emptied", "remote_dpt", "remote_peak_traffic"):
        np.testing.assert_allclose(getattr(stats, name), getattr(report, name), rtol=1e-6)


def test_in_generation_a_row_keeps_its_home(qwen: Any) -> None:
    from coterie.models.layers import spec_of

    spec = spec_of(qwen)
    placement = placed(spec, "4")
    with seen(qwen) as before, coterie.prune_destinations(qwen, placement, 0.5), seen(qwen) as after:
        qwen.generate(token_ids(), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    calls = len(before) // spec.num_layers
    assert calls == 3
    for call in range(calls):
        part = slice(call * spec.num_layers, (call + 1) * spec.num_layers)
        trace = traced(spec, before[part], np.arange(ROWS))
        routed = RoutedTrace(trace, placement.device_of_expert(), placement.topology)
        for layer, (_, _, weights) in enumerate(after[part]):
            np.testing.assert_array_equal(weights > 0, Cap(0.5).prune_layer(layer, routed.layer(layer)))


def test_homes_may_be_given_or_absent(qwen: Any) -> None:
    from coterie.models.layers import spec_of

    spec = spec_of(qwen)
    placement = placed(spec, "4")
    for homes in ([2, 0, 2], None):
        with seen(qwen) as before, coterie.prune_destinations(qwen, placement, 0.5, homes=homes), seen(qwen) as after:
            logits(qwen, token_ids())
        tokens = RoutedTrace(
            traced(spec, before, np.array(homes or [0])), placement.device_of_expert(), placement.topology
        ).layer(0)
        if homes is None:
            tokens.home_T[:] = -1
        np.testing.assert_array_equal(after[0][2] > 0, Cap(0.5).prune_layer(0, tokens))
    with (
        coterie.prune_destinations(qwen, placement, 0.5, homes=[0, 1]),
        pytest.raises(ConfigError, match="2 homes for a batch of 3 rows"),
    ):
        logits(qwen, token_ids())


@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_it_renormalises_where_the_model_does(family: str, load: Any) -> None:
    """Where a model renormalises, its weights sum to the same for every token."""
    from coterie.models.prune import renormalises

    model = load(family)
    with seen(model) as decisions:
        logits(model, token_ids())
    sums_T = np.concatenate([weights.sum(1) for *_, weights in decisions])
    assert renormalises(model) == bool(np.ptp(sums_T) < 1e-4)
    for renormalise in (None, True, False):
        with (
            coterie.prune_destinations(model, p=0.5, topology="4", renormalise=renormalise) as pruner,
            seen(model) as pruned,
        ):
            logits(model, token_ids())
        kept_T = pruned[0][2].sum(1) / decisions[0][2].sum(1)  # the first layer sees the same input
        rescaled = renormalises(model) if renormalise is None else renormalise
        assert pruner.renormalise == rescaled
        if rescaled:
            np.testing.assert_allclose(kept_T, 1, rtol=1e-5)
        else:
            assert kept_T.min() < 0.9
            assert np.isin(pruned[0][2], [0.0, *decisions[0][2].ravel()]).all()


@pytest.mark.parametrize(("says", "expected"), [(True, True), (False, False), (None, None)])
def test_another_family_goes_by_its_config_or_must_be_told(says: bool | None, expected: bool | None) -> None:
    from coterie.models.prune import renormalises

    config = SimpleNamespace(model_type="new_moe", norm_topk_prob=says)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config)
    if expected is None:
        with pytest.raises(ConfigError, match="say renormalise=True or False"):
            renormalises(model)
    else:
        assert renormalises(model) is expected


def test_bad_arguments_are_one_clear_error(qwen: Any) -> None:
    from coterie.models.layers import spec_of

    spec = spec_of(qwen)
    thetas = np.zeros((3, 4))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"p": 0.2}, ConfigError, "give a placement, or a topology"),
        ({"p": 0.2, "placement": placed(spec, "4"), "topology": "4"}, ConfigError, "brings its own topology"),
        ({"p": 1.0, "topology": "4"}, ConfigError, "not within 0 and 1"),
        ({"topology": "4"}, ConfigError, "the rule cap takes p"),
        ({"topology": "4", "rule": "naive", "p": 0.1, "thetas": thetas}, ConfigError, "neither thetas nor a floor"),
        ({"topology": "4", "rule": "priced", "p": 0.2}, ConfigError, "takes thetas"),
        ({"topology": "4", "rule": "priced", "thetas": thetas[:2]}, ConfigError, r"shape \[2, 4\].* need \[3, 4\]"),
        ({"topology": "4", "rule": "priced", "thetas": thetas, "floor": 2}, ConfigError, "floor of 2"),
        ({"topology": "4", "rule": "pried", "p": 0.2}, ConfigError, "did you mean 'priced'"),
        ({"topology": "4", "rule": Cap(0.2), "p": 0.2}, ConfigError, "given with its strength"),
        ({"topology": "4", "p": 0.2, "homes": "row"}, ConfigError, "homes = 'row'"),
        ({"topology": "4", "p": 0.2, "homes": [0, 4]}, ConfigError, "home 4 is no device"),
        ({"topology": "4", "p": 0.2, "homes": 4}, ConfigError, "home 4 is no device"),
        ({"topology": "9", "p": 0.2}, InfeasiblePlacement, "8 experts on 9 devices"),
        ({"placement": placed(MoESpec("other", 2, 8, 3), "4"), "p": 0.2}, InfeasiblePlacement, "made from this model"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message), coterie.prune_destinations(qwen, **arguments):
            pass
    with (
        coterie.prune_destinations(qwen, p=0.2, topology="4", count=False) as pruner,
        pytest.raises(ConfigError, match="nothing was counted"),
    ):
        pruner.stats()


@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("mixtral", Cap(0.45)),
        ("qwen3_moe", Cap(0.0)),
        ("qwen3_moe", Naive(0.45)),
        ("gpt_oss", Priced(np.full((9, 4), 0.45), 0.6)),
        ("deepseek_v2", Cap(0.45)),
    ],
)
def test_the_triton_kernel_runs_models_to_the_same_bits(family: str, rule: Any, load: Any) -> None:
    from coterie.models.layers import spec_of

    model = load(family)
    spec = spec_of(model)
    placement = placed(spec, "2x2,inter=3")
    if isinstance(rule, Priced):
        rule = Priced(rule.theta_LG[: spec.num_layers], rule.floor)
    found = []
    for kernel in ("torch", "triton"):
        with coterie.prune_destinations(model, placement, rule=rule, renormalise=True, kernel=kernel) as pruner:
            generated = model.generate(token_ids(), max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
            found.append((logits(model, token_ids()), generated, pruner.stats()))
    (expected, text, stats), (got, text_again, stats_again) = found
    assert got.equal(expected)
    assert text_again.equal(text)
    assert stats_again.to_json() == stats.to_json()
    assert (stats.kept_weight < 0.99).all() == (rule != Cap(0.0))


def test_kernels_that_are_not_there_or_do_not_run_here(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    def enter(kernel: str) -> None:
        coterie.prune_destinations(qwen, p=0.2, topology="4", kernel=kernel).__enter__()

    before = hooks(qwen)
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        enter("tritn")
    if importlib.util.find_spec("triton") is not None:
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0")
            with pytest.raises(ConfigError, match="runs on GPUs and the model is on the CPU: use kernel='torch'"):
                enter("triton")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    with pytest.raises(BackendUnavailable, match=r"pip install 'coterie\[triton\]'"):
        enter("triton")
    assert hooks(qwen) == before


@pytest.mark.needs("triton")
def test_a_model_that_the_triton_kernel_does_not_take_is_refused_before_it_runs(tiny_checkpoint: Any) -> None:
    import torch

    from coterie.models.load import load_model

    model = load_model(tiny_checkpoint("mixtral"), torch.float64)
    before = hooks(model)
    with (
        pytest.raises(ConfigError, match="in float64; the Triton kernel"),
        coterie.prune_destinations(model, p=0.2, topology="4", kernel="triton"),
    ):
        pass
    assert hooks(model) == before


def test_in_bfloat16_weights_stay_bfloat16(tiny_checkpoint: Any) -> None:
    import torch

    from coterie.models.load import load_model

    folder: Path = tiny_checkpoint("qwen3_moe")
    model = load_model(folder, torch.bfloat16)
    plain = logits(model, token_ids())
    with coterie.prune_destinations(model, p=0.0, topology="4"):
        assert logits(model, token_ids()).equal(plain)
    with coterie.prune_destinations(model, p=0.5, topology="4"):
        pruned = logits(model, token_ids())
    assert pruned.dtype == torch.bfloat16
    assert pruned.isfinite().all()
