"""Bytes that the paper's formula expects, seconds of preparing a model, bytes of metadata: CRISP §3.3.4, A.4.1."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.calibration.profile import profile_model
from coterie.models.reorder import reordered
from coterie.profile.model_profile import ModelProfile
from coterie.pruning.tiers import TIERS, tiers
from coterie.pruning.width_planning import plan_widths
from coterie.pruning.width_tables import metadata_bytes
from coterie.spec import MoESpec
from coterie.study.widths.estimates import estimate, plain, ratio
from coterie.units import format_bytes

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

_PAPER_SHARES = (0.6, 0.3, 0.1)
_WIDTHS = (1.0, 0.5, 0.0)  # of the auxiliary: hot, warm, cold
_MIXTRAL, _MIXTRAL_WIDTH = MoESpec("Mixtral-8x7B", 32, 8, 2), 14336
_TOKENS, _QUICK_TOKENS = 4096, 512


def run(context: StudyContext) -> dict[str, Any]:
    """The formula against the bytes that the policy ran; seconds of every offline step; bytes beside the weights.

    Source: CRISP §3.3.4, A.4.1, Table 2. Seconds are of this machine while the study ran, so they vary.
    """
    tier_LWSP = context.uses.look_up(tiers(context.profile.pairs_LEE))
    held_WX = np.stack([(tier_LWSP == tier).sum((0, 2, 3)) for tier in range(3)], 1)
    sums_WX = np.concatenate([held_WX, held_WX.sum(1, keepdims=True)], 1)
    policy = plan_widths(context.profile, "crisp", dominance=context.dominance)
    found = {
        "formula_at_the_papers_shares": expected_bytes(_PAPER_SHARES),
        "tiers": {name: estimate(sums_WX, ratio(tier, 3), context.seed) for tier, name in enumerate(TIERS)},
        "formula": estimate(sums_WX, lambda x: _formula(x[:, :3] / x[:, 3:]), context.seed),
        "expected_on_calibration": policy.settings["expected_bytes"],
        "measured": context.evaluate(policy).bytes,
        "offline_seconds": _seconds(context),
        "metadata": {"this model": _metadata(context.profile), "Mixtral-8x7B": mixtral_metadata()},
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def expected_bytes(shares: tuple[float, float, float]) -> float:
    """The paper's formula: the share of full-width bytes that a token reads, from the tiers' shares of the uses.

    Source: CRISP §3.3.4: the dominant expert whole, the auxiliary whole, half or not at all.
    """
    return float(_formula(np.array([shares]))[0])


def _formula(share_RC: Any) -> Any:
    return (share_RC * (1 + np.array(_WIDTHS)) / 2).sum(1)


def _seconds(context: StudyContext) -> dict[str, Any]:
    """Seconds of every offline step on some tokens."""
    tokens = _QUICK_TOKENS if context.quick else _TOKENS
    order_LEI = plan_widths(context.profile, "crisp").order_LEI

    def profile(gradients: bool) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*are few for tiers", category=UserWarning)
            profile_model(
                context.model, context.tokenizer, dict(context.first), tokens=tokens, window=context.size.window,
                gradients=gradients, progress=context.progress,
            )  # fmt: skip

    def reorder() -> None:
        with reordered(context.model, order_LEI):
            pass

    forward = _timed(lambda: profile(False))
    return {
        "tokens": tokens,
        "combinations and importance": forward,
        "dominance, by gradients": max(0.0, _timed(lambda: profile(True)) - forward),
        "planning, crisp": _timed(lambda: plan_widths(context.profile, "crisp")),
        "planning, value": _timed(lambda: plan_widths(context.profile, "value", bytes=0.6)),
        "reordering in memory, there and back": _timed(reorder),
    }


def _timed(step: Callable[[], Any]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _metadata(profile: ModelProfile) -> dict[str, int]:
    """Bytes beside the weights of a reordered checkpoint, by policy, and of the order itself."""
    crisp, value = plan_widths(profile, "crisp"), plan_widths(profile, "value", threshold=0.1)
    priced = plan_widths(profile, "value", threshold=0.1, prices=(1.0, 1.5, 2.0))
    return {
        "crisp": metadata_bytes(crisp), "value": metadata_bytes(value), "value, priced by tier": metadata_bytes(priced),
        "order, needed to reorder only": int(crisp.order_LEI.nbytes),
    }  # fmt: skip


def mixtral_metadata() -> dict[str, int]:
    """The same for Mixtral-8x7B's shape."""
    return _metadata(blank(_MIXTRAL, _MIXTRAL_WIDTH))


def blank(spec: MoESpec, width: int) -> ModelProfile:
    """A profile that says nothing, of any shape: enough to count the bytes of plans made from it."""
    layers, experts, top_k = spec.num_layers, spec.num_experts, spec.top_k
    load_LE = np.full((layers, experts), top_k, np.int64)
    pairs_LEE = np.ones((layers, experts, experts), np.int64) - np.eye(experts, dtype=np.int64)
    even_LEI = np.ones((layers, experts, width), np.float32)
    ids_LSK = np.broadcast_to(np.arange(top_k), (layers, 1, top_k))
    return ModelProfile(
        spec=spec, identity="blank", width=width, num_tokens=experts, load_LE=load_LE, pairs_LEE=pairs_LEE,
        importance={"mean_abs_down": even_LEI}, dominance={"weight": pairs_LEE.astype(np.float32)},
        sample_ids_LSK=ids_LSK, sample_weights_LSK=np.full((layers, 1, top_k), 1 / top_k, np.float32),
    )  # fmt: skip


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent

    seconds = {name: value for name, value in result["offline_seconds"].items() if name != "tokens"}
    page.section(
        "Bytes, offline cost and metadata (CRISP §3.3.4, Table 2)",
        "The paper: with 60%, 30% and 10% of the tokens hot, warm and cold, a token reads 13% fewer expert bytes. "
        "Preparing Mixtral-8x7B takes 48 minutes (importance 18, combinations 15, dominance 8, reordering 7); the "
        "metadata take less than 2 MB.",
        f"Here the formula gives {percent(result['formula_at_the_papers_shares'])} of full width at the paper's shares "
        f"and {interval(result['formula'])} at this text's; the policy ran {percent(result['measured'])}, "
        f"{percent(result['expected_on_calibration'])} expected from calibration text. Above top-2 the formula counts "
        "a token's anchor once for each of its combinations, while it runs once, at the widest, and is never dropped. "
        "Seconds are of this machine, with whatever else it did.",
    )
    page.table(
        ["offline step", "seconds"],
        [[name + (f" ({result['offline_seconds']['tokens']:,} tokens)" if number < 2 else ""), value]
         for number, (name, value) in enumerate(seconds.items())],
    )  # fmt: skip
    page.table(
        ["metadata of", *result["metadata"]],
        [[name, *(format_bytes(each[name]) for each in result["metadata"].values())]
         for name in result["metadata"]["this model"]],
    )  # fmt: skip
