"""`coterie generate`: text from a model that does not fit, at a byte budget, and what that cost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from coterie.cli.common import JsonOption, SeedOption, emit_json, note, say, table, warnings_as_notes
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.models.completions import Sampling
    from coterie.models.prompts import Prompt
    from coterie.offloading.stats import OffloadStats
    from coterie.offloading.timeline import Timeline


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
        str | None, typer.Option("--policy", help="What to keep: lru, lru-layer, lfu, reuse or company.")
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
            metavar="F", help="Skip an expert that would miss and weighs under F/K of a token; lossy, e.g. 0.75."
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write every load and computation as a Chrome trace, .json.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the last token's loads and computations, .html; needs coterie[report].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts with the experts read from the store as they are needed."""
    from coterie.models.completions import Sampling
    from coterie.offloading.model import offload
    from coterie.offloading.timeline import Timeline
    from coterie.policies.registry import DEFAULT
    from coterie.pruning.width_plan_file import load_plan
    from coterie.units import parse_bandwidth

    sampling = Sampling(tokens, temperature, top_p, seed)
    asked = _asked(prompt, prompts, out, as_json)
    recorder: Timeline | None = None if timeline is None and picture is None else Timeline()
    with ExitStack() as files, warnings_as_notes():
        _require_places(timeline, picture)
        plan = None if widths is None else load_plan(widths)
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        tokenizer, ids = _tokens(store, asked, sampling)
        sink = _sink(files, prompts, out)
        model = offload(
            store,
            budget,
            plan,
            policy=policy or DEFAULT,
            schedule=schedule,
            bandwidth=rate,
            ahead=ahead,
            timeline=recorder,
            device=device,
            use_cached=use_cached if cached_widths is None else load_plan(cached_widths),
            skip_misses=skip_misses,
        )
        files.callback(model.close)
        text, result = _continue(model, tokenizer, asked, ids, sampling, batch, sink)
    if recorder is not None and timeline is not None:
        recorder.write(timeline)
    if recorder is not None and picture is not None:
        _draw(recorder, picture, store, model.stats())
    if device is not None:
        note("offloading to a device is experimental: it has not run on a GPU yet")
    about = {"store": str(store), "budget": budget, "batch": batch, **vars(sampling), "versions": _versions()}
    if as_json:
        emit_json({**about, **({"text": text} if prompts is None else {"out": str(out)}), **result})
    elif prompts is None or out is not None:
        say(text if prompts is None else f"{out}: {len(asked)} results")
        _show(result, model.stats())
    else:
        note(
            f"{len(asked)} prompts continued by {result['tokens']} tokens, {result['tokens_per_s']:.2f} a second with "
            f"the prompts; {result['miss_ratio']:.1%} of expert uses missed"
        )


def _asked(prompt: str | None, prompts: Path | None, out: Path | None, as_json: bool) -> list[Prompt]:
    """What to continue."""
    from coterie.models.prompts import Prompt, read_prompts

    if (prompt is None) == (prompts is None):
        raise ConfigError(f"{'neither' if prompt is None else 'both'} --prompt and --prompts are given; give one")
    if prompts is None:
        if out is not None:
            raise ConfigError("--out takes the results of --prompts; with --prompt the text goes to stdout")
        return [Prompt(0, "--prompt", prompt)]
    if as_json and out is None:
        raise ConfigError(
            "--json prints one object, and the results of --prompts are one each; send them to --out FILE"
        )
    return read_prompts(prompts)


def _tokens(store: Path, asked: Sequence[Prompt], sampling: Sampling) -> tuple[Any, list[list[int]]]:
    """The store's tokenizer, and every prompt's tokens: all of them are checked before the work."""
    from coterie.checkpoint.expert_store import open_store
    from coterie.models.completions import require_positions
    from coterie.models.load import load_config, load_tokenizer

    folder = open_store(store).skeleton
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    ids = [each.tokens(tokenizer) for each in asked]
    for each, tokens in zip(asked, ids, strict=True):
        require_positions(config.get_text_config(), len(tokens), sampling, each.source)
    return tokenizer, ids


def _require_places(timeline: Path | None, picture: Path | None) -> None:
    """Refuse files that cannot be written, and a picture that cannot be drawn, before the work."""
    from coterie.files import replacing
    from coterie.report.page import graph_objects

    if picture is not None:
        graph_objects()
    for path in (timeline, picture):
        if path is not None:
            with suppress(_Tried), replacing(path):
                raise _Tried  # leaves nothing behind


class _Tried(Exception):
    pass


def _sink(files: ExitStack, prompts: Path | None, out: Path | None) -> TextIO | None:
    """Where result lines go; a file appears when all is done."""
    from coterie.files import replacing

    if prompts is None:
        return None
    if out is None:
        return sys.stdout
    return files.enter_context(files.enter_context(replacing(out)).open("w", encoding="utf-8"))


def _continue(
    model: Any, tokenizer: Any, asked: Sequence[Prompt], ids: list[list[int]], sampling: Sampling, batch: int,
    sink: TextIO | None,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """The last prompt with its continuation, and figures of all; a line for each goes to the sink."""
    from coterie.models.completions import complete

    started, done, counted, text = time.perf_counter(), 0, 0, ""
    for completions in complete(model, tokenizer, ids, sampling, batch):
        for each in completions:
            source, own = asked[done], ids[done]
            text = tokenizer.decode([*own, *each.ids], skip_special_tokens=True)
            line = {
                "id": source.id, "text": each.text, "prompt_tokens": len(own), "tokens": len(each.ids),
                "finish": each.finish,
            }  # fmt: skip
            if sink is not None:
                sink.write(json.dumps(line) + "\n")
            done, counted = done + 1, counted + len(each.ids)
        if sink is not None:
            sink.flush()
    seconds = time.perf_counter() - started
    return text, {
        "prompts": done, "prompt_tokens": sum(map(len, ids)), "tokens": counted, "seconds": seconds,
        "tokens_per_s": counted / seconds, **model.stats().to_json(),
    }  # fmt: skip


def _draw(recorder: Timeline, picture: Path, store: Path, stats: OffloadStats) -> None:
    from coterie.report.token_timeline import token_page
    from coterie.units import format_bytes

    notes = [
        f"{store}, {format_bytes(stats.budget_bytes)} for experts, policy {stats.policy}, schedule {stats.schedule}. "
        f"Made with {', '.join(f'{name} {number}' for name, number in _versions().items())}."
    ]
    if stats.emulated_bandwidth is not None:
        notes.append(f"Reads at an emulated {stats.emulated_bandwidth / 1e9:g} GB/s: times are an emulation's.")
    token_page(recorder.last_token(), notes).save(picture)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    import coterie

    return {"coterie": coterie.__version__, **{name: version(name) for name in ("torch", "transformers")}}


def _show(result: dict[str, Any], stats: OffloadStats) -> None:
    from coterie.units import format_bytes

    if stats.emulated_bandwidth is not None:
        note(f"an emulated disk of {stats.emulated_bandwidth / 1e9:g} GB/s: the times are an emulation's")
    if stats.use_cached or stats.skip_misses:
        note("which neurons run depends on what is resident: another budget or order may give another text")
    rows = [
        ["tokens per second, prompt included", f"{result['tokens_per_s']:.2f}"],
        ["memory of experts: most taken, budget", f"{format_bytes(stats.peak_expert_bytes)}, "
         f"{format_bytes(stats.budget_bytes)}"],
        ["expert uses that missed", f"{stats.miss_ratio:.1%}"],
        ["bytes read; share of reading every chosen expert", f"{format_bytes(stats.loaded_bytes)}; "
         f"{stats.bytes_share:.1%}"],
        ["time: loading, waiting for loads, computing experts", f"{stats.load_seconds:.2f} s, "
         f"{stats.exposed_seconds:.2f} s, {stats.compute_seconds:.2f} s"],
        ["share of the loading that computation hid; attainable", f"{stats.overlap:.1%}; "
         f"{stats.attainable_overlap:.1%}"],
    ]  # fmt: skip
    table([f"policy {stats.policy}, schedule {stats.schedule}", ""], rows)
