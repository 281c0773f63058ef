"""One door for every trace: a native file is memory-mapped, any other format is imported, a shipped one is found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie import data
from coterie.errors import ConfigError, TraceError, unknown_name
from coterie.files import about_file
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.trace.check import check_decisions, pieces
from coterie.trace.cleaning import find_idle_rows, select_tokens
from coterie.trace.importers.base import Importer, Layout, id_dtype
from coterie.trace.importers.reconcile import reconcile
from coterie.trace.importers.registry import FORMATS, detect, importer
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.storage import ARRAY_FIELDS, is_safetensors, writing

NATIVE = "coterie"


def open_trace(
    path: str | Path,
    format: str | None = None,
    spec: MoESpec | None = None,
    progress: Progress = silent,
    *,
    num_experts: int | None = None,
) -> RoutingTrace:
    """The trace in a file of any known format, memory-mapped.

    A native file is mapped as it is. Anything else is imported, a bounded piece at a time, into a temporary file
    (in `TMPDIR`) that disappears with the trace; rows of warm-up and padding are dropped and counted in the
    provenance, where everything inferred is named too.

    Args:
        path: a file or folder, or the name of a trace that ships with the package.
        format: "coterie", "npz", "jsonl", "sglang" or "vllm"; None: told from the content.
        spec: the model's shape; overrides what the file says. None: as the file says, or inferred.
        progress: told how far the import is.
        num_experts: E, where only that is known; None: as the file says, or its largest id + 1.

    Raises:
        TraceError: when the file is missing, damaged, hostile, of no known format, or not of that model.
        ConfigError: for an unknown format.
        BackendUnavailable: when the format takes a package that is not there.
    """
    source = locate(path)
    chosen = _importer(source, format)
    if chosen is None:
        return _with_spec(RoutingTrace.load(source), source, spec, num_experts)
    return _import_into(chosen, source, None, spec, num_experts, progress)


def import_trace(
    source: str | Path,
    out: str | Path,
    format: str | None = None,
    spec: MoESpec | None = None,
    progress: Progress = silent,
    *,
    num_experts: int | None = None,
    change: Callable[[RoutingTrace], RoutingTrace] | None = None,
) -> RoutingTrace:
    """Import a trace as `open_trace` does and write it to `out`, whole or not at all.

    Args:
        source: as `path` of `open_trace`.
        out: the native trace file to write; scratch space is taken in its folder.
        format: as for `open_trace`.
        spec: as for `open_trace`.
        progress: as for `open_trace`.
        num_experts: as for `open_trace`.
        change: what to make of it before it is written.

    Returns:
        The written trace, memory-mapped.

    Raises:
        TraceError: as `open_trace`.
        ConfigError: as `open_trace`, and when `out` cannot be written.
        BackendUnavailable: as `open_trace`.
    """
    found, out = locate(source), Path(out)
    if out.is_dir():
        raise ConfigError(f"cannot write {out}: it is a folder; name a file in it")
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out}: {out.parent} is no folder; create it or choose another")
    chosen = _importer(found, format)
    if chosen is None:
        trace = _with_spec(RoutingTrace.load(found), found, spec, num_experts)
    else:
        trace = _import_into(chosen, found, out.parent, spec, num_experts, progress)
    if change is not None:
        trace = change(trace)
    trace.save(out)
    return RoutingTrace.load(out)


def locate(path: str | Path) -> Path:
    """The file or folder itself, or the shipped trace of that name.

    Raises:
        TraceError: when there is neither.
    """
    if Path(path).exists():
        if not os.access(path, os.R_OK):
            raise TraceError(f"{path} cannot be read; check its permissions")
        return Path(path)
    if str(path) in data.NAMES:
        return data.path(str(path))
    hint = str(unknown_name("", str(path), data.NAMES)).partition("; ")[2]
    raise TraceError(f"{path} does not exist; check the path, or name a shipped trace: {hint}")


def _importer(path: Path, format: str | None) -> Importer | None:
    """Who reads the file; None: it is native."""
    if format is None:
        return None if is_safetensors(path) or path.suffix == ".safetensors" else detect(path)
    if format not in (NATIVE, *FORMATS):
        raise unknown_name("trace format", format, (NATIVE, *FORMATS))
    return None if format == NATIVE else importer(format)


def _with_spec(trace: RoutingTrace, path: Path, spec: MoESpec | None, num_experts: int | None) -> RoutingTrace:
    if spec is None and num_experts is None:
        return trace
    layout = Layout(
        trace.num_layers, trace.num_tokens, trace.spec.top_k, {}, trace.spec, layer_ids=trace.spec.layer_ids
    )
    try:
        reconciled, _ = reconcile(layout, 0, spec, num_experts)
        trace = replace(trace, spec=reconciled)
        check_decisions(trace)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return trace


def _import_into(
    chosen: Importer, path: Path, folder: Path | None, spec: MoESpec | None, num_experts: int | None, progress: Progress
) -> RoutingTrace:
    """Import into scratch files in `folder` (None: `TMPDIR`) that are unlinked once mapped, or on any failure."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".coterie-") as scratch:
            return _import(chosen, path, Path(scratch), spec, num_experts, progress)
    except TraceError as error:
        raise TraceError(about_file(path, str(error))) from error
    except OSError as error:
        where = folder or f"{tempfile.gettempdir()} (TMPDIR)"
        reason = f"{error.strerror or error}; it needs a writable folder with space for the trace"
        raise ConfigError(f"cannot import {path} by way of {where}: {reason}") from error


def _import(
    chosen: Importer, path: Path, scratch: Path, spec: MoESpec | None, num_experts: int | None, progress: Progress
) -> RoutingTrace:
    with chosen.open(path, spec) as source:
        layout = source.layout
        with writing(scratch / "as-recorded", layout.arrays(), {}) as target:
            source.fill(target, progress)
    ids, kept = target["expert_ids"], target.get("kept")
    largest_id = _largest(ids)
    resolved, inferred = reconcile(layout, largest_id, spec, num_experts)
    idle = find_idle_rows(ids, kept, resolved.num_experts)
    if not idle.keep_T.any():
        raise TraceError(
            f"all {layout.num_tokens} rows are warm-up ({idle.warm_up}) or padding ({idle.padding}): "
            "nothing is left; record real requests"
        )
    provenance = {
        **layout.provenance, "source": path.name, "format": chosen.name, "coterie": coterie.__version__,
        "dropped": {"warm_up": idle.warm_up, "padding": idle.padding, **layout.dropped}, "inferred": inferred,
    }  # fmt: skip
    filled: dict[str, Any] = dict(target)
    trace = RoutingTrace(spec=resolved, provenance=provenance, **filled)
    dtype = id_dtype(resolved.num_experts) if largest_id < resolved.num_experts else ids.dtype.type
    if not idle.keep_T.all() or dtype != ids.dtype:
        trace = select_tokens(trace, idle.keep_T, dtype, scratch / "cleaned")
    _check(trace, int((~idle.keep_T).sum()))
    if trace.kept is not None and all(bool(np.all(layer)) for layer in trace.kept):
        trace = replace(trace, kept=None)
    for values in (getattr(trace, name) for name in ARRAY_FIELDS):
        if values is not None:
            values.flags.writeable = False
    return replace(trace, weight_ordered=_weight_ordered(trace))


def _check(trace: RoutingTrace, num_dropped: int) -> None:
    try:
        check_decisions(trace)
    except TraceError as error:
        counted = f" (tokens counted without {num_dropped} dropped rows)" if num_dropped else ""
        raise TraceError(f"{error}{counted}") from error


def _largest(ids_LTK: NDArray[Any]) -> int:
    return max(int(layer[tokens].max()) for layer in ids_LTK for tokens in pieces(ids_LTK.shape[1]))


def _weight_ordered(trace: RoutingTrace) -> bool:
    """Whether every token's kept experts are ordered by falling weight."""
    if trace.weights is None:
        return False
    for layer in range(trace.num_layers):
        for tokens in pieces(trace.num_tokens):
            routing = trace.layer(layer, tokens)
            assert routing.weights_TK is not None
            weights = np.where(routing.kept(), routing.weights_TK, 0)
            if (weights[:, 1:] > weights[:, :-1]).any():
                return False
    return True
