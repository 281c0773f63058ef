"""Steps that are not done twice, unless they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.parallel.steps import Step, digest_of, run_steps


class Work:
    """Three steps; the second writes a folder. Notes which ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fail = ""

    def steps(self, first: Any = 1, second: Any = 1) -> list[Step]:
        return [
            Step("one", "one.txt", {"value": first}, lambda path: self._write("one", path, f"{first}")),
            Step("two", "two", {"value": second}, lambda path: self._folder(path, f"{second}")),
            Step("three", "three.txt", {}, lambda path: self._write("three", path, "done")),
        ]

    def _write(self, name: str, path: Path, text: str) -> None:
        self.ran.append(name)
        if name == self.fail:
            raise ConfigError("it failed; try again")
        path.write_text(text)

    def _folder(self, path: Path, text: str) -> None:
        path.mkdir(exist_ok=True)
        self._write("two", path / "a.txt", text)


def test_done_once(tmp_path: Path) -> None:
    work, folder = Work(), tmp_path / "new" / "folder"
    first = run_steps(folder, work.steps())
    again = run_steps(folder, work.steps())
    assert work.ran == ["one", "two", "three"]
    assert [done.reused for done in first] == [False] * 3
    assert [done.reused for done in again] == [True] * 3
    assert [done.seconds for done in again] == [done.seconds for done in first]
    assert first[1].to_json()["output"] == str(folder / "two")


def test_a_changed_setting_redoes_its_step_and_what_follows_from_it(tmp_path: Path) -> None:
    work = Work()
    run_steps(tmp_path, work.steps())
    work.ran.clear()
    run_steps(tmp_path, work.steps(second=2))
    assert work.ran == ["two", "three"]
    work.ran.clear()
    run_steps(tmp_path, work.steps(first=2, second=2))
    assert work.ran == ["one", "two", "three"]


@pytest.mark.parametrize("damage", ["edit", "remove", "mark", "no mark"])
def test_what_was_touched_is_done_again(tmp_path: Path, damage: str) -> None:
    work = Work()
    run_steps(tmp_path, work.steps())
    work.ran.clear()
    mark = tmp_path / "two.step.json"
    if damage == "edit":
        (tmp_path / "two" / "a.txt").write_text("other")
    elif damage == "remove":
        (tmp_path / "two" / "a.txt").unlink()
    elif damage == "mark":
        mark.write_text(mark.read_text()[:20])
    else:
        mark.unlink()
    run_steps(tmp_path, work.steps())
    assert work.ran == ["two"]  # it came out the same, so what follows stands


def test_a_step_that_failed_is_where_it_goes_on(tmp_path: Path) -> None:
    work = Work()
    work.fail = "two"
    with pytest.raises(ConfigError, match="it failed"):
        run_steps(tmp_path, work.steps())
    work.fail = ""
    run_steps(tmp_path, work.steps())
    assert work.ran == ["one", "two", "two", "three"]


def test_another_version_does_it_anew(tmp_path: Path) -> None:
    work = Work()
    run_steps(tmp_path, work.steps())
    mark = tmp_path / "three.step.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "coterie": "0.0.0"}))
    work.ran.clear()
    run_steps(tmp_path, work.steps())
    assert work.ran == ["three"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        run_steps(tmp_path / "file" / "folder", Work().steps())
    assert digest_of(tmp_path / "nothing") is None
