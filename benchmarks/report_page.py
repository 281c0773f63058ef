"""The page of `coterie report` for 61 layers of 256 experts on 4 x 8 devices: its size, and how long a browser takes.

Routing is synthetic and short, and placements are random: only size and opening are measured. The time is from the
start of navigation until all figures are drawn, by the browser's own clock, the least of several new profiles.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path

import numpy as np

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
_PROBE = (
    "<script>window.addEventListener('load', () => {document.title = JSON.stringify({"
    "ms: performance.now(), drawn: document.querySelectorAll('.figure .plot-container').length})})</script>"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--openings", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="write the page there")
    asked = parser.parse_args()
    html = make_page()
    if asked.keep:
        asked.keep.write_text(html, encoding="utf-8")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    opened = [open_once(browser, html) for _ in range(asked.openings)] if browser else []
    size = len(html.encode())
    best = min((each["ms"] for each in opened), default=None)
    print(f"{size / 1e6:.2f} MB; drawn in {f'{best / 1e3:.2f} s' if best else 'no browser here'}")
    print(json.dumps({"bytes": size, "openings": opened, "best_ms": best, "coterie": coterie.__version__}))


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


def open_once(browser: str, html: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html.replace("</body>", _PROBE + "</body>"), encoding="utf-8")
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
             "--window-size=1280,1000", "--timeout=30000", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    return json.loads(unescape(found[1])) if found else {}


if __name__ == "__main__":
    main()
