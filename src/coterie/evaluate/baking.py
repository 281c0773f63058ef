"""Whether a baked checkpoint decides and computes what the original does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import data
from coterie.errors import CheckpointError
from coterie.evaluate.compare import divergence
from coterie.evaluate.logits import scored_logits
from coterie.evaluate.text import encode_text
from coterie.evaluate.windows import Window
from coterie.models.layers import MoELayer, find_moe_layers
from coterie.models.load import load_model, load_tokenizer

TOLERANCE = 1e-5  # of the largest logit, in float32; and of scores that may change places without being equal
_DOMAINS = ("prose", "code")
_WINDOW = 128


@dataclass(frozen=True)
class Decisions:
    """Choices of every MoE layer's router, the baked model's given what the original's was given.

    Attributes:
        compared: tokens x layers.
        tied: of these, where other experts were chosen because their scores at the K-th place are equal.
        different: where other experts were chosen otherwise.
        gap: of those, the largest difference of the scores that changed places; 0 where there are none.
    """

    compared: int
    tied: int
    different: int
    gap: float


@dataclass(frozen=True)
class BakedAgreement:
    """How far a baked checkpoint is from the original on a few windows of text.

    Attributes:
        tokens: predictions compared.
        relative: in float32, the largest difference of two logits, as a share of the largest logit.
        decisions: in float32.
        dtype: the weights' own type.
        own: where that is not float32, decisions in it; else None.
        kl: the mean KL(original || baked) in it, nats, or None.
        kl_max: the largest of the same.
    """

    tokens: int
    relative: float
    decisions: Decisions
    dtype: str
    own: Decisions | None
    kl: float | None
    kl_max: float | None

    def to_json(self) -> Mapping[str, Any]:
        """The figures, ready for JSON."""
        own = None if self.own is None else dict(vars(self.own))
        return {**vars(self), "decisions": dict(vars(self.decisions)), "own": own}


@dataclass
class _Run:
    """What a model predicted, and what its routers were given and chose."""

    logits_RV: Any
    dtype: Any
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    ids_LTK: list[Any] = field(default_factory=list)
    scores_LTE: list[Any] = field(default_factory=list)


def compare_baked(source: Path, out: Path, map_LE: NDArray[np.int64]) -> BakedAgreement:
    """Compare two checkpoints on a window of each of two shipped texts; only one model is in memory at a time.

    Args:
        source: the original's folder, with its tokenizer.
        out: the baked one's.
        map_LE: [L, E], the original number of each of its experts.

    Raises:
        CheckpointError: when in float32 their logits differ by more than `TOLERANCE`, or other experts are chosen
            whose scores differ by more than that; or a model does not fit the memory.
    """
    torch = importlib.import_module("torch")
    tokenizer = load_tokenizer(source)
    texts = [torch.tensor(encode_text(tokenizer, name, data.text(name)[:8192], _WINDOW - 1).ids) for name in _DOMAINS]

    def pair(dtype: Any) -> tuple[_Run, _Run, Decisions]:
        expected = _run(load_model(source, dtype), texts)
        baked = load_model(out, dtype)
        got = _run(baked, texts)
        return expected, got, compare_decisions(expected, find_moe_layers(baked), map_LE)

    expected, got, decisions = pair(torch.float32)
    relative = float((got.logits_RV - expected.logits_RV).abs().max() / expected.logits_RV.abs().max())
    if not (relative <= TOLERANCE and decisions.gap <= TOLERANCE):
        raise CheckpointError(
            f"the baked checkpoint's logits differ by {relative:.1e} of the largest, and {decisions.different} of "
            f"{decisions.compared} decisions ({decisions.tied} more by exact ties), by scores up to "
            f"{decisions.gap:.1e} apart (limit {TOLERANCE:.0e}), in float32; nothing was written"
        )
    own_expected, own_got, own = pair(None)
    name = str(own_expected.dtype).removeprefix("torch.")
    if own_expected.dtype == torch.float32:
        return BakedAgreement(len(got.logits_RV), relative, decisions, name, None, None, None)
    kl_R, _ = divergence(own_expected.logits_RV, own_got.logits_RV)
    return BakedAgreement(len(got.logits_RV), relative, decisions, name, own, float(kl_R.mean()), float(kl_R.max()))


def compare_decisions(expected: Any, layers: list[MoELayer], map_LE: NDArray[np.int64]) -> Decisions:
    """What the routers of a baked model choose, given what the original's were given.

    Each layer is compared by itself, so that a tie in one does not count in those above it.

    Args:
        expected: what `watched` collected of the original.
        layers: the baked model's.
        map_LE: [L, E], the original number of each of its experts.
    """
    torch = importlib.import_module("torch")
    compared = tied = different = 0
    gap = 0.0
    for layer in layers:
        for call in range(layer.index, len(expected.calls), len(layers)):
            arguments, named = expected.calls[call]
            with torch.inference_mode():
                _, _, ids_TK = layer.router(*arguments, **named)
            mine_TK = torch.as_tensor(map_LE[layer.index])[ids_TK.cpu()]
            scores_TE = expected.scores_LTE[call]
            first_TK = _by_score(scores_TE, expected.ids_LTK[call])
            second_TK = _by_score(scores_TE, mine_TK)
            apart_T = (first_TK - second_TK).abs().amax(dim=1)
            other_T = (mine_TK.sort(dim=1).values != expected.ids_LTK[call].sort(dim=1).values).any(dim=1)
            compared += len(mine_TK)
            tied += int((other_T & (apart_T == 0)).sum())
            different += int((other_T & (apart_T > 0)).sum())
            gap = max(gap, float(torch.where(other_T, apart_T, 0.0).max()))
    return Decisions(compared, tied, different, gap)


@contextmanager
def watched(model: Any) -> Iterator[_Run]:
    """Collect what every router is given, its scores and its choice, while the block runs the model."""
    torch = importlib.import_module("torch")
    seen = _Run(None, model.dtype)

    def hook(module: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        logits_TE, _, ids_TK = output
        seen.calls.append((tuple(each.clone() for each in arguments), dict(named)))
        seen.ids_LTK.append(ids_TK.cpu().clone())
        seen.scores_LTE.append(_choice_scores(torch, module, logits_TE).cpu())

    handles = [layer.router.register_forward_hook(hook, with_kwargs=True) for layer in find_moe_layers(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _run(model: Any, texts: list[Any]) -> _Run:
    torch = importlib.import_module("torch")
    with watched(model) as seen:
        parts = [scored_logits(model, ids_T, [Window(0, len(ids_T), 1)]) for ids_T in texts]
    seen.logits_RV = torch.cat(parts)
    return seen


def _choice_scores(torch: Any, router: Any, logits_TE: Any) -> Any:
    """[T, E] float32, what the router orders experts by; groups aside."""
    logits_TE = logits_TE.float()
    statics = getattr(router, "moe_statics", None)  # ERNIE 4.5
    if statics is not None:
        return torch.softmax(logits_TE, dim=-1) + statics.e_score_correction_bias.reshape(-1)
    bias_E = getattr(router, "e_score_correction_bias", None)
    return logits_TE if bias_E is None else logits_TE.sigmoid() + bias_E


def _by_score(scores_TE: Any, ids_TK: Any) -> Any:
    return scores_TE.gather(1, ids_TK.long()).sort(dim=1).values
