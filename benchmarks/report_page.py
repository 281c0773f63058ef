"""The page of `coterie report` for 61 layers of 256 experts on 4 x 8 devices: its size, and how long a browser takes.

Routing is synthetic and short, and placements are random: only size and opening are measured. Times are from the start
of navigation until there is something to read, and until all figures are drawn, by the browser's own clock, the least
of several new profiles, at the width of a desktop and of a phone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.headless import ALL_FIGURES, find_browser, headless

import coterie
from coterie.placement.driver import prepare
from coterie.placement.metrics import measure
from coterie.report.placement_data import PlacementReport, Shown
from coterie.report.placement_page import placement_page
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.splits import split

LAYERS, EXPERTS, TOP_K, TOKENS = 61, 256, 8, 800
WIDTHS = (1280, 390)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--openings", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="write the page there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = asked.keep or Path(folder) / "page.html"
        page.write_text(make_page(), encoding="utf-8")
        size, browser = page.stat().st_size, find_browser()
        opened = [open_once(browser, page, width) for width in WIDTHS for _ in range(asked.openings)] if browser else []
    print(f"{size / 1e6:.2f} MB" + ("" if browser else "; no browser here"))
    best = {}
    for width in WIDTHS if browser else ():
        shown, drawn = (min(each[key] for each in opened if each["width"] == width) for key in ("shown_ms", "drawn_ms"))
        best[width] = {"shown_ms": shown, "drawn_ms": drawn}
        print(f"{width} px wide: to be read after {shown / 1e3:.2f} s, all figures drawn after {drawn / 1e3:.2f} s")
    print(json.dumps({"bytes": size, "best": best, "openings": opened, "coterie": coterie.__version__}))


def make_page() -> str:
    rng = np.random.default_rng(0)
    ids = np.stack([np.argsort(rng.gumbel(size=(TOKENS, EXPERTS)), axis=1)[:, :TOP_K] for _ in range(LAYERS)])
    spec = MoESpec("61 x 256, synthetic", LAYERS, EXPERTS, TOP_K)
    trace = RoutingTrace(ids.astype(np.uint8), spec, provenance={"synthetic": True})
    topology = Topology.parse("4x8")
    setting, parts = prepare(trace, topology), split(trace, 0.2)
    slots = np.repeat(np.arange(32), EXPERTS // 32)
    shown = {}
    for name in ("linear", "eplb", "cap", "coterie", "mine"):
        rows = np.stack([slots if name == "linear" else rng.permutation(slots) for _ in range(LAYERS)])
        shown[name] = Shown(rows, measure(trace, rows, topology, parts.second))
    over_time = {name: [shown[name].means()] * 16 for name in ("linear", "mine")}
    load_LE = rng.integers(1, 1000, (LAYERS, EXPERTS))
    report = PlacementReport(
        setting, parts, shown, "mine", {"coterie": [(8.0, 1.5), (9.0, 1.1)]}, load_LE, list(range(16)), over_time
    )
    return placement_page(report, "synthetic").html()


def open_once(browser: str, page: Path, width: int) -> dict[str, float]:
    with headless(browser, timeout=120) as running:
        opened = running.open(page, width, phone=width < 500, drawn=ALL_FIGURES)
        return {"width": width, "shown_ms": opened.shown_ms, "drawn_ms": opened.drawn_ms, "errors": len(opened.errors)}


if __name__ == "__main__":
    main()
