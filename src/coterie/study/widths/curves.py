"""Bytes against quality for every policy and baseline: the whole curve, and the paper's policy at equal terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.errors import BudgetError
from coterie.pruning.width_planning import plan_widths
from coterie.study.widths.context import Point
from coterie.study.widths.curve import Curve, divergence, rise
from coterie.study.widths.estimates import Estimate, estimate, increase, plain
from coterie.study.widths.ordering import columns, difference

if TYPE_CHECKING:
    from coterie.report.page import Page
    from coterie.study.widths.context import StudyContext

Settings = Mapping[str, Any]
_MOST_SHOWN = 0.15  # of the increase of perplexity: what is beyond is of no use to anyone
PAPER = "warm 50%, cold 0 (the paper's)"
HALF = "0.5"
LEARNT = "value-learnt"
PRICED, PRICES = "value-priced", (1.0, 1.5, 2.0)  # hot, warm, cold

_VALUE = (0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.1)
_QUICK_VALUE = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
_SHARES: Mapping[str, Sequence[float]] = {
    "value": _VALUE,
    LEARNT: _VALUE,
    "value-priced": (0.9, 0.75, 0.6, 0.45, 0.3),
    "uniform": (0.9, 0.75, 0.625, 0.5, 0.375, 0.25),
    "by-weight": (0.9, 0.75, 0.6, 0.45, 0.3),
    "skip": (0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    "drop": (0.9, 0.75, 0.6, 0.5),
}
_QUICK: Mapping[str, Sequence[float]] = {
    "value": _QUICK_VALUE, LEARNT: _QUICK_VALUE, "value-priced": (0.6,), "uniform": (0.75, 0.5),
    "by-weight": (0.6,), "skip": (0.7,), "drop": (0.75,),
}  # fmt: skip
_TIERED: Mapping[str, Mapping[str, Settings]] = {
    "crisp": {
        PAPER: {},
        "warm 50%, cold 50%": {"cold_aux": 0.5},
        "warm 75%, cold 50%": {"warm_aux": 0.75, "cold_aux": 0.5},
        "alpha 0.8, beta 0.95": {"alpha": 0.8, "beta": 0.95},
        "alpha 0.3, beta 0.6": {"alpha": 0.3, "beta": 0.6},
        "alpha 0, beta 0.6": {"alpha": 0.0, "beta": 0.6},
        "alpha 0, beta 0.3, cold 25%": {"alpha": 0.0, "beta": 0.3, "cold_aux": 0.25},
    },
    "symmetric": {
        "75% warm, 50% cold": {},
        "75% warm, 75% cold": {"cold_aux": 0.5},
        "alpha 0, beta 0.6": {"alpha": 0.0, "beta": 0.6},
    },
}
_TOLD = ("bytes", "steps", "steps_done", "best_step", "tokens_learnt", "tokens_aside", "kl_before", "kl_after", "seed")
_QUICK_TIERED = {"crisp": (PAPER, "warm 50%, cold 50%"), "symmetric": ("75% warm, 50% cold",)}


def run(context: StudyContext) -> dict[str, Any]:
    """Every policy at several strengths, and comparisons of the paper's policy with others.

    Source: CRISP §5.2.1 and §5.5.2 for its policy against uniform width; curves and `value` go beyond the paper.
    `value-learnt` is `value` with what `learn_values` learnt on the first halves; `at_crisp_loss` is of that, with
    that of `value` by importance, which learns nothing, beside it. The other policies stand in order of importance;
    the paper's is also measured in the learnt order, to tell what the order does from what widths do. Strengths are
    met on the profile's sample; bytes are those run on the evaluation text.
    """
    measured = {policy: _measure(context, policy) for policy in (*_SHARES, *_TIERED)}
    paper = measured["crisp"][PAPER]
    at_loss = {name: at_loss_of(paper, list(measured[name].values()), context.seed) for name in ("value", LEARNT)}
    in_learnt_order = plan_widths(context.learnt, "crisp", dominance=context.dominance)
    found = {
        "curves": {
            policy: [{"settings": name, **point.to_json()} for name, point in points.items()]
            for policy, points in measured.items()
        },
        "dominance": context.dominance,
        "dominance_on_calibration": {
            name: estimate(columns(each), increase, context.seed)
            for name, each in context.dominance_on_calibration.items()
        },
        "at_crisp_loss": {
            **at_loss[LEARNT], "value_policy": LEARNT, "value_by_importance": at_loss["value"],
            "crisp_in_learnt_order": context.evaluate(in_learnt_order, label="crisp, learnt order").to_json(),
        },
        "learnt": {name: context.learnt.provenance["learnt"][name] for name in _TOLD},
        "against_value": against(
            {name: points for name, points in measured.items() if name != LEARNT}, context.seed
        ),
        "against_learnt": against(measured, context.seed, LEARNT),
        "crisp_against_uniform": _against_uniform(context, paper, measured["uniform"][HALF]),
    }  # fmt: skip
    shown: dict[str, Any] = plain(found)
    return shown


def _measure(context: StudyContext, policy: str) -> dict[str, Point]:
    """The points of one policy by what they are called; strengths that it cannot reach are left out."""
    points = {}
    for name, settings in _settings(context.quick, policy).items():
        if policy == "crisp":
            settings["dominance"] = context.dominance
        try:
            profile = context.learnt if policy == LEARNT else context.profile
            plan = plan_widths(profile, policy.removesuffix("-priced").removesuffix("-learnt"), **settings)
        except BudgetError:
            continue
        points[name] = context.evaluate(plan, label=policy)
    return points


def _settings(quick: bool, policy: str) -> dict[str, dict[str, Any]]:
    if policy in _TIERED:
        wanted = _QUICK_TIERED[policy] if quick else tuple(_TIERED[policy])
        return {name: dict(_TIERED[policy][name]) for name in wanted}
    extra = {"prices": PRICES} if policy == PRICED else {}
    return {f"{share:.3g}": {"bytes": share, **extra} for share in (_QUICK if quick else _SHARES)[policy]}


def at_loss_of(paper: Point, value: Sequence[Point], seed: int = 0) -> dict[str, Any]:
    """The bytes that `value` needs to lose as much as the paper's policy, read off its curve.

    Args:
        paper: the paper's policy.
        value: the points of `value`.
        seed: of the intervals.
    """
    by_loss = Curve(value, rise).bytes_at_equal_loss(paper, seed)
    by_kl = Curve(value, divergence).bytes_at_equal_loss(paper, seed)
    return {
        "perplexity_increase": paper.measured.increase,
        "kl": paper.measured.kl,
        "crisp_bytes": paper.bytes,
        "value_bytes": by_loss.value,
        "value_bytes_interval_95": [by_loss.low, by_loss.high],
        "ratio": _scaled(by_loss, 1 / paper.bytes),
        "ratio_at_equal_kl": _scaled(by_kl, 1 / paper.bytes),
    }


def _scaled(each: Estimate, factor: float) -> Estimate:
    return Estimate(each.value * factor, each.low * factor, each.high * factor)


def against(measured: Mapping[str, Mapping[str, Point]], seed: int = 0, reference: str = "value") -> dict[str, Any]:
    """For every point of the other policies: how much more it loses than `value` at equal bytes, nats a token.

    Args:
        measured: points by policy and setting.
        seed: of the intervals.
        reference: what to call `value`: a policy in `measured`.

    Returns:
        "points": each with policy, settings, bytes, "further_loss" and "further_kl"; those with fewer bytes than
        value's narrowest are left out. "value_above": how many of them lie below value's curve beyond noise: their
        95% interval of the loss is below 0.
    """
    by_loss, by_kl = (Curve(list(measured[reference].values()), loss) for loss in (rise, divergence))
    points, further = [], []
    for policy, named in measured.items():
        for name, point in named.items():
            if policy == reference or point.bytes < by_loss.least_bytes:
                continue
            further.append(by_loss.further_at_equal_bytes(point, seed))
            kl = by_kl.further_at_equal_bytes(point, seed)
            told = {"policy": policy, "settings": name, "bytes": point.bytes}
            points.append({**told, "further_loss": further[-1], "further_kl": kl})
    return {
        "points": points,
        "value_below": sum(each.low > 0 for each in further),
        "within_noise": sum(each.low <= 0 <= each.high for each in further),
        "value_above": sum(each.high < 0 for each in further),
    }


def _against_uniform(context: StudyContext, paper: Point, half: Point) -> dict[str, Any]:
    """The paper's policy, uniform width with as many bytes (to a neuron, rounded down), and uniform half width."""
    plan = plan_widths(context.profile, "uniform", bytes=paper.bytes, step=1)
    equal = context.evaluate(plan, label="uniform, as many bytes as crisp")
    return {
        "crisp": paper.to_json(),
        "uniform_at_equal_bytes": equal.to_json(),
        "uniform_half": half.to_json(),
        "crisp_over_uniform_at_equal_bytes": difference(paper.measured, equal.measured, context.seed),
        "uniform_half_over_crisp": difference(half.measured, paper.measured, context.seed),
    }


def show(page: Page, result: dict[str, Any]) -> None:
    """Section of the page."""
    from coterie.study.widths.wording import interval, percent, verdict

    at, fair = result["at_crisp_loss"], result["crisp_against_uniform"]
    named = {name: {"value": each["perplexity_increase"], "interval_95": each["interval_95"]}
             for name, each in fair.items() if "perplexity" in each}  # fmt: skip
    fairer = verdict(
        fair["crisp_over_uniform_at_equal_bytes"], 0, "uniform width is better at equal bytes",
        "the paper's policy is better at equal bytes", "at equal bytes they cannot be told apart here",
    )  # fmt: skip
    page.section(
        "Bytes against quality, every policy",
        "The paper (Mixtral-8x7B): its policy raises perplexity by 0.14 (3.84 to 3.98), uniform 50% width by 0.83 (to "
        "4.67), at what it calls a similar I/O volume.",
        f"Here the paper's policy reads {percent(at['crisp_bytes'])} of the bytes and raises perplexity by "
        f"{interval(named['crisp'], 2)}; uniform 50% width by {interval(named['uniform_half'], 2)}. The two do not "
        f"read as many bytes: uniform width with {percent(fair['uniform_at_equal_bytes']['bytes'])}, in the same order "
        f"of neurons, raises it by {interval(named['uniform_at_equal_bytes'], 2)}: {fairer}. Who dominates is told by "
        f"{result['dominance']}, the best for the paper's policy on the calibration text ("
        + ", ".join(f"{name} {interval(each, 2)}" for name, each in result["dominance_on_calibration"].items())
        + ").",
        *_read(result),
    )
    page.figure(_figure(result["curves"], "perplexity_increase", "increase of perplexity"))
    page.figure(_figure(result["curves"], "kl", "KL from the unchanged model, nats a token"))
    page.table(
        [
            "policy",
            "setting (or share of bytes asked for)",
            "bytes",
            "perplexity (95%)",
            "KL",
            "loss beyond value's at equal bytes, nats",
        ],
        list(_rows(result)),
    )


def _read(result: dict[str, Any]) -> Iterator[str]:
    """What the curves of `value` say."""
    from coterie.study.widths.wording import interval, number, percent

    at, learnt = result["at_crisp_loss"], result["learnt"]
    plain, paper = at["value_by_importance"], at["crisp_in_learnt_order"]
    yield (
        f"value-learnt, the policy value with what every neuron is worth learnt on the first halves "
        f"({learnt['tokens_learnt']:,} tokens, {learnt['steps_done']} steps at {percent(learnt['bytes'])} of the "
        f"bytes; KL on {learnt['tokens_aside']:,} further tokens of them {learnt['kl_before']:.4f} before, "
        f"{learnt['kl_after']:.4f} after), reaches the paper's policy's loss with {percent(at['value_bytes'])} of the "
        f"bytes, {number(at['ratio'])} times as many (at equal KL {number(at['ratio_at_equal_kl'])} times). By "
        f"importance alone, which takes no learning, value needs {percent(plain['value_bytes'])}, "
        f"{number(plain['ratio'])} times as many (at equal KL {number(plain['ratio_at_equal_kl'])} times). Learning "
        "also orders the neurons: in that order the paper's policy raises perplexity by "
        + interval({"value": paper["perplexity_increase"], "interval_95": paper["interval_95"]}, 2) + "."
    )  # fmt: skip
    for name, key in (("value", "against_value"), ("value-learnt", "against_learnt")):
        others = result[key]
        yield (
            f"Of {len(others['points'])} points of other policies, {others['value_below']} lose more than {name} at "
            f"equal bytes, {others['within_noise']} the same within noise and {others['value_above']} less."
        )


def _rows(result: dict[str, Any]) -> Iterator[list[Any]]:
    from coterie.study.widths.wording import interval, number, percent

    further = {(each["policy"], each["settings"]): each["further_loss"] for each in result["against_value"]["points"]}
    for policy, points in result["curves"].items():
        for each in points:
            beyond = further.get((policy, each["settings"]))
            increase = {"value": each["perplexity_increase"], "interval_95": each["interval_95"]}
            yield [policy, each["settings"], percent(each["bytes"]), interval(increase, 2), each["kl"],
                   "-" if beyond is None else number(beyond)]  # fmt: skip


def _figure(curves: Mapping[str, Sequence[Mapping[str, Any]]], key: str, title: str) -> Any:
    from coterie.report.page import graph_objects

    figure = graph_objects().Figure()
    for policy, points in curves.items():
        falling = sorted(points, key=lambda each: -float(each["bytes"]))
        bars = None
        if key == "perplexity_increase":
            bars = {"type": "data", "symmetric": False, "thickness": 1,
                    "array": [each["interval_95"][1] - each[key] for each in falling],
                    "arrayminus": [each[key] - each["interval_95"][0] for each in falling]}  # fmt: skip
        figure.add_scatter(
            x=[each["bytes"] for each in falling], y=[each[key] for each in falling], error_y=bars, name=policy,
            text=[each["settings"] for each in falling], mode="markers" if policy in _TIERED else "lines+markers",
        )  # fmt: skip
    axis: dict[str, Any] = {"title": title}
    if key == "kl":
        axis |= {"type": "log"}
    else:
        axis |= {"tickformat": ".1%", "range": [-0.005, _MOST_SHOWN]}
    figure.update_layout(xaxis={"title": "share of expert bytes per token", "tickformat": ".0%"}, yaxis=axis)
    return figure
