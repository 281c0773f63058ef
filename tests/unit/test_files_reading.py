"""Small input files: whatever is wrong with them is one clear error, and they are never read without a limit."""

from pathlib import Path

import pytest

from coterie import files
from coterie.errors import CheckpointError, InfeasiblePlacement
from coterie.files import parse_json, read_text
from coterie.placement.placement import Placement, integer_rows, read_json


def test_reads_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert read_text(path, CheckpointError) == '{"a": "é"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"\xff\xfe\x00", "no UTF-8 text"), (b"x" * 11, "larger than")],
)
def test_unreadable_text(tmp_path: Path, content: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 10)
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_text(path, CheckpointError)


def test_folder_and_nul_in_path(tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlacement, match="cannot read"):
        read_text(tmp_path, InfeasiblePlacement)
    with pytest.raises(InfeasiblePlacement, match="cannot read"):
        read_text(Path("a\0b"), InfeasiblePlacement)


def test_a_sparse_file_of_10_gigabytes_is_refused_without_being_loaded(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(InfeasiblePlacement, match="larger than 64 MiB"):
        Placement.load(path)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[" * 200_000, "9" * 5000, "nonsense"])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(InfeasiblePlacement, match=r"x\.json is truncated or no JSON"):
        parse_json(text, "x.json", InfeasiblePlacement)


@pytest.mark.parametrize(("text", "message"), [('{"a": 1, "a": 2}', "'a' is written twice"), ('{"a": NaN}', "NaN")])
def test_strict_json(text: str, message: str) -> None:
    assert "a" in parse_json(text, "x", InfeasiblePlacement)
    with pytest.raises(InfeasiblePlacement, match=message):
        parse_json(text, "x", InfeasiblePlacement, strict=True)


def test_placement_json_must_be_an_object(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("[1]")
    with pytest.raises(InfeasiblePlacement, match="no JSON object"):
        read_json(path)


@pytest.mark.parametrize("item", [2**40, True, 1.0, "1", None])
def test_a_map_names_what_is_no_expert_id(item: object) -> None:
    with pytest.raises(InfeasiblePlacement, match=f"holds {item!r}"):
        integer_rows([[0, item]])
