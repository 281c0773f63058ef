"""Tables of loads: how often every expert was chosen, without who was chosen together.

Engines and tools that balance loads record no more. That is enough for EPLB and for B; devices per token, peak traffic,
pruning and every placement by company need a trace of every token's experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError, unknown_name
from coterie.files import about_file, parse_json, read_text
from coterie.trace.importers.torch_file import is_torch_file, load_torch_file

FORMATS = ("sglang-stat", "tensorrt-llm", "vllm-ascend", "eplb")
NOT_ENOUGH = (
    "loads alone say nothing of devices per token or peak traffic, and place by EPLB only; cap, coterie and pruning "
    "need every token's experts: record them (SGLang per_token, vLLM --enable-return-routed-experts, coterie record)"
)
_MOST_LAYERS, _MOST_EXPERTS = 4096, 2**16
_META, _RANKS, _RANK = "meta_info.json", "rank*.safetensors", re.compile(r"rank\d+\.safetensors")
_WITH_MAP = ("vllm-ascend", "tensorrt-llm")
_KEYS = ("logical_count", "weight", "weights", "loads", "load", "expert_load", "moe_load", "counts")
_DAMAGE = (OSError, ValueError, EOFError, MemoryError, OverflowError, KeyError, TypeError)


@dataclass(frozen=True)
class LoadTable:
    """How often experts were chosen.

    Attributes:
        load_SLE: [S, L, E] float64 >= 0, token-expert pairs (or weights like them) in each step or iteration; S = 1
            where the source has only sums. Layers and steps without any load are left out.
        layer_ids: [L] the index of each layer in the source.
        format: one of `FORMATS`.
        top_k: experts a token, where the source says it; 0: it does not.
        provenance: where it came from.
    """

    load_SLE: NDArray[np.float64]
    layer_ids: tuple[int, ...]
    format: str
    top_k: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def load_LE(self) -> NDArray[np.float64]:
        """Loads of all steps together, [L, E]."""
        total: NDArray[np.float64] = self.load_SLE.sum(axis=0)
        return total


def open_loads(path: str | Path, format: str | None = None, expert_map: str | Path | None = None) -> LoadTable:
    """Read a table of loads.

    Known are SGLang's recordings in mode `stat` (.pt with `logical_count` [steps, L, E], a ring of steps of which the
    unused are 0); TensorRT-LLM's statistics (a folder with meta_info.json and rank0.safetensors and so on, keys
    "iteration_layer"; counts of slots where a load balancer ran); vllm-ascend's `moe_load` with the expert map it was
    counted under, [L, ranks, slots of a rank] as its updater gathers it (with iterations before that, where it counts
    each), or ranks first; and EPLB-style tables [L, E] as .npy, .npz, .json, .csv or .pt.

    Args:
        path: a file, or TensorRT-LLM's folder.
        format: one of `FORMATS`; None: told from the content.
        expert_map: whose slot is whose: vllm-ascend's expert map (JSON), or TensorRT-LLM's load balancer file (YAML).

    Raises:
        TraceError: when it is missing, damaged, or holds no loads.
        ConfigError: for an unknown format, or a map where none belongs.
        BackendUnavailable: for .pt files without torch.
    """
    source = Path(path)
    if format is not None and format not in FORMATS:
        raise unknown_name("format of loads", format, FORMATS)
    if not source.exists():
        raise TraceError(f"{path} does not exist; check the path")
    if expert_map is not None and format not in (None, *_WITH_MAP):
        raise ConfigError(f"--expert-map belongs to {' and '.join(_WITH_MAP)}, not to {format}; leave one of them out")
    try:
        if source.is_dir():
            return _tensorrt_llm(source, expert_map)
        table, key = _array(source)
        if expert_map is not None or format == "vllm-ascend":
            return _ascend(source, table, expert_map)
        stat = format == "sglang-stat" or (format is None and key == "logical_count")
        if table.ndim in (3, 4) and not stat:
            raise TraceError(
                f"it holds an array {list(table.shape)}; a table is [layers, experts]. Of vllm-ascend's loads give the "
                "--expert-map, of SGLang's steps say --format sglang-stat"
            )
        return _table(source, table[None] if table.ndim == 2 else table, "sglang-stat" if stat else "eplb")
    except TraceError as error:
        raise TraceError(about_file(source, str(error))) from error


def _table(source: Path, load: NDArray[Any], format: str, **about: Any) -> LoadTable:
    """Check [S, L, E] loads and leave out layers that have none (dense ones), and steps (not used)."""
    if load.ndim != 3 or 0 in load.shape:
        raise TraceError(f"it holds an array {list(load.shape[1:])}; a table of loads is [layers, experts]")
    if load.dtype.kind not in "iuf":
        raise TraceError(f"its elements are {load.dtype}; loads are numbers")
    _, layers, experts = load.shape
    if layers > _MOST_LAYERS or not 2 <= experts <= _MOST_EXPERTS:
        raise TraceError(
            f"it holds {layers} layers of {experts} experts; at most {_MOST_LAYERS} of 2 to {_MOST_EXPERTS}"
        )
    values = load.astype(np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise TraceError("a load is negative, infinite or not a number; loads are counts from 0 on")
    some, used = np.flatnonzero(values.any(axis=(0, 2))), np.flatnonzero(values.any(axis=(1, 2)))
    if not some.size:
        raise TraceError("all loads are 0; record while requests are served")
    layer_ids = np.asarray(about.pop("layer_ids", range(layers)))[some]
    return LoadTable(
        values[np.ix_(used, some)], tuple(layer_ids.tolist()), format,
        provenance={"source": source.name, **about.pop("said", {})}, **about,
    )  # fmt: skip


def _array(source: Path) -> tuple[NDArray[Any], str]:
    """The one table in a file, and the key it stands under."""
    try:
        if is_torch_file(source):
            held = load_torch_file(source)
        elif source.suffix == ".npy":
            held = np.load(source, allow_pickle=False)
        elif source.suffix == ".npz":
            with np.load(source, allow_pickle=False) as archive:
                held = {name: archive[name] for name in archive.files}
        elif source.suffix == ".csv":
            held = [
                [float(cell) for cell in line.split(",")] for line in read_text(source, TraceError).splitlines() if line
            ]
        else:
            held = parse_json(read_text(source, TraceError), source, TraceError)
        key = ""
        if isinstance(held, Mapping):
            known = [name for name in _KEYS if name in held] or (list(held) if len(held) == 1 else [])
            if not known:
                raise TraceError(f"it has no table of loads; name it one of {', '.join(_KEYS)}")
            key, held = str(known[0]), held[known[0]]
        return np.asarray(held.numpy() if hasattr(held, "numpy") else held), key
    except TraceError:
        raise
    except _DAMAGE as error:
        raise TraceError(f"it is damaged, or no table of numbers ({error}); write it again") from error


def _tensorrt_llm(folder: Path, expert_map: str | Path | None) -> LoadTable:
    """Sum the ranks' counts of every iteration and layer, and with a map those of an expert's slots."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    files = sorted(file for file in folder.glob(_RANKS) if _RANK.fullmatch(file.name))
    if not (folder / _META).is_file() or not files:
        raise TraceError(f"it is a folder without {_META} and {_RANKS}: no statistics of TensorRT-LLM")
    meta = parse_json(read_text(folder / _META, TraceError), folder / _META, TraceError)
    counts: dict[tuple[int, int], NDArray[Any]] = {}
    for file in files:
        try:
            held = load_file(file)
        except (SafetensorError, *_DAMAGE) as error:
            raise TraceError(f"{file.name} is damaged ({error}); copy or record it again") from error
        for key, count_E in held.items():
            iteration, _, layer = key.partition("_")
            if not (iteration.isdigit() and layer.isdigit()) or count_E.ndim != 1:
                raise TraceError(
                    f"{file.name} holds {key!r}; its keys are iteration_layer, each with one count an expert"
                )
            known = counts.get((int(iteration), int(layer)))
            if known is not None and known.shape != count_E.shape:
                raise TraceError(f"{file.name} has {count_E.size} experts in {key!r}, another rank {known.size}")
            counts[int(iteration), int(layer)] = count_E.astype(np.float64) + (0 if known is None else known)
    if len({count_E.size for count_E in counts.values()}) != 1:
        raise TraceError("its layers have different numbers of experts, or none; record it again")
    steps, layers = sorted({step for step, _ in counts}), sorted({layer for _, layer in counts})
    experts = next(iter(counts.values())).size
    none = np.zeros(experts)
    load = np.stack([np.stack([counts.get((step, layer), none) for layer in layers]) for step in steps])
    said = meta if isinstance(meta, dict) else {}
    top_k = said.get("num_experts_per_token", 0)
    if said.get("num_experts", experts) != experts:
        raise TraceError(f"{_META} says {said['num_experts']} experts, the counts have {experts}; record it again")
    about: dict[str, Any] = {"ranks": len(files), "iterations": len(steps)}
    if expert_map is not None:
        load = _by_expert(load, _assignments(Path(expert_map), layers, experts))
        about["expert_map"] = Path(expert_map).name
    return _table(
        folder, load, "tensorrt-llm", layer_ids=layers, top_k=top_k if type(top_k) is int and top_k > 0 else 0,
        said=about,
    )  # fmt: skip


def _assignments(path: Path, layers: Sequence[int], num_slots: int) -> NDArray[np.int64]:
    """[L, slots] the expert in every slot, from TensorRT-LLM's load balancer file."""
    import yaml

    try:
        held = yaml.safe_load(read_text(path, TraceError))
        found = np.asarray([held["initial_global_assignments"][layer] for layer in layers])
        if found.dtype.kind != "i" or found.shape != (len(layers), num_slots):
            raise ValueError(f"it has not {num_slots} slots in each layer, as the counts have")
        if found.min() < 0 or found.max() >= _MOST_EXPERTS:
            raise ValueError("ids cannot be")
        return found.astype(np.int64)
    except (yaml.YAMLError, *_DAMAGE) as error:
        words = " ".join(str(error).split())
        raise TraceError(f"{path} is not the load balancer's file ({words}); give the one that it ran with") from error


def _by_expert(load_SLP: NDArray[np.float64], map_LP: NDArray[np.int64]) -> NDArray[np.float64]:
    """Loads of slots as loads of experts, copies added up, [S, L, E]."""
    load_ELS = np.zeros((int(map_LP.max()) + 1, len(map_LP), len(load_SLP)))
    for layer, row in enumerate(map_LP):
        np.add.at(load_ELS[:, layer], row, load_SLP[:, layer].T)
    return np.ascontiguousarray(load_ELS.T)


def _ascend(source: Path, table: NDArray[Any], expert_map: str | Path | None) -> LoadTable:
    """Loads of physical slots as loads of experts, copies added up."""
    if expert_map is None:
        raise TraceError("vllm-ascend counts by slot; give the expert map it ran with as --expert-map")
    map_LRS = _expert_map(Path(expert_map))
    layers, ranks, slots = map_LRS.shape
    if table.shape[-3:] == map_LRS.shape and table.ndim in (3, 4):  # where there are as many ranks as layers, too
        load = table.reshape(-1, layers, ranks * slots)
    elif table.shape == (ranks, layers, slots):
        load = table.transpose(1, 0, 2).reshape(1, layers, ranks * slots)
    else:
        raise TraceError(
            f"it holds an array {list(table.shape)}, the expert map {layers} layers of {ranks} ranks with {slots} "
            "slots; moe_load is [layers, ranks, slots of a rank], with iterations before that or with ranks first"
        )
    by_expert = _by_expert(load.astype(np.float64), map_LRS.reshape(layers, -1))
    return _table(source, by_expert, "vllm-ascend", said={"expert_map": Path(expert_map).name})


def _expert_map(path: Path) -> NDArray[np.int64]:
    """[L, ranks, slots] the expert in every slot of vllm-ascend's map."""
    document = parse_json(read_text(path, TraceError), path, TraceError)
    try:
        rows = [[device["device_expert"] for device in layer["device_list"]] for layer in document["layer_list"]]
        found = np.asarray(rows, dtype=np.int64)
        if found.ndim != 3 or found.min() < 0 or found.max() >= _MOST_EXPERTS:
            raise ValueError("ids or numbers of slots cannot be")
        return found
    except _DAMAGE as error:
        raise TraceError(f"{path} is no expert map of vllm-ascend ({error}); use the file it ran with") from error


def halves(table: LoadTable) -> Sequence[NDArray[np.float64]]:
    """Loads [L, E] of the earlier and of the later half of the steps; one table where there is one step."""
    steps = len(table.load_SLE)
    if steps == 1:
        return [table.load_LE]
    return [table.load_SLE[: steps // 2].sum(axis=0), table.load_SLE[steps // 2 :].sum(axis=0)]
