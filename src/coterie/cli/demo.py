"""`coterie demo`: the main job, on real routing that ships with the package and on a live model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import demo_live
from coterie.cli import place as place_verb
from coterie.cli.common import progress, say

if TYPE_CHECKING:
    from coterie.placement.candidates import Setting
    from coterie.progress import Progress

TRACE, TOPOLOGY, ENGINE, PRUNING = "dsv2lite-law", "8", "sglang", 0.2


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the files it makes.")] = Path("coterie-demo"),
) -> None:
    """Place the experts of DeepSeek-V2-Lite on 8 devices from its real routing, and those of a model that runs here."""
    from coterie.files import replacing_folder
    from coterie.placement.driver import prepare
    from coterie.topology import Topology
    from coterie.trace.open import open_trace

    started = time.monotonic()
    with replacing_folder(out, "placement.json") as folder, progress() as listen:
        trace, topology = open_trace(TRACE, progress=listen), Topology.parse(TOPOLOGY)
        spec = trace.spec
        say(
            f"1. Routing: {spec.model}, {spec.num_layers} MoE layers, {spec.num_experts} experts, top-{spec.top_k}, "
            f"{trace.num_tokens:,} real tokens of Chinese law texts ({trace.num_sequences} sequences)"
        )
        setting = prepare(trace, topology, progress=listen)
        _compare(setting)
        _place_and_export(setting, folder, out)
        _prune_then_place(setting, folder, listen)
        demo_live.record_and_place(folder, out, listen)
    say(f"\nDone in {time.monotonic() - started:.0f} s; files are in {out}/")


def _compare(setting: Setting) -> None:
    from coterie.placement.driver import compare

    say("\n2. Placements on 8 devices, fitted on the first half and measured on the second")
    place_verb.show_comparison(compare(setting))


def _place_and_export(setting: Setting, folder: Path, out: Path) -> None:
    from coterie.engines.base import export_file
    from coterie.engines.registry import get_exporter
    from coterie.placement.driver import place, spectrum
    from coterie.placement.spectrum_files import write_spectrum

    say("3. One placement for use, and a spectrum from least traffic to best balance to time on the target")
    placement = place(setting)
    placement.save(folder / "placement.json")
    (folder / "spectrum").mkdir()
    write_spectrum(spectrum(setting, 8), folder / "spectrum")
    exported = export_file(get_exporter(ENGINE), placement, folder / f"{ENGINE}.json")
    say(f"   {out}/placement.json, {out}/spectrum/, and for SGLang {out}/{ENGINE}.json:")
    say("   " + " ".join(flag.replace(str(folder), str(out)) for flag in exported.flags))


def _prune_then_place(setting: Setting, folder: Path, listen: Progress) -> None:
    """CAP's order: prune the trace, then place on what is left."""
    from coterie.placement.driver import place, prepare
    from coterie.placement.placement import Placement
    from coterie.pruning.fitting import RuleChoice
    from coterie.pruning.prune import prune_trace_to
    from coterie.trace.routing_trace import RoutingTrace

    say(f"\n4. Lossy: skip destinations worth at most {PRUNING:.0%} of a token's weight (CAP's rule), then place again")
    before = Placement.load(folder / "placement.json")
    path = folder / "pruned.safetensors"
    report = prune_trace_to(
        path, setting.trace, before.device_of_expert(), setting.topology, RuleChoice("cap", p=PRUNING), progress=listen
    )
    again = place(prepare(RoutingTrace.load(path), setting.topology, progress=listen))
    again.save(folder / "placement-pruned.json")
    old, new = before.metrics["heldout"], again.metrics["heldout"]
    say(
        f"   kept {report.heldout.mean('kept_weight'):.1%} of the routing weight; devices per token {old['dpt']:.2f} "
        f"-> {new['dpt']:.2f}, peak traffic {old['peak_traffic']:.3f} -> {new['peak_traffic']:.3f} (held out)"
    )
