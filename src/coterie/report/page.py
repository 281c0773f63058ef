"""One self-contained HTML page of sections with text, tables and plotly figures, readable at phone width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from coterie.errors import BackendUnavailable
from coterie.files import write_text

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; color: #1c1c1c; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .figure { width: 100%; min-height: 26rem; }
.figure.square { min-height: 0; max-width: 44rem; aspect-ratio: 1; }
.note { color: #555; font-size: .9rem; }
@media (max-width: 40rem) { table { font-size: .8rem; } th, td { padding: .25rem .5rem; } }
"""
_CONFIG = {
    "displaylogo": False, "responsive": True,
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],  # nothing leaves the page
}  # fmt: skip
_DRAW = """
const touch = matchMedia('(pointer: coarse)').matches;
function draw(names) {
  if (!names.length) { document.documentElement.dataset.drawn = 'all'; return; }
  const f = JSON.parse(document.getElementById(names[0] + '-data').textContent);
  if (touch) f.layout.dragmode = false;
  Plotly.newPlot(names[0], f.data, f.layout, CONFIG).then(() => setTimeout(draw, 0, names.slice(1)));
}
"""
"""Draws one figure after another, so that the page can be read meanwhile; where a finger drags, the page scrolls."""


@dataclass
class Page:
    """A page in the making; sections stand in the order they are added.

    Attributes:
        title: heading of the page.
        notes: what holds for every figure: versions, model size, what is emulated.
        subject: what every section's figures are of, e.g. the model and its size; said under each heading.
    """

    title: str
    notes: Sequence[str] = ()
    subject: str = ""
    _parts: list[str] = field(default_factory=list)
    _figures: int = 0

    def section(self, heading: str, *paragraphs: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(heading)}</h2>")
        if self.subject:
            self._parts.append(f'<p class="note">{escape(self.subject)}</p>')
        self._parts += [f"<p>{escape(text)}</p>" for text in paragraphs]

    def paragraph(self, text: str) -> None:
        """A paragraph in the section begun last."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table; numbers are shown to four significant digits."""
        head = "".join(f"<th>{escape(header)}</th>" for header in headers)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row) + "</tr>" for row in rows)
        self._parts.append(f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>')

    def figure(self, figure: Any, top: int = 40, square: bool = False) -> None:
        """A plotly figure, as wide as the page.

        Args:
            figure: a plotly `Figure`.
            top: pixels above it, for a menu or a legend.
            square: as high as wide, as maps of the same things across and down are read.
        """
        figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": top, "b": 60}, autosize=True)
        if figure.layout.legend.orientation is None:  # beside the plot it would leave none of a phone's width
            figure.update_layout(legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0})
        name = f"figure-{self._figures}"
        self._figures += 1
        self._parts.append(
            f'<div id="{name}" class="figure{" square" if square else ""}"></div>'
            f'<script type="application/json" id="{name}-data">{_for_script(figure.to_json())}</script>'
        )

    def html(self) -> str:
        """The whole page."""
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        names = _json([f"figure-{number}" for number in range(self._figures)])
        draw = _DRAW.replace("CONFIG", _json(_CONFIG))
        script = f"<script>{_plotlyjs()}</script><script>{draw}draw({names});</script>" if self._figures else ""
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><h1>{escape(self.title)}</h1>{notes}{''.join(self._parts)}{script}</body></html>\n"
        )

    def save(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        write_text(path, self.html())


def graph_objects() -> Any:
    """The module `plotly.graph_objects`.

    Raises:
        BackendUnavailable: without plotly.
    """
    try:
        from plotly import graph_objects
    except ImportError:
        raise BackendUnavailable("figures need plotly; pip install 'coterie[report]'") from None
    return graph_objects


def cell(value: object) -> str:
    """A table's value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _plotlyjs() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def _for_script(text: str) -> str:
    """JSON that can stand inside a script element, whatever strings it holds."""
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")
