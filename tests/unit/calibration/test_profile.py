"""Interrupted, updated and refused profiling; ablation against runs by hand; the choice of windows."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.errors import CheckpointError, ConfigError
from coterie.profile.profile_file import digest_of

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers")]

TOKENS, WINDOW = 160, 32


@pytest.fixture(scope="module")
def qwen(load: Any) -> Any:
    """A model of top-3 with its tokenizer."""
    return load("qwen3_moe")


class Stop(Exception):
    """Stands for the machine going away."""


def stopping_at(what: str, number: int) -> Any:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == what and done == number:
            raise Stop

    return progress


@pytest.mark.parametrize("gradients", [True, False])
def test_an_interrupted_run_goes_on_to_the_same_result(qwen, text, profiled, tmp_path, gradients):
    run = {"tokens": TOKENS, "window": WINDOW, "ablation_pairs": 4, "seed": 3, "gradients": gradients}
    whole = profiled(*qwen, text(400), **run)
    state = tmp_path / "p.partial"
    for stage, number in (("profiling", 4), ("leaving out experts", 3)):
        with pytest.raises(Stop):
            profiled(
                *qwen, text(400), **run, resume_from=state, save_every=2, progress=stopping_at(stage, number)
            )  # fmt: skip
        assert state.exists()
    seen: list[tuple[str, int]] = []
    again = profiled(
        *qwen, text(400), **run, resume_from=state, progress=lambda stage, done, _: seen.append((stage, done))
    )  # fmt: skip
    assert ("profiling", 1) not in seen
    assert [done for stage, done in seen if stage == "leaving out experts"] == [3, 4]
    assert digest_of(again) == digest_of(whole)
    assert again.provenance == whole.provenance
    assert {"ablation", "weight"} <= set(whole.dominance)


def test_a_state_of_another_run_is_refused(qwen, text, profiled, tmp_path):
    state = tmp_path / "p.partial"
    run = {"tokens": TOKENS, "window": WINDOW, "gradients": False, "resume_from": state}
    profiled(*qwen, text(400), **run)
    for other in ({"seed": 1}, {"ablation_pairs": 1}, {"window": 40}, {"tokens": 100}, {"gradients": True}):
        with pytest.raises(ConfigError, match=f"{state} is of another run .* delete {state}"):
            profiled(*qwen, text(400), **{**run, **other})
    with pytest.raises(ConfigError, match=r"of another run .*texts was"):
        profiled(*qwen, text(400, seed=1), **run)
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"truncated .* delete"):
        profiled(*qwen, text(400), **run)


def test_an_update_equals_profiling_both_texts(qwen, text, profiled):
    first, second = text(161), text(161, seed=1)
    run = {"tokens": TOKENS, "window": WINDOW}
    joint = profiled(*qwen, {"a": first, "b": second}, tokens=2 * TOKENS, window=WINDOW)
    old, new = profiled(*qwen, first, **run), profiled(*qwen, second, **run)
    updated = profiled(*qwen, second, **run, update=old)
    assert updated.num_tokens == joint.num_tokens == 2 * TOKENS
    np.testing.assert_array_equal(updated.load_LE, joint.load_LE)
    np.testing.assert_array_equal(updated.pairs_LEE, joint.pairs_LEE)
    for mine, theirs in ((updated.importance, joint.importance), (updated.dominance, joint.dominance)):
        assert set(mine) == set(theirs)
        for name, values in mine.items():
            np.testing.assert_allclose(values, theirs[name], rtol=1e-5)
    np.testing.assert_array_equal(
        updated.sample_ids_LSK, np.concatenate([old.sample_ids_LSK, new.sample_ids_LSK], axis=1)
    )
    assert updated.provenance["update"] == old.provenance


def test_the_sample_of_an_update_is_spread_over_both(qwen, text, profiled, monkeypatch):
    monkeypatch.setattr("coterie.calibration.sums.SAMPLE_TOKENS", 40)
    run = {"tokens": TOKENS, "window": WINDOW, "gradients": False}
    old = profiled(*qwen, text(400), **run)
    updated = profiled(*qwen, text(400, seed=1), **run, update=old)
    assert old.sample_ids_LSK.shape[1] == updated.sample_ids_LSK.shape[1] == 40
    np.testing.assert_array_equal(updated.sample_ids_LSK[:, :20], old.sample_ids_LSK[:, 1::2])


def test_an_update_keeps_ablations_that_are_not_measured_anew(qwen, text, profiled):
    run = {"tokens": TOKENS, "window": WINDOW, "gradients": False}
    old = profiled(*qwen, text(400), **run, ablation_pairs=3)
    updated = profiled(*qwen, text(400, seed=1), **run, update=old)
    np.testing.assert_array_equal(updated.dominance["ablation"], old.dominance["ablation"])
    assert np.isfinite(old.dominance["ablation"]).sum() == 6


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_ablation_is_a_run_without_the_expert(family, load, text, profiled):
    import torch

    from coterie.calibration.text_windows import text_windows
    from coterie.models.layers import find_moe_layers

    model, tokenizer = load(family)
    words = text(TOKENS + 1)
    made = profiled(model, tokenizer, words, tokens=TOKENS, window=WINDOW, gradients=False, ablation_pairs=4)
    table = made.dominance["ablation"]
    measured = np.argwhere(np.isfinite(table))
    assert len(measured) == 8
    assert len({layer for layer, _, _ in measured}) > 1
    windows = text_windows(model, tokenizer, {"text": words}, TOKENS, WINDOW, 0).windows
    uses = 0

    def loss() -> float:
        total = 0.0
        for window in windows:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([list(window.inputs)]), use_cache=False).logits[0]
            total -= float(torch.log_softmax(logits, dim=-1)[range(len(window.targets)), list(window.targets)].sum())
        return total

    def leave_out(module: Any, args: Any) -> Any:
        nonlocal uses
        hidden, ids, weights = args
        weights = weights.clone()
        for t in range(len(ids)):
            row = ids[t].tolist()
            anchor = row[int(weights[t].argmax())]
            if anchor in (masked, company) and {masked, company} <= set(row):
                uses += 1
                weights[t, row.index(masked)] = 0
        return hidden, ids, weights

    whole = loss()
    for layer, masked, company in measured.tolist():
        uses = 0
        handle = find_moe_layers(model)[layer].experts.register_forward_pre_hook(leave_out)
        rise = loss() - whole
        handle.remove()
        assert uses == made.pairs_LEE[layer, masked, company]
        assert table[layer, masked, company] == pytest.approx(rise / uses, rel=2e-3, abs=1e-4)


def test_the_sample_is_the_decisions_by_falling_weight(qwen, text, profiled):
    import torch

    model, tokenizer = qwen
    words = text(TOKENS + 1)
    made = profiled(model, tokenizer, words, tokens=TOKENS, window=TOKENS, gradients=False)
    with torch.no_grad(), coterie.record(model) as recorder:
        model(input_ids=torch.tensor([tokenizer(words)["input_ids"][:TOKENS]]))
    trace = recorder.trace()
    order = np.argsort(-trace.weights, axis=2, kind="stable")
    weights = np.take_along_axis(trace.weights, order, axis=2)
    np.testing.assert_array_equal(made.sample_ids_LSK, np.take_along_axis(trace.expert_ids, order, axis=2))
    np.testing.assert_allclose(made.sample_weights_LSK, weights / weights.sum(axis=2, keepdims=True), rtol=1e-5)


def test_nan_names_layer_expert_and_window(qwen, text, profiled):
    import torch

    from coterie.models.layers import find_moe_layers

    model, tokenizer = copy.deepcopy(qwen[0]), qwen[1]
    run = {"tokens": TOKENS, "window": WINDOW}
    sound = profiled(model, tokenizer, text(400), **run)
    expert = int(np.argmax(sound.load_LE[1]))
    with torch.no_grad():
        find_moe_layers(model)[1].experts.gate_up_proj[expert, 5, 7] = float("nan")
    for gradients in (True, False):
        with pytest.raises(
            CheckpointError, match=rf"MoE layer 1, expert {expert}: its activations are NaN .* window \d"
        ):
            profiled(model, tokenizer, text(400), **run, gradients=gradients)


def test_what_cannot_be_profiled(qwen, load, text, profiled):
    run = {"tokens": TOKENS, "window": WINDOW, "gradients": False}
    with pytest.raises(ConfigError, match=r"40 tokens are too few for 8 experts, top-3: .* use at least 43"):
        profiled(*qwen, text(400), tokens=40)
    with pytest.raises(ConfigError, match="text 'text' has 100 tokens, which is 3 windows of 32, and 5 are needed"):
        profiled(*qwen, text(100), **run)
    with pytest.raises(ConfigError, match="a window of 513 tokens; choose 2 to 512"):
        profiled(*qwen, text(400), tokens=TOKENS, window=513)
    old = profiled(*qwen, text(400), **run)
    with pytest.raises(ConfigError, match="their routers differ"):
        profiled(*load("olmoe"), text(400), **run, update=old)
    with pytest.raises(ConfigError, match="without gradients and this run is with them"):
        profiled(*qwen, text(400), **{**run, "gradients": True}, update=old)
    training = copy.deepcopy(qwen[0]).train()
    with pytest.raises(ConfigError, match="training mode"):
        profiled(training, qwen[1], text(400), **run)
    reordered = copy.deepcopy(qwen[0])
    reordered.config.coterie_neuron_order = "1234"
    with pytest.raises(ConfigError, match="in the order of the original, the model in 1234"):
        profiled(reordered, qwen[1], text(400), **run, update=old)


def test_few_tokens_are_warned_of(qwen, text):
    with pytest.warns(UserWarning, match=r"44 tokens are few for tiers: about \d\d% of the uses"):
        coterie.profile_model(*qwen, text(400), tokens=44, gradients=False)


# ---- windows --------------------------------------------------------------------------------------------------------


def inputs(qwen: Any, texts: dict[str, str], tokens: int, seed: int = 0) -> list[str]:
    from coterie.calibration.text_windows import text_windows

    windows = text_windows(*qwen, texts, tokens, 10, seed).windows
    for window in windows:
        assert list(window.inputs[1:]) == list(window.targets[:-1])
    return [qwen[1].decode(list(window.inputs)) for window in windows]


def test_all_of_a_text_in_order(qwen):
    assert inputs(qwen, {"a": "0123456789abcdefghijABCDEF"}, 25) == ["0123456789", "abcdefghij", "ABCDE"]


def test_texts_take_turns(qwen):
    assert inputs(qwen, {"a": "a" * 40, "b": "b" * 40}, 25) == ["a" * 10, "b" * 10, "a" * 5]


def test_the_seed_chooses_windows_and_their_order_stays(qwen):
    long = "".join(chr(97 + i) * 10 for i in range(26)) + "!"
    chosen = {tuple(inputs(qwen, {"a": long}, 50, seed)) for seed in range(4)}
    assert len(chosen) == 4
    for windows in chosen:
        assert list(windows) == sorted(set(windows))
        assert all(window == window[0] * 10 for window in windows)


def test_each_window_begins_with_the_begin_token(qwen):
    """For a tokenizer that puts one before every text."""
    from coterie.calibration.text_windows import text_windows

    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [int(digit) for digit in text]}

    windows = text_windows(qwen[0], Tokenizer(), {"a": "23456789"}, 9, 4, 0).windows
    assert [window.inputs for window in windows] == [[1, 2, 3, 4], [1, 5, 6, 7], [1]]
    assert [window.targets for window in windows] == [[2, 3, 4, 5], [5, 6, 7, 8], [8]]
    with pytest.raises(ConfigError, match="1 tokens of 1 texts"):
        text_windows(qwen[0], Tokenizer(), {"a": "23456789"}, 1, 4, 0)
