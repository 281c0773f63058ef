"""Profile a model on text: which experts keep company, and which neurons and experts matter."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie.calibration.ablation import Ablation, choose_pairs
from coterie.calibration.activations import check_experts, down_norms, num_neurons
from coterie.calibration.collector import collecting
from coterie.calibration.importance import variants
from coterie.calibration.state import load_state, save_state
from coterie.calibration.sums import Sums
from coterie.calibration.text_windows import TextWindow, TextWindows, text_windows
from coterie.errors import ConfigError
from coterie.models.backend import import_transformers, quiet
from coterie.models.identity import ORDER_KEY, identity_of
from coterie.models.layers import find_moe_layers, spec_of
from coterie.models.record import refuse_training
from coterie.profile.model_profile import ModelProfile
from coterie.profile.profile_file import check_profile, digest_of
from coterie.progress import Progress, silent
from coterie.pruning.importance_order import LEARNT
from coterie.pruning.tier_error import tier_error
from coterie.spec import MoESpec

MIN_TOKENS_PER_EXPERT = 16  # a mean over fewer varies by more than a quarter of the values' own spread
WARN_TIER_ERROR = 0.1


def profile_model(
    model: Any,
    tokenizer: Any,
    texts: str | Mapping[str, str],
    *,
    tokens: int,
    window: int | None = None,
    seed: int = 0,
    gradients: bool = True,
    ablation_pairs: int = 0,
    update: ModelProfile | None = None,
    resume_from: str | Path | None = None,
    save_every: int = 8,
    progress: Progress = silent,
) -> ModelProfile:
    """Measure the combinations, neuron importance and dominance of a model on calibration text.

    The text runs window by window; memory holds one window and the sums. With `gradients` each window is also run
    backward (no parameter's gradient is kept), which gives the importance `first_order` and the dominance `fisher`.

    Source: CRISP sections 3.2.2, 3.3.1 and 3.3.2; importance variants, Fisher scores and weights are beyond the paper.

    Args:
        model: a Transformers model in eval mode. Importance is in the order its neurons are in.
        tokenizer: its tokenizer.
        texts: a text, or several by name, which take turns.
        tokens: tokens to run.
        window: tokens of a window; None: what the model reads, up to 1,024.
        seed: which windows of a text that is longer than needed.
        gradients: also run backward.
        ablation_pairs: pairs, over all layers, whose experts are also left out in turn, each in up to 8 windows; the
            most frequent warm and cold ones.
        update: an earlier profile of the same model: the new text is added to it. Counts add, means are weighted by
            tokens, and a pair's ablation is replaced where it is measured anew.
        resume_from: a file for the sums, written every `save_every` windows. If it is there, and of the same run, that
            run goes on from it to the same result. It is not removed.
        save_every: windows between two writes.
        progress: told of windows and pairs.

    Raises:
        ConfigError: for a model in training mode, too few tokens (fewer than 16 for each expert on average), a text
            that is too short, an `update` of another model, or a `resume_from` of another run.
        CheckpointError: for unknown experts, another model's tokenizer, and activations that are NaN or infinite.
    """
    import_transformers()
    refuse_training(model)
    named = {"text": texts} if isinstance(texts, str) else dict(texts)
    spec, layers = spec_of(model), find_moe_layers(model)
    for layer in layers:
        check_experts(layer)
    if ablation_pairs < 0 or save_every < 1:
        raise ConfigError(f"ablation_pairs = {ablation_pairs}, save_every = {save_every}; at least 0 and 1")
    _require_tokens(spec, tokens + (0 if update is None else update.num_tokens))
    chosen = text_windows(model, tokenizer, named, tokens, window, seed)
    settings = _settings(model, spec, chosen, seed, gradients, update) | {"ablation_pairs": ablation_pairs}
    if update is None:
        sums = Sums.empty(spec, num_neurons(layers[0].experts), tokens, gradients=gradients)
    else:
        _require_same(update, settings, gradients)
        sums = Sums.after(update, tokens)
    state = None if resume_from is None else Path(resume_from)
    if state is not None and state.exists():
        load_state(state, sums, settings)
    run = _Run(model, chosen.windows, sums, state, settings, save_every, progress)
    with quiet():
        run.collect(gradients)
        run.ablate(ablation_pairs)
    result = _result(model, spec, sums, settings, update)
    check_profile(result)
    _warn(result, update)
    return result


class _Run:
    """The long part: windows, then pairs, with the sums put aside now and then."""

    def __init__(
        self, model: Any, windows: Sequence[TextWindow], sums: Sums, state: Path | None, settings: Mapping[str, Any],
        save_every: int, progress: Progress,
    ) -> None:  # fmt: skip
        self._model, self._windows, self._sums = model, windows, sums
        self._state, self._settings, self._every, self._progress = state, settings, save_every, progress

    def collect(self, gradients: bool) -> None:
        """Add the windows that are missing."""
        if self._sums.windows == len(self._windows):
            return
        with collecting(self._model, self._sums, gradients=gradients) as collector:
            for window in self._windows[self._sums.windows :]:
                collector.run(window)
                self._progress("profiling", self._sums.windows, len(self._windows))
                self._save(self._sums.windows)
        self._save(0)

    def ablate(self, budget: int) -> None:
        """Measure the pairs that are missing."""
        pairs = choose_pairs(self._sums.pairs_LEE, budget)
        done = self._sums.ablated
        if done == len(pairs):
            return
        ablation = Ablation(
            self._model, self._windows, pairs[done:], lambda at, total: self._progress("the text as it is", at, total)
        )
        for number, pair in enumerate(pairs[done:], done + 1):
            layer, first, second = pair
            rises = ablation.measure(pair)
            if not np.isnan(rises[0]):  # else an earlier profile's figure, if any, stays
                self._sums.ablation_LEE[layer, first, second], self._sums.ablation_LEE[layer, second, first] = rises
            self._sums.ablated = number
            self._progress("leaving out experts", number, len(pairs))
            self._save(number)
        self._save(0)

    def _save(self, number: int) -> None:
        if self._state is not None and number % self._every == 0:
            save_state(self._state, self._sums, self._settings)


def _require_tokens(spec: MoESpec, tokens: int) -> None:
    least = -(-MIN_TOKENS_PER_EXPERT * spec.num_experts // spec.top_k)
    if tokens < least:
        raise ConfigError(
            f"{tokens} tokens are too few for {spec.num_experts} experts, top-{spec.top_k}: an expert would see "
            f"{tokens * spec.top_k / spec.num_experts:.1f} on average and its means be chance; use at least {least} "
            "(thousands for stable tiers)"
        )


def _settings(
    model: Any, spec: MoESpec, chosen: TextWindows, seed: int, gradients: bool, update: ModelProfile | None
) -> dict[str, Any]:
    """What decides the result: the same settings give the same profile. Ready for JSON."""
    return {
        "model": spec.model, "identity": identity_of(model), "neuron_order": getattr(model.config, ORDER_KEY, None),
        "dtype": str(model.dtype).removeprefix("torch."), "texts": [dict(source) for source in chosen.sources],
        "window": chosen.length, "seed": seed, "gradients": gradients,
        "update": None if update is None else digest_of(update),
    }  # fmt: skip


def _require_same(update: ModelProfile, settings: Mapping[str, Any], gradients: bool) -> None:
    order = update.provenance.get("neuron_order")
    if update.identity != settings["identity"]:
        raise ConfigError(
            f"the profile to update is of {update.spec.model} ({update.identity}), the model is {settings['model']} "
            f"({settings['identity']}): their routers differ; profile the model anew"
        )
    if order != settings["neuron_order"]:
        raise ConfigError(
            f"the profile to update has the neurons in the order {order or 'of the original'}, the model in "
            f"{settings['neuron_order'] or 'that of the original'}; profile the model anew"
        )
    if gradients != ("first_order" in update.importance):
        raise ConfigError(
            f"the profile to update was made {'without' if gradients else 'with'} gradients and this run is "
            f"{'with' if gradients else 'without'} them; use the same, so that means can be joined"
        )


def _result(
    model: Any, spec: MoESpec, sums: Sums, settings: Mapping[str, Any], update: ModelProfile | None
) -> ModelProfile:
    norms_LEI = np.stack([down_norms(layer.experts).cpu().numpy() for layer in find_moe_layers(model)])
    uses = np.where(sums.pairs_LEE > 0, sums.pairs_LEE, np.nan)
    dominance = {name: (values / uses).astype(np.float32) for name, values in sums.roles.items()}
    if not np.isnan(sums.ablation_LEE).all():
        dominance["ablation"] = sums.ablation_LEE.astype(np.float32)
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers")}
    small = np.uint8 if spec.num_experts <= 256 else np.uint16
    return ModelProfile(
        spec=spec, identity=str(settings["identity"]), width=norms_LEI.shape[2], num_tokens=sums.num_tokens,
        load_LE=sums.load_LE, pairs_LEE=sums.pairs_LEE,
        importance=variants(sums.neurons, sums.load_LE, norms_LEI), dominance=dominance,
        sample_ids_LSK=sums.sample_ids_LSK.astype(small), sample_weights_LSK=sums.sample_weights_LSK,
        provenance={
            **settings, "versions": {"coterie": coterie.__version__, **versions},
            "update": None if update is None else dict(update.provenance),
        },
    )  # fmt: skip


def _warn(profile: ModelProfile, update: ModelProfile | None) -> None:
    if update is not None and LEARNT in update.importance:
        warnings.warn(
            "what was learnt for the earlier profile is of its text alone and left out; learn it again "
            "(coterie learn)", UserWarning, stacklevel=3,
        )  # fmt: skip
    error = tier_error(profile)
    if error > WARN_TIER_ERROR:
        warnings.warn(
            f"{profile.num_tokens:,} tokens are few for tiers: about {error:.0%} of the uses sit in combinations that "
            "chance may have put into the wrong tier; profile more tokens, or use a policy without tiers",
            UserWarning, stacklevel=3,
        )  # fmt: skip
