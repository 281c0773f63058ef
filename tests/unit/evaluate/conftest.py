"""A tiny random MoE model with a byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

WORDS = (
    "The quick brown fox jumps over the lazy dog. Question: which experts keep company with one another?\n"
    "Answer: those that are often chosen together, é à ü ß 東京 included. Numbers: 0 1 2 3 4 5 6 7 8 9.\n"
)


def make_tokenizer(bos: bool) -> Any:
    """A byte-level BPE tokenizer of 300 tokens; with `bos` it begins every text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator([WORDS], trainer)
    if bos:
        start = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def make_model(seed: int = 0, vocabulary: int = 300, positions: int = 2048) -> Any:
    """A random Mixtral in float32: 2 layers, 4 experts, top-2."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=positions,
        bos_token_id=0, eos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizers() -> Any:
    """Makes tokenizers: see `make_tokenizer`."""
    return make_tokenizer


@pytest.fixture(scope="session")
def models() -> Any:
    """Makes models: see `make_model`."""
    return make_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(bos=True)


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="session")
def text() -> str:
    return WORDS * 3
