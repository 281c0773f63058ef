"""What each Mixture-of-Experts architecture calls things, in its config.json and in Transformers; data, no weights.

Source: the configuration classes of Hugging Face Transformers (key names, defaults), its decoder layers and those of
SGLang and vLLM (which layers are MoE), and the modelling code published with DeepSeek-MoE-16B.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coterie.errors import CheckpointError, ConfigError
from coterie.files import parse_json, read_text
from coterie.spec import MoESpec

Config = Mapping[str, Any]
DenseRule = Literal["all", "first_k", "sparse_step", "start_end"]

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "moe_k")
_TEXT_KEYS = ("text_config", "language_config", "llm_config")
_MAX_LAYERS, _MAX_EXPERTS = 10_000, 65_536


@dataclass(frozen=True)
class Family:
    """One architecture (`model_type`).

    Attributes:
        model_type: its name in config.json.
        experts: key of the number of routed experts. Newer Transformers write some families' count under another of
            `EXPERT_KEYS`, which is accepted too.
        top_k: key of the routed experts chosen for each token.
        intermediate: key of the routed experts' width.
        shared: key that tells of shared experts, or None.
        shared_is_width: the key gives the width of the one shared expert, not a number of them.
        dense: which layers are MoE: all; from `first_k_dense_replace` on, each `moe_layer_freq`-th; each
            `decoder_sparse_step`-th without `mlp_only_layers`; each `moe_layer_interval`-th from start to end index.
        grouped: when routing is limited to groups: never, when n_group > 1, or when `topk_method` says so too.
        defaults: what Transformers takes when a key of the layout or of the groups is absent. A key that is absent
            both here and in the config is an error.
        block: attribute of a decoder layer that is the MoE block in an MoE layer (Transformers).
        router: attribute of the block that chooses; the experts are its attribute `experts` in every family.
    """

    model_type: str
    experts: str
    top_k: str = "num_experts_per_tok"
    intermediate: str = "moe_intermediate_size"
    shared: str | None = None
    shared_is_width: bool = False
    dense: DenseRule = "all"
    grouped: Literal["never", "n_group", "topk_method"] = "never"
    defaults: Mapping[str, int] = field(default_factory=dict)
    block: str = "mlp"
    router: str = "gate"


_STEP_DEFAULTS = {"decoder_sparse_step": 1}
_FAMILY_LIST = (
    Family("mixtral", "num_local_experts", intermediate="intermediate_size"),
    Family("qwen2_moe", "num_experts", shared="shared_expert_intermediate_size", shared_is_width=True,
           dense="sparse_step", defaults=_STEP_DEFAULTS),
    Family("qwen3_moe", "num_experts", dense="sparse_step", defaults=_STEP_DEFAULTS),
    Family("deepseek", "n_routed_experts", shared="n_shared_experts", dense="first_k",
           defaults={"moe_layer_freq": 1}),
    Family("deepseek_v2", "n_routed_experts", shared="n_shared_experts", dense="first_k", grouped="topk_method",
           defaults={"first_k_dense_replace": 0, "moe_layer_freq": 1}),
    Family("deepseek_v3", "n_routed_experts", shared="n_shared_experts", dense="first_k", grouped="n_group",
           defaults={"first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4}),
    Family("glm4_moe", "n_routed_experts", shared="n_shared_experts", dense="first_k", grouped="n_group",
           defaults={"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1}),
    Family("olmoe", "num_experts", intermediate="intermediate_size"),
    # no defaults: without a start index Transformers begins at layer 1, vLLM at layer 0
    Family("ernie4_5_moe", "moe_num_experts", top_k="moe_k", shared="moe_num_shared_experts", dense="start_end",
           defaults={"moe_layer_end_index": -1, "moe_layer_interval": 1}),
    Family("phimoe", "num_local_experts", intermediate="intermediate_size", router="router"),
    Family("granitemoe", "num_local_experts", intermediate="intermediate_size", block="block_sparse_moe",
           router="router"),
    Family("gpt_oss", "num_local_experts", intermediate="intermediate_size", router="router"),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _FAMILY_LIST}


def spec_from_config(config: Config, name: str) -> MoESpec:
    """The routing's shape, from the contents of a config.json.

    Multimodal wrappers are looked into (`text_config` and its like). An unknown `model_type` is read by the common
    keys, unless it has keys that look like a rule for dense layers and are not known here.

    Args:
        config: the JSON object.
        name: what to call the model.

    Returns:
        A spec with `layer_ids` and `num_model_layers` set.

    Raises:
        CheckpointError: when a key is missing or wrong, or the model has no MoE layers.
    """
    config = text_part(config)
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointError(f"model_type = {reprlib.repr(model_type)} in {name}'s config; it must be a string")
    family = FAMILIES.get(model_type or "")
    if not any(config.get(key) for key in EXPERT_KEYS):
        raise CheckpointError(f"{name} has no MoE layers: none of {', '.join(EXPERT_KEYS)} is set in its config")
    experts = _count(config, _present(config, family.experts if family else None, EXPERT_KEYS, name), name)
    top_k = _count(config, _present(config, family.top_k if family else None, TOP_K_KEYS, name), name)
    num_model_layers = _count(config, "num_hidden_layers", name)
    if experts > _MAX_EXPERTS or num_model_layers > _MAX_LAYERS:
        raise CheckpointError(
            f"{name} has {num_model_layers} layers and {experts} experts in its config; "
            f"at most {_MAX_LAYERS} and {_MAX_EXPERTS} are supported"
        )
    layer_ids = tuple(i for i, moe in enumerate(_moe_layers(config, family, num_model_layers, name)) if moe)
    if not layer_ids:
        raise CheckpointError(f"{name} has no MoE layers: its config makes all {num_model_layers} layers dense")
    num_groups, topk_groups = routing_groups(config, family, name)
    hidden_size = _count(config, "hidden_size", name) if config.get("hidden_size") is not None else 0
    try:
        return MoESpec(
            name, len(layer_ids), experts, top_k, num_groups, topk_groups, layer_ids, num_model_layers, hidden_size
        )
    except ConfigError as error:
        raise CheckpointError(f"{name}'s config: {error}") from None


def load_spec(path: str | Path) -> MoESpec:
    """The routing's shape of a model, from its config.json or the folder that holds one.

    Raises:
        CheckpointError: when there is no such file, it is no config, or the model has no MoE layers.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return spec_from_config(read_config(file), model_name(file))


def model_name(path: Path) -> str:
    """What to call a model, from its folder or its config.json; in the hub's cache the folder's name is a hash."""
    path = path.absolute()
    if path.name != "config.json" and not path.is_dir():
        return path.stem
    folder = Path(os.path.normpath(path if path.is_dir() else path.parent))
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name or "model"


def read_config(file: Path) -> dict[str, Any]:
    """The contents of a config.json.

    Raises:
        CheckpointError: when there is no such file, or it holds no JSON object.
    """
    config = parse_json(read_text(file, CheckpointError), file, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object; give a model's config.json or the folder that holds it")
    return config


def shared_experts(config: Config, family: Family | None) -> int | None:
    """How many experts every token passes besides the routed ones; None when the config does not say."""
    if family is not None and family.shared is None:
        return 0
    value = None if family is None or family.shared is None else config.get(family.shared)
    if not isinstance(value, int):
        return None
    return min(value, 1) if family is not None and family.shared_is_width else value


def text_part(config: Config) -> Config:
    """The part that describes the language model: the config itself, or one level down in multimodal wrappers."""
    if any(config.get(key) for key in EXPERT_KEYS):
        return config
    return next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), config)


def _present(config: Config, preferred: str | None, keys: tuple[str, ...], name: str) -> str:
    """The one of `keys` that is set; of several the preferred, if they agree."""
    found = [key for key in keys if config.get(key) is not None]
    if not found:
        raise CheckpointError(f"{name}'s config lacks {preferred or ' or '.join(keys)}; add it or use another config")
    if any(config[key] != config[found[0]] for key in found[1:]):
        values = ", ".join(f"{key} = {reprlib.repr(config[key])}" for key in found)
        raise CheckpointError(f"{name}'s config contradicts itself: {values}; remove the wrong one")
    return preferred if preferred in found else found[0]


def _count(config: Config, key: str, name: str, least: int = 1, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise CheckpointError(f"{name}'s config lacks {key}; add it or use the model's own config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"{key} = {reprlib.repr(value)} in {name}'s config; it must be an integer >= {least}")
    return value


def routing_groups(config: Config, family: Family | None, name: str) -> tuple[int, int]:
    """Groups of group-limited routing and how many a token may choose from; (1, 1) when routing is not limited."""
    defaults = family.defaults if family else {}
    method = config.get("topk_method")
    if family is None:
        limited = method != "greedy" and config.get("n_group") is not None
    else:
        limited = family.grouped == "n_group" or (family.grouped == "topk_method" and method == "group_limited_greedy")
    num_groups = _count(config, "n_group", name, default=defaults.get("n_group")) if limited else 1
    if num_groups == 1:
        return 1, 1
    return num_groups, _count(config, "topk_group", name, default=defaults.get("topk_group"))


# ---- which layers are MoE -------------------------------------------------------------------------------------------


def _first_k(config: Config, count: int, name: str, defaults: Mapping[str, int]) -> list[bool]:
    first = _count(config, "first_k_dense_replace", name, least=0, default=defaults.get("first_k_dense_replace"))
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        moe = _layer_list(frequency, "moe_layer_freq", count, name, {0: False, 1: True})
        return [moe[i] and i >= first for i in range(count)]
    every = _count(config, "moe_layer_freq", name, default=defaults.get("moe_layer_freq"))
    return [i >= first and i % every == 0 for i in range(count)]


def _sparse_step(config: Config, count: int, name: str, defaults: Mapping[str, int]) -> list[bool]:
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < count for i in dense):
        raise CheckpointError(
            f"mlp_only_layers = {reprlib.repr(dense)} in {name}'s config; it must list layers from 0 to {count - 1}"
        )
    step = _count(config, "decoder_sparse_step", name, default=defaults.get("decoder_sparse_step"))
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def _start_end(config: Config, count: int, name: str, defaults: Mapping[str, int]) -> list[bool]:
    start = _count(config, "moe_layer_start_index", name, least=0, default=defaults.get("moe_layer_start_index"))
    end = _count(config, "moe_layer_end_index", name, least=-1, default=defaults.get("moe_layer_end_index"))
    every = _count(config, "moe_layer_interval", name, default=defaults.get("moe_layer_interval"))
    last = count - 1 if end == -1 else end
    return [start <= i <= last and (i + 1) % every == 0 for i in range(count)]


_Rule = Callable[[Config, int, str, Mapping[str, int]], list[bool]]
_RULES: Mapping[str, tuple[tuple[str, ...], _Rule]] = {
    "first_k": (("first_k_dense_replace", "moe_layer_freq"), _first_k),
    "sparse_step": (("mlp_only_layers", "decoder_sparse_step"), _sparse_step),
    "start_end": (("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _start_end),
}
_UNKNOWN_DEFAULTS = {"first_k_dense_replace": 0, "moe_layer_freq": 1, "decoder_sparse_step": 1}
_KNOWN_LAYOUT_KEYS = {"mlp_layer_types", *(key for keys, _ in _RULES.values() for key in keys)}
# keys of other architectures that tell which layers are MoE: interleave_moe_layer_step, expert_layer_period, ...
_LAYOUT_LIKE = re.compile(
    r"(moe|expert|mlp|ffn|dense|sparse).*(layer|freq|interval|period|step|replace|index|idx|pattern)"
    r"|(layer|block).*(moe|expert|mlp|ffn|dense|block_type)|hybrid.*pattern"
)


def _moe_layers(config: Config, family: Family | None, count: int, name: str) -> list[bool]:
    """For each model layer whether it is MoE."""
    rules = [family.dense] if family else [rule for rule, (keys, _) in _RULES.items() if _any_set(config, keys)]
    if family is None:
        _refuse_unknown_layout(config, name)
    defaults = family.defaults if family else _UNKNOWN_DEFAULTS
    types = config.get("mlp_layer_types")
    if types is None:
        masks = [_RULES[rule][1](config, count, name, defaults) for rule in rules if rule != "all"]
        return [all(layer) for layer in zip(*masks, strict=True)] if masks else [True] * count
    listed = _layer_list(types, "mlp_layer_types", count, name, {"dense": False, "sparse": True, "moe": True})
    for rule in rules:
        keys, mask = _RULES[rule] if rule != "all" else ((), None)
        if mask is not None and _any_set(config, keys) and mask(config, count, name, defaults) != listed:
            raise CheckpointError(f"{name}'s config contradicts itself: mlp_layer_types and {keys[0]} disagree")
    return listed


def _layer_list(values: Any, key: str, count: int, name: str, meaning: Mapping[Any, bool]) -> list[bool]:
    known = isinstance(values, list) and len(values) == count
    if not known or any(type(value) not in (int, str) or value not in meaning for value in values):
        raise CheckpointError(
            f"{key} = {reprlib.repr(values)} in {name}'s config; "
            f"it must be a list of {count} of {', '.join(map(repr, meaning))}"
        )
    return [meaning[value] for value in values]


def _any_set(config: Config, keys: tuple[str, ...]) -> bool:
    return any(config.get(key) is not None for key in keys)


def _refuse_unknown_layout(config: Config, name: str) -> None:
    """Raise when an unknown architecture may have dense layers that no known key tells of."""
    layer_types = config.get("layer_types")
    attention = isinstance(layer_types, list) and all(str(kind).endswith("attention") for kind in layer_types)
    words = {key: re.sub("layer_?norm", "", str(key).lower()) for key in config if config[key] is not None}
    strange = [key for key, word in words.items() if key not in _KNOWN_LAYOUT_KEYS and _LAYOUT_LIKE.search(word)]
    if layer_types is not None and not attention:
        strange.append("layer_types")
    if strange:
        model_type = str(config.get("model_type", "none"))
        near = difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=0.3)
        hint = f"the nearest known one is {near[0]}" if near else f"known ones: {', '.join(FAMILIES)}"
        raise CheckpointError(
            f"{name} has the unknown model_type {model_type!r}, "
            f"and {strange[0]} may say which of its layers are dense; {hint}"
        )
