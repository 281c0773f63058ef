"""A model's profile as one safetensors file, written whole or not at all, and never trusted when read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, TraceError
from coterie.profile.model_profile import ModelProfile
from coterie.spec import MoESpec
from coterie.trace.storage import writing

SCHEMA_VERSION = 1
KIND = "model_profile"
_KEY = "coterie"
_WEIGHT_SLACK = 1e-3  # weights are normalised in float32, and perhaps computed in bfloat16


def save_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write a profile.

    Raises:
        TraceError: when the profile holds what cannot be.
        ConfigError: when the file cannot be written.
    """
    check_profile(profile)
    described = {
        "spec": profile.spec.to_json(), "identity": profile.identity, "width": profile.width,
        "num_tokens": profile.num_tokens, "importance": list(profile.importance),
        "dominance": list(profile.dominance), "provenance": dict(profile.provenance),
    }  # fmt: skip
    write_arrays(Path(path), KIND, SCHEMA_VERSION, dict(_arrays(profile)), described)


def load_profile(path: str | Path) -> ModelProfile:
    """Read a profile and check all of it.

    Raises:
        TraceError: when the file is missing, truncated, no profile, of another schema, or holds what cannot be.
    """
    arrays, described = read_arrays(Path(path), KIND, SCHEMA_VERSION)
    try:
        profile = ModelProfile(
            spec=MoESpec.from_json(described["spec"]), identity=str(described["identity"]),
            width=int(described["width"]), num_tokens=int(described["num_tokens"]),
            load_LE=arrays["load"], pairs_LEE=arrays["pairs"],
            importance={name: arrays[f"importance.{name}"] for name in described["importance"]},
            dominance={name: arrays[f"dominance.{name}"] for name in described["dominance"]},
            sample_ids_LSK=arrays["sample_ids"], sample_weights_LSK=arrays["sample_weights"],
            provenance=dict(described["provenance"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise TraceError(f"{path} lacks parts of a profile ({error}); profile the model again") from error
    try:
        check_profile(profile)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return profile


def digest_of(profile: ModelProfile) -> str:
    """A digest of everything in a profile but its provenance."""
    digest = hashlib.sha256(f"{profile.identity} {profile.width} {profile.num_tokens}".encode())
    for name, values in sorted(_arrays(profile)):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def check_profile(profile: ModelProfile) -> None:
    """Refuse a profile whose arrays have another shape or type than `ModelProfile` says, or impossible values.

    Raises:
        TraceError: naming the array and what is wrong with it.
    """
    spec, sample = profile.spec, np.shape(profile.sample_ids_LSK)[1:2]
    layers, experts, top_k = spec.num_layers, spec.num_experts, spec.top_k
    if profile.num_tokens < 1 or profile.width < 1 or not sample:
        raise TraceError(f"a profile of {profile.num_tokens} tokens and {profile.width} neurons holds nothing")
    neurons, roles = (layers, experts, profile.width), (layers, experts, experts)
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "load": ((layers, experts), np.integer), "pairs": (roles, np.integer),
        "sample_ids": ((layers, *sample, top_k), np.integer), "sample_weights": ((layers, *sample, top_k), np.float32),
    } | {f"importance.{name}": (neurons, np.float32) for name in profile.importance} | {
        f"dominance.{name}": (roles, np.float32) for name in profile.dominance
    }  # fmt: skip
    for name, values in _arrays(profile):
        shape, kind = expected[name]
        if values.shape != shape or not np.issubdtype(values.dtype, kind):
            raise TraceError(
                f"{name} is {values.dtype} of shape {list(values.shape)}; a profile of this model has "
                f"{kind.__name__} of shape {list(shape)}: profile the model again"
            )
        _check_values(name, values)
    _check_counts(profile)


def _arrays(profile: ModelProfile) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "load", profile.load_LE
    yield "pairs", profile.pairs_LEE
    yield "sample_ids", profile.sample_ids_LSK
    yield "sample_weights", profile.sample_weights_LSK
    for kind, held in (("importance", profile.importance), ("dominance", profile.dominance)):
        for name, values in held.items():
            yield f"{kind}.{name}", values


def _check_values(name: str, values: NDArray[Any]) -> None:
    if name.startswith("dominance."):  # NaN: not measured; ablation may find that masking helps
        wrong = int(np.isinf(values).sum())
        what = "infinite"
    else:
        wrong = int((~(values >= 0) | ~np.isfinite(values)).sum())
        what = "negative, NaN or infinite"
    if wrong:
        raise TraceError(f"{wrong} values of {name} are {what}; profile the model again")


def _check_counts(profile: ModelProfile) -> None:
    spec, pairs_LEE, ids_LSK = profile.spec, profile.pairs_LEE, profile.sample_ids_LSK
    uses = profile.num_tokens * (spec.top_k - 1)
    reason = None
    if (profile.load_LE.sum(axis=1) != profile.num_tokens * spec.top_k).any():
        reason = f"the loads of a layer do not add up to {profile.num_tokens} tokens x {spec.top_k} experts"
    elif (pairs_LEE != pairs_LEE.transpose(0, 2, 1)).any() or np.diagonal(pairs_LEE, axis1=1, axis2=2).any():
        reason = "pairs are not symmetric with an empty diagonal"
    elif (np.triu(pairs_LEE).sum(axis=(1, 2)) != uses).any():
        reason = f"the pairs of a layer do not add up to {uses} uses"
    elif (ids_LSK >= spec.num_experts).any() or (np.diff(np.sort(ids_LSK, axis=2), axis=2) == 0).any():
        reason = f"a sampled token chooses an expert twice, or one that is not among {spec.num_experts}"
    elif (np.abs(profile.sample_weights_LSK.sum(axis=2) - 1) > _WEIGHT_SLACK).any():
        reason = "the weights of a sampled token do not add up to 1"
    elif (np.diff(profile.sample_weights_LSK, axis=2) > 0).any():
        reason = "the weights of a sampled token do not fall"
    if reason is not None:
        raise TraceError(f"{reason}; profile the model again")


# ---- arrays with a description, as one file -------------------------------------------------------------------------


def write_arrays(
    path: Path, kind: str, version: int, arrays: Mapping[str, NDArray[Any]], described: Mapping[str, Any]
) -> None:
    """Write arrays and a JSON description as one safetensors file, whole or not at all.

    Raises:
        ConfigError: when the file cannot be written.
    """
    shapes = {name: (values.dtype, values.shape) for name, values in arrays.items()}
    with writing(path, shapes, {"kind": kind, "schema_version": version, **described}) as target:
        for name, values in arrays.items():
            target[name][...] = values


def read_arrays(path: Path, kind: str, version: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """What `write_arrays` wrote.

    Raises:
        TraceError: when the file is missing, truncated, damaged, of another kind or schema.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise TraceError(f"{path} does not exist or is no file; check the path")
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            names = file.keys() if described.get("kind") == kind else []
            arrays = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is truncated or no safetensors file ({error}); profile the model again") from error
    found, wanted = described.get("kind"), kind.replace("_", " ")
    if found != kind:
        raise TraceError(f"{path} holds {'no' if found is None else f'a {found}, not a'} {wanted}; give another file")
    if described.get("schema_version") != version:
        raise TraceError(
            f"{path} has {wanted} schema {described.get('schema_version')!r}, this version reads {version}; "
            "profile the model again or use the version that wrote it"
        )
    return arrays, described
