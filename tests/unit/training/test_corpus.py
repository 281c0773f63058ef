"""Splitting texts by whole documents; and that the shipped held-out texts were really held out."""

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.corpus import (
    DOMAINS,
    SEPARATOR,
    TEXT,
    hold_out,
    join_short,
    leading_lines,
    read_documents,
    split_long,
    write_documents,
)

DOCUMENTS = st.lists(st.text("ab\n", min_size=1, max_size=20), min_size=1, max_size=12)


def test_documents_survive_a_file(tmp_path):
    documents = ["one\n", "two £\n\nlines", ""]
    write_documents(tmp_path / "x.txt.xz", documents)
    assert read_documents(tmp_path / "x.txt.xz") == documents


def test_a_document_with_the_separator_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.txt\.xz contains the separator"):
        write_documents(tmp_path / "x.txt.xz", [f"a{SEPARATOR}b"])
    assert not list(tmp_path.iterdir())


@given(DOCUMENTS, st.floats(0.0, 1.0))
def test_held_out_documents_are_the_fewest_last_ones_that_reach_the_share(documents, share):
    seen, held = hold_out(documents, share)
    assert seen + held == documents
    assert held
    total = sum(map(len, documents))
    assert sum(map(len, held)) >= share * total
    if len(held) > 1:
        assert sum(map(len, held[1:])) < share * total


def test_short_documents_are_joined_by_blank_lines_until_long_enough():
    assert join_short(["ab\n", "cd", "\nefgh\n", "i"], 4) == ["ab\n\ncd", "efgh", "i"]
    assert join_short(["a", "b"], 1) == ["a", "b"]
    assert join_short([], 5) == []


@given(st.text("ab\n", max_size=60), st.integers(1, 10))
def test_cutting_loses_nothing_and_cuts_only_at_boundaries(text, min_chars):
    pieces = split_long(text, min_chars)
    assert "".join(pieces) == text
    assert all(len(piece) >= min_chars and piece.endswith("\n\n") for piece in pieces[:-1])


def test_leading_lines_count_bytes_and_keep_whole_lines():
    assert leading_lines("££\nab\ncd\n", 8) == "££\nab\n"
    assert leading_lines("££\nab\n", 7) == "££\n"
    assert leading_lines("££\nab\n", 4) == ""


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_long_paragraph_of_the_held_out_text_is_in_the_training_text(domain):
    held_out = (files("coterie.data") / "text" / f"{domain}.txt").read_text()
    training = "\n".join(read_documents(TEXT / f"{domain}.txt.xz"))
    paragraphs = [paragraph for paragraph in re.split(r"\n\s*\n", held_out) if len(paragraph) > 150]
    assert len(paragraphs) > 5
    assert not [paragraph for paragraph in paragraphs if paragraph.strip() in training]
