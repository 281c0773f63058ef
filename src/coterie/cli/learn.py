"""`coterie learn`: what neurons are worth, learnt from what leaving them out does to predictions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, progress, say, table, warnings_as_notes
from coterie.cli.width_texts import profiled_model, profiled_texts

if TYPE_CHECKING:
    from coterie.profile.model_profile import ModelProfile

_INTERRUPTED = 130
_MOST_TOKENS = 65536


def learn(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A model's profile (coterie profile).")],
    out: Annotated[Path, typer.Option("--out", help="The profile to write, with what was learnt, .safetensors.")],
    model: Annotated[str | None, typer.Option(help="The model that was profiled; what the profile names.")] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text file; those that were profiled.")] = None,
    domain: Annotated[list[str] | None, typer.Option("--domain", help="A shipped text; may be repeated.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to use, shared by the texts; all there are, up to 65,536.")
    ] = None,
    share: Annotated[str, typer.Option("--bytes", help="Share of expert bytes at which to learn.")] = "0.42",
    steps: Annotated[int, typer.Option(help="Most steps; fewer where nothing better is found.")] = 160,
    window: Annotated[int | None, typer.Option(help="Tokens of a window; 256.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own.")] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Learn what each neuron is worth to the policy value: the same quality at fewer bytes.

    A few minutes for a small model. Progress is kept in OUT.partial; the same command goes on from there.
    """
    import coterie
    from coterie.models.load import load_model, load_tokenizer
    from coterie.models.record import check_output
    from coterie.profile.profile_file import load_profile, save_profile
    from coterie.units import parse_fraction

    check_output(out)
    bytes, loaded = parse_fraction(share), load_profile(profile)
    texts, name = profiled_texts(loaded, text or [], domain or []), profiled_model(loaded, model)
    partial = out.with_name(f"{out.name}.partial")
    with warnings_as_notes(), progress() as listen:
        tokenizer, live = load_tokenizer(name), load_model(name, dtype)
        started = time.monotonic()
        try:
            made = coterie.learn_values(
                live, tokenizer, texts, loaded, tokens=tokens or _all_tokens(tokenizer, texts, window), bytes=bytes,
                steps=steps, window=window, seed=seed, resume_from=partial, progress=listen,
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


def _all_tokens(tokenizer: Any, texts: dict[str, str], window: int | None) -> int:
    """Whole windows that all texts have, since they take turns; 65,536 tokens at most."""
    from coterie.calibration.learning import DEFAULT_WINDOW

    length, shortest = window or DEFAULT_WINDOW, min(len(_ids(tokenizer, text)) for text in texts.values())
    each = (shortest - 1) // length
    return max(1, min(each * len(texts), _MOST_TOKENS // length)) * length


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _result(made: ModelProfile, out: Path, seconds: float) -> dict[str, Any]:
    from coterie.pruning.importance_order import LEARNT

    return {"out": str(out), "model": made.spec.model, **made.provenance[LEARNT], "seconds": round(seconds, 3)}


def _show(result: dict[str, Any]) -> None:
    say(f"{result['out']}: profile of {result['model']} with what was learnt, seed {result['seed']}")
    change = result["kl_after"] / result["kl_before"] - 1 if result["kl_before"] > 0 else 0.0
    rows = [
        ["tokens learnt from; put aside to judge by", f"{result['tokens_learnt']:,}; {result['tokens_aside']:,}"],
        ["share of expert bytes", f"{result['bytes']:.3f}"],
        ["KL from the full model, tokens put aside: before", f"{result['kl_before']:.4f}"],
        ["  with what was learnt", f"{result['kl_after']:.4f} ({change:+.1%})"],
        ["steps; the best", f"{result['steps_done']}; {result['best_step']}"],
        ["seconds", f"{result['seconds']:.1f}"],
    ]
    table(["what", "value"], rows)
    if not result["best_step"]:
        say("nothing better was found: values are the profile's own; use more text or more steps")
