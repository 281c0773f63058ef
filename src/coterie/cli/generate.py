"""`coterie generate`: text from a model that does not fit, at a byte budget, and what that cost."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, say, warnings_as_notes
from coterie.cli.generate_prompts import asked_for, continue_all, require_skips, sink_of, tokens_of
from coterie.cli.generate_show import TimelineFiles, show, versions


def generate(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="An expert store (coterie pack).")],
    budget: Annotated[str, typer.Option("--budget", help="What experts may take in memory: 6GiB, or 20% of them.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Many: .jsonl, {"prompt": ...} or {"messages": [{"role", "content"}]} a line, "id" if wanted.'
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the results of --prompts go, .jsonl; else to stdout.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that run together, padded on the left.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sample at this temperature; 0: the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 1.0,
    seed: SeedOption = 0,
    widths: Annotated[Path | None, typer.Option("--widths", help="A width plan for this store.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="What to keep: lru, lru-layer, lru-whole, lru-layer-whole, lfu, reuse or company.",
        ),
    ] = None,
    schedule: Annotated[str, typer.Option(help="Order of a layer's loads: johnson, widest-first or fifo.")] = "johnson",
    bandwidth: Annotated[
        str | None, typer.Option(help="Emulate a slower disk, e.g. 1GB/s; its numbers are an emulation's.")
    ] = None,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Read what the next layer probably needs while the disk is idle.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda or cuda:1, experimental: never run on a GPU yet. The budget is its memory.")
    ] = None,
    use_cached: Annotated[
        bool,
        typer.Option(
            "--use-cached", help="Run resident neurons beyond the planned widths too; outputs then depend on them."
        ),
    ] = False,
    cached_widths: Annotated[
        Path | None,
        typer.Option(help="The same, only up to the widths of this second, wider plan."),
    ] = None,
    skip_misses: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Skip an expert that would miss and weighs under F/K of a token, F below K; lossy, e.g. 0.75.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write every load and computation as a Chrome trace, .json.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the last token's loads and computations, .html; needs coterie\\[report].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts with the experts read from the store as they are needed."""
    from coterie.models.completions import Sampling
    from coterie.offloading.model import offload
    from coterie.policies.registry import DEFAULT
    from coterie.pruning.width_plan_file import load_plan
    from coterie.units import parse_bandwidth

    sampling = Sampling(tokens, temperature, top_p, seed)
    asked = asked_for(prompt, prompts, out, as_json)
    views = TimelineFiles(timeline, picture)
    recorder = views.recorder()
    with ExitStack() as files, warnings_as_notes():
        views.require()
        require_skips(store, skip_misses)
        plan = None if widths is None else load_plan(widths)
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        tokenizer, ids = tokens_of(store, asked, sampling)
        sink = sink_of(files, prompts, out)
        model = offload(
            store, budget, plan, policy=policy or DEFAULT, schedule=schedule, bandwidth=rate, ahead=ahead,
            timeline=recorder, device=device, skip_misses=skip_misses,
            use_cached=use_cached if cached_widths is None else load_plan(cached_widths),
        )  # fmt: skip
        files.callback(model.close)
        text, result = continue_all(model, tokenizer, asked, ids, sampling, batch, sink)
    views.write(recorder, store, model.stats())
    if device is not None:
        note("offloading to a device is experimental: it has not run on a GPU yet")
    if as_json:
        about = {
            "store": str(store),
            "budget": budget,
            "batch": batch,
            "sampling": vars(sampling),
            "versions": versions(),
        }
        emit_json({**about, **({"text": text} if prompts is None else {"out": str(out)}), **result})
    elif prompts is None or out is not None:
        say(text if prompts is None else f"{out}: {len(asked)} results")
        show(result, model.stats())
    else:  # results are on stdout, which is theirs alone
        note(
            f"{len(asked)} prompts continued by {result['tokens']} tokens, {result['tokens_per_s']:.2f} a second with "
            f"the prompts; {result['miss_ratio']:.1%} of expert uses missed"
        )
