"""Prompts to continue, from a JSONL file: each checked and turned into tokens before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.files import parse_json

_KEYS = {"id", "prompt", "messages"}


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        id: what its result is called.
        source: where it stands, for messages: "FILE line N".
        text: the text; None: it is a conversation.
        messages: a conversation, each {"role", "content"}; None: it is a text.
    """

    id: str | int
    source: str
    text: str | None = None
    messages: Sequence[dict[str, Any]] | None = None

    def tokens(self, tokenizer: Any) -> list[int]:
        """Its token ids: a text's as the tokenizer makes them, a conversation's by the tokenizer's chat template.

        Raises:
            ConfigError: when it has no tokens, or there is no template or one that refuses it.
        """
        if self.messages is None:
            ids: list[int] = tokenizer(self.text)["input_ids"]
        else:
            ids = tokenizer(self._chat(tokenizer), add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError(f"{self.source} has no tokens; give some text")
        return ids

    def _chat(self, tokenizer: Any) -> str:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{self.source} has messages, and the model's tokenizer has no chat template; give a prompt"
            )
        try:
            text: str = tokenizer.apply_chat_template(
                list(self.messages or ()), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs of others, and refuse by whatever they raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{self.source}: the model's chat template refuses these messages: {reason}") from error
        return text


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a JSONL file, in order; empty lines are passed over.

    Every line is an object with "prompt", a text, or "messages", a list of {"role", "content"}; and an "id", if wanted,
    else the number of the line.

    Raises:
        ConfigError: for a file that cannot be read or holds none; for a line that is none of these, with its number.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other line ends
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text (byte {error.start}); check the path") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; check the path") from error
    prompts = [_parse(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f'{file} holds no prompts; write one JSON object a line, as {{"prompt": "Once upon a time"}}')
    seen: dict[str, str] = {}
    for prompt in prompts:
        key = json.dumps(prompt.id)
        if key in seen:
            raise ConfigError(f"{prompt.source} has the id {key} of {seen[key]}; give each its own, or none")
        seen[key] = prompt.source
    return prompts


def _parse(line: str, number: int, file: Path) -> Prompt:
    source = f"{file} line {number}"
    found = parse_json(line, source, ConfigError, strict=True)
    if not isinstance(found, dict):
        raise ConfigError(f'{source} is no JSON object; write it like {{"prompt": "Once upon a time"}}')
    unknown = sorted(found.keys() - _KEYS)
    if unknown:
        raise ConfigError(f"{source} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    if ("prompt" in found) == ("messages" in found):
        raise ConfigError(
            f'{source} has {"both" if "prompt" in found else "neither"} "prompt" and "messages"; give one'
        )
    name, text, messages = found.get("id", number), found.get("prompt"), found.get("messages")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ConfigError(f"{source} has the id {name!r}; it must be a text or a whole number")
    if "prompt" in found and not isinstance(text, str):
        raise ConfigError(f"{source}: prompt must be a text, not {type(text).__name__}")
    if "messages" in found and not _is_chat(messages):
        raise ConfigError(f'{source}: messages must be a list of {{"role": text, "content": text}}, one at least')
    return Prompt(name, source, text, messages)


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
            for each in messages
        )
    )
