"""Profiles of tiny random models, and the text they run on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "the", "of", "in", "on", "for", "and")


@pytest.fixture(scope="session")
def text() -> Any:
    """Makes a text of so many tokens (bytes), another for each seed."""
    import numpy as np

    def make(tokens: int, seed: int = 0) -> str:
        words = np.random.default_rng(seed).choice(WORDS, tokens)
        return " ".join(words)[:tokens]

    return make


@pytest.fixture(scope="session")
def profiled() -> Any:
    """`coterie.profile_model` without the warning that so few tokens deserve."""
    import coterie

    def run(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*few for tiers")
            return coterie.profile_model(*arguments, **options)

    return run


@pytest.fixture(scope="session")
def load(tiny_checkpoint: Any) -> Any:
    """Makes the tiny random model of a family, and its tokenizer."""
    from coterie.models.load import load_model, load_tokenizer

    return lambda family: (load_model(tiny_checkpoint(family)), load_tokenizer(tiny_checkpoint(family)))
