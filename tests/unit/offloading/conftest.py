"""A small model with experts of several blocks, and its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.profile.model_profile import ModelProfile


@dataclass(frozen=True)
class Small:
    """A checkpoint, the model in memory, a profile with importances by chance, and the store packed with it."""

    folder: Path
    model: Any
    profile: ModelProfile
    store: Path


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, make_profile: Any) -> Small:
    """2 layers of 8 experts, top-2, of 256 neurons in 16 blocks; hidden size 64, float32."""
    import torch
    import transformers

    from coterie.models.backend import quiet
    from coterie.models.identity import identity_of
    from coterie.models.layers import spec_of
    from coterie.models.load import load_model

    folder = tmp_path_factory.mktemp("small") / "model"
    config = transformers.MixtralConfig(
        vocab_size=260, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
    model = load_model(folder).requires_grad_(False)
    profile = make_profile(2, 8, 2, 256, spec=spec_of(model), identity=identity_of(model))
    store = folder.parent / "store"
    coterie.pack(folder, store, profile=profile)
    return Small(folder, model, profile, store)


@pytest.fixture
def offload(small: Small) -> Iterator[Any]:
    """`coterie.offload` of the small store; every model is closed at the end."""
    made = []

    def make(budget: Any, widths: Any = None, **options: Any) -> Any:
        made.append(coterie.offload(small.store, budget, widths, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def prompts() -> Any:
    """[2, 16] token ids."""
    import torch

    return torch.randint(3, 260, (2, 16), generator=torch.Generator().manual_seed(7))
