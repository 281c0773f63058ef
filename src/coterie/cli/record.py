"""`coterie record`: the routing of a real model on a text, as a trace."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, progress, say
from coterie.cli.pruning_options import AUTO, FLOOR_HELP, PruningOptions
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.trace.routing_trace import RoutingTrace


def record(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a shipped model or a hub id.")],
    out: Annotated[Path, typer.Option("--out", help="The trace file to write, .safetensors.")],
    text: Annotated[Path | None, typer.Option("--text", help="A text file, UTF-8.")] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="A held-out text that ships, e.g. prose.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to record; with --generate at least so many.")] = 8192,
    generate: Annotated[bool, typer.Option("--generate", help="Let the model go on from pieces of the text.")] = False,
    batch: Annotated[int, typer.Option("--batch", help="Sequences that run together.")] = 4,
    length: Annotated[
        int, typer.Option("--length", help="Tokens of a sequence; with --generate half are prompt.")
    ] = 256,
    prune: Annotated[str | None, typer.Option(help="Prune destinations: share of routing weight to drop.")] = None,
    peak: Annotated[
        str | None, typer.Option(help="Prune to so many remote visits a token to the busiest device.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Pruning rule: cap, naive or priced.")] = "cap",
    topology: Annotated[str | None, typer.Option(help='Devices to prune over, like "8" or "2x8,inter=5".')] = None,
    placement: Annotated[Path | None, typer.Option(help="Where experts live; without it: in order.")] = None,
    fit: Annotated[
        Path | None, typer.Option(help="A trace of the model on other text, to fit --peak or priced.")
    ] = None,
    floor: Annotated[str, typer.Option(help=FLOOR_HELP)] = AUTO,
    renormalise: Annotated[
        bool | None, typer.Option("--renormalise/--no-renormalise", help="Rescale kept weights; as the model does.")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run a model over a text and record which experts every token is routed to, in every MoE layer.

    With --prune or --peak the model runs with pruned destinations, and what is recorded is what is left.
    """
    from coterie.evaluate.change import changed
    from coterie.models.load import load_model, load_tokenizer
    from coterie.models.record import check_output
    from coterie.models.run_text import TextRun, record_text

    run = TextRun(tokens, length, batch, generate, seed)
    pruning = PruningOptions(prune, peak, rule, floor, topology, placement, fit, renormalise)
    pruning.check()
    check_output(out)
    source, contents = _source(text, domain)
    with progress() as listen:
        tokenizer, loaded = load_tokenizer(model), load_model(model)
        changes = pruning.changes(loaded, listen)
        started = time.monotonic()
        trace = record_text(
            loaded, tokenizer, contents, run, out, source=source, progress=listen,
            pruning=changes[0].settings if changes else None,
            around=lambda sequences: changed(loaded, changes, sequences),
        )  # fmt: skip
    result = _result(trace, out, source, run.seed, time.monotonic() - started)
    result["pruning"] = changes[0].to_json() if changes else None
    if as_json:
        emit_json(result)
    else:
        _show(result)


def _source(text: Path | None, domain: str | None) -> tuple[str, str]:
    """What to call the text, and the text."""
    from coterie import data
    from coterie.files import read_text

    if (text is None) == (domain is None):
        known = ", ".join(data.text_names())
        raise ConfigError(f"a recording runs over one text; give either --text FILE or --domain ({known})")
    if domain is not None:
        return f"{domain} (shipped)", data.text(domain)
    assert text is not None
    return text.name, read_text(text, ConfigError)


def _result(trace: RoutingTrace, out: Path, source: str, seed: int, seconds: float) -> dict[str, Any]:
    from coterie.trace.routing_trace import DECODE, PREFILL

    assert trace.phase is not None
    return {
        "out": str(out), "model": trace.spec.model, "source": source, "seed": seed,
        "layers": trace.num_layers, "experts": trace.spec.num_experts, "top_k": trace.spec.top_k,
        "tokens": trace.num_tokens, "sequences": trace.num_sequences,
        "phases": {
            "prefill": int((trace.phase == PREFILL).sum()), "decode": int((trace.phase == DECODE).sum()),
        },
        "dropped": dict(trace.provenance["dropped"]), "seconds": round(seconds, 3),
    }  # fmt: skip


def _show(result: dict[str, Any]) -> None:
    phases, dropped = result["phases"], result["dropped"]
    say(f"{result['out']}: routing of {result['model']} on {result['source']}")
    say(f"  {result['layers']} MoE layers, {result['experts']} experts, top-{result['top_k']}")
    say(
        f"  {result['tokens']:,} tokens ({phases['prefill']:,} prefill, {phases['decode']:,} decode) in "
        f"{result['sequences']:,} sequences, {result['seconds']:.1f} s"
    )
    if any(dropped.values()):
        say(f"  left out: {dropped['padding']:,} slots of padding, {dropped['finished']:,} after a sequence's end")
    if result["pruning"] is not None:
        measured = result["pruning"]["measured"]
        say(
            f"  pruned, rule {result['pruning']['rule']}: kept weight {measured['kept_weight']:.3f}, remote devices a "
            f"token {measured['remote_dpt']:.3f}, remote peak traffic {measured['remote_peak_traffic']:.3f}"
        )
