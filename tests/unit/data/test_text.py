"""The held-out texts that ship."""

from __future__ import annotations

import lzma

import pytest

from coterie import data
from coterie.errors import ConfigError


def test_every_text_is_readable():
    names = data.text_names()
    assert {"prose", "code", "wikitext2-test"} <= set(names)
    assert not any(name.startswith(("LICENSE", "README")) for name in names)
    for name in names:
        assert len(data.text(name)) > 5_000


def test_plain_and_compressed(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "plain.txt").write_text("grüße", encoding="utf-8")
    (tmp_path / "text" / "packed.txt.xz").write_bytes(lzma.compress("grüße".encode()))
    (tmp_path / "text" / "README.md").write_text("no text")
    (tmp_path / "text" / "LICENSE-MIT.txt").write_text("no text either")
    monkeypatch.setattr(data, "files", lambda package: tmp_path)
    assert data.text_names() == ["packed", "plain"]
    assert data.text("plain") == data.text("packed") == "grüße"


def test_unknown_text_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'prose'"):
        data.text("pros")
