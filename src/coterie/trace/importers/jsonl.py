"""Traces as JSON Lines: one decision a line, in any order, read twice so that little is ever held.

    {"layer": 3, "token_idx": 17, "topk_ids": [5, 60], "topk_weights": [0.7, 0.2], "req_id": "a"}

`topk_weights` and `req_id` may be absent. `layer` may count all layers of the model: the distinct numbers are the MoE
layers. `token_idx` counts from any start, within each request or over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.trace.importers.base import MAX_EXPERTS, MAX_LAYERS, Layout, id_dtype
from coterie.trace.importers.lines import head, json_lines, parse

_MAX_LINE_BYTES = 2**20
_MAX_WEIGHT = 1e30  # well within float32
_LINES_AT_ONCE = 2**15
_LINES_TO_EXPLAIN = 2**22


class JsonlImporter:
    """One decision a line, plain or gzip-compressed."""

    name = "jsonl"

    def sniff(self, path: Path) -> bool:
        """A first line that is a JSON object with `topk_ids`."""
        line = head(path, _MAX_LINE_BYTES).lstrip().partition(b"\n")[0] if path.is_file() else b""
        try:
            record = parse(line, "") if line[:1] == b"{" else None
        except TraceError:
            return False
        return isinstance(record, dict) and "topk_ids" in record

    @contextmanager
    def open(self, path: Path, spec: MoESpec | None) -> Iterator[JsonlSource]:
        """Read the file once to learn its layers, requests and tokens."""
        yield JsonlSource(path, _scan(path))


@dataclass(frozen=True)
class Record:
    """One decision, as a line says it."""

    layer: int
    token_idx: int
    ids: list[int]
    weights: list[float] | None
    request: str | int | None


@dataclass
class Scan:
    """What one reading of the file learns; memory grows with requests and layers, not with lines.

    Attributes:
        lines: records.
        layers: distinct layer numbers.
        spans: for each request, in order of appearance, the smallest and largest `token_idx`.
        top_k: experts a record.
        weighted: whether records hold weights.
        largest_id: the largest expert id.
    """

    lines: int = 0
    layers: set[int] = field(default_factory=set)
    spans: dict[str | int | None, list[int]] = field(default_factory=dict)
    top_k: int = 0
    weighted: bool = False
    largest_id: int = 0

    @property
    def per_request(self) -> bool:
        """Whether `token_idx` leaves no gaps within a request; else it must leave none over all of them."""
        return sum(last - first + 1 for first, last in self.spans.values()) * len(self.layers) == self.lines

    def rows(self) -> tuple[dict[str | int | None, int], int]:
        """For each request the trace row of its `token_idx` 0 (may be negative), and the number of rows."""
        if not self.per_request:
            first = min(first for first, _ in self.spans.values())
            total = max(last for _, last in self.spans.values()) - first + 1
            return dict.fromkeys(self.spans, -first), total
        base, start = {}, 0
        for request, (first, last) in self.spans.items():
            base[request] = start - first
            start += last - first + 1
        return base, start


class JsonlSource:
    """A scanned file."""

    def __init__(self, path: Path, scan: Scan) -> None:
        self._path, self._scan = path, scan
        self._bases, num_tokens = scan.rows()
        if scan.lines != num_tokens * len(scan.layers):
            explain(path, scan)
        dtypes: dict[str, Any] = {"expert_ids": id_dtype(scan.largest_id + 1)}
        if scan.weighted:
            dtypes["weights"] = np.float32
        if set(scan.spans) != {None}:
            dtypes["sequence_ids"] = np.int32
            if scan.per_request and len({first for first, _ in scan.spans.values()}) == 1:
                dtypes["positions"] = np.int32  # numbers that restart with each request
        layers = tuple(sorted(scan.layers))
        self.layout = Layout(len(layers), num_tokens, scan.top_k, dtypes, layer_ids=layers)

    def fill(self, target: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Write the records where they belong, some thousands of lines at a time."""
        layer_of = {number: layer for layer, number in enumerate(self.layout.layer_ids)}
        sequence_of = {request: sequence for sequence, request in enumerate(self._scan.spans)}
        seen_LT = np.zeros((self.layout.num_layers, self.layout.num_tokens), dtype=np.bool_)
        batch: list[Record] = []

        def write() -> None:
            layers = np.array([layer_of[record.layer] for record in batch])
            tokens = np.array([self._bases[record.request] + record.token_idx for record in batch])
            seen_LT[layers, tokens] = True
            target["expert_ids"][layers, tokens] = [record.ids for record in batch]
            if self._scan.weighted:
                target["weights"][layers, tokens] = np.array([record.weights for record in batch], dtype=np.float64)
            if "sequence_ids" in target:
                target["sequence_ids"][tokens] = [sequence_of[record.request] for record in batch]
            if "positions" in target:
                target["positions"][tokens] = [record.token_idx for record in batch]
            batch.clear()

        for _, record in _records(self._path, "reading records", progress):
            batch.append(record)
            if len(batch) == _LINES_AT_ONCE:
                write()
        if batch:
            write()
        if not seen_LT.all():  # as many lines as decisions, one missing: another is there twice
            explain(self._path, self._scan)


def _scan(path: Path) -> Scan:
    scan = Scan()
    for number, record in _records(path, "scanning records", silent):
        if scan.lines == 0:
            scan.top_k, scan.weighted = len(record.ids), record.weights is not None
        if len(record.ids) != scan.top_k:
            raise TraceError(f"line {number} has {len(record.ids)} topk_ids, the lines before {scan.top_k}; record all")
        if (record.weights is not None) != scan.weighted:
            raise TraceError(f"line {number}: topk_weights are in some lines only; record them in all or none")
        scan.lines += 1
        scan.layers.add(record.layer)
        if len(scan.layers) > MAX_LAYERS:
            raise TraceError(f"line {number} is of the {len(scan.layers)}th layer; at most {MAX_LAYERS} are read")
        scan.largest_id = max(scan.largest_id, *record.ids)
        span = scan.spans.setdefault(record.request, [record.token_idx, record.token_idx])
        span[0], span[1] = min(span[0], record.token_idx), max(span[1], record.token_idx)
    if scan.lines == 0:
        raise TraceError("it holds no records; record at least one token")
    return scan


def explain(path: Path, scan: Scan) -> None:
    """Raise for the first decision that is there twice, or else for one that is missing."""
    first_line: dict[tuple[Any, int, int], int] = {}
    for number, record in _records(path, "looking for the fault", silent):
        key = (record.request, record.token_idx, record.layer)
        if key in first_line:
            raise TraceError(
                f"line {number} repeats layer {record.layer}, token {record.token_idx}{_of(record.request)} of line "
                f"{first_line[key]}; each decision is there once: give concurrent requests their req_id"
            )
        first_line[key] = number
        if len(first_line) == _LINES_TO_EXPLAIN:
            break
    for request, (first, last) in scan.spans.items():
        for token_idx in range(first, last + 1):
            for layer in sorted(scan.layers):
                if (request, token_idx, layer) not in first_line and len(first_line) < _LINES_TO_EXPLAIN:
                    raise TraceError(
                        f"layer {layer} of token {token_idx}{_of(request)} is missing; "
                        "every token has one line for each layer: record it again"
                    )
    raise TraceError(f"its {scan.lines} lines are not one for each of {len(scan.layers)} layers of every token")


def _of(request: str | int | None) -> str:
    return "" if request is None else f" of request {request!r}"


def _records(path: Path, what: str, progress: Progress) -> Iterator[tuple[int, Record]]:
    size = path.stat().st_size
    for number, value in json_lines(path, _MAX_LINE_BYTES, lambda done: progress(what, done, size)):
        yield number, _record(number, value)


def _record(number: int, value: Any) -> Record:
    if not isinstance(value, dict):
        raise TraceError(
            f"line {number} is a JSON {type(value).__name__}; it is an object with layer, token_idx, topk_ids"
        )
    missing = [name for name in ("layer", "token_idx", "topk_ids") if name not in value]
    if missing:
        raise TraceError(f"line {number} lacks {', '.join(missing)}; a record has layer, token_idx and topk_ids")
    ids, weights, request = value["topk_ids"], value.get("topk_weights"), value.get("req_id")
    for name in ("layer", "token_idx"):
        if type(value[name]) is not int or not 0 <= value[name] < 2**31:
            raise TraceError(f"line {number}: {name} is {value[name]!r}; it is an integer >= 0")
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
        raise TraceError(f"line {number}: topk_ids is {ids!r}; it is a list of integers")
    if min(ids) < 0 or max(ids) >= MAX_EXPERTS:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise TraceError(f"line {number}: expert id {wrong}; ids run from 0 to {MAX_EXPERTS - 1}: record logical ids")
    if weights is not None:
        if not isinstance(weights, list) or len(weights) != len(ids) or not set(map(type, weights)) <= {int, float}:
            raise TraceError(f"line {number}: topk_weights is {weights!r}; it is {len(ids)} numbers, one for each id")
        if not -_MAX_WEIGHT <= min(weights) <= max(weights) <= _MAX_WEIGHT or math.isnan(sum(weights)):
            raise TraceError(f"line {number}: topk_weights is {weights!r}; weights are finite numbers >= 0")
    if request is not None and type(request) not in (str, int):
        raise TraceError(f"line {number}: req_id is {request!r}; it is a string or an integer")
    return Record(value["layer"], value["token_idx"], ids, weights, request)
