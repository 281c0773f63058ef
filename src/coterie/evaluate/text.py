"""A text as the tokens that are scored, and the bytes that those tokens stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError


@dataclass(frozen=True)
class EncodedText:
    """Tokens of one text.

    Attributes:
        name: what to call the text in messages and results.
        ids: [T] token ids; the first is only context.
        num_bytes: UTF-8 bytes of the text that ids[1:] stand for.
    """

    name: str
    ids: tuple[int, ...]
    num_bytes: int


def read_text_file(path: Path) -> str:
    """A text file of any length.

    Raises:
        ConfigError: when it is missing, unreadable, no UTF-8 text or empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as reason:
        raise ConfigError(f"cannot read text {path}: {getattr(reason, 'strerror', None) or reason}") from None
    if not text.strip():
        raise ConfigError(f"text {path} is empty; give a file with some text in it")
    return text


def encode_text(tokenizer: Any, name: str, text: str, max_tokens: int | None = None) -> EncodedText:
    """The tokens of a text.

    Where the tokenizer begins a text with its own token (`<s>`), that is the context of the text's first token;
    elsewhere the first token has none and is not scored, so its bytes are not counted either.

    Args:
        tokenizer: a Transformers tokenizer.
        name: what to call the text.
        text: the text.
        max_tokens: use only so many tokens of the text; None for all.

    Raises:
        ConfigError: for a text without two tokens, or `max_tokens` below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"{max_tokens} tokens of {name} cannot be scored; ask for at least 1")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    cut = max_tokens is not None and max_tokens < len(ids)
    ids = ids[:max_tokens]
    start = _start_tokens(tokenizer)
    if len(start) + len(ids) < 2:
        raise ConfigError(f"text {name!r} is empty or a single token; give a longer text")
    last_byte = _bytes_of(tokenizer, text, ids, len(ids)) if cut else len(text.encode())
    unscored = 0 if start else _bytes_of(tokenizer, text, ids, 1)
    return EncodedText(name, (*start, *ids), last_byte - unscored)


def _start_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The token that this tokenizer puts before every text, if it does."""
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return tuple(first) if first and first[0] == tokenizer.bos_token_id else ()


def _bytes_of(tokenizer: Any, text: str, ids: list[int], count: int) -> int:
    """UTF-8 bytes of the text up to the end of token `count`; a character that a token splits counts whole."""
    if not tokenizer.is_fast:
        return len(tokenizer.decode(ids[:count]).encode())
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return len(text[: encoded["offset_mapping"][count - 1][1]].encode())
