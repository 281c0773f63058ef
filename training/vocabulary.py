"""The tokenizer, and the training texts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.batches import concatenate
from training.corpus import DOMAINS, TEXT, join_short, read_documents
from training.models import BOS, EOS, PAD, SEQUENCE

VOCABULARY = 4096
JOIN_CHARS = 4_000  # short documents are joined by blank lines up to this length, as in the held-out files


def tokenizer(folder: Path) -> Any:
    """The tokenizer saved in `folder`; trained and saved there first if it is missing."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        train_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_tokenizer() -> Any:
    """A byte-level BPE of `VOCABULARY` tokens, trained on the training half of every domain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for domain in DOMAINS for text in training_texts(domain)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=4 * SEQUENCE
    )


def training_texts(domain: str) -> list[str]:
    """The training half of a domain, short documents joined."""
    return join_short(read_documents(TEXT / f"{domain}.txt.xz"), JOIN_CHARS)


def training_tokens(tok: Any, cache: Path) -> dict[str, NDArray[np.uint16]]:
    """Token ids of every domain, an end token after each document; kept in `cache` (.npz)."""
    if not cache.exists():
        ids = {domain: tok(training_texts(domain), add_special_tokens=False)["input_ids"] for domain in DOMAINS}
        arrays = {domain: concatenate(documents, tok.eos_token_id) for domain, documents in ids.items()}
        with cache.open("wb") as file:
            np.savez(file, **arrays)
    with np.load(cache) as stored:
        return {domain: stored[domain] for domain in DOMAINS}
