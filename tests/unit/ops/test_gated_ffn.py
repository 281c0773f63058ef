"""Experts run in part: against a plain masked computation, and against each family's own module."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from coterie.errors import CheckpointError, ConfigError
from coterie.families import FAMILIES

pytestmark = pytest.mark.needs("transformers")

TOKENS = 9


@pytest.fixture(scope="module")
def experts_of(tiny_checkpoint: Any) -> Any:
    """The first experts module of each family's tiny model, in float64; biases are not zero."""
    import torch

    from coterie.models.layers import find_moe_layers
    from coterie.models.load import load_model

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            experts = find_moe_layers(load_model(tiny_checkpoint(family)))[0].experts.double().requires_grad_(False)
            for name, tensor in experts.named_parameters():
                if name.endswith("bias"):
                    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
            made[family] = experts
        return made[family]

    return get


def decisions(experts: Any, tokens: int = TOKENS, top_k: int = 3, seed: int = 0) -> tuple[Any, Any, Any]:
    """(hidden, ids, weights): different experts for each token, weights of any scale."""
    import torch

    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 32, generator=random, dtype=torch.float64)
    ids = torch.rand(tokens, experts.num_experts, generator=random).argsort(1)[:, :top_k]
    return hidden, ids, torch.rand(tokens, top_k, generator=random, dtype=torch.float64) * 2


def parts_of(experts: Any) -> Any:
    from coterie.ops.gated_ffn import ExpertWeights

    return ExpertWeights.of(experts)


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_widths_equal_the_masked_computation(family: str, tokens: int, experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn, gated_ffn_reference

    experts = experts_of(family)
    parts = parts_of(experts)
    hidden, ids, weights = decisions(experts, tokens)
    choices = torch.tensor([0, 1, 5, 16, parts.width])
    widths = choices[torch.randint(0, 5, ids.shape, generator=torch.Generator().manual_seed(tokens))]
    got = gated_ffn(parts, hidden, ids, weights, widths)
    torch.testing.assert_close(got, gated_ffn_reference(parts, hidden, ids, weights, widths), rtol=1e-12, atol=1e-12)
    full = gated_ffn(parts, hidden, ids, weights, torch.full_like(ids, parts.width))
    assert (got - full).abs().max() > 1e-3, "widths must matter"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_equals_the_module_itself_without_the_other_neurons(family: str, experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn

    experts = experts_of(family)
    parts = parts_of(experts)
    hidden, ids, weights = decisions(experts)
    for width in (7, parts.width):
        narrow = copy.deepcopy(experts)
        narrow.config._experts_implementation = "eager"  # the one that runs in float64
        down = narrow.down_proj.transpose(1, 2) if family == "gpt_oss" else narrow.down_proj  # [E, H, I]
        down[:, :, width:] = 0
        got = gated_ffn(parts, hidden, ids, weights, torch.full_like(ids, width))
        torch.testing.assert_close(got, narrow(hidden, ids, weights), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_width_of_zero_skips_the_expert_with_its_bias(family: str, experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn

    parts = parts_of(experts_of(family))
    hidden, ids, weights = decisions(experts_of(family))
    widths = torch.full_like(ids, parts.width)
    widths[:, 1], widths[4] = 0, 0
    got = gated_ffn(parts, hidden, ids, weights, widths)
    kept = [0, 2]
    expected = gated_ffn(parts, hidden, ids[:, kept], weights[:, kept], torch.full_like(ids[:, kept], parts.width))
    expected[4] = 0
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_token_s_sum_goes_by_its_slots_whatever_else_runs(experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import weighted_sum

    outputs = torch.tensor([[[1e8], [1.0], [-1e8]], [[1e8], [-1e8], [1.0]]], dtype=torch.float32)
    weights = torch.ones(2, 3)
    assert weighted_sum(outputs, weights).flatten().tolist() == [0.0, 1.0]  # float32 loses the 1 in this order alone
    assert weighted_sum(outputs.double(), weights.double()).flatten().tolist() == [1.0, 1.0]


def test_small_groups_join_wider_ones_of_their_expert() -> None:
    from coterie.ops.gated_ffn import Group, _joined

    assert _joined([Group(0, 16, 2), Group(0, 48, 1), Group(1, 16, 2)]) == [Group(0, 48, 3, True), Group(1, 16, 2)]
    assert _joined([Group(0, 16, 9), Group(0, 48, 1)]) == [Group(0, 16, 9), Group(0, 48, 1)]
    assert _joined([Group(0, 0, 1), Group(0, 48, 1)]) == [Group(0, 0, 1), Group(0, 48, 1)]
    assert _joined([Group(0, 0, 1), Group(0, 48, 1)], 10**6) == [Group(0, 0, 1), Group(0, 48, 1)]
    assert _joined([Group(0, 16, 9), Group(0, 48, 1)], 32) == [Group(0, 48, 10, True)]
    assert _joined([]) == []


def test_padded_rows_change_nothing(experts_of: Any) -> None:
    """In bf16 on a CPU, for every number of rows about the steps of padding."""
    import torch

    from coterie.ops.gated_ffn import ExpertWeights, gated_ffn, gated_ffn_reference

    whole = parts_of(experts_of("qwen3_moe"))
    parts = ExpertWeights(whole.gate_up.bfloat16(), whole.down.bfloat16(), None, None, False, False, whole.gate)
    for tokens in (8, 9, 17, 63, 64, 65, 130):
        hidden, ids, weights = decisions(experts_of("qwen3_moe"), tokens, 1)
        given = (torch.zeros_like(ids), weights, (torch.arange(tokens) % 3 * 8)[:, None])
        got = gated_ffn(parts, hidden.bfloat16(), *given)
        expected = gated_ffn_reference(whole, hidden, *given)
        torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_groups_that_are_not_joined_compute_the_same(experts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from coterie.ops import gated_ffn

    parts = parts_of(experts_of("gpt_oss"))
    hidden, ids, weights = decisions(experts_of("gpt_oss"), 40)
    widths = torch.randint(0, 49, ids.shape, generator=torch.Generator().manual_seed(2))
    got = []
    for rows in (0, 10**6):
        monkeypatch.setattr(gated_ffn, "_READ_ROWS", rows)
        monkeypatch.setattr(gated_ffn, "_CALL_TERMS", rows)
        got.append(gated_ffn.gated_ffn(parts, hidden, ids, weights, widths))
    torch.testing.assert_close(*got, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weights_are_views(family: str, experts_of: Any) -> None:
    experts = experts_of(family)
    parts = parts_of(experts)
    assert parts.gate_up.data_ptr() == experts.gate_up_proj.data_ptr()
    assert parts.down.data_ptr() == experts.down_proj.data_ptr()
    per_neuron = 3 * 32 + (2 if family == "gpt_oss" else 0)
    assert parts.neuron_bytes == per_neuron * 8
    assert (parts.num_experts, parts.width) == (8, 48)


def test_gradients_flow_through_what_runs(experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn, gated_ffn_reference

    parts = parts_of(experts_of("qwen3_moe"))
    hidden, ids, weights = decisions(experts_of("qwen3_moe"))
    widths = torch.tensor([8, 24, 0]).expand_as(ids)
    gradients = []
    for run in (gated_ffn, gated_ffn_reference):
        x, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(parts, x, ids, w, widths).square().sum(), (x, w)))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_no_tokens_no_output(experts_of: Any) -> None:
    from coterie.ops.gated_ffn import gated_ffn

    hidden, ids, weights = decisions(experts_of("mixtral"))
    none = gated_ffn(parts_of(experts_of("mixtral")), hidden[:0], ids[:0], weights[:0], ids[:0])
    assert none.shape == (0, 32)


@pytest.mark.parametrize(("width", "expert"), [(-1, 0), (25, 0), (4, 8)])
def test_what_cannot_run_is_refused(width: int, expert: int, experts_of: Any) -> None:
    import torch

    from coterie.ops.gated_ffn import gated_ffn

    hidden, _, weights = decisions(experts_of("qwen3_moe"), 1, 1)
    ids = torch.tensor([[expert]])
    with pytest.raises(ConfigError, match=r"there are 8 experts of 24 neurons"):
        gated_ffn(parts_of(experts_of("qwen3_moe")), hidden, ids, weights, torch.tensor([[width]]))


def test_modules_of_another_kind_are_refused(experts_of: Any) -> None:
    from torch import nn

    with pytest.raises(CheckpointError, match="Linear has no gate_up_proj"):
        parts_of(nn.Linear(2, 2))
    for flag, value, message in (
        ("has_gate", False, "has no gate:"),
        ("has_post_expert_norm", True, "normalises"),
        ("_is_expert_parallel", True, "spread over processes"),
    ):
        experts = copy.deepcopy(experts_of("mixtral"))
        setattr(experts, flag, value)
        with pytest.raises(CheckpointError, match=message):
            parts_of(experts)
    with pytest.raises(CheckpointError, match="meta device"):
        parts_of(copy.deepcopy(experts_of("mixtral")).to("meta"))
