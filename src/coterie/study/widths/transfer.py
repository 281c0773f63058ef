"""Profiles of one domain used on another, as they are and refreshed: Fig. 16 of CRISP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.profile.model_profile import ModelProfile
from coterie.pruning.roles import roles
from coterie.pruning.tiers import tiers
from coterie.pruning.width_planning import plan_widths
from coterie.study.measure import Bench
from coterie.study.widths.context import make_profile, spread_windows
from coterie.study.widths.estimates import estimate, increase, plain

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.study.widths.context import Point, StudyContext

DOMAINS = ("encyclopedic", "code", "maths")
_BYTES = 0.6
# uniform reads the same bytes whatever the profile, which then decides the order of neurons alone
_POLICIES: dict[str, dict[str, Any]] = {"crisp": {}, "value": {"bytes": _BYTES}, "uniform": {"bytes": _BYTES}}


def run(context: StudyContext) -> dict[str, Any]:
    """For every target domain: its own profile, the others', and the others' with the target's text added.

    Source: CRISP §5.2.4, A.2, Fig. 16. Profiles are of the domains' first halves, measured on their second halves.
    Adding domain A to a profile of B gives the same sums as adding B to A, so one profile serves both directions.
    """
    names = choose(context.first, 2 if context.quick else 3)
    if len(names) < 2:
        return {"domains": names, "policies": [], "similarity": []}
    matched = {name: _profile(context, name, None) for name in names}
    refreshed = {
        frozenset(pair): _profile(context, pair[1], matched[pair[0]]) for pair in itertools.combinations(names, 2)
    }
    found = []
    for target in names:
        count = max(2, context.size.windows // 3)
        ids_WN, _ = spread_windows(context.tokenizer, {target: context.second[target]}, context.size.window, count)
        bench = Bench(context.model, ids_WN, progress=context.progress)
        for policy in ("crisp",) if context.quick else _POLICIES:
            own = _point(context, matched[target], policy, bench, f"{target}, its own profile")
            found.append(_row(target, target, policy, "matched", own, own, context.seed))
            for source in names:
                if source == target:
                    continue
                both = refreshed[frozenset((source, target))]
                for kind, profile in (("direct", matched[source]), ("refreshed", both)):
                    point = _point(context, profile, policy, bench, f"{target}, {kind} from {source}")
                    found.append(_row(source, target, policy, kind, point, own, context.seed))
    pairs = [
        {"source": one, "target": other, **similarity(matched[one], matched[other], context.dominance)}
        for one, other in itertools.permutations(names, 2)
    ]
    shown: dict[str, Any] = plain({
        "domains": names, "tokens": {name: profile.num_tokens for name, profile in matched.items()},
        "policies": found, "similarity": pairs,
    })  # fmt: skip
    return shown


def choose(texts: Mapping[str, str], count: int) -> list[str]:
    """The domains to study: the usual ones where they are among the texts, else the first others."""
    usual = [name for name in DOMAINS if name in texts]
    return (usual + [name for name in texts if name not in usual])[:count]


def _profile(context: StudyContext, name: str, update: ModelProfile | None) -> ModelProfile:
    return make_profile(
        context.model, context.tokenizer, {name: context.first[name]}, context.size, seed=context.seed,
        update=update, progress=context.progress,
    )  # fmt: skip


def _point(context: StudyContext, profile: ModelProfile, policy: str, bench: Bench, label: str) -> Point:
    told: dict[str, Any] = {"dominance": context.dominance} if policy == "crisp" else {}
    return context.evaluate(plan_widths(profile, policy, **_POLICIES[policy], **told), bench, label)


def _row(source: str, target: str, policy: str, kind: str, point: Point, own: Point, seed: int) -> dict[str, Any]:
    """Figures of one transfer, beside what the target's own profile gives."""

    def figure(rise_WS: NDArray[np.float64]) -> Any:
        return estimate(np.stack([rise_WS.sum(1), np.full(len(rise_WS), float(rise_WS.shape[1]))], 1), increase, seed)

    return {
        "source": source, "target": target, "policy": policy, "kind": kind, "bytes": point.bytes,
        "increase": figure(point.measured.nll_WS - point.measured.base_WS), "kl": point.measured.kl,
        "over_matched": figure(point.measured.nll_WS - own.measured.nll_WS),
    }  # fmt: skip


def similarity(source: ModelProfile, target: ModelProfile, method: str | None = None) -> dict[str, float]:
    """Shares of the target's uses whose combination has the same tier, and the same dominant expert, at the source."""
    low_P, high_P = np.triu_indices(source.spec.num_experts, 1)
    uses_LP = target.pairs_LEE[:, low_P, high_P]
    same_tier = (tiers(source.pairs_LEE) == tiers(target.pairs_LEE))[:, low_P, high_P]
    same_role = (roles(source, method).higher_LEE == roles(target, method).higher_LEE)[:, low_P, high_P]
    total = max(int(uses_LP.sum()), 1)
    return {"same_tier": float(uses_LP[same_tier].sum() / total), "same_role": float(uses_LP[same_role].sum() / total)}


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent

    rows = result["policies"]
    told = [_told(policy, rows) for policy in _POLICIES]
    reading = "There are fewer than two texts to transfer between."
    if rows:
        reading = (
            "Here, in perplexity over the matched profile's: "
            + " ".join(each for each in told if each)
            + " Under the paper's policy bytes differ too: a combination "
            "that the source never saw is cold. The policies value and uniform are held to "
            f"{percent(_BYTES, 0)} of the bytes on each profile's own text; uniform reads as many on any. A refreshed "
            "profile is of both domains' texts, twice as many tokens as a matched one."
        )
    page.section(
        "Transfer between domains (CRISP Fig. 16)",
        "The paper (MMLU, HellaSwag, WinoGrande): another workload's profile costs at most 2.7 points of accuracy; "
        "refreshed on the target it comes within 0.5 points of a matched one.",
        reading,
    )
    page.table(
        ["policy", "profile of", "used on", "kind", "bytes", "perplexity (95%)", "over the matched profile (95%)"],
        [[row["policy"], row["source"] + (" + " + row["target"] if row["kind"] == "refreshed" else ""), row["target"],
          row["kind"], percent(row["bytes"]), interval(row["increase"], 2),
          "-" if row["kind"] == "matched" else interval(row["over_matched"], 2)] for row in rows],
    )  # fmt: skip
    page.table(
        ["profile of", "used on", "uses in the same tier", "uses with the same dominant expert"],
        [[each["source"], each["target"], percent(each["same_tier"]), percent(each["same_role"])]
         for each in result["similarity"]],
    )  # fmt: skip


def _told(policy: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The worst transfers of a policy in words; nothing where it was not measured."""
    from coterie.study.widths.wording import interval

    found = []
    for kind in ("direct", "refreshed"):
        of_kind = [row for row in rows if (row["policy"], row["kind"]) == (policy, kind)]
        if of_kind:
            worst = max(of_kind, key=lambda row: row["over_matched"]["value"])
            found.append(f"{kind} at most {interval(worst['over_matched'])}, {worst['source']} to {worst['target']}")
    return f"{policy}: {'; '.join(found)}." if found else ""
