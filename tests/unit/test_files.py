"""Output files and folders that exist whole or not at all, and never take anything else with them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.files import about_file, replacing, replacing_folder, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(path: Path, error: BaseException) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        assert temporary.parent == path.parent  # a rename within a folder cannot fail for want of space
        raise error


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path, old: str | None, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_text(old)
    with pytest.raises(error):
        write_half(path, error())
    assert names(tmp_path) == ([] if old is None else ["a.txt"])
    assert old is None or path.read_text() == old


def test_a_finished_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old, and longer")
    write_text(path, "neu: ü")
    assert path.read_bytes() == "neu: ü".encode()
    assert names(tmp_path) == ["a.txt"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "")
    (tmp_path / "b.txt").touch()
    with replacing(tmp_path / "c.txt") as temporary:
        temporary.unlink()
        temporary.touch(0o600)  # as a library does that writes a file of its own and renames it
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "b.txt", "c.txt")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("it is empty", "in/a.pt: it is empty"),
        ("a.pt holds loads", "in/a.pt holds loads"),
        ("in/a.pt is empty", "in/a.pt is empty"),
        ("record 3 of a.pt: no ids", "record 3 of in/a.pt: no ids"),
        ("cannot read in/a.pt: no", "cannot read in/a.pt: no"),
        ("data.pt is empty", "in/a.pt: data.pt is empty"),
    ],
)
def test_a_message_names_its_file_once(message: str, told: str) -> None:
    assert about_file(Path("in/a.pt"), message) == told


def test_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder; name a file in it"):
        write_text(tmp_path, "text")
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        write_text(tmp_path / "missing" / "a.txt", "text")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        write_text(tmp_path / "file" / "a.txt", "text")


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No space left on device; free some space"):
        write_half(tmp_path / "a", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert names(tmp_path) == []


def write_folder(path: Path, *contents: str) -> None:
    with replacing_folder(path, "index.json") as folder:
        for name in contents:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_appears_whole(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "out"
    if there:
        path.mkdir()
    write_folder(path, "index.json", "place-0.json", "sub/a.txt")
    assert names(path) == ["index.json", "place-0.json", "sub"]
    assert names(tmp_path) == ["out"]
    assert os.access(path, os.R_OK | os.W_OK | os.X_OK)


def test_a_folder_of_the_same_command_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_folder(path, "index.json", *(f"place-{i}.json" for i in range(12)), "sub/index.json", "sub/place-3.json")
    write_folder(path, "index.json", "place-0.json", "sub/index.json", "sub/place-0.json")
    assert names(path) == ["index.json", "place-0.json", "sub"]
    assert (path / "index.json").read_text() == "new"


@pytest.mark.parametrize("stranger", ["thesis.tex", "sub/thesis.tex", "place-0.json.bak", "place-x.json"])
def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path: Path, stranger: str) -> None:
    """Any web project has an index.json: that name alone must not cost its owner the folder."""
    path = tmp_path / "out"
    path.mkdir()
    (path / "index.json").write_text("mine")
    (path / stranger).parent.mkdir(exist_ok=True)
    (path / stranger).write_text("mine")
    with pytest.raises(ConfigError, match="name a new folder"):
        write_folder(path, "index.json", "place-0.json")
    assert (path / "index.json").read_text() == (path / stranger).read_text() == "mine"
    assert names(tmp_path) == ["out"]


def test_a_folder_without_the_mark_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "place-0.json").write_text("mine")
    with pytest.raises(ConfigError, match="name a new folder"), replacing_folder(path, "index.json"):
        raise AssertionError("work was begun")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="name a new folder"), replacing_folder(tmp_path / "file", "index.json"):
        raise AssertionError("work was begun")
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        write_folder(tmp_path / "missing" / "out", "index.json")


def test_the_current_folder_is_not_pulled_from_under_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out" / "sub")
    with pytest.raises(ConfigError, match="current folder"), replacing_folder(Path(), "index.json"):
        raise AssertionError("work was begun")
    (tmp_path / "out" / "index.json").touch()
    with pytest.raises(ConfigError, match="current folder"), replacing_folder(tmp_path / "out", "index.json"):
        raise AssertionError("work was begun")
    write_folder(Path("here"), "index.json")
    assert names(tmp_path / "out" / "sub") == ["here"]


def test_a_link_to_a_folder_keeps_pointing_to_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", "index.json")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["index.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_folder_that_is_not_finished_leaves_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out"
    write_folder(path, "index.json", "place-7.json")

    def write_half_of_it() -> None:
        with replacing_folder(path, "index.json") as folder:
            (folder / "index.json").write_text("half")
            raise error

    with pytest.raises(error):
        write_half_of_it()
    assert names(path) == ["index.json", "place-7.json"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("moved", [1, 2])
def test_an_interrupt_while_folders_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    """After the first rename the old one is on its way out, after the second the new one is in."""
    path = tmp_path / "out"
    write_folder(path, "index.json", "place-7.json")
    rename, count = Path.rename, []

    def interrupted(self: Path, target: Path) -> Path:
        result = rename(self, target)
        count.append(target)
        if len(count) == moved:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_folder(path, "index.json", "place-0.json")
    assert names(path) == ["index.json", "place-7.json" if moved == 1 else "place-0.json"]
    assert names(tmp_path) == ["out"]
