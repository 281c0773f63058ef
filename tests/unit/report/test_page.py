"""A page is one file that needs nothing else, and holds whatever strings it is given as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.errors import BackendUnavailable
from coterie.report.page import Page, cell, graph_objects


def test_text_and_tables_are_escaped() -> None:
    page = Page("a <b> title", ["note & note"])
    page.section("Head <i>", "one < two")
    page.table(["x", "<y>"], [["<script>", 1234], ["z", 0.123456]])
    html = page.html()
    assert "<script>" not in html  # no figure, so no script of plotly's either
    assert "a &lt;b&gt; title" in html
    assert "&lt;script&gt;" in html
    assert "1,234" in html
    assert "0.1235" in html


def test_every_section_says_what_its_figures_are_of() -> None:
    page = Page("t", subject="a model of 12 <million>")
    page.section("one")
    page.section("two")
    assert page.html().count("a model of 12 &lt;million&gt;") == 2


@pytest.mark.needs("plotly")
def test_a_figure_is_inlined_with_the_library(tmp_path: Path) -> None:
    graphs = graph_objects()
    page = Page("t")
    page.figure(graphs.Figure(graphs.Scatter(x=[1, 2], y=[3, 4], name="</script><b>")))
    path = tmp_path / "page.html"
    page.save(path)
    html = path.read_text()
    assert "Plotly.newPlot" in html
    assert "</script><b>" not in html
    body = html.split("<body>")[1].split("<script>")[0]  # before the library, which speaks of sources itself
    assert "src=" not in body
    assert path.stat().st_size < 6_000_000


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BackendUnavailable, match=r"coterie\[report\]"):
        graph_objects()


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (True, "True"), (12345, "12,345"), (1e-5, "1e-05"), ("a", "a")]
)
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown
