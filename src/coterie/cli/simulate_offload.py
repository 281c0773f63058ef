"""`coterie simulate offload`: what an expert cache of a given size would read for the tokens of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.common import JsonOption, emit_json, progress, say, table
from coterie.errors import ConfigError
from coterie.units import parse_fraction

if TYPE_CHECKING:
    from coterie.simulate.offload import Replayed

_POLICIES = "lru,lru-layer,lfu,reuse,company,belady"


def simulate_offload(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace, or any file that can be imported.")],
    budgets: Annotated[str, typer.Option(help="Shares of all experts' bytes, with commas.")] = "10%,20%,30%,50%",
    policies: Annotated[str, typer.Option(help="Eviction policies, with commas.")] = _POLICIES,
    widths: Annotated[
        Path | None, typer.Option(help="A width plan: experts are read only as wide as they run.")
    ] = None,
    warm: Annotated[str, typer.Option(help="Share of the tokens, the earliest, that only fill and teach.")] = "0%",
    as_json: JsonOption = False,
) -> None:
    """Count what each policy misses and reads at each budget, token by token, from an empty cache.

    Full offload keeps nothing and reads exactly the chosen experts; bytes are a share of what it reads. belady knows
    the future: no policy reads less.
    """
    from coterie.pruning.width_plan_file import load_plan
    from coterie.simulate.offload import decode_tokens, planned_widths, simulate, uses_of
    from coterie.trace.open import open_trace

    names = _listed(policies, "policies", "lru,company")
    texts = _listed(budgets, "budgets", "10%,20%")
    shares = {text: parse_fraction(text) for text in texts}
    warm_share = parse_fraction(warm)
    with progress() as listen:
        routing = open_trace(trace, progress=listen)
        plan = None if widths is None else load_plan(widths)
        rule = None if plan is None else planned_widths(plan, routing)
        uses = uses_of(routing, decode_tokens(routing), rule, 0 if plan is None else plan.width)
        tokens = len(uses.ids_TLK)
        warm_tokens = round(warm_share * tokens)
        found = simulate(uses, list(dict.fromkeys(shares.values())), names, warm_tokens, listen)
    results = {text: found[share] for text, share in shares.items()}
    if as_json:
        figures = {
            text: {name: {"miss_ratio": row.miss_ratio, "bytes_share": row.bytes_share} for name, row in rows.items()}
            for text, rows in results.items()
        }
        about = {
            "trace": str(trace), "widths": None if widths is None else str(widths), "model": routing.spec.to_json(),
            "tokens": tokens, "warm_tokens": warm_tokens, "blocks_per_expert": uses.shape.blocks,
            "smallest_budget": uses.smallest_share,
        }  # fmt: skip
        emit_json({"budgets": figures, **about})
    else:
        _show(results, trace, tokens, warm_tokens)


def _listed(text: str, what: str, example: str) -> list[str]:
    """The parts of a list with commas, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError(f"--{what} {text!r} names none; write it like --{what} {example}")
    return parts


def _show(results: dict[str, dict[str, Replayed]], trace: Path, tokens: int, warm: int) -> None:
    names = list(next(iter(results.values())))
    say(f"{trace}: {tokens - warm} tokens counted, {warm} before them to warm up")
    for title, figure in (
        ("share of expert uses that miss", "miss_ratio"),
        ("bytes read, as a share of full offload", "bytes_share"),
    ):
        rows = [(text, *(getattr(row[name], figure) for name in names)) for text, row in results.items()]
        table(("budget", *names), rows, title)
