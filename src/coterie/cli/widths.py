"""`coterie widths`: how wide each expert runs in each company, decided from a model's profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, progress, say, table, warnings_as_notes
from coterie.cli.width_texts import AllowanceOptions
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.pruning.width_plan import WidthPlan


def widths(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A model's profile (coterie profile).")],
    out: Annotated[Path, typer.Option("--out", help="The width plan to write, .safetensors.")],
    policy: Annotated[str, typer.Option(help="value, crisp, symmetric, uniform, by-weight, drop or skip.")] = "value",
    threshold: Annotated[
        float | None, typer.Option(help="Of value, by-weight, drop or skip: larger is narrower, 0 runs everything.")
    ] = None,
    share: Annotated[
        str | None, typer.Option("--bytes", help="Stay within this share of full expert bytes a token, e.g. 0.6.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="Fewest bytes at which perplexity rises by at most this, e.g. 1%.")
    ] = None,
    alpha: Annotated[str, typer.Option(help="Share of the uses that hot combinations hold.")] = "0.6",
    beta: Annotated[str, typer.Option(help="Share of the uses that hot and warm combinations hold.")] = "0.9",
    warm_aux: Annotated[str, typer.Option(help="Width of a warm combination's auxiliary expert.")] = "0.5",
    cold_aux: Annotated[str, typer.Option(help="Width of a cold combination's auxiliary expert.")] = "0",
    role_widths: Annotated[
        str | None, typer.Option(help='All six: dominant, auxiliary of hot, warm, cold: "1,1 1,0.5 1,0".')
    ] = None,
    gamma: Annotated[float, typer.Option(help="Exponent of by-weight.")] = 0.7,
    prices: Annotated[
        str | None, typer.Option(help='For value: what hot, warm and cold bytes cost, e.g. "1,1.5,2".')
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Which importance of neurons; the best one there.")] = None,
    layers: Annotated[str | None, typer.Option(help="For value: how layers compare, by loss or equal.")] = None,
    dominance: Annotated[str | None, typer.Option(help="What tells who dominates; the best one there.")] = None,
    step: Annotated[int | None, typer.Option(help="Widths are multiples of so many neurons.")] = None,
    model: Annotated[
        str | None, typer.Option(help="For --max-ppl-increase: the model; the one that was profiled.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="Its calibration text; what was profiled.")] = None,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="A shipped text for it.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of it, over all texts; 8,192.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose execution widths from a profile, for a share of the bytes or a perplexity allowance.

    crisp and symmetric need no strength: alpha and beta have the paper's values.
    """
    from coterie.files import replacing
    from coterie.profile.profile_file import load_profile
    from coterie.pruning.width_plan_file import save_plan
    from coterie.pruning.width_planning import plan_widths
    from coterie.units import parse_fraction

    allowance = AllowanceOptions(max_ppl_increase, model, text or [], domain or [], tokens)
    allowance.check(threshold is not None or share is not None)
    options: dict[str, Any] = {
        "alpha": parse_fraction(alpha), "beta": parse_fraction(beta), "warm_aux": parse_fraction(warm_aux),
        "cold_aux": parse_fraction(cold_aux), "role_widths": _pairs(role_widths), "gamma": gamma,
        "prices": None if prices is None else _numbers(prices, "--prices"), "variant": variant,
        "layers": layers, "dominance": dominance, "step": step,
    }  # fmt: skip
    with replacing(out) as temporary, warnings_as_notes(), progress() as listen:  # a place to write to, before the work
        loaded = load_profile(profile)
        plan_of: Callable[[float], WidthPlan] = lambda bytes: plan_widths(loaded, policy, bytes=bytes, **options)  # noqa: E731
        if allowance.wanted:
            plan = allowance.plan(loaded, plan_of, listen)
        else:
            asked = None if share is None else parse_fraction(share)
            plan = plan_widths(loaded, policy, threshold=threshold, bytes=asked, **options)
        save_plan(plan, temporary)
    result = _result(plan, out)
    if as_json:
        emit_json(result)
    else:
        _show(result)


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no list of numbers; write it like 1,1.5,2") from None


def _pairs(text: str | None) -> list[tuple[float, ...]] | None:
    return None if text is None else [tuple(_numbers(part, "--role-widths")) for part in text.split()]


def _result(plan: WidthPlan, out: Path) -> dict[str, Any]:
    from coterie.pruning.width_tables import metadata_bytes

    return {
        "out": str(out), "model": plan.spec.model, "layers": plan.spec.num_layers, "experts": plan.spec.num_experts,
        "top_k": plan.spec.top_k, "width": plan.width, "policy": plan.policy, "metadata_bytes": metadata_bytes(plan),
        **plan.settings,
    }  # fmt: skip


def _show(result: dict[str, Any]) -> None:
    from coterie.units import format_bytes

    layers = result["expected_bytes_by_layer"]
    error = result["expected_bytes_standard_error"]
    say(f"{result['out']}: widths for {result['model']}, policy {result['policy']}{_strength(result)}")
    rows = [
        ["share of full expert bytes a token (expected)", result["expected_bytes"]],
        ["  standard error, over sampled tokens", "-" if error is None else f"{error:.4f}"],
        ["  of a layer: least, most", f"{min(layers):.3f}, {max(layers):.3f}"],
        ["neurons of an expert; widths in steps of", f"{result['width']:,}; {result['step']}"],
        ["tables beside the reordered model", format_bytes(result["metadata_bytes"])],
    ]
    table(["", ""], rows)
    if "tiers" in result:
        _show_tiers(result)
    if "allowance" in result:
        told = result["allowance"]
        say(
            f"perplexity {told['full_perplexity']:.3f} at full width, {told['increase']:+.2%} with this plan, on "
            f"{told['tokens']:,} tokens of {', '.join(told['texts'])}"
        )
    if result["unseen_experts"]:
        say(f"{result['unseen_experts']} experts were never chosen in the profile: taken for average ones")


def _strength(result: dict[str, Any]) -> str:
    return f", threshold {result['threshold']:.4g}" if "threshold" in result else ""


def _show_tiers(result: dict[str, Any]) -> None:
    widths = result.get("widths", {})
    rows = []
    for name, tier in result["tiers"].items():
        roles = widths.get(name)
        wide = "-" if roles is None else f"{roles['dominant']:,} / {roles['auxiliary']:,}"
        rows.append([name, f"{tier['combinations']:.1%}", f"{tier['uses']:.1%}", wide])
    table(["tier", "combinations", "uses", "dominant / auxiliary"], rows)
    if "dominance_decided_by" in result:
        decided = ", ".join(f"{way} {share:.1%}" for way, share in result["dominance_decided_by"].items())
        say(f"who dominates, share of the uses decided by: {decided}")
