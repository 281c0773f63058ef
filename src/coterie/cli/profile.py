"""`coterie profile`: what a model's experts and neurons matter, from text that runs through it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, say, table, warnings_as_notes
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile

_INTERRUPTED = 130


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a shipped model or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="The profile to write, .safetensors.")],
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text file, UTF-8; may be repeated.")] = None,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="A shipped text; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to run, shared by the texts.")] = 16384,
    update: Annotated[Path | None, typer.Option(help="An earlier profile of the model, to add this text to.")] = None,
    ablation_pairs: Annotated[
        int, typer.Option("--ablation-pairs", min=0, help="Pairs whose experts are left out in turn: exact, slow.")
    ] = 0,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Also run backward: Fisher scores; twice as slow.")
    ] = True,
    window: Annotated[int | None, typer.Option(help="Tokens of a window; what the model reads, up to 1,024.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Profile a model on text: how often experts keep company, which neurons matter, and which expert of a pair.

    Progress is kept in OUT.partial; the same command goes on from there after an interruption.
    """
    import coterie
    from coterie.models.load import load_model, load_tokenizer
    from coterie.models.record import check_output
    from coterie.profile.profile_file import load_profile, save_profile

    texts = _texts(text or [], domain or [])
    check_output(out)
    earlier = None if update is None else load_profile(update)
    partial = out.with_name(f"{out.name}.partial")
    with warnings_as_notes(), progress() as listen:
        tokenizer, loaded = load_tokenizer(model), load_model(model, dtype)
        started = time.monotonic()
        try:
            made = coterie.profile_model(
                loaded, tokenizer, texts, tokens=tokens, window=window, seed=seed, gradients=gradients,
                ablation_pairs=ablation_pairs, update=earlier, resume_from=partial, progress=listen,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = f"{partial} holds what was done; the same command goes on" if partial.exists() else "nothing is kept"
            note(f"coterie: error: interrupted; {kept}")
            raise SystemExit(_INTERRUPTED) from None
        seconds = time.monotonic() - started
        save_profile(made, out)
    partial.unlink(missing_ok=True)
    result = _result(made, out, seconds)
    if as_json:
        emit_json(result)
    else:
        _show(result)


def _texts(files: list[Path], domains: list[str]) -> dict[str, str]:
    """The texts by name."""
    from coterie import data
    from coterie.evaluate.text import read_text_file

    if not files and not domains:
        known = ", ".join(data.text_names())
        raise ConfigError(f"profiling runs over text; give --text FILE or --domain NAME ({known})")
    texts = {str(file): read_text_file(file) for file in files}
    texts |= {f"{name} (shipped)": data.text(name) for name in domains}
    if len(texts) < len(files) + len(domains):
        raise ConfigError("a text was given twice; give each once")
    return texts


def _result(made: ModelProfile, out: Path, seconds: float) -> dict[str, Any]:
    import numpy as np

    from coterie.profile.combinations import top_share
    from coterie.pruning.agreement import dominance_agreement
    from coterie.pruning.tier_error import tier_error

    skews = [top_share(counts_EE) for counts_EE in made.pairs_LEE] if made.spec.top_k > 1 else []
    return {
        "out": str(out), "model": made.spec.model, "layers": made.spec.num_layers, "experts": made.spec.num_experts,
        "top_k": made.spec.top_k, "width": made.width, "tokens": made.num_tokens, "seed": made.provenance["seed"],
        "texts": made.provenance["texts"], "unused_experts": int((made.load_LE == 0).sum()),
        "skew": float(np.mean(skews)) if skews else None, "tier_error": tier_error(made),
        "importance": list(made.importance), "dominance": list(made.dominance),
        "agreement": [
            {
                "methods": list(each.methods), "pairs": each.pairs, "share": _plain(each.share),
                "share_not_hot": _plain(each.share_not_hot),
            }
            for each in dominance_agreement(made)
        ],
        "seconds": round(seconds, 3),
    }  # fmt: skip


def _plain(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN, which JSON has no word for


def _show(result: dict[str, Any]) -> None:
    say(f"{result['out']}: profile of {result['model']}, seed {result['seed']}")
    say(
        f"  {result['layers']} MoE layers, {result['experts']} experts of {result['width']} neurons, "
        f"top-{result['top_k']}"
    )
    rows = [
        ["tokens", f"{result['tokens']:,}"],
        ["uses held by the top 25% of combinations", "-" if result["skew"] is None else f"{result['skew']:.1%}"],
        ["uses whose tier is uncertain (estimate)", f"{result['tier_error']:.1%}"],
        ["experts that no token chose", result["unused_experts"]],
    ]
    for each in result["agreement"]:
        if each["share"] is not None:
            one, other = each["methods"]
            cold = "" if each["share_not_hot"] is None else f", warm and cold {each['share_not_hot']:.1%}"
            rows.append(
                [f"same dominant expert: {one}, {other}", f"{each['share']:.1%}{cold} ({each['pairs']:,} pairs)"]
            )
    table(["what", "value"], [*rows, ["seconds", f"{result['seconds']:.1f}"]])
