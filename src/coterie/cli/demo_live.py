"""The demo's last step: a real model runs here, its routing is recorded live, and its experts are placed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli import place as place_verb
from coterie.cli.common import say
from coterie.progress import Progress, silent

if TYPE_CHECKING:
    from coterie.trace.routing_trace import RoutingTrace

MODEL, TEXT, TOPOLOGY, TOKENS = "tiny-qwen3-moe", "wikitext2-test", "8", 16_384


def record_and_place(folder: Path, out: Path, listen: Progress = silent) -> None:
    """Record the shipped model on a held-out text, compare placements of its experts and save one.

    Args:
        folder: where the files are written now.
        out: the name that people know the folder by.
        listen: told of the progress.
    """
    if any(find_spec(name) is None for name in ("torch", "transformers")):
        say("\n5. Skipped: running a model needs torch and transformers; pip install 'coterie[models]'")
        return
    from coterie.placement.driver import compare, place, prepare
    from coterie.topology import Topology

    say(f"\n5. Live: {MODEL} (a small model that ships, trained on a few million tokens) reads {TEXT}")
    trace = record(MODEL, folder / "tiny-trace.safetensors", listen)
    spec = trace.spec
    say(
        f"   recorded {trace.num_tokens:,} tokens in {spec.num_layers} MoE layers of {spec.num_experts} experts, "
        f"top-{spec.top_k}; placements of its experts:"
    )
    setting = prepare(trace, Topology.parse(TOPOLOGY), progress=listen)
    place_verb.show_comparison(compare(setting))
    place(setting).save(folder / "tiny-placement.json")
    say(f"   {out}/tiny-trace.safetensors, {out}/tiny-placement.json (a small model: how it works, not what you save)")


def record(model: str, path: Path, listen: Progress = silent) -> RoutingTrace:
    """The routing of a model on the demo's text, written to a trace file.

    Args:
        model: a shipped model's name, or a folder.
        path: the trace file.
        listen: told of the tokens recorded.
    """
    from coterie import data
    from coterie.models.load import load_model, load_tokenizer
    from coterie.models.run_text import TextRun, record_text

    loaded: Any = load_model(model)
    run = TextRun(TOKENS, batch=8)
    return record_text(loaded, load_tokenizer(model), data.text(TEXT), run, path, source=TEXT, progress=listen)
