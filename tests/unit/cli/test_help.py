"""What `--help` says: rich reads [name] in it as markup, and shows nothing of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from coterie.cli.main import app
from coterie.policies.registry import POLICIES


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part, each in getattr(command, "commands", {}).items():
        yield from _commands(each, f"{name} {part}")


COMMANDS = dict(_commands(typer.main.get_command(app), "coterie"))


def test_nothing_is_taken_for_markup() -> None:
    checked = 0
    for name, command in COMMANDS.items():
        for text in (command.help, *(getattr(each, "help", None) for each in command.params)):
            if text:
                checked += 1
                assert Text.from_markup(text).plain == re.sub(r"\\(?=\[)", "", text), name
    assert checked > 200


def _help(command: str, option: str) -> str:
    return next(str(each.help) for each in COMMANDS[command].params if option in each.opts)


def test_a_picture_says_what_to_install() -> None:
    assert "coterie[report]" in Text.from_markup(_help("coterie generate", "--picture")).plain


def test_every_policy_is_listed() -> None:
    listed = _help("coterie generate", "--policy")
    assert set(re.findall(r"[a-z-]+", listed.partition(":")[2])) - {"or"} == set(POLICIES)
