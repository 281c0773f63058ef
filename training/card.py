"""The model card: `card.md` filled in with what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.corpus import DOMAINS
from training.models import SEQUENCE

TEMPLATE = Path(__file__).with_name("card.md")


def model_card(
    config: Mapping[str, Any], moe: Mapping[str, Any], dense: Mapping[str, Any], training: Mapping[str, Any]
) -> str:
    """README.md of a model folder.

    Args:
        config: the model's `config.json`.
        moe: `quality.evaluate` of the MoE, and `parameters`, `active_parameters`.
        dense: the same of the dense model trained on as many tokens.
        training: what `train_tiny.py` wrote to `training.json` for the MoE.
    """
    position, settings = training["position"], training["settings"]
    return TEMPLATE.read_text().format(
        name=moe["name"],
        architecture=config["architectures"][0],
        layers=config["num_hidden_layers"],
        experts=config.get("num_local_experts") or config["num_experts"],
        top_k=config["num_experts_per_tok"],
        width=config.get("moe_intermediate_size") or config["intermediate_size"],
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        parameters=moe["parameters"] / 1e6,
        active=moe["active_parameters"] / 1e6,
        dense_parameters=dense["parameters"] / 1e6,
        tokens=position["tokens"] / 1e6,
        steps=position["step"],
        rows=settings["rows"],
        window=SEQUENCE,
        minutes=position["seconds"] / 60,
        cpu=position["cpu_seconds"] / position["seconds"],
        quality_table=quality_table(moe, dense),
        routing_table=routing_table(moe["routing"]),
        balance=balance(position["balance_history"]),
        corpus=training["corpus_tokens"] / 1e6,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        decay=settings["decay"],
        peak=settings["peak"],
        max_norm=settings["max_norm"],
        seed=settings["seed"],
    )


def quality_table(moe: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Perplexity and bits per byte of both models, a row for each text."""
    lines = ["| text | perplexity | bits/byte | perplexity, dense | bits/byte, dense |", "|---|---|---|---|---|"]
    rows = [(domain, moe["domains"][domain], dense["domains"][domain]) for domain in DOMAINS]
    rows.append(("all eight", moe["all"], dense["all"]))
    rows.append(("wikitext2-test", moe["domains"]["wikitext2-test"], dense["domains"]["wikitext2-test"]))
    for label, ours, theirs in rows:
        figures = [f"{of['perplexity']:.1f} | {of['bits_per_byte']:.3f}" for of in (ours, theirs)]
        lines.append(f"| {label} | {' | '.join(figures)} |")
    return "\n".join(lines)


def routing_table(routing: Mapping[str, list[float]]) -> str:
    """Skew of every layer and the mean over layers."""
    layers = len(routing["max_mean"])
    lines = ["| layer | " + " | ".join(map(str, range(layers))) + " | mean |", "|---" * (layers + 2) + "|"]
    rows = (
        ("top 25% of pairs", "top_quarter", ".0%"),
        ("largest load / mean", "max_mean", ".2f"),
        ("smallest load / mean", "min_mean", ".2f"),
    )
    for label, key, form in rows:
        values = [*routing[key], sum(routing[key]) / layers]
        lines.append(f"| {label} | " + " | ".join(format(value, form) for value in values) + " |")
    return "\n".join(lines)


def balance(history: list[tuple[int, float]]) -> str:
    """The weight of the load-balancing loss, and from which step each later one held."""
    (_, first), *later = history
    return f"{first:g}" + "".join(f", from step {step:,} on {weight:g}" for step, weight in later)
