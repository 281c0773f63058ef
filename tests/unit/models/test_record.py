"""The recorder around a model: which tokens count, exact undo, bounded memory, nothing half-written, clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError, TraceError
from coterie.models.intercept import intercept
from coterie.models.load import load_model
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.storage import ARRAY_FIELDS

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]
PROMPTS = ([10, 11, 12, 13, 14], [20, 21], [30, 31, 32], [40])


@pytest.fixture(scope="module")
def model(tiny_checkpoint) -> Any:
    return load_model(tiny_checkpoint("mixtral"))


def batch(rows=PROMPTS) -> dict[str, Any]:
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(model, **inputs):
    import torch

    with torch.no_grad():
        return model(**inputs)


def cache_name(output) -> str:
    """`past_key_values` before Transformers 5.24."""
    return "cache" if "cache" in output else "past_key_values"


def start(model, rows) -> dict[str, Any]:
    """Run prompts and return the cache, as an argument."""
    output = run(model, **batch(rows), use_cache=True)
    return {cache_name(output): output[cache_name(output)]}


def num_hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def assert_equal(one: RoutingTrace, other: RoutingTrace) -> None:
    for name in ARRAY_FIELDS:
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            np.testing.assert_array_equal(first, second, err_msg=name)
            assert first.dtype == second.dtype
    assert (one.spec, one.weight_ordered) == (other.spec, other.weight_ordered)


def generate(model, rows, **options):
    return model.generate(**batch(rows), do_sample=False, max_new_tokens=8, suppress_tokens=[0, 1, 2], **options)


# ---- which tokens count ---------------------------------------------------------------------------------------------


def test_rows_that_are_done_are_left_out(model):
    """In a batch, generation runs a finished row on; recorded is what the row makes by itself."""
    end = int(generate(model, PROMPTS)[1, 5 + 3])  # so that at least one row ends early
    alone = []
    for row in PROMPTS:
        with coterie.record(model, end_token_ids=[end]) as recorder:
            generate(model, [row], eos_token_id=end)
        alone.append(recorder.trace())
    with coterie.record(model, end_token_ids=[end]) as recorder:
        generate(model, PROMPTS, eos_token_id=end)
    together = recorder.trace()
    assert recorder.dropped["finished"] > 0
    assert together.provenance["dropped"] == recorder.dropped
    for sequence, single in enumerate(alone):
        mine = together.sequence_ids == sequence
        assert mine.sum() == single.num_tokens
        np.testing.assert_array_equal(together.positions[mine], single.positions)
        np.testing.assert_array_equal(together.expert_ids[:, mine], single.expert_ids)
        np.testing.assert_allclose(together.weights[:, mine], single.weights, atol=2e-5)


def test_end_tokens_come_from_the_models_configuration(model):
    import torch

    assert model.config.eos_token_id == 2
    fed = torch.tensor([[2], [9]])
    for ends, expected in ((None, [1, 2]), ((), [2, 2])):
        with coterie.record(model, end_token_ids=ends) as recorder:
            cache = start(model, ([5], [6]))
            run(model, input_ids=fed, **cache)
        assert np.bincount(recorder.trace().sequence_ids).tolist() == expected


def test_fed_padding_is_left_out(model):
    """A row that a stop string ended is fed padding only; one that sampled a padding token goes on after it."""
    import torch

    with coterie.record(model) as recorder:
        cache = start(model, ([5], [6]))
        for fed in ([7, 0], [8, 0], [0, 0], [9, 0]):
            run(model, input_ids=torch.tensor(fed)[:, None], **cache)
    trace = recorder.trace()
    assert trace.positions[trace.sequence_ids == 0].tolist() == [0, 1, 2, 4]
    assert trace.positions[trace.sequence_ids == 1].tolist() == [0]
    assert recorder.dropped == {"padding": 0, "finished": 5}


def test_sequences_go_on_with_their_cache(model):
    """Chunks of a prompt and turns of a conversation belong to one sequence; another cache is another sequence."""
    import torch

    long = [[3, 4, 5, 6, 7, 8, 9]]
    with coterie.record(model) as recorder:
        first = start(model, [long[0][:4]])
        other = start(model, [[50, 51]])
        run(model, input_ids=torch.tensor([long[0][4:6]]), **first)
        run(model, input_ids=torch.tensor([[52]]), **other)
        run(model, input_ids=torch.tensor([long[0][6:]]), **first)
        run(model, **batch(long))
    trace = recorder.trace()
    assert trace.sequence_ids.tolist() == [0] * 4 + [1] * 2 + [0] * 2 + [1] + [0] + [2] * 7
    assert trace.phase.tolist() == [0] * 4 + [0] * 2 + [0] * 2 + [1] + [1] + [0] * 7
    pieces, whole = trace.sequence_ids == 0, trace.sequence_ids == 2
    assert trace.positions[pieces].tolist() == list(range(7))
    np.testing.assert_array_equal(trace.expert_ids[:, pieces], trace.expert_ids[:, whole])


def test_a_cache_from_before_the_recording(model):
    import torch

    cache = start(model, [[3, 4, 5]])
    with coterie.record(model) as recorder:
        run(model, input_ids=torch.tensor([[6]]), **cache)
    assert (recorder.trace().positions.tolist(), recorder.trace().phase.tolist()) == ([3], [1])


def test_packed_sequences(model):
    import torch

    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    with coterie.record(model) as recorder:
        run(model, input_ids=torch.arange(5, 11)[None], position_ids=positions, use_cache=False)
        run(model, **batch([[7]]))
    assert recorder.trace().sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert recorder.trace().positions.tolist() == [*positions[0].tolist(), 0]


def test_several_samples_of_one_prompt(model):
    """`num_return_sequences` makes rows of one prompt; each is a sequence."""
    with coterie.record(model) as recorder:
        model.generate(
            **batch(PROMPTS[:1]), do_sample=True, num_return_sequences=3, max_new_tokens=4, suppress_tokens=[0, 2]
        )
    assert np.bincount(recorder.trace().sequence_ids).tolist() == [5 + 3] * 3


# ---- exact undo, any mode -------------------------------------------------------------------------------------------


def test_recording_changes_nothing(model):
    import torch

    before, hooks = run(model, **batch()).logits, num_hooks(model)
    with coterie.record(model):
        during = run(model, **batch()).logits
    after = run(model, **batch()).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert num_hooks(model) == hooks


def test_an_error_inside_leaves_nothing(model, tmp_path):
    hooks = num_hooks(model)
    path = tmp_path / "t.safetensors"
    with pytest.raises(RuntimeError, match="own"), coterie.record(model, path=path, buffer_tokens=1) as recorder:
        run_twice_and_fail(model)
    assert num_hooks(model) == hooks
    assert not list(tmp_path.iterdir())
    with pytest.raises(TraceError, match="ended with an error"):
        recorder.trace()


def test_grad_and_inference_mode_mix(model):
    import torch

    with coterie.record(model, buffer_tokens=64) as recorder:
        with torch.inference_mode():
            model(**batch())
        model(**batch()).logits.sum().backward()
        run(model, **batch())
    model.zero_grad()
    trace = recorder.trace()
    thirds = np.split(np.asarray(trace.weights), 3, axis=1)
    np.testing.assert_array_equal(thirds[0], thirds[1])
    np.testing.assert_array_equal(thirds[0], thirds[2])


def test_a_forward_call_that_failed_is_forgotten(model):
    with coterie.record(model) as recorder:
        run(model, **batch(PROMPTS[:1]))
        with pytest.raises(RuntimeError, match="out of memory"), intercept(model, fail_in_layer_1):
            run(model, **batch(PROMPTS))
        run(model, **batch(PROMPTS[1:2]))
    assert recorder.trace().sequence_ids.tolist() == [0] * 5 + [1] * 2
    assert recorder.trace().step.tolist() == [0] * 5 + [1] * 2


def run_twice_and_fail(model):
    for _ in range(2):
        run(model, **batch())
    raise RuntimeError("the block's own error")


def fail_in_layer_1(layer, hidden, ids, weights):
    if layer == 1:
        raise RuntimeError("out of memory")


# ---- memory, files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_tokens", [1, 7, 21])
def test_spilling_gives_the_same_trace(model, tmp_path, buffer_tokens):
    def work(recorder):
        generate(model, PROMPTS)
        run(model, **batch(PROMPTS[1:]))

    with coterie.record(model) as recorder:
        work(recorder)
    path = tmp_path / "t.safetensors"
    with coterie.record(model, path=path, buffer_tokens=buffer_tokens) as spilling:
        work(spilling)
        assert not path.exists()
    assert_equal(RoutingTrace.load(path), recorder.trace())
    assert_equal(spilling.trace(), recorder.trace())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_trace_so_far(model):
    with coterie.record(model) as recorder:
        run(model, **batch(PROMPTS[:1]))
        early = recorder.trace()
        run(model, **batch(PROMPTS[:1]))
    assert early.num_tokens == 5
    assert recorder.num_tokens == recorder.trace().num_tokens == 10
    np.testing.assert_array_equal(recorder.trace().expert_ids[:, :5], early.expert_ids)


def test_provenance(model):
    import torch
    import transformers

    with coterie.record(model, provenance={"source": "a text"}) as recorder:
        run(model, **batch())
    told = recorder.trace().provenance
    assert told["versions"] == {
        "coterie": coterie.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    assert (told["source"], told["format"], told["dtype"], told["tokens"]) == ("a text", "recorded", "float32", 11)


def test_dropped_experts_are_not_kept(model):
    import torch

    def drop_second(layer, hidden, ids, weights):
        return ids, torch.where(torch.arange(weights.shape[1]) == 1, 0, weights) if layer == 1 else weights

    with intercept(model, drop_second), coterie.record(model, pruning={"rule": "toy"}) as recorder:
        run(model, **batch())
    trace = recorder.trace()
    assert trace.kept[[0, 2]].all()
    assert trace.kept[1].tolist() == [[True, False]] * 11
    assert trace.provenance["pruning"] == {"rule": "toy"}


def test_bfloat16_weights_are_exact(tiny_checkpoint):
    model = load_model(tiny_checkpoint("mixtral", "bfloat16"))
    seen = []
    with coterie.record(model) as recorder, intercept(model, lambda layer, hidden, ids, weights: seen.append(weights)):
        run(model, **batch(PROMPTS[:1]))
    for layer, weights in enumerate(seen):
        np.testing.assert_array_equal(recorder.trace().weights[layer], weights.float().numpy())


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_beam_search_is_refused(model):
    with pytest.raises(ConfigError, match="beam search"), coterie.record(model):
        generate(model, PROMPTS, num_beams=2)
    assert num_hooks(model) == 0


def test_training_is_refused(model):
    try:
        model.train()
        with pytest.raises(ConfigError, match=r"model\.eval"), coterie.record(model):
            pass
        model.eval()
        with pytest.raises(ConfigError, match=r"model\.eval"), coterie.record(model):
            run(model.train(), **batch())
        model.eval()
        model.model.gradient_checkpointing = True
        with pytest.raises(ConfigError, match=r"checkpointing_disable\(\)"), coterie.record(model):
            pass
    finally:
        model.model.gradient_checkpointing = False
        model.eval()


def test_a_mask_that_cannot_tell_padding_is_refused(model):
    with pytest.raises(ConfigError, match="attention_mask"), coterie.record(model):
        generate(model, PROMPTS, cache_implementation="static")


def test_parts_of_a_model_are_refused(model):
    import torch

    block = model.model.layers[0].mlp
    with pytest.raises(ConfigError, match="run the model itself"), coterie.record(model):
        run(block, hidden_states=torch.zeros(1, 3, 32))


@pytest.mark.parametrize("path", [".", "absent/t.safetensors"])
def test_an_output_that_cannot_be_is_refused_at_once(model, tmp_path, path):
    with pytest.raises(ConfigError, match="cannot write"), coterie.record(model, path=tmp_path / path):
        pytest.fail("nothing may run")


def test_nothing_recorded(model, tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(TraceError, match="nothing was recorded"), coterie.record(model, path=path):
        pass
    assert not list(tmp_path.iterdir())


def test_buffer_of_nothing(model):
    with pytest.raises(ConfigError, match="at least 1"), coterie.record(model, buffer_tokens=0):
        pass
