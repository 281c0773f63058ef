"""`coterie generate`: text from a model that does not fit, at a byte budget, and what that cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.common import JsonOption, emit_json, note, say, table, warnings_as_notes

if TYPE_CHECKING:
    from coterie.offloading.stats import OffloadStats
    from coterie.offloading.timeline import Timeline


def generate(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="An expert store (coterie pack).")],
    budget: Annotated[str, typer.Option("--budget", help="What experts may take in memory: 6GiB, or 20% of them.")],
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate, at most.")] = 64,
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
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, greedily, with the experts read from the store as they are needed."""
    from coterie.files import replacing
    from coterie.models.load import load_tokenizer
    from coterie.offloading.model import offload
    from coterie.offloading.timeline import Timeline
    from coterie.policies.registry import DEFAULT
    from coterie.pruning.width_plan_file import load_plan
    from coterie.units import parse_bandwidth

    recorder: Timeline | None = None
    if timeline is not None:
        recorder = Timeline()
        with replacing(timeline) as place:  # a place to write to, before the work
            place.write_text("{}", encoding="utf-8")
    with warnings_as_notes():
        plan = None if widths is None else load_plan(widths)
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        model = offload(
            store,
            budget,
            plan,
            policy=policy or DEFAULT,
            schedule=schedule,
            bandwidth=rate,
            ahead=ahead,
            timeline=recorder,
            use_cached=use_cached if cached_widths is None else load_plan(cached_widths),
            skip_misses=skip_misses,
        )
        try:
            text, result = _continue(model, load_tokenizer(store / "model"), prompt, tokens)
        finally:
            model.close()
    if recorder is not None and timeline is not None:
        recorder.write(timeline)
    if as_json:
        emit_json({"store": str(store), "budget": budget, "text": text, **result})
    else:
        say(text)
        _show(result, model.stats())


def _continue(model: Any, tokenizer: Any, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """The text, and figures of prompt and generation."""
    import torch

    from coterie.errors import ConfigError

    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if ids["input_ids"].shape[1] == 0:
        raise ConfigError("--prompt has no tokens; give some text")
    with torch.inference_mode():
        started = time.perf_counter()
        out = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=_padding(model, tokenizer))
        seconds = time.perf_counter() - started
    new = out[0, ids["input_ids"].shape[1] :]
    text: str = tokenizer.decode(out[0], skip_special_tokens=True)
    figures = {
        "prompt_tokens": int(ids["input_ids"].shape[1]), "tokens": len(new), "seconds": seconds,
        "tokens_per_s": len(new) / seconds, **model.stats().to_json(),
    }  # fmt: skip
    return text, figures


def _padding(model: Any, tokenizer: Any) -> Any:
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, model.generation_config.eos_token_id)
    return next((each for each in known if isinstance(each, int)), 0)


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
