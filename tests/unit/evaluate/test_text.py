"""Which tokens of a text are scored, and how many bytes they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.evaluate.text import encode_text, read_text_file

pytestmark = pytest.mark.needs("transformers")


def test_with_a_start_token_the_whole_text_is_scored(tokenizer: Any, text: str) -> None:
    encoded = encode_text(tokenizer, "t", text)
    assert encoded.ids == tuple(tokenizer(text)["input_ids"])
    assert encoded.ids[0] == tokenizer.bos_token_id
    assert encoded.num_bytes == len(text.encode())


def test_without_one_the_first_token_is_context_only(tokenizers: Any, text: str) -> None:
    tokenizer = tokenizers(bos=False)
    encoded = encode_text(tokenizer, "t", text)
    first = tokenizer.decode([encoded.ids[0]])
    assert encoded.ids == tuple(tokenizer(text)["input_ids"])
    assert encoded.num_bytes == len(text.encode()) - len(first.encode())


@pytest.mark.parametrize("bos", [True, False])
def test_a_limit_counts_the_bytes_of_its_tokens(tokenizers: Any, text: str, bos: bool) -> None:
    tokenizer = tokenizers(bos=bos)
    encoded = encode_text(tokenizer, "t", text, max_tokens=50)
    own = tokenizer(text, add_special_tokens=False)["input_ids"][:50]
    assert encoded.ids[-50:] == tuple(own)
    assert encoded.num_bytes == len(tokenizer.decode(own if bos else own[1:]).encode())


def test_a_split_character_counts_whole(tokenizers: Any) -> None:
    encoded = encode_text(tokenizers(bos=True), "t", "a東京", max_tokens=2)  # 東 is three bytes, three tokens
    assert encoded.num_bytes == 1 + 3


def test_a_limit_beyond_the_text_changes_nothing(tokenizer: Any, text: str) -> None:
    assert encode_text(tokenizer, "t", text, 10**6) == encode_text(tokenizer, "t", text)


@pytest.mark.parametrize("short", ["", "a"])
def test_too_little_text_is_refused(tokenizers: Any, short: str) -> None:
    with pytest.raises(ConfigError, match="'t' is empty or a single token"):
        encode_text(tokenizers(bos=False), "t", short)


def test_a_limit_of_nothing_is_refused(tokenizer: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="0 tokens of t cannot be scored"):
        encode_text(tokenizer, "t", text, max_tokens=0)


def test_text_files(tmp_path: Path) -> None:
    good, empty, binary = tmp_path / "good.txt", tmp_path / "empty.txt", tmp_path / "binary"
    good.write_text("naïve\n", encoding="utf-8")
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe")
    assert read_text_file(good) == "naïve\n"
    for path, reason in ((empty, "is empty"), (binary, "utf-8"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            read_text_file(path)
