"""What all tests share: optional packages, hypothesis's profile, and small traces with the skew of real routing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings

from coterie.placement.problem import LayerProblem, build_problem
from coterie.profile.model_profile import ModelProfile
from coterie.spec import MoESpec
from coterie.topology import Topology
from coterie.trace.routing_trace import RoutingTrace

_EXTRAS = {"plotly": "report", "transformers": "models", "lm_eval": "eval", "triton": "triton"}
_BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")

settings.register_profile("coterie", deadline=None, derandomize=True)
settings.load_profile("coterie")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose package is absent, or fail it where everything was promised to be there."""
    for marker in item.iter_markers("needs"):
        package = marker.args[0]
        if package == "chromium":
            there, remedy = any(map(shutil.which, _BROWSERS)), "apt-get install chromium-headless-shell"
        else:
            there = importlib.util.find_spec(package) is not None
            remedy = f"pip install 'coterie[{_EXTRAS.get(package, package)}]'"
        if not there:
            reason = f"needs {package}: {remedy}"
            if os.environ.get("COTERIE_REQUIRE_ALL") == "1" and package != os.environ.get("COTERIE_SKIP"):
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)


class MakeTrace(Protocol):
    """See `make_trace`."""

    def __call__(
        self, layers: int = 2, tokens: int = 600, experts: int = 16, top_k: int = 4, *, seed: int = 0,
        sequences: int = 12, kept: float | None = None, groups: int = 1, **fields: Any,
    ) -> RoutingTrace: ...  # fmt: skip


@pytest.fixture(scope="session")
def make_trace() -> MakeTrace:
    """Makes traces in which some experts are popular, some keep company, and sequences differ in topic.

    Its arguments: shape; `sequences` of equal length, 0 for none; `kept`: the share of entries that is kept, None for
    all; `groups` of the router (said, not obeyed); further fields of `RoutingTrace`.
    """

    def make(
        layers: int = 2, tokens: int = 600, experts: int = 16, top_k: int = 4, *, seed: int = 0,
        sequences: int = 12, kept: float | None = None, groups: int = 1, **fields: Any,
    ) -> RoutingTrace:  # fmt: skip
        rng = np.random.default_rng([seed, layers, tokens, experts, top_k])
        sequence_T = np.arange(tokens) * max(sequences, 1) // tokens
        topics = 4
        topic_T = rng.integers(0, topics, max(sequences, 1))[sequence_T]
        topic_T = np.where(rng.random(tokens) < 0.5, rng.integers(0, topics, tokens), topic_T)
        popular_LE = rng.normal(0, 0.7, (layers, experts))
        liked_LSE = rng.normal(0, 1.5, (layers, topics, experts))
        logit_LTE = popular_LE[:, None] + liked_LSE[:, topic_T] + rng.gumbel(size=(layers, tokens, experts))
        ids = np.argsort(-logit_LTE, axis=2)[:, :, :top_k].astype(np.uint8)
        if sequences:
            fields.setdefault("sequence_ids", sequence_T.astype(np.int32))
        if kept is not None:
            fields["kept"] = rng.random(ids.shape) < kept
        spec = MoESpec("toy", layers, experts, top_k, num_groups=groups)
        return RoutingTrace(ids, spec, **fields)

    return make


class MakeProblem(Protocol):
    """See `make_problem`."""

    def __call__(self, topology: str | Topology = "4", keep_groups: bool = False, **trace: Any) -> LayerProblem: ...


@pytest.fixture(scope="session")
def make_problem(make_trace: MakeTrace) -> MakeProblem:
    """Makes the placement problem of the one layer of a `make_trace`, on a topology; windows of 256 tokens or more."""

    def make(topology: str | Topology = "4", keep_groups: bool = False, **trace: Any) -> LayerProblem:
        parsed = Topology.parse(topology) if isinstance(topology, str) else topology
        made = make_trace(**{"layers": 1, **trace})
        with patch("coterie.placement.problem.WINDOW_TOKENS", 256):
            return build_problem(made, 0, parsed, keep_groups=keep_groups)

    return make


class MakeProfile(Protocol):
    """See `make_profile`."""

    def __call__(
        self, layers: int = 2, experts: int = 8, top_k: int = 2, width: int = 64, *, tokens: int = 800, seed: int = 0,
        **fields: Any,
    ) -> ModelProfile: ...  # fmt: skip


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    """Makes profiles with skewed pairs, as a model's would be; all tokens are in the sample. Further fields replace."""

    def make(
        layers: int = 2, experts: int = 8, top_k: int = 2, width: int = 64, *, tokens: int = 800, seed: int = 0,
        **fields: Any,
    ) -> ModelProfile:  # fmt: skip
        rng = np.random.default_rng([seed, layers, experts, top_k, width])
        logit_LTE = rng.normal(0, 1, (layers, 1, experts)) + rng.gumbel(size=(layers, tokens, experts))
        ids_LTK = np.argsort(-logit_LTE, axis=2)[:, :, :top_k]
        weights_LTK = np.exp(np.take_along_axis(logit_LTE, ids_LTK, 2))
        weights_LTK = (weights_LTK / weights_LTK.sum(2, keepdims=True)).astype(np.float32)
        load_LE = np.stack([np.bincount(ids.ravel(), minlength=experts) for ids in ids_LTK])
        pairs_LEE = np.zeros((layers, experts, experts), dtype=np.int64)
        for slot in range(1, top_k):
            for layer in range(layers):
                np.add.at(pairs_LEE[layer], (ids_LTK[layer, :, 0], ids_LTK[layer, :, slot]), 1)
        pairs_LEE += pairs_LEE.transpose(0, 2, 1)
        spread_LEI = rng.lognormal(0, 1, (layers, experts, width)).astype(np.float32)
        dominance_LEE = rng.random((layers, experts, experts)).astype(np.float32)
        values: dict[str, Any] = {
            "spec": MoESpec("toy", layers, experts, top_k), "identity": "0123456789abcdef", "width": width,
            "num_tokens": tokens, "load_LE": load_LE.astype(np.int64), "pairs_LEE": pairs_LEE,
            "importance": {"mean_abs": spread_LEI, "mean_abs_down": spread_LEI[:, :, ::-1].copy()},
            "dominance": {"fisher": np.where(pairs_LEE > 0, dominance_LEE, np.float32(np.nan))},
            "sample_ids_LSK": ids_LTK, "sample_weights_LSK": weights_LTK, "provenance": {"model": "toy"},
        }  # fmt: skip
        return ModelProfile(**{**values, **fields})

    return make


# ---- tiny random checkpoints of every family ------------------------------------------------------------------------

_SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NARROW = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_GROUPS = {"n_group": 4, "topk_group": 2}
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 8, **_NARROW, **_GROUPS,
}  # fmt: skip
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], **_NARROW},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, "head_dim": 8, **_NARROW},
    "deepseek": {"first_k_dense_replace": 1, "n_shared_experts": 2, "n_routed_experts": 8, **_NARROW},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "deepseek_v3": {**_MLA, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "glm4_moe": {
        "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 8, "head_dim": 8,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, **_NARROW, **_GROUPS,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL,
    "gpt_oss": {
        **_LOCAL, "head_dim": 8, "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


class TinyCheckpoint(Protocol):
    """See `tiny_checkpoint`."""

    def __call__(self, family: str, dtype: str = "float32") -> Path: ...


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Makes model folders with random weights, one of each family, saved by Transformers' own class.

    3 layers, 8 experts, hidden size 32, a byte-level tokenizer of 260 tokens (0 padding, 1 begin, 2 end). Routers have
    weights, and biases where the family has them, that spread the choices; gpt_oss's experts have biases too. Each is
    made once; do not write to it.
    """
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, dtype: str = "float32") -> Path:
        key = (family, dtype)
        if key not in made:
            made[key] = _save_tiny(family, dtype, tmp_path_factory.mktemp(f"{family}-{dtype}"))
        return made[key]

    return make


def _save_tiny(family: str, dtype: str, folder: Path) -> Path:
    import torch
    import transformers

    from coterie.models.backend import quiet

    if family == "deepseek":
        importlib.import_module("coterie.models.deepseek").register()
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **TINY_CONFIGS[family]})
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, family)))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in name or name.endswith("router.bias"):
                torch.nn.init.normal_(tensor.data, std=0.3)
            elif name.endswith("_proj_bias"):  # of gpt_oss's experts
                torch.nn.init.normal_(tensor.data, std=0.1)
        model.save_pretrained(folder)
        _tiny_tokenizer().save_pretrained(folder)
    return folder


def _tiny_tokenizer() -> Any:
    """One token a byte, and the three special ones."""
    import tokenizers
    import transformers

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
