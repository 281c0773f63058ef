"""Task files: found, read and checked, with the file and the line of whatever is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.evaluate.task_data import definitions, load_tasks, read_rows

ARC = {"query": "Question: a?\nAnswer:", "choices": ["b", "c"], "gold": 1}
ROWS: dict[str, dict[str, Any]] = {
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "hellaswag": ARC,
    "openbookqa": ARC,
    "piqa": {"goal": "a", "sol1": "b", "sol2": "c", "label": 0},
    "winogrande": {"sentence": "a _ b.", "option1": "c", "option2": "d", "answer": "2"},
    "mmlu": {"subject": "s", "question": "a", "choices": ["b", "c", "d", "e"], "answer": 3},
    "lambada_openai": {"query": "a b", "choices": ["c"]},
    "gsm8k": {"question": "a", "answer": "b\n#### 1"},
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps({**row, "unused": 1}) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_every_task_reads_its_format(tmp_path: Path, name: str, suffix: str) -> None:
    definition = definitions()[name]
    path = write(tmp_path / f"{definition.files[0]}{suffix}", [ROWS[name]] * 7)
    for stem in definition.examples:
        write(tmp_path / f"{stem}.jsonl", [ROWS[name]] * 5)
    (asked,) = load_tasks([name], tmp_path)
    assert asked.rows == [ROWS[name]] * 7
    assert (asked.source, asked.available, len(asked.examples)) == (str(path), 7, 5 if definition.examples else 0)


def test_every_task_has_a_test() -> None:
    assert set(ROWS) == set(definitions())


def test_the_sample_ships() -> None:
    (asked,) = load_tasks(["arc_easy"])
    assert len(asked.rows) == 50
    assert {len(row["choices"]) for row in asked.rows} == {4}
    assert {row["gold"] for row in asked.rows} == {0, 1, 2, 3}
    assert all(row["query"].startswith("Question: ") for row in asked.rows)


def test_a_limit_is_spread_over_the_file(tmp_path: Path) -> None:
    write(tmp_path / "arc_easy.jsonl", [{**ARC, "query": str(number)} for number in range(10)])
    (asked,) = load_tasks(["arc_easy"], tmp_path, limit=4)
    assert [row["query"] for row in asked.rows] == ["0", "2", "5", "7"]
    assert (asked.available, asked.limit) == (10, 4)
    assert len(load_tasks(["arc_easy"], tmp_path, limit=99)[0].rows) == 10


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"gold": 2}, r"field 'gold' is '2', not an index of the 2 choices"),
        ("arc_easy", {"gold": True}, r"field 'gold' is 'True'"),
        ("arc_easy", {"gold": "1"}, r"field 'gold' is '1'"),
        ("arc_easy", {"choices": []}, r"field 'choices' is '\[\]', not a list of texts"),
        ("arc_easy", {"choices": ["a", ""]}, r"not a list of texts"),
        ("arc_easy", {"query": 7}, r"field 'query' is '7', not a text"),
        ("piqa", {"label": 2}, r"field 'label' is '2', not one of \[0, 1\]"),
        ("piqa", {"label": False}, r"field 'label' is 'False'"),
        ("winogrande", {"answer": 1}, r"field 'answer' is '1', not one of \['1', '2'\]"),
        ("winogrande", {"sentence": "no blank"}, r"not a text with one blank"),
        ("mmlu", {"choices": ["a", "b"]}, r"not a list of four texts"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    definition = definitions()[name]
    path = write(tmp_path / f"{definition.files[0]}.jsonl", [ROWS[name], {**ROWS[name], **change}])
    with pytest.raises(ConfigError, match=rf"{path}, line 2: .*{message}"):
        load_tasks([name], tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "a', r"line 3: no JSON"),
        ("[1]", r"line 3: a list, not an object with query, choices, gold"),
        ('{"query": "a", "choices": ["b"]}', r"line 3: field 'gold' is missing"),
        ("[" * 100_000, r"line 3: no JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "arc_easy.jsonl"
    path.write_text(f"{json.dumps(ARC)}\n\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(path, definitions()["arc_easy"].fields)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    def fails(message: str, name: str = "arc_easy", folder: Path | None = tmp_path, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            load_tasks([name], folder, **options)

    fails(r"has no file for task arc_easy; put arc_easy_test.jsonl or .* there")
    fails(r"is no folder", folder=tmp_path / "none")
    fails(r"task piqa needs its file; give --task-data DIR with piqa_val.jsonl", "piqa", None)
    fails(r"unknown task 'arc_eazy'; did you mean 'arc_easy'", "arc_eazy")
    fails(r"a limit of 0 questions", limit=0)
    write(tmp_path / "gsm8k.jsonl", [ROWS["gsm8k"]])
    fails(r"has no file for task gsm8k; put gsm8k_train.jsonl", "gsm8k")
    write(tmp_path / "gsm8k_train.jsonl", [ROWS["gsm8k"]] * 4)
    fails(r"has 4 rows, task gsm8k shows 5", "gsm8k")
    whole = write(tmp_path / "arc_easy.jsonl.gz", [ARC] * 100).read_bytes()
    (tmp_path / "arc_easy.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    fails(r"cannot read .*arc_easy.jsonl.gz")
    (tmp_path / "arc_easy.jsonl").write_text("\n\n")
    fails(r"arc_easy.jsonl has no rows")
    (tmp_path / "arc_easy.jsonl").write_bytes(b"\xff\n")
    fails(r"cannot read .*arc_easy.jsonl")
    with pytest.raises(ConfigError, match="arc_easy is named twice"):
        load_tasks(["arc_easy", "arc_easy"])
