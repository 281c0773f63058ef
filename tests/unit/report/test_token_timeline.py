"""The picture of one token: which spans are its, where its bars stand, and that times add up."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.offloading.timeline import COMPUTE, LAYER, LINK, WAIT, Timeline
from coterie.report.token_timeline import token_page


@pytest.fixture
def timeline() -> Timeline:
    """Two tokens through two layers; a read for the second began while the first was computed."""
    made = Timeline()
    for token in (0.0, 1.0):
        for layer, at in ((0, token + 0.1), (1, token + 0.5)):
            made.add(COMPUTE, f"layer {layer} expert 3", at + 0.02, at + 0.12, neurons=8, rows=1)
            made.add(WAIT, f"layer {layer} expert 4", at + 0.12, at + 0.17)
            made.add(COMPUTE, f"layer {layer} expert 4", at + 0.17, at + 0.2, neurons=4, rows=1)
            for end in (0.15, 0.17):  # two threads
                about = {"bytes": 10**6, "first_block": 0, "end_block": 2}
                made.add(LINK, f"layer {layer} expert 4", at + 0.05, at + end, **about)
            made.add(LAYER, f"layer {layer}", at, at + 0.25, rows=1)
    made.add(LINK, "layer 0 expert 9", 1.05, 1.13, bytes=5 * 10**5, first_block=2, end_block=3)
    return made


def test_the_last_token_begins_with_its_first_layer(timeline: Timeline) -> None:
    spans = timeline.last_token()
    assert len(spans) == 2 * 6 + 1
    assert [(span.layer, round(span.start, 3)) for span in spans if span.track == LAYER] == [(0, 0), (1, 0.4)]
    early = next(span for span in spans if span.expert == 9)
    assert (round(early.start, 3), round(early.end, 3)) == (-0.05, 0.03)
    assert Timeline().last_token() == []
    tracks = {each["cat"] for each in timeline.to_json()["traceEvents"] if each["ph"] == "X"}
    assert tracks == {LINK, COMPUTE, WAIT, LAYER}


@pytest.mark.needs("plotly")
def test_a_row_a_layer_and_a_bar_an_interval(timeline: Timeline) -> None:
    html = token_page(timeline.last_token(), ["from a test"]).html()
    figure = _figure(html)
    bars = {trace["name"]: trace for trace in figure["data"]}
    assert set(bars) == {"the layer's experts in all", "reading from the disk", "computing", "waiting for a read"}
    computing = bars["computing"]
    assert computing["y"] == [0, 0, 1, 1]
    assert computing["base"] == pytest.approx([20, 170, 420, 570])
    assert computing["x"] == pytest.approx([100, 30, 100, 30])
    assert "expert 4: 4 neurons, 1 rows<br>30.000 ms from 170.000 ms" in computing["text"][1]
    assert "expert 9: 0.50 MB, blocks 2 to 2<br>80.000 ms from -50.000 ms" in bars["reading from the disk"]["text"][0]
    lanes = sorted((trace["offset"], trace["offset"] + trace["width"]) for trace in figure["data"])[1:]
    assert all(end <= start for (_, end), (start, _) in pairwise(lanes)), "lanes overlap"
    assert figure["layout"]["yaxis"]["autorange"] == "reversed"
    assert "from a test" in html


@pytest.mark.needs("plotly")
def test_times_add_up(timeline: Timeline) -> None:
    html = token_page(timeline.last_token()).html()
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    told = {row[0]: [float(value) for value in row[1:]] for row in cells if row}
    assert told["all"] == [650]
    parts = ("computing experts", "waiting for reads", "routing, scheduling and sums of the experts",
             "attention and all else, between the layers&#x27; experts")  # fmt: skip
    assert [told[part][0] for part in parts] == [260, 100, 140, 150]
    assert told["reads under way, hidden or not"] == [320], "reads of two threads count once"
    assert told["0"] == [2, 3, 2.5, 200, 50, 130]
    assert told["1"] == [2, 2, 2, 120, 50, 130]


def test_nothing_to_draw_is_told() -> None:
    with pytest.raises(ConfigError, match="no layer has run"):
        token_page([])


def _figure(html: str) -> Any:
    data = 'id="figure-0-data">'
    start = html.index(data) + len(data)
    return json.JSONDecoder().raw_decode(html[start:].replace("<\\/", "</"))[0]
