"""Texts by domain: reading them, holding a part out, and joining short documents."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path

TEXT = Path(__file__).parent / "text"
SEPARATOR = "\x1e"  # ASCII "record separator": occurs in none of the texts
DOMAINS = ("prose", "encyclopedic", "code", "documentation", "chat", "maths", "abstracts", "papers")


def read_documents(path: Path) -> list[str]:
    """The documents of one compressed domain file, in order."""
    return lzma.decompress(path.read_bytes()).decode().split(SEPARATOR)


def write_documents(path: Path, documents: Sequence[str]) -> None:
    """Write one compressed domain file that `read_documents` reads back."""
    if any(SEPARATOR in document for document in documents):
        raise ValueError(f"a document for {path.name} contains the separator {SEPARATOR!r}")
    path.write_bytes(lzma.compress(SEPARATOR.join(documents).encode(), preset=9 | lzma.PRESET_EXTREME))


def hold_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Split off the last whole documents, at least `share` of the characters and at least one document.

    Returns:
        (training documents, held-out documents), both in order.
    """
    wanted = share * sum(map(len, documents))
    first, held = len(documents), 0
    while first > 0 and (held < wanted or first == len(documents)):
        first -= 1
        held += len(documents[first])
    return list(documents[:first]), list(documents[first:])


def join_short(documents: Sequence[str], min_chars: int) -> list[str]:
    """Join consecutive documents by a blank line until each is at least `min_chars` long (the last may be shorter)."""
    joined: list[str] = []
    waiting: list[str] = []
    size = 0
    for document in documents:
        waiting.append(document.strip("\n"))
        size += len(document)
        if size >= min_chars:
            joined.append("\n\n".join(waiting))
            waiting, size = [], 0
    if waiting:
        joined.append("\n\n".join(waiting))
    return joined


def split_long(text: str, min_chars: int, boundary: str = "\n\n") -> list[str]:
    """Cut a text at boundaries into documents of at least `min_chars` (the last may be shorter); nothing is lost.

    The boundary stays with the document before it.
    """
    documents: list[str] = []
    start, position = 0, text.find(boundary)
    while position >= 0:
        end = position + len(boundary)
        if end - start >= min_chars:
            documents.append(text[start:end])
            start = end
        position = text.find(boundary, end)
    if start < len(text):
        documents.append(text[start:])
    return documents


def leading_lines(text: str, max_bytes: int) -> str:
    """The longest run of whole leading lines of at most `max_bytes` in UTF-8."""
    kept: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        size += len(line.encode())
        if size > max_bytes:
            break
        kept.append(line)
    return "".join(kept)
