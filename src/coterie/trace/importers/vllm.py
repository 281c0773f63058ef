"""Routing that vLLM returns with completions (`--enable-return-routed-experts`): [tokens, hidden layers, k] arrays.

A .npy file, a folder of one .npy for each request, or JSON or JSON Lines of responses whose `routed_experts` (and
`prompt_routed_experts`, where prompt and generation come apart) hold a base64 .npy or nested lists. Dense layers are
there as zeros: a layer that is zero for every token is dropped and the others keep their numbers as `layer_ids`.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import TraceError
from coterie.progress import Progress
from coterie.spec import MoESpec
from coterie.trace.importers.base import MAX_EXPERTS, MAX_LAYERS, PIECE_BYTES, Layout, check_range
from coterie.trace.importers.lines import head, json_lines, parse
from coterie.trace.importers.npy_header import MAGIC, read_npy_header
from coterie.units import format_bytes

_KEY, _PROMPT_KEY = "routed_experts", "prompt_routed_experts"
_SNIFF_BYTES = 2**24
_MAX_LINE_BYTES, _MAX_DOCUMENT_BYTES, _MAX_DEPTH = 2**28, 2**30, 64


class VllmImporter:
    """`routed_experts` arrays, in files of their own or inside responses."""

    name = "vllm"

    def sniff(self, path: Path) -> bool:
        """A .npy file, a folder of them, or JSON that names `routed_experts`."""
        if path.is_dir():
            return any(path.glob("*.npy"))
        start = head(path, _SNIFF_BYTES)
        return start.startswith(MAGIC) or (start.lstrip()[:1] in (b"{", b"[") and f'{_KEY}"'.encode() in start)

    @contextmanager
    def open(self, path: Path, spec: MoESpec | None) -> Iterator[VllmSource]:
        """Read all arrays once, to learn the layers that route."""
        yield VllmSource(path)


@dataclass(frozen=True)
class Part:
    """Routing of consecutive tokens of one request.

    Attributes:
        what: where it came from, for messages.
        ids_TLK: [tokens, hidden layers, k] integers, possibly memory-mapped.
        request: number of the request.
        position: of its first token in the request.
    """

    what: str
    ids_TLK: NDArray[Any]
    request: int
    position: int


class VllmSource:
    """A file or folder that has been read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        num_tokens, shape, dtype, routed = 0, None, np.dtype(np.uint8), np.zeros(0, dtype=np.bool_)
        for part in _parts(path):
            if shape is None:
                shape = part.ids_TLK.shape[1:]
                routed = np.zeros(shape[0], dtype=np.bool_)
            if part.ids_TLK.shape[1:] != shape:
                raise TraceError(
                    f"{part.what} has {list(part.ids_TLK.shape[1:])} layers and experts a token, others {list(shape)}; "
                    "import the requests of one model together"
                )
            num_tokens += len(part.ids_TLK)
            dtype = max(dtype, part.ids_TLK.dtype, key=lambda each: each.itemsize)
            for piece in _pieces(part.ids_TLK):
                routed |= piece.any(axis=(0, 2))
        if shape is None or num_tokens == 0:
            raise TraceError(f"it holds no {_KEY}; start vLLM with --enable-return-routed-experts")
        if not routed.any():
            raise TraceError(f"all {num_tokens} rows of {_KEY} are zero: nothing was recorded; record real requests")
        self._routed = np.flatnonzero(routed)
        dense = np.flatnonzero(~routed).tolist()
        dtypes: dict[str, Any] = {"expert_ids": np.uint8 if dtype.itemsize == 1 else np.uint16}
        if not _lone_array(path):
            dtypes |= {"sequence_ids": np.int32, "positions": np.int32}
        self.layout = Layout(
            self._routed.size, num_tokens, shape[1], dtypes,
            layer_ids=tuple(self._routed.tolist()), num_model_layers=shape[0],
            inferred={"dense_layers": f"{dense}: zero for every token"} if dense else {},
        )  # fmt: skip

    def fill(self, target: Mapping[str, NDArray[Any]], progress: Progress) -> None:
        """Write the routing layers of every part, one after the other."""
        start = 0
        for part in _parts(self._path):
            position = part.position
            for piece in _pieces(part.ids_TLK):
                ids_LTK = piece.transpose(1, 0, 2)[self._routed]
                check_range(ids_LTK, MAX_EXPERTS, 0, start)
                tokens = slice(start, start + len(piece))
                target["expert_ids"][:, tokens] = ids_LTK
                if "sequence_ids" in target:
                    target["sequence_ids"][tokens] = part.request
                    target["positions"][tokens] = np.arange(position, position + len(piece))
                start, position = tokens.stop, position + len(piece)
                progress(f"reading {_KEY}", start, self.layout.num_tokens)


def _lone_array(path: Path) -> bool:
    """Whether it is one array: of one request or of several, which nothing tells."""
    return path.is_file() and head(path, len(MAGIC)) == MAGIC


def _pieces(ids_TLK: NDArray[Any]) -> Iterator[NDArray[Any]]:
    step = max(1, PIECE_BYTES // max(1, ids_TLK[:1].nbytes))
    for start in range(0, len(ids_TLK), step):
        yield np.asarray(ids_TLK[start : start + step])


def _parts(path: Path) -> Iterator[Part]:
    """Every part, in a fixed order; arrays in files are mapped, arrays in JSON decoded one at a time."""
    if path.is_dir() or _lone_array(path):
        files = sorted(path.glob("*.npy")) if path.is_dir() else [path]
        for request, file in enumerate(files):
            yield Part(file.name, _mapped(file), request, 0)
        return
    request, counted = -1, None
    for what, response in _responses(path):
        for prompt, routed in _requests(response, None, 0):
            request, position = request + 1, 0
            if prompt is not None:
                ids_TLK = _decoded(prompt, f"{_PROMPT_KEY} in {what}")
                if prompt is not counted:  # several choices share one prompt, which ran once
                    yield Part(f"{_PROMPT_KEY} in {what}", ids_TLK, request, 0)
                counted, position = prompt, len(ids_TLK)
            if routed is not None:
                yield Part(f"{_KEY} in {what}", _decoded(routed, f"{_KEY} in {what}"), request, position)


def _responses(path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON values in the file, and where each is: one for each line, or one document over many lines."""
    start = head(path, _SNIFF_BYTES)
    by_line = len(start) == _SNIFF_BYTES and b"\n" not in start  # the first line is long: it is a record
    with suppress(TraceError):
        parse(start.lstrip().partition(b"\n")[0], "")
        by_line = True
    if by_line:
        yield from ((f"line {number}", value) for number, value in json_lines(path, _MAX_LINE_BYTES))
        return
    text = head(path, _MAX_DOCUMENT_BYTES + 1)
    if len(text) > _MAX_DOCUMENT_BYTES:
        limit = format_bytes(_MAX_DOCUMENT_BYTES)
        raise TraceError(f"it is one JSON document of more than {limit}; write one response a line instead")
    yield "the document", parse(text, "it")


def _requests(node: Any, prompt: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """The prompt's and the generated tokens' routing of every request within a JSON value."""
    if depth > _MAX_DEPTH:
        raise TraceError(f"its JSON is nested more than {_MAX_DEPTH} deep; write vLLM's responses as they are")
    if isinstance(node, list):
        for item in node:
            yield from _requests(item, prompt, depth + 1)
    elif isinstance(node, dict):
        own = node.get(_PROMPT_KEY)
        prompt = prompt if own is None else own
        found = False
        if node.get(_KEY) is not None:
            found = True
            yield prompt, node[_KEY]
        for key, item in node.items():
            if key not in (_KEY, _PROMPT_KEY) and isinstance(item, (dict, list)):
                for request in _requests(item, prompt, depth + 1):
                    found = True
                    yield request
        if own is not None and not found:
            yield own, None


def _decoded(value: Any, what: str) -> NDArray[Any]:
    """The array in a base64 .npy, or in nested lists."""
    if isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise TraceError(f"{what} is no base64 ({error}); is the file truncated?") from error
        header = read_npy_header(io.BytesIO(raw), len(raw), what)
        return _checked(np.frombuffer(raw, header.dtype, offset=header.start).reshape(header.shape), what)
    try:
        return _checked(np.asarray(value), what)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{what} is neither a base64 .npy nor [tokens, layers, k] lists of integers") from error


def _mapped(path: Path) -> NDArray[Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = read_npy_header(file, size, path.name)
    if 0 in header.shape:  # nothing to map
        return _checked(np.empty(header.shape, header.dtype), path.name)
    return _checked(np.memmap(path, header.dtype, "r", header.start, header.shape), path.name)


def _checked(ids_TLK: NDArray[Any], what: str) -> NDArray[Any]:
    if ids_TLK.ndim != 3 or (ids_TLK.dtype.kind not in "iu" and ids_TLK.size):
        found = f"{list(ids_TLK.shape)} {ids_TLK.dtype}"
        raise TraceError(f"{what} is {found}; it is [tokens, hidden layers, k] integers")
    if not 0 < ids_TLK.shape[1] <= MAX_LAYERS or ids_TLK.shape[2] == 0:
        raise TraceError(f"{what} has shape {list(ids_TLK.shape)}; 1 to {MAX_LAYERS} layers are read")
    return ids_TLK
