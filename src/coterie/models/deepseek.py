"""DeepSeek-MoE-16B (model_type "deepseek"), which Transformers 5 cannot run: Llama's attention, DeepSeek-V2's experts.

Source: the modelling code published with deepseek-ai/deepseek-moe-16b-base. Here the router computes in float32, as
Transformers does for the later DeepSeek models; the published code computes in the model's own dtype.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

# untyped on purpose: Transformers' partial annotations contradict the very subclassing that it is made for
_transformers: Any = importlib.import_module("transformers")
_conversion: Any = importlib.import_module("transformers.conversion_mapping")
_llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
_deepseek_v2: Any = importlib.import_module("transformers.models.deepseek_v2.modeling_deepseek_v2")
_strict: Any = importlib.import_module("huggingface_hub.dataclasses").strict

MODEL_TYPE = "deepseek"


@_strict
class DeepseekConfig(_transformers.LlamaConfig):  # type: ignore[misc]
    """The keys of the published config.json that Llama's lacks, with the published defaults."""

    model_type = MODEL_TYPE
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012 - what Transformers reads it as

    vocab_size: int = 102400
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1407
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    # what DeepSeek-V2's router reads besides: choice among all experts, weights as they are
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"
    routed_scaling_factor: float = 1.0

    def validate_architecture(self) -> None:
        """Refuse what the port does not compute."""
        super().validate_architecture()
        if self.scoring_func != "softmax" or self.topk_method != "greedy":
            raise ValueError(
                f"scoring_func = {self.scoring_func!r}, topk_method = {self.topk_method!r}; only softmax and greedy run"
            )


class DeepseekRouter(_deepseek_v2.DeepseekV2TopkRouter):  # type: ignore[misc]
    """Softmax over all experts, the largest k, renormalised if `norm_topk_prob`."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.renormalises = config.norm_topk_prob and config.num_experts_per_tok > 1

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], weights [T, K] and ids [T, K]."""
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) if self.renormalises else weights, ids


class DeepseekMoe(_deepseek_v2.DeepseekV2Moe):  # type: ignore[misc]
    """Routed experts plus shared ones."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config)
        self.gate = DeepseekRouter(config)


class DeepseekDecoderLayer(_llama.LlamaDecoderLayer):  # type: ignore[misc]
    """Llama's layer, with experts where the config says so."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if layer_idx >= config.first_k_dense_replace and layer_idx % config.moe_layer_freq == 0:
            self.mlp = DeepseekMoe(config)


class DeepseekPreTrainedModel(_deepseek_v2.DeepseekV2PreTrainedModel):  # type: ignore[misc]
    """Initial weights and precision of the router as in DeepSeek-V2."""

    config_class = DeepseekConfig
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": DeepseekDecoderLayer, "attentions": _llama.LlamaAttention}  # noqa: RUF012

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # Transformers looks for a decorator in the source, which is in DeepSeek-V2's


class DeepseekModel(DeepseekPreTrainedModel, _llama.LlamaModel):  # type: ignore[misc]
    """The layers; the forward is Llama's."""

    def __init__(self, config: DeepseekConfig) -> None:
        super(_llama.LlamaModel, self).__init__(config)  # Llama's own would build its dense layers
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = _llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = _llama.LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, _llama.LlamaForCausalLM):  # type: ignore[misc]
    """The language model; the forward is Llama's."""

    def __init__(self, config: DeepseekConfig) -> None:
        super(_llama.LlamaForCausalLM, self).__init__(config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Make Transformers' Auto classes and its loader know the family; once is enough, more does no harm.

    Nothing is replaced: a version of Transformers that knows the family itself keeps its own.
    """
    if MODEL_TYPE in _transformers.CONFIG_MAPPING:
        return
    _transformers.AutoConfig.register(MODEL_TYPE, DeepseekConfig)
    _transformers.AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
    per_expert = _conversion.get_checkpoint_conversion_mapping("qwen2_moe")  # the same tensor names
    _conversion.register_checkpoint_conversion_mapping(MODEL_TYPE, per_expert)
