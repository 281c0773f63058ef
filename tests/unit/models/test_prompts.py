"""Files of prompts: what is read, and that every bad line is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.models.prompts import Prompt, read_prompts


def test_texts_and_conversations_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a\\u2028b", "id": "x"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\r\n'
        '{"prompt": "\u2028"}',
        encoding="utf-8",
    )
    first, second, third = read_prompts(file)
    assert (first.id, first.text, first.source) == ("x", "a\u2028b", f"{file} line 1")
    assert (second.id, second.messages) == (3, [{"role": "user", "content": "hi"}])
    assert (third.id, third.text) == (4, "\u2028"), "a line separator inside a text ends no line"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is truncated or no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"text": "a"}', "line 2 has the unknown key 'text'; known are id, messages, prompt"),
        ('{"id": 1}', 'line 2 has neither "prompt" and "messages"; give one'),
        ('{"prompt": "a", "messages": []}', 'line 2 has both "prompt" and "messages"'),
        ('{"prompt": 5}', "line 2: prompt must be a text, not int"),
        ('{"messages": []}', "line 2: messages must be a list of .*, one at least"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages must be a list"),
        ('{"prompt": "a", "id": true}', "line 2 has the id True"),
        ('{"prompt": "a", "prompt": "b"}', "line 2 .*the key 'prompt' is written twice"),
        ('{"prompt": "b", "id": 1}', "line 2 has the id 1 of .* line 1"),
    ],
)
def test_bad_lines_are_named_by_their_number(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts(file)


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, message in (("empty", "holds no prompts"), ("bytes", "no UTF-8 text"), ("none", "cannot read .*No such")):
        with pytest.raises(ConfigError, match=message):
            read_prompts(tmp_path / name)


@pytest.mark.needs("transformers")
def test_tokens_of_a_conversation_are_the_templates(tiny_checkpoint: Any) -> None:
    from coterie.models.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_checkpoint("mixtral"))
    chat = Prompt(1, "p line 1", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match="p line 1 has messages, and the model's tokenizer has no chat template"):
        chat.tokens(tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}"
        "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}bot:{% endif %}"
    )
    assert chat.tokens(tokenizer) == tokenizer("<s>user:hi</s>bot:", add_special_tokens=False)["input_ids"]
    assert Prompt(1, "p line 1", "hi").tokens(tokenizer) == tokenizer("hi")["input_ids"]
    with pytest.raises(ConfigError, match="p line 1: the model's chat template refuses these messages: users begin"):
        Prompt(1, "p line 1", messages=[{"role": "bot", "content": "hi"}]).tokens(tokenizer)
    with pytest.raises(ConfigError, match="p line 1 has no tokens"):
        Prompt(1, "p line 1", "").tokens(tokenizer)
