"""Dumps of SGLang's expert distribution recorder in mode `per_token`: one .pt a rank, or a folder of them.

A record is one forward pass of one rank: `topk_ids_of_layer` int32 [model layers, tokens, 8] with physical ids, -1
where a slot is unused (the width is fixed, K may be smaller), and -1 throughout for dense layers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.progress import Progress
from coterie.spec import MoESpec
from coterie.trace.importers.base import MAX_LAYERS, Layout, id_dtype
from coterie.trace.importers.sglang_sequences import DECODE_BATCH, EXTEND_BATCH, MIXED_BATCH, SequenceTracker
from coterie.trace.importers.torch_file import is_torch_file, load_torch_file

_REMEDY = "record with --expert-distribution-recorder-mode per_token"


class SglangImporter:
    """Recordings of every token's experts."""

    name = "sglang"

    def sniff(self, path: Path) -> bool:
        """A .pt file, or a folder that holds some."""
        return any(path.glob("*.pt")) if path.is_dir() else is_torch_file(path)

    @contextmanager
    def open(self, path: Path, spec: MoESpec | None) -> Iterator[SglangSource]:
        """Read all recordings once, one file at a time."""
        files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"it is a folder without .pt files; {_REMEDY} and name the folder it wrote")
        yield SglangSource(files)


@dataclass(frozen=True)
class Pass:
    """One forward pass of one rank.

    Attributes:
        what: where it is, for messages.
        number: SGLang's forward_pass_id.
        rank: who recorded it.
        ids_LTC: [model layers, tokens, columns] physical ids, -1 where unused.
        mode: SGLang's forward mode, or None where the record has none.
        lengths: tokens of each request of an extending batch, or None.
        positions: of each token in its request, or None where the record has none.
    """

    what: str
    number: int
    rank: int
    ids_LTC: NDArray[np.int32]
    mode: int | None
    lengths: list[int] | None
    positions: list[int] | None

    @property
    def tracked(self) -> bool:
        """Whether it says enough to follow its requests."""
        if self.positions is None or self.mode not in (EXTEND_BATCH, DECODE_BATCH, MIXED_BATCH):
            return False
        fits = len(self.positions) == self.ids_LTC.shape[1]
        return fits and (
            self.mode == DECODE_BATCH or sum(self.lengths or [len(self.positions) + 1]) <= len(self.positions)
        )


@dataclass
class Scan:
    """What one reading of all files learns; memory grows with passes, not with tokens.

    Attributes:
        logical_LP: [model layers, P] the logical expert in each physical slot.
        valid_LC: for each rank, [model layers, columns], tokens with an expert there.
        digests: for each rank and pass, a digest of what was recorded.
        sizes: tokens of each (pass, rank).
        tracked: whether every pass says enough to follow its requests.
    """

    logical_LP: NDArray[np.int64] | None = None
    valid_LC: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    digests: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    tracked: bool = True

    def drop_repeated_ranks(self) -> int:
        """Forget ranks whose whole recording a lower rank holds too: they share its attention; returns the tokens."""
        distinct: dict[tuple[tuple[int, bytes], ...], int] = {}
        for rank in sorted(self.digests):
            distinct.setdefault(tuple(sorted(self.digests[rank].items())), rank)
        held = set(distinct.values())
        self.valid_LC = {rank: valid for rank, valid in self.valid_LC.items() if rank in held}
        repeated = {key: size for key, size in self.sizes.items() if key[1] not in held}
        self.sizes = {key: size for key, size in self.sizes.items() if key[1] in held}
        return sum(repeated.values())


class SglangSource:
    """Recordings that have been read once."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._scan = _scan(files)
        repeated = self._scan.drop_repeated_ranks()
        logical_LP, valid_LC = (
            self._scan.logical_LP,
            sum(self._scan.valid_LC.values(), start=np.zeros((1, 1), np.int64)),
        )
        num_tokens = sum(self._scan.sizes.values())
        if logical_LP is None or not valid_LC.any():
            raise TraceError(f"it holds no routed token; {_REMEDY} while requests are served")
        self._layers, self._columns = np.flatnonzero(valid_LC.any(axis=1)), np.flatnonzero(valid_LC.any(axis=0))
        self._logical_LP = logical_LP
        num_experts = int(logical_LP.max()) + 1
        dtypes: dict[str, Any] = {"expert_ids": id_dtype(num_experts), "step": np.int64}
        if (valid_LC[np.ix_(self._layers, self._columns)] < num_tokens).any():
            dtypes["kept"] = np.bool_
        inferred = {}
        dense = np.flatnonzero(~valid_LC.any(axis=1)).tolist()
        if dense:
            inferred["dense_layers"] = f"{dense}: no expert for any token"
        if self._scan.tracked:
            dtypes |= {"sequence_ids": np.int32, "positions": np.int32, "phase": np.uint8}
            inferred["sequence_ids"] = "from lengths, positions and batch order: recordings hold no request ids"
        if len({rank for _, rank in self._scan.sizes}) > 1:
            dtypes["home_ids"] = np.int32
            inferred["home_ids"] = "the rank that recorded the token"
        self.layout = Layout(
            self._layers.size, num_tokens, self._columns.size, dtypes,
            num_experts=num_experts, layer_ids=tuple(self._layers.tolist()), num_model_layers=len(valid_LC),
            inferred=inferred, dropped={"repeated_by_rank": repeated} if repeated else {},
        )  # fmt: skip

    def fill(self, target: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Write every pass where its number puts it, one file at a time."""
        order = sorted(self._scan.sizes)
        ends = itertools.accumulate(self._scan.sizes[key] for key in order)
        start_of = {key: end - self._scan.sizes[key] for key, end in zip(order, ends, strict=True)}
        counter = itertools.count()
        trackers: dict[int, SequenceTracker] = defaultdict(lambda: SequenceTracker(lambda: next(counter)))
        done = 0
        for each, _ in _passes(self._files):
            start = start_of.get((each.number, each.rank))
            if start is None:
                continue
            tokens = slice(start, start + each.ids_LTC.shape[1])
            self._store(each, target, tokens)
            if self._scan.tracked:
                assert each.mode is not None
                assert each.positions is not None
                sequences, phases = trackers[each.rank].label(each.mode, each.lengths, each.positions)
                target["sequence_ids"][tokens], target["phase"][tokens] = sequences, phases
                target["positions"][tokens] = each.positions
            done += each.ids_LTC.shape[1]
            progress("reading passes", done, self.layout.num_tokens)

    def _store(self, each: Pass, target: Mapping[str, NDArray[Any]], tokens: slice) -> None:
        for row, layer in enumerate(self._layers):
            physical_TK = each.ids_LTC[layer][:, self._columns]
            kept_TK = physical_TK >= 0
            target["expert_ids"][row, tokens] = np.where(kept_TK, self._logical_LP[layer][physical_TK], 0)
            if "kept" in target:
                target["kept"][row, tokens] = kept_TK
        target["step"][tokens] = each.number
        if "home_ids" in target:
            target["home_ids"][tokens] = each.rank


def _scan(files: list[Path]) -> Scan:
    scan = Scan()
    owner: dict[tuple[int, int], str] = {}
    for each, logical_LP in _passes(files):
        key, shape = (each.number, each.rank), (each.ids_LTC.shape[0], each.ids_LTC.shape[2])
        if scan.logical_LP is None:
            scan.logical_LP, first_shape = logical_LP, shape
        if shape != first_shape or not np.array_equal(scan.logical_LP, logical_LP):
            raise TraceError(
                f"{each.what} has another shape or expert map than {files[0].name}; import recordings apart"
            )
        if key in owner:
            raise TraceError(
                f"{each.what} and {owner[key]} are the same pass of the same rank; import recordings apart"
            )
        _check_physical(each, logical_LP.shape[1])
        _check_whole(each)
        owner[key] = each.what
        ids = each.ids_LTC
        logical_LTC = np.where(ids >= 0, logical_LP[np.arange(len(ids))[:, None, None], ids], -1)
        digest = hashlib.sha256(repr(each.positions).encode() + b"|")  # ranks may choose different copies of an expert
        digest.update(np.ascontiguousarray(logical_LTC).data)
        scan.digests[each.rank][each.number] = digest.digest()
        scan.sizes[key] = ids.shape[1]
        valid_LC = scan.valid_LC.setdefault(each.rank, np.zeros(shape, dtype=np.int64))
        valid_LC += (ids >= 0).sum(axis=1)
        scan.tracked &= each.tracked
    return scan


def _check_physical(each: Pass, num_slots: int) -> None:
    if each.ids_LTC.size and (each.ids_LTC.min() < -1 or each.ids_LTC.max() >= num_slots):
        value = int(each.ids_LTC.min()) if each.ids_LTC.min() < -1 else int(each.ids_LTC.max())
        raise TraceError(
            f"{each.what} holds physical id {value}; ids run from 0 to {num_slots - 1}, -1 where unused: "
            "record with --disable-shared-experts-fusion, which keeps shared experts out"
        )


def _check_whole(each: Pass) -> None:
    """Every token of a batch that extends has experts, unless its rank worked on a share of the batch."""
    if each.mode != EXTEND_BATCH or not each.lengths:
        return
    chosen = (each.ids_LTC[:, : sum(each.lengths)] >= 0).any(axis=(0, 2))
    if chosen.any() and not chosen.all():
        raise TraceError(
            f"{each.what} has experts for {int(chosen.sum())} of {chosen.size} tokens and does not say which: with an "
            "all-to-all backend and tensor-parallel attention each rank records its share; record with "
            "--moe-a2a-backend none, where every rank sees all tokens"
        )


def _passes(files: list[Path]) -> Iterator[tuple[Pass, NDArray[np.int64]]]:
    """Every pass with tokens, and its file's map from physical to logical experts; one file is open at a time."""
    for file in files:
        dump = load_torch_file(file)
        if not isinstance(dump, dict) or not isinstance(dump.get("records"), list):
            if isinstance(dump, dict) and "logical_count" in dump:
                raise TraceError(
                    f"{file.name} holds loads (mode stat), which say nothing of company; read them with coterie loads, "
                    f"or {_REMEDY}"
                )
            raise TraceError(f"{file.name} is no recording of SGLang: it has no list of records; {_REMEDY}")
        logical_LP = _map(dump.get("last_physical_to_logical_map"), file.name)
        for index, record in enumerate(dump["records"]):
            each = _pass(record, f"record {index} of {file.name}", len(logical_LP))
            if each.ids_LTC.shape[1]:
                yield each, logical_LP


def _map(value: Any, name: str) -> NDArray[np.int64]:
    array = _array(value)
    if array is None or array.ndim != 2 or array.dtype.kind not in "iu" or array.size == 0 or array.min() < 0:
        raise TraceError(f"{name} has no usable last_physical_to_logical_map [layers, slots]; record it again")
    if len(array) > MAX_LAYERS or array.max() >= 2**16:
        raise TraceError(
            f"{name} maps {len(array)} layers and expert {array.max()}; at most {MAX_LAYERS} and {2**16 - 1}"
        )
    return array.astype(np.int64)


def _pass(record: Any, what: str, num_layers: int) -> Pass:
    if not isinstance(record, dict):
        raise TraceError(f"{what} is a {type(record).__name__}, no record; record it again")
    ids = _array(record.get("topk_ids_of_layer"))
    if ids is None:
        if "global_physical_count" in record:
            raise TraceError(f"{what} holds loads (mode per_pass), which say nothing of company; {_REMEDY}")
        raise TraceError(f"{what} lacks topk_ids_of_layer; {_REMEDY}")
    if ids.ndim != 3 or ids.dtype.kind != "i" or ids.shape[0] != num_layers:
        found = f"{list(ids.shape)} {ids.dtype}"
        raise TraceError(f"{what}: topk_ids_of_layer is {found}; it is integers [{num_layers} layers, tokens, columns]")
    number, rank, mode = record.get("forward_pass_id"), record.get("rank", 0), record.get("forward_mode")
    if type(number) is not int or type(rank) is not int or min(number, rank) < 0:
        raise TraceError(f"{what} has forward_pass_id {number!r} and rank {rank!r}; they are integers >= 0")
    return Pass(
        what, number, rank, ids, mode if type(mode) is int else None,
        _integers(record.get("extend_seq_lens")), _integers(record.get("positions")),
    )  # fmt: skip


def _array(value: Any) -> NDArray[Any] | None:
    """A tensor's elements, or None when it is no tensor, or one of a kind that NumPy does not know."""
    try:
        return value.detach().numpy() if hasattr(value, "detach") else None
    except (TypeError, RuntimeError):
        return None


def _integers(value: Any) -> list[int] | None:
    fits = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)
    return value if fits else None
