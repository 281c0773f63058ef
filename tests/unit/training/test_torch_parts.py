"""What is computed in an unusual way for speed equals the plain computation, gradients included."""

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]


def plain_experts(experts, hidden, ids, weights):
    import torch

    rows = []
    for token in range(len(hidden)):
        total = torch.zeros_like(hidden[token])
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            total = total + weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("num_tokens", [1, 150])
def test_padded_experts_equal_one_token_after_the_other(num_tokens):
    import torch
    from training.fast_experts import experts_forward

    torch.manual_seed(0)
    shapes = {"gate_up_proj": (5, 12, 8), "down_proj": (5, 8, 6)}
    experts = SimpleNamespace(
        **{name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    )
    hidden = torch.randn(num_tokens, 8, dtype=torch.float64, requires_grad=True)
    # expert 4 stays unused: an empty group
    weights, ids = torch.randn(num_tokens, 4, dtype=torch.float64).softmax(-1).topk(2)
    weights.requires_grad_()
    inputs = (hidden, weights, experts.gate_up_proj, experts.down_proj)
    outputs = [function(experts, hidden, ids, weights) for function in (experts_forward, plain_experts)]
    torch.testing.assert_close(*outputs)
    direction = torch.randn_like(hidden)
    ours, plain = (torch.autograd.grad((output * direction).sum(), inputs) for output in outputs)
    torch.testing.assert_close(ours, plain)


def test_rows_are_grouped_by_expert_in_multiples():
    import torch
    from training.fast_experts import ROWS, padded_rows

    ids = torch.tensor([[2, 0]] * (ROWS + 1))
    rows, spans = padded_rows(ids, 4)
    assert spans == [(0, 2 * ROWS), (2 * ROWS, 2 * ROWS), (2 * ROWS, 4 * ROWS), (4 * ROWS, 4 * ROWS)]
    assert rows.view(-1, 2)[:, 1].tolist() == list(range(ROWS + 1))
    assert rows.view(-1, 2)[:, 0].tolist() == list(range(2 * ROWS, 3 * ROWS + 1))


def test_the_loss_in_pieces_equals_cross_entropy():
    import torch
    from training.head_loss import ROWS, HeadLoss

    torch.manual_seed(0)
    hidden = torch.randn(ROWS + 7, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(20, (ROWS + 7,))
    ours = HeadLoss.apply(hidden, weight, targets)
    plain = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(3 * ours, (hidden, weight)), torch.autograd.grad(3 * plain, (hidden, weight))
    )


def test_attention_equals_sdpa_with_shared_keys():
    import torch
    from training.fast_attention import attention_forward

    torch.manual_seed(0)
    query = torch.randn(2, 6, 10, 4)
    key, value = torch.randn(2, 2, 2, 10, 4).unbind(0)
    ours, _ = attention_forward(None, query, key, value, None, scaling=0.5)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.5
    )
    torch.testing.assert_close(ours, plain.transpose(1, 2))


def test_balance_is_one_when_even_and_e_when_one_expert_takes_all():
    import torch
    from training.routing import balance_loss

    even = (torch.zeros(8, 4), torch.ones(8, 1), torch.arange(8)[:, None] % 4)
    alone = (torch.tensor([[50.0, 0, 0, 0]] * 8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.long))
    assert float(balance_loss([even])) == pytest.approx(1.0)
    assert float(balance_loss([alone])) == pytest.approx(4.0)
    assert float(balance_loss([even, alone])) == pytest.approx(2.5)


def small_model():
    import torch
    from training import fast_attention, fast_experts
    from transformers import MixtralConfig, MixtralForCausalLM

    fast_attention.register()
    fast_experts.register()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=40, tie_word_embeddings=True, **shape, **experts))
    model.set_attn_implementation(fast_attention.NAME)
    model.set_experts_implementation(fast_experts.NAME)
    return model


def test_master_weights_follow_adamw():
    import torch
    from training.optimizer import MasterAdamW

    plain = torch.nn.Linear(3, 2)
    masters = [parameter.detach().clone() for parameter in plain.parameters()]
    ours = MasterAdamW.of(plain, decay=0.1, betas=(0.9, 0.95))
    reference = [torch.nn.Parameter(master) for master in masters]
    options = [{"params": reference[:1], "weight_decay": 0.1}, {"params": reference[1:], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(options, lr=0.01, betas=(0.9, 0.95))
    for step in range(3):
        for parameter, other in zip(plain.parameters(), reference, strict=True):
            gradient = torch.full_like(other, 0.25 * (step + 1))
            parameter.grad.copy_(gradient)
            other.grad = gradient
        torch.nn.utils.clip_grad_norm_(reference, 1.0)
        ours.step(0.01, max_norm=1.0)
        adam.step()
    for parameter, other in zip(plain.parameters(), reference, strict=True):
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter, other.to(torch.bfloat16))
        assert not parameter.grad.any()


def test_an_interrupted_training_ends_as_an_uninterrupted_one(tmp_path):
    import torch
    from training.loop import train
    from training.models import SEQUENCE
    from training.schedule import Budget
    from training.settings import Settings

    tokens = {"a": np.random.default_rng(0).integers(0, 40, 2000).astype(np.uint16)}
    settings = Settings(rows=1, report_steps=1, checkpoint_seconds=0.0)
    once = small_model()
    (tmp_path / "once").mkdir()
    train(once, tokens, Budget(tokens=4 * SEQUENCE), settings, tmp_path / "once")

    folder = tmp_path / "twice"
    folder.mkdir()

    class Interruption(Exception):
        pass

    class Stops(dict):
        """Token arrays that can be looked at for so many batches."""

        batches = 2

        def values(self):
            self.batches -= 1
            if self.batches < 0:
                raise Interruption
            return super().values()

    with pytest.raises(Interruption):
        train(small_model(), Stops(tokens), Budget(tokens=4 * SEQUENCE), settings, folder)
    twice = small_model()
    position = train(twice, tokens, Budget(tokens=4 * SEQUENCE), settings, folder)
    assert (position.step, position.tokens) == (4, 4 * SEQUENCE)
    for ours, other in zip(once.parameters(), twice.parameters(), strict=True):
        assert torch.equal(ours, other)
    assert len((folder / "log.jsonl").read_text().splitlines()) == 4


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    from training import loop
    from training.settings import Position

    now = 100.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    position, clock = Position(seconds=50.0), loop.Clock()
    now += 3.0
    clock.update(position)
    assert position.seconds == 53.0
    now += 3600.0
    clock.update(position)
    assert position.seconds == 53.0 + loop.LONGEST_STEP_SECONDS


def test_quality_counts_every_token_but_the_first_once():
    import torch
    from training.models import SEQUENCE
    from training.quality import ROWS, measure

    class Uniform:
        """Says every one of 40 tokens is as likely as another."""

        def __call__(self, input_ids, use_cache):
            assert input_ids.shape[1] <= SEQUENCE
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 40))

    for length in (2, SEQUENCE, SEQUENCE + 1, ROWS * SEQUENCE + 2, 2 * ROWS * SEQUENCE + 300):
        found = measure(Uniform(), [3] * length, size=length)
        assert found.tokens == length - 1
        assert found.perplexity == pytest.approx(40.0)
