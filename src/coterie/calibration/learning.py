"""Learn what neurons are worth: by descent on what masking them does to a model's predictions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.calibration.activations import check_experts
from coterie.calibration.collector import frozen
from coterie.calibration.learning_state import LearningState
from coterie.calibration.masked_model import ASIDE, MaskedModel
from coterie.calibration.text_windows import TextWindows, text_windows
from coterie.errors import ConfigError
from coterie.models.backend import import_transformers, quiet
from coterie.models.identity import ORDER_KEY, identity_of
from coterie.models.layers import find_moe_layers
from coterie.models.record import refuse_training
from coterie.profile.model_profile import ModelProfile
from coterie.profile.profile_file import digest_of
from coterie.progress import Progress, silent
from coterie.pruning.importance_order import LEARNT, neuron_order

DEFAULT_BYTES, DEFAULT_STEPS, DEFAULT_WINDOW = 0.42, 160, 256
MIN_TOKENS_PER_EXPERT = 16  # as for profiling: fewer teach chance
_JUDGE_EVERY, _PATIENCE = 20, 4
_LEAST = 1e-6  # of the mean: a neuron worth nothing has no logarithm


def learn_values(
    model: Any,
    tokenizer: Any,
    texts: str | Mapping[str, str],
    profile: ModelProfile,
    *,
    tokens: int,
    bytes: float = DEFAULT_BYTES,
    steps: int = DEFAULT_STEPS,
    window: int | None = None,
    seed: int = 0,
    resume_from: str | Path | None = None,
    progress: Progress = silent,
) -> ModelProfile:
    """Learn, on calibration text, what every neuron is worth to the policy `value`.

    The frozen model runs with neuron i of expert e masked where w_e v_i is below a threshold, with the threshold set
    so that a share of the expert bytes runs. log v descends along the gradient of KL(full model || masked model), less
    what would only move the threshold: no neuron gains unless others lose as many bytes. A mask passes its gradient
    straight through (the soft mask's). One window in five is put aside; what did best there is kept, the start (the
    profile's own importance) included, and learning stops once it finds nothing better.

    One step takes one forward pass of the whole model, and one forward and backward pass with whole experts, over
    about 1,024 tokens. Memory holds beside the model the activations of one such pass outside the experts, and five
    float32 arrays of a number for each neuron.

    Source: beyond the papers. The rule that the values serve is in `pruning.widths`.

    Args:
        model: a Transformers model in eval mode, its neurons in the order in which it was profiled.
        tokenizer: its tokenizer.
        texts: a text, or several by name, which take turns.
        profile: of this model.
        tokens: tokens of text to use, in all; whole windows of them are.
        bytes: the share of expert bytes to learn at. What is learnt serves other shares as well, near ones best.
        steps: most steps.
        window: tokens of a window; None: 256, or what the model reads if that is less.
        seed: which windows, and their order.
        resume_from: a file for the state, written at every look at the windows put aside. If it is there, and of the
            same run, that run goes on from it to the same result. It is not removed.
        progress: told of every step.

    Returns:
        The profile with one more variant of importance, `learnt`, which orders and values prefer to the others. Its
        provenance holds the text, settings and what was found under that name.

    Raises:
        ConfigError: for a profile of another model or order, a model in training mode, too few tokens (16 for each
            expert on average, and five windows), or settings that cannot be.
        CheckpointError: for unknown experts, another model's tokenizer, and predictions that are NaN or infinite.
    """
    import_transformers()
    refuse_training(model)
    _check(model, profile, tokens, bytes, steps)
    named = {"text": texts} if isinstance(texts, str) else dict(texts)
    length = min(window or DEFAULT_WINDOW, getattr(model.config.get_text_config(), "max_position_embeddings", tokens))
    chosen = text_windows(model, tokenizer, named, max(tokens // length, 1) * length, length, seed)
    settings = _settings(model, profile, chosen, bytes, steps, seed)
    start_LEI = _start(profile)
    state = LearningState.beginning(start_LEI)
    saved = None if resume_from is None else Path(resume_from)
    if saved is not None and saved.exists():
        state.load(saved, settings)
    learner = MaskedModel(model, profile, chosen, bytes, seed)
    with quiet(), frozen(model):
        _learn(learner, state, steps, saved, settings, progress)
    return _result(profile, state, settings, learner)


def _learn(
    learner: MaskedModel, state: LearningState, steps: int, saved: Path | None, settings: Mapping[str, Any],
    progress: Progress,
) -> None:  # fmt: skip
    """Descend until `steps`, or until nothing better is found; put the state aside at every look."""
    if not state.tried:
        state.judge(learner.divergence(state.average_LEI))
    while state.step < steps and not state.stale(_PATIENCE):
        state.descend(learner.gradient(state.log_value_LEI, state.step), steps)
        progress("learning", state.step, steps)
        if state.step % _JUDGE_EVERY == 0 or state.step == steps:
            state.judge(learner.divergence(state.average_LEI))
            if saved is not None:
                state.save(saved, settings)


def _start(profile: ModelProfile) -> NDArray[np.float32]:
    """[L, E, I] logarithms of the values that the profile's own importance gives, in the model's order of neurons."""
    others = {name: values for name, values in profile.importance.items() if name != LEARNT}
    order = neuron_order(replace(profile, importance=others))
    value_LEI = np.empty_like(order.value_LEI)
    np.put_along_axis(value_LEI, order.order_LEI.astype(np.int64), order.value_LEI, axis=2)
    logarithms_LEI: NDArray[np.float32] = np.log(np.maximum(value_LEI, _LEAST * value_LEI.mean()))
    return logarithms_LEI


def _check(model: Any, profile: ModelProfile, tokens: int, bytes: float, steps: int) -> None:
    for layer in find_moe_layers(model):
        check_experts(layer)
    identity, order = identity_of(model), getattr(model.config, ORDER_KEY, None)
    if identity != profile.identity:
        raise ConfigError(
            f"the profile is of {profile.spec.model} with identity {profile.identity}, the model has {identity}: their "
            "routers differ; profile this model"
        )
    if order != (profiled := profile.provenance.get("neuron_order")):
        raise ConfigError(
            f"the model's neurons are in the order {order or 'of the original'}, the profile's in "
            f"{profiled or 'that of the original'}; use the model that was profiled"
        )
    if not 0 < bytes < 1:
        raise ConfigError(f"a byte share of {bytes:g} is not within 0 and 1; write it like 0.5")
    if steps < 1:
        raise ConfigError(f"{steps} steps of learning; at least 1 is needed, {DEFAULT_STEPS} is the default")
    spec = profile.spec
    least = -(-MIN_TOKENS_PER_EXPERT * spec.num_experts // spec.top_k)
    if tokens < least:
        raise ConfigError(
            f"{tokens} tokens are too few to learn from with {spec.num_experts} experts, top-{spec.top_k}; use at "
            f"least {least}, and tens of thousands to learn what holds on other text"
        )


def _settings(
    model: Any, profile: ModelProfile, chosen: TextWindows, bytes: float, steps: int, seed: int
) -> dict[str, Any]:
    """What decides the result: the same settings give the same values. Ready for JSON."""
    if len(chosen.windows) < ASIDE:
        raise ConfigError(
            f"the text gives {len(chosen.windows)} windows of {chosen.length} tokens; learning needs {ASIDE} at "
            "least, one of them to judge by: use more tokens, or a smaller window"
        )
    others = {name: values for name, values in profile.importance.items() if name != LEARNT}
    return {
        "profile": digest_of(replace(profile, importance=others)),
        "dtype": str(model.dtype).removeprefix("torch."), "texts": [dict(source) for source in chosen.sources],
        "window": chosen.length, "bytes": bytes, "steps": steps, "seed": seed,
    }  # fmt: skip


def _result(
    profile: ModelProfile, state: LearningState, settings: Mapping[str, Any], learner: MaskedModel
) -> ModelProfile:
    value_LEI = np.exp(state.best_LEI.astype(np.float64))
    found = dict(state.tried)
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers")}
    learnt = {
        **settings, "tokens_learnt": learner.tokens, "tokens_aside": int(learner.aside_WN.numel()),
        "steps_done": state.step, "best_step": state.best_step, "kl_before": state.tried[0][1],
        "kl_after": found[state.best_step], "tried": [list(each) for each in state.tried],
        "versions": {"coterie": coterie.__version__, **versions},
    }  # fmt: skip
    importance = {**profile.importance, LEARNT: (value_LEI / value_LEI.mean()).astype(np.float32)}
    return replace(profile, importance=importance, provenance={**profile.provenance, LEARNT: learnt})
