"""A test that needs an absent package is skipped with the remedy, or fails where everything was promised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Any:
    """The hook of tests/conftest.py, called for a test that needs the given package."""
    path = Path(__file__).parents[1] / "conftest.py"
    plugins = request.config.pluginmanager.get_plugins()
    hooks = next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == str(path))
    marker = pytest.mark.needs

    def call(package: str) -> None:
        hooks.pytest_runtest_setup(SimpleNamespace(iter_markers=lambda name: [marker(package).mark]))

    return call


def test_what_is_there_runs(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_REQUIRE_ALL", "1")
    setup("numpy")


def test_what_is_absent_is_skipped_with_the_remedy(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^needs no_such: pip install 'coterie\[no_such\]'$"):
        setup("no_such")


def test_where_everything_was_promised_it_fails(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="needs no_such"):
        setup("no_such")


def test_a_browser_is_looked_for_on_the_path(setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COTERIE_REQUIRE_ALL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="needs chromium: apt-get install chromium-headless-shell"):
        setup("chromium")
    (tmp_path / "chromium").write_text("#!/bin/sh\n")
    (tmp_path / "chromium").chmod(0o755)
    setup("chromium")
