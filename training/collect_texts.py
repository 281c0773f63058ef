"""Make training/text/*.txt.xz and the shipped held-out texts from the collected originals (text/README.md lists them).

    python -m training.collect_texts ORIGINALS

ORIGINALS holds the files named in `SOURCES` below. The results are in the repository: this need not be run to train.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training.corpus import TEXT, hold_out, join_short, leading_lines, split_long, write_documents

HELD_OUT = Path(__file__).parents[1] / "src/coterie/data/text"
HELD_OUT_SHARE = 0.04
HELD_OUT_BYTES = 60_000  # of each domain at most
DOCUMENT_CHARS = 4_000  # long texts without marked documents are cut at blank lines into pieces of about this size


def main() -> None:
    """Write both halves of every domain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("originals", type=Path)
    originals = parser.parse_args().originals
    HELD_OUT.mkdir(parents=True, exist_ok=True)
    for domain, readers in SOURCES.items():
        training: list[str] = []
        held_out: list[str] = []
        for name, reader in readers:
            seen, held = hold_out(list(reader(originals / name)), HELD_OUT_SHARE)
            training += seen
            held_out.append(leading_lines("\n\n".join(join_short(held, 1)) + "\n", HELD_OUT_BYTES // len(readers)))
        write_documents(TEXT / f"{domain}.txt.xz", training)
        (HELD_OUT / f"{domain}.txt").write_text("\n".join(held_out))
        characters = sum(map(len, training)), sum(map(len, held_out))
        report = f"{domain}: {len(training)} documents, {characters[0]:,} characters; held out {characters[1]:,}"
        sys.stdout.write(report + "\n")
    identifiers = [str(row["arxiv_id"]) for row in separate_abstracts(originals / "qasper_abstracts.jsonl")]
    (TEXT / "abstracts-arxiv-ids.txt").write_text("\n".join(identifiers) + "\n")
    test = (originals / "wikitext2_test.txt").read_bytes()
    (HELD_OUT / "wikitext2-test.txt.xz").write_bytes(lzma.compress(test, preset=9 | lzma.PRESET_EXTREME))


def sherlock(path: Path) -> Iterator[str]:
    """The stories, one document each; the table of contents before them is dropped."""
    yield from re.split(r"^(?=ADVENTURE [IVX]+\. )", path.read_text(), flags=re.MULTILINE)[1:]


def paragraphs(path: Path) -> Iterator[str]:
    """A long text without marked documents, cut at blank lines."""
    yield from split_long(path.read_text(), DOCUMENT_CHARS)


def lines(path: Path) -> Iterator[str]:
    """A text of one paragraph a line, cut at line ends; blank lines go between the paragraphs."""
    for document in split_long(path.read_text(), DOCUMENT_CHARS, "\n"):
        yield "\n\n".join(document.strip("\n").split("\n"))


def wikipedia(path: Path) -> Iterator[str]:
    """Articles of WikiText: a heading with a single equals sign opens one."""
    yield from re.split(r"^(?= = [^=].* = $)", path.read_text(), flags=re.MULTILINE)[1:]


def modules(path: Path) -> Iterator[str]:
    """Modules of the standard library: a line `# FILE: name` opens one and is kept."""
    yield from re.split(r"^(?=# FILE: )", path.read_text(), flags=re.MULTILINE)[1:]


def tasks(path: Path) -> Iterator[str]:
    """Self-instruct tasks, one document each: instruction, input and output of every instance."""
    for row in json_lines(path):
        dialogues = []
        for instance in row["instances"]:
            question = "\n".join(part.strip() for part in (row["instruction"], instance["input"]) if part.strip())
            dialogues.append(f"User: {question}\nAssistant: {instance['output'].strip()}")
        yield "\n\n".join(dialogues)


def questions(path: Path) -> Iterator[str]:
    """Prompts without answers, one turn after the other."""
    for row in json_lines(path):
        yield "\n".join(f"User: {turn.strip()}" for turn in row["turns"])


def problems(path: Path) -> Iterator[str]:
    """GSM8K: question and worked answer, without the calculator annotations."""
    for row in json_lines(path):
        answer = re.sub(r"<<[^>]*>>", "", row["answer"])
        yield f"Question: {row['question'].strip()}\nAnswer: {answer.strip()}"


def abstracts(path: Path) -> Iterator[str]:
    """Title and abstract."""
    for row in separate_abstracts(path):
        yield f"{row['title'].strip()}\n{row['abstract'].strip()}"


def separate_abstracts(path: Path) -> Iterator[dict[str, Any]]:
    """The abstracts of papers whose body is not among the texts."""
    bodies = (path.parent / "qasper_paper_bodies.txt").read_text()
    for row in json_lines(path):
        if row["abstract"][:80] not in bodies:
            yield row


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, compressed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    yield from (json.loads(line) for line in text.splitlines() if line.strip())


SOURCES: dict[str, list[tuple[str, Callable[[Path], Iterator[str]]]]] = {
    "prose": [("sherlock.txt", sherlock), ("tiny_shakespeare.txt", paragraphs)],
    "encyclopedic": [("wikitext2_valid.txt", wikipedia)],
    "code": [("python_stdlib_code.txt", modules)],
    "documentation": [("python_docs.txt", paragraphs)],
    "chat": [
        ("self_instruct_seed_tasks.jsonl", tasks),
        ("self_instruct_user_oriented.jsonl", tasks),
        ("mt_bench_questions.jsonl", questions),
        ("vicuna_questions.jsonl", questions),
    ],
    "maths": [("gsm8k_train.jsonl.gz", problems)],
    "abstracts": [("qasper_abstracts.jsonl", abstracts)],
    "papers": [("qasper_paper_bodies.txt", lines)],
}

if __name__ == "__main__":
    main()
