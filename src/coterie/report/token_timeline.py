"""One token's loads, waits and computations, layer by layer, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.offloading.timeline import COMPUTE, LAYER, LINK, WAIT, Span
from coterie.report.page import Page, graph_objects

# lanes of a layer's row: what, colour, where from its middle, how high
_LANES = {
    LAYER: ("the layer's experts in all", "#e8e8e8", -0.46, 0.92),
    LINK: ("reading from the disk", "#3b7dd8", -0.44, 0.28),
    COMPUTE: ("computing", "#2a9d4a", -0.14, 0.28),
    WAIT: ("waiting for a read", "#d9822b", 0.16, 0.28),
}
_PIXELS_A_LAYER, _PIXELS_AROUND, _FEWEST_PIXELS = 34, 170, 420


def token_page(spans: Sequence[Span], notes: Sequence[str] = ()) -> Page:
    """A page with the picture of one pass through the layers and what it took.

    A row a layer, time to the right. What overlaps a read in time hid it; waits are what was not hidden.

    Args:
        spans: `Timeline.last_token()`.
        notes: what holds for the picture: versions, budget, what is emulated.

    Raises:
        BackendUnavailable: without plotly.
        ConfigError: when nothing ran.
    """
    if not spans:
        raise ConfigError("no layer has run, so there is nothing to draw; generate a token first")
    page, rows = Page("One token's loads and computations", notes), _rows(spans)
    rows_of_token = next(span.about["rows"] for span in spans if span.track == LAYER)
    tokens = "one token" if rows_of_token == 1 else f"{rows_of_token:,} tokens"
    page.section(
        "Where the time went",
        f"The latest pass through the model's {len(rows)} MoE layers, of {tokens}, "
        f"took {_milliseconds(max(span.end for span in spans)):.3g} ms from its first MoE layer to its last.",
    )
    page.table(["", "ms"], _totals(spans))
    page.section(
        "Layer by layer",
        "Grey: from where a layer knows its experts until they are summed. Reads that lie over computing cost nothing; "
        "waits are the part of reads that nothing hid. White gaps are attention and all else that is resident. "
        "Point at a bar for its expert; drag to look closer.",
    )
    page.figure(_figure(spans))
    page.table(["layer", "experts computed", "reads", "MB read", "reading, ms", "waiting, ms", "computing, ms"], rows)
    return page


def _figure(spans: Sequence[Span]) -> Any:
    graphs = graph_objects()
    figure, layers = graphs.Figure(), sorted({span.layer for span in spans})
    for track, (name, colour, offset, height) in _LANES.items():
        own = [span for span in spans if span.track == track]
        starts = [_milliseconds(span.start) for span in own]
        times = [_milliseconds(span.end - span.start) for span in own]
        figure.add_trace(
            graphs.Bar(
                orientation="h", name=name, y=[span.layer for span in own], base=starts, x=times,
                offset=offset, width=height, marker_color=colour, opacity=1 if track == LAYER else 0.85,
                marker_line_width=0 if track == LAYER else 0.5, marker_line_color="white",
                text=[_label(span) for span in own], textposition="none", hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        barmode="overlay", height=max(_FEWEST_PIXELS, _PIXELS_AROUND + _PIXELS_A_LAYER * len(layers)),
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0}, xaxis_title="milliseconds",
        yaxis={"title": "MoE layer", "autorange": "reversed", "dtick": 1, "zeroline": False},
    )  # fmt: skip
    return figure


def _label(span: Span) -> str:
    about = span.about
    times = f"<br>{_milliseconds(span.end - span.start):.3f} ms from {_milliseconds(span.start):.3f} ms"
    if span.track == LAYER:
        return f"layer {span.layer}, {about['rows']} rows{times}"
    text = f"layer {span.layer}, expert {span.expert}"
    if span.track == LINK:
        text += f": {about['bytes'] / 1e6:.2f} MB, blocks {about['first_block']} to {about['end_block'] - 1}"
    if span.track == COMPUTE:
        text += f": {about['neurons']} neurons, {about['rows']} rows"
    return text + times


def _totals(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Time by kind; reads of several threads at once count once."""
    whole = max(span.end for span in spans)
    inside = sum(span.end - span.start for span in spans if span.track == LAYER)
    own = {track: sum(span.end - span.start for span in spans if span.track == track) for track in (COMPUTE, WAIT)}
    rows = [
        ("all", whole),
        ("computing experts", own[COMPUTE]),
        ("waiting for reads", own[WAIT]),
        ("routing, scheduling and sums of the experts", inside - own[COMPUTE] - own[WAIT]),
        ("attention and all else, between the layers' experts", whole - inside),
        ("reads under way, hidden or not", _covered([span for span in spans if span.track == LINK])),
    ]
    return [(what, _milliseconds(seconds)) for what, seconds in rows]


def _rows(spans: Sequence[Span]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for layer in sorted({span.layer for span in spans if span.track == LAYER}):
        own = {track: [span for span in spans if (span.track, span.layer) == (track, layer)] for track in _LANES}
        waited, computed = (sum(span.end - span.start for span in own[track]) for track in (WAIT, COMPUTE))
        read = sum(int(span.about["bytes"]) for span in own[LINK]) / 1e6
        times = (_covered(own[LINK]), waited, computed)
        experts = len({span.expert for span in own[COMPUTE]})  # a large one computes in pieces
        rows.append((layer, experts, len(own[LINK]), read, *map(_milliseconds, times)))
    return rows


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them is under way."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def _milliseconds(seconds: float) -> float:
    return 1e3 * seconds
