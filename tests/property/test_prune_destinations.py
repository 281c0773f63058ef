"""The torch rules against plain Python, to the last tie, in float64 and float32; the Triton form against them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.pruning import reference
from coterie.pruning.destinations import Cap, Naive, Priced
from coterie.topology import Topology

pytestmark = pytest.mark.needs("torch")

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which reads it then

TOPOLOGIES = ("1", "2", "4", "8", "2x2,inter=2", "2x3,inter=5", "3x2,inter=1")
# few distinct values, so that ties in weight, in a/c and in sums are common; some exact in binary, some not
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.25, 0.5, 1.0, 3e-7)
THETAS = (0.0, 0.1, 0.25, 0.3, 0.6, 2.0)
PARTS = 23  # sums of 23rds are often rounded to below the number they stand for, in float32
# where the sums of parts end, less what some rules allow
BOUNDS = tuple(n / PARTS - less for n in range(2, PARTS, 3) for less in (0.0, reference.TOLERANCE))
thresholds = st.sampled_from((0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.9)) | st.sampled_from(BOUNDS) | st.floats(1e-5, 0.99)


class Tokens:
    """Up to six tokens of a layer with up to eight experts a token, some of them already dropped."""

    def __init__(self, topology: Topology, experts: int, top_k: int, tokens: int, seed: int, ties: bool) -> None:
        rng = np.random.default_rng(seed)
        ids_TK = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        self.cost_GG = topology.cost_matrix()
        self.device_TK = rng.integers(0, topology.num_devices, experts)[ids_TK]
        if not ties:
            self.weight_TK = rng.random(ids_TK.shape) ** 3
        elif rng.random() < 0.5:
            self.weight_TK = rng.choice(WEIGHTS, size=ids_TK.shape)
        else:
            self.weight_TK = rng.multinomial(PARTS, [1 / top_k] * top_k, tokens).astype(float)
        self.theta_G = rng.choice(THETAS, size=topology.num_devices) if ties else rng.random(topology.num_devices) / 3
        self.home_T = rng.integers(-1, topology.num_devices, tokens) if rng.random() < 0.8 else None
        self.before_TK = rng.random(ids_TK.shape) < 0.8 if rng.random() < 0.5 else None
        if self.before_TK is not None:
            self.weight_TK = np.where(self.before_TK, self.weight_TK, np.nan)  # what was dropped must not be read

    def token(self, t: int) -> tuple[list[int], list[tuple[int, float]], int, dict[int, float]]:
        """The kept slots of a token, its (device, weight) pairs, its home, and the cost from there."""
        before_K = np.ones(self.device_TK.shape[1], bool) if self.before_TK is None else self.before_TK[t]
        slots = [int(k) for k in np.flatnonzero(before_K)]
        pairs = [(int(self.device_TK[t, k]), float(self.weight_TK[t, k])) for k in slots]
        home = -1 if self.home_T is None else int(self.home_T[t])
        costs = {d: float(self.cost_GG[home, d]) if home >= 0 else 1.0 for d in range(len(self.cost_GG))}
        return slots, pairs, home, costs

    def in_float32(self) -> Tokens:
        """The same with NumPy's float32 in place of Python's floats, with which the plain rules round every sum."""
        self.weight_TK, self.theta_G = self.weight_TK.astype(np.float32), self.theta_G.astype(np.float32)
        plain = self.token

        def token(t: int) -> tuple[list[int], list[tuple[int, float]], int, dict[int, float]]:
            slots, pairs, home, costs = plain(t)
            rounded = [(device, np.float32(weight)) for device, weight in pairs]
            if not sum(weight for _, weight in pairs):  # equal shares, of which Python's rule makes Python floats
                rounded = [(device, np.float32(1)) for device, _ in pairs]
            return slots, rounded, home, costs

        self.token = token  # type: ignore[method-assign]
        return self

    def expected(self, rule: str, strength: float, prices: float = 1.0) -> np.ndarray:
        """What the plain rules keep, [T, K], with the thetas times `prices`."""
        kept_TK = np.zeros(self.device_TK.shape, dtype=np.bool_)
        for t in range(len(kept_TK)):
            slots, pairs, home, costs = self.token(t)
            if rule == "naive":
                kept_TK[t, [slots[n] for n in reference.naive(pairs, strength)]] = True
                continue
            if rule == "cap":
                devices = reference.cap(pairs, home, costs, strength)
            else:
                devices = reference.priced(pairs, home, costs, dict(enumerate(self.theta_G * prices)), strength)
            kept_TK[t, [k for k in slots if int(self.device_TK[t, k]) in devices]] = True
        return kept_TK

    def actual(self, rule: str, strength: float, dtype: str = "float64") -> np.ndarray:
        """What the torch rules keep, [T, K]."""
        import torch

        from coterie.ops import prune_destinations as op

        def tensor(values: Any) -> Any:
            return None if values is None else torch.tensor(values)

        weight_TK = tensor(self.weight_TK).to(getattr(torch, dtype))
        before_TK, home_T, device_TK = tensor(self.before_TK), tensor(self.home_T), tensor(self.device_TK)
        links = op.Links.of(self.cost_GG, dtype=getattr(torch, dtype))
        if rule == "naive":
            kept_TK = op.naive(weight_TK, strength, before_TK)
        elif rule == "cap":
            kept_TK = op.cap(device_TK, weight_TK, home_T, links, strength, before_TK)
        else:
            kept_TK = op.priced(device_TK, weight_TK, home_T, links, tensor(self.theta_G), strength, before_TK)
        assert kept_TK.dtype == torch.bool
        return kept_TK.numpy()


@st.composite
def layers(draw: st.DrawFn, ties: bool | None = None) -> Tokens:
    topology = Topology.parse(draw(st.sampled_from(TOPOLOGIES)))
    experts = draw(st.integers(1, 10))
    top_k, tokens = draw(st.integers(1, min(8, experts))), draw(st.integers(1, 6))
    return Tokens(
        topology, experts, top_k, tokens, draw(st.integers(0, 2**32 - 1)), draw(st.booleans()) if ties is None else ties
    )


@given(layers(), thresholds)
def test_cap_equals_its_reference(tokens: Tokens, p: float) -> None:
    np.testing.assert_array_equal(tokens.actual("cap", p), tokens.expected("cap", p))


@given(layers(), thresholds)
def test_priced_equals_its_reference_with_and_without_floor(tokens: Tokens, floor: float) -> None:
    for least in (0.0, floor):
        np.testing.assert_array_equal(tokens.actual("priced", least), tokens.expected("priced", least))


@given(layers(), thresholds)
def test_naive_equals_its_reference(tokens: Tokens, p: float) -> None:
    np.testing.assert_array_equal(tokens.actual("naive", p), tokens.expected("naive", p))


@given(layers(ties=False), st.sampled_from(("cap", "naive", "priced")), thresholds)
def test_float32_agrees_where_no_share_is_near_a_bound(tokens: Tokens, rule: str, strength: float) -> None:
    shifts, scales = (-4e-6, 0.0, 4e-6), (1 - 1e-5, 1.0, 1 + 1e-5)
    answers = [tokens.expected(rule, strength + shift, scale) for shift in shifts for scale in scales]
    if all((answer == answers[0]).all() for answer in answers):
        np.testing.assert_array_equal(tokens.actual(rule, strength, "float32"), answers[0])


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="older NumPy adds scalars in float64")
@settings(max_examples=1000)
@given(layers(ties=True), st.sampled_from(("cap", "naive", "priced")), st.sampled_from(BOUNDS))
def test_float32_equals_the_reference_that_rounds_every_sum(tokens: Tokens, rule: str, strength: float) -> None:
    tokens = tokens.in_float32()
    np.testing.assert_array_equal(tokens.actual(rule, strength, "float32"), tokens.expected(rule, strength))


@pytest.mark.needs("triton")
@settings(max_examples=40)
@given(
    layers(), st.sampled_from(("cap", "naive", "priced")), thresholds | st.just(0.0), st.booleans(),
    st.sampled_from(("float32", "float16", "bfloat16")),
)  # fmt: skip
def test_the_triton_form_does_what_the_torch_form_does(
    tokens: Tokens, rule: str, strength: float, renormalise: bool, dtype: str
) -> None:
    import torch

    from coterie.ops import prune_destinations_triton, prune_layer
    from coterie.ops.prune_destinations import Links

    made: Any = {"cap": Cap, "naive": Naive, "priced": lambda floor: Priced(np.zeros((1, 1)), floor)}[rule](strength)
    home_T, before_TK = (None if x is None else torch.tensor(x) for x in (tokens.home_T, tokens.before_TK))
    given = (
        made, torch.tensor(tokens.device_TK), torch.tensor(tokens.weight_TK).to(getattr(torch, dtype)),
        torch.arange(len(tokens.cost_GG)), home_T, Links.of(tokens.cost_GG),
        torch.tensor(tokens.theta_G, dtype=torch.float32), before_TK,
    )  # fmt: skip
    got = prune_destinations_triton.prune(*given, renormalise=renormalise)
    expected = prune_layer.prune(*given, renormalise=renormalise)
    assert got.kept_TK.equal(expected.kept_TK)
    assert got.device_TK.equal(expected.device_TK)
    # the interpreter (3.9 for one) truncates where a GPU rounds to bfloat16
    step = 2**-7 if dtype == "bfloat16" and renormalise else 0.0
    torch.testing.assert_close(got.weight_TK, expected.weight_TK, rtol=step, atol=0.0, equal_nan=True)


@given(layers())
def test_p_zero_and_price_zero_keep_everything(tokens: Tokens) -> None:
    tokens.theta_G = np.zeros(len(tokens.cost_GG))
    before_TK = np.ones(tokens.device_TK.shape, bool) if tokens.before_TK is None else tokens.before_TK
    for rule in ("cap", "naive", "priced"):
        np.testing.assert_array_equal(tokens.actual(rule, 0.0), before_TK)


@given(layers(), thresholds, st.sampled_from(("float64", "float32", "bfloat16")))
def test_renormalised_weights_sum_to_what_they_summed_to(tokens: Tokens, p: float, dtype: str) -> None:
    import torch

    from coterie.ops import prune_destinations as op

    weight_TK = torch.tensor(np.nan_to_num(tokens.weight_TK)).to(getattr(torch, dtype))
    kept_TK = torch.tensor(tokens.expected("naive", p))
    dropped = op.apply(weight_TK, kept_TK, renormalise=False)
    assert (dropped[~kept_TK] == 0).all()
    assert torch.equal(dropped[kept_TK], weight_TK[kept_TK])
    scaled = op.apply(weight_TK, kept_TK, renormalise=True)
    assert scaled.dtype == weight_TK.dtype
    assert (scaled[~kept_TK] == 0).all()
    before, after = weight_TK.double().sum(1), scaled.double().sum(1)
    left = dropped.double().sum(1) > 0
    torch.testing.assert_close(after[left], before[left], rtol=0.01 if dtype == "bfloat16" else 1e-5, atol=0)
    assert (after[~left] == 0).all()


@given(layers())
def test_weights_of_which_all_are_kept_stay_bit_for_bit(tokens: Tokens) -> None:
    import torch

    from coterie.ops import prune_destinations as op

    weight_TK = torch.tensor(np.nan_to_num(tokens.weight_TK))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for renormalise in (False, True):
            weights = weight_TK.to(dtype)
            assert torch.equal(op.apply(weights, torch.ones_like(weights, dtype=torch.bool), renormalise), weights)
