"""The torch rules on small tokens worked out by hand, and that they never look at the data to find a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coterie.topology import Topology

pytestmark = pytest.mark.needs("torch")


def rules(device: str = "cpu", topology: str = "2x2,inter=5") -> dict[str, Callable[..., Any]]:
    """Every rule as a function of (device_TK, weight_TK, home_T, before_TK)."""
    import torch

    from coterie.ops import prune_destinations as op

    links = op.Links.of(Topology.parse(topology).cost_matrix(), device)
    theta_G = torch.full((4,), 0.2, device=device)
    return {
        "cap": lambda ids, weights, home, before: op.cap(ids, weights, home, links, 0.3, before),
        "naive": lambda ids, weights, home, before: op.naive(weights, 0.3, before),
        "priced": lambda ids, weights, home, before: op.priced(ids, weights, home, links, theta_G, 0.0, before),
        "priced with a floor": lambda ids, weights, home, before: op.priced(
            ids, weights, home, links, theta_G, 0.9, before
        ),
    }


def inputs(device: str, tokens: int, home: bool, before: bool) -> tuple[Any, ...]:
    import torch

    generator = torch.Generator().manual_seed(0)
    device_TK = torch.randint(0, 4, (tokens, 6), generator=generator)
    weight_TK = torch.rand((tokens, 6), generator=generator)
    home_T = torch.arange(tokens) % 4 if home else None
    before_TK = torch.rand((tokens, 6), generator=generator) < 0.8 if before else None
    return tuple(None if each is None else each.to(device) for each in (device_TK, weight_TK, home_T, before_TK))


@pytest.mark.parametrize("topology", ["4", "2x2,inter=5"])
@pytest.mark.parametrize("home", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_shapes_are_known_without_data(topology: str, home: bool, before: bool) -> None:
    """A meta tensor holds nothing: whatever read a value, or took a shape from one, would raise."""
    import torch

    from coterie.ops import prune_destinations as op

    for tokens in (1, 5):
        device_TK, weight_TK, home_T, before_TK = inputs("meta", tokens, home, before)
        for rule in rules("meta", topology).values():
            kept_TK = rule(device_TK, weight_TK, home_T, before_TK)
            assert (kept_TK.shape, kept_TK.dtype) == ((tokens, 6), torch.bool)
            for renormalise in (False, True):
                applied_TK = op.apply(weight_TK, kept_TK, renormalise)
                assert (applied_TK.shape, applied_TK.dtype) == ((tokens, 6), torch.float32)
            assert op.kept_share(weight_TK, kept_TK).shape == (tokens,)
            assert op.visits_per_device(device_TK, kept_TK, 4).shape == (tokens, 4)


@pytest.mark.parametrize("rule", ["cap", "naive", "priced", "priced with a floor"])
def test_a_trace_made_on_some_tokens_is_right_on_others(rule: str) -> None:
    """As a CUDA graph, a traced graph replays fixed operations: a choice made from data would be baked in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    function = rules()[rule]
    device_TK, weight_TK, home_T, _ = inputs("cpu", 32, home=True, before=False)
    traced = make_fx(lambda ids, weights, home: function(ids, weights, home, None))(device_TK, weight_TK, home_T)
    others = (device_TK.flip(0), weight_TK.flip(1) ** 4, home_T.flip(0))
    assert traced(*others).equal(function(*others, None))
    assert not function(*others, None).all()


def test_cap_keeps_the_home_and_the_best_bargain() -> None:
    import torch

    from coterie.ops import prune_destinations as op

    links = op.Links.of(Topology.parse("2x2,inter=5").cost_matrix())
    device_TK = torch.tensor([[2, 1, 0, 3]])
    weight_TK = torch.tensor([[0.4, 0.3, 0.1, 0.2]])
    home_T = torch.tensor([0])
    # home 0 (0.1), then a/c: device 1 0.3, device 2 0.08, device 3 0.04
    assert op.cap(device_TK, weight_TK, home_T, links, 0.2).tolist() == [[True, True, True, False]]
    assert op.cap(device_TK, weight_TK, home_T, links, 0.65).tolist() == [[False, True, True, False]]
    # without a home every device costs 1: 0.4, 0.3 and 0.2 make 0.9
    assert op.cap(device_TK, weight_TK, None, links, 0.1).tolist() == [[True, True, False, True]]
    # the same said for one token
    assert op.cap(device_TK, weight_TK, torch.tensor([-1]), links, 0.1).tolist() == [[True, True, False, True]]


def test_cap_drops_what_a_later_device_made_unnecessary() -> None:
    import torch

    from coterie.ops import prune_destinations as op

    links = op.Links.of(Topology.parse("2x2,inter=5").cost_matrix())
    device_TK, weight_TK = torch.tensor([[1, 2]]), torch.tensor([[0.2, 0.8]])
    # a/c: device 1 0.2, device 2 0.16; both are taken to reach 0.75, and then the light one can go
    assert op.cap(device_TK, weight_TK, torch.tensor([0]), links, 0.25).tolist() == [[False, True]]


def test_priced_compares_weight_with_price_times_cost() -> None:
    import torch

    from coterie.ops import prune_destinations as op

    links = op.Links.of(Topology.parse("2x2,inter=5").cost_matrix())
    device_TK, weight_TK = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0.05, 0.15, 0.5, 0.3]])
    theta_G, home_T = torch.tensor([0.9, 0.1, 0.1, 0.1]), torch.tensor([0])
    assert op.priced(device_TK, weight_TK, home_T, links, theta_G).tolist() == [[True, True, True, False]]
    assert op.priced(device_TK, weight_TK, None, links, theta_G).tolist() == [[False, True, True, True]]
    # a floor brings the dropped ones back
    assert op.priced(device_TK, weight_TK, home_T, links, theta_G, 0.9).tolist() == [[True, True, True, True]]


def test_of_zero_weights_each_is_an_equal_share() -> None:
    import torch

    from coterie.ops import prune_destinations as op

    links = op.Links.of(Topology.parse("4").cost_matrix())
    device_TK, weight_TK = torch.tensor([[3, 2, 1, 0]]), torch.zeros(1, 4)
    # equal devices: the lower number stays; half of the weight is enough
    assert op.cap(device_TK, weight_TK, None, links, 0.5).tolist() == [[False, False, True, True]]
    assert op.naive(weight_TK, 0.5).tolist() == [[True, True, False, False]]
    assert op.priced(device_TK, weight_TK, None, links, torch.full((4,), 0.25)).tolist() == [[True] * 4]
    kept_TK = torch.tensor([[True, True, False, False]])
    assert op.apply(weight_TK, kept_TK, renormalise=True).tolist() == [[0.0] * 4]
    assert op.kept_share(weight_TK, kept_TK).tolist() == [0.5]


def test_visits_count_devices_not_experts() -> None:
    import torch

    from coterie.ops import prune_destinations as op

    device_TK = torch.tensor([[0, 0, 2], [1, 2, 1]])
    kept_TK = torch.tensor([[True, True, False], [False, True, True]])
    assert op.visits_per_device(device_TK, kept_TK, 3).tolist() == [[True, False, False], [False, True, True]]
