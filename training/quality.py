"""What a trained model is worth on the held-out texts, and how skewed its routing is there."""

from __future__ import annotations

import lzma
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from coterie.profile.combinations import combination_counts, top_share
from coterie.profile.load import imbalance, trace_load
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace
from training.corpus import DOMAINS
from training.models import SEQUENCE
from training.routing import collect_routing

ROWS = 8


@dataclass(frozen=True)
class Quality:
    """Cross-entropy of one text, summed in nats over `tokens`, and the text's length in bytes."""

    nats: float
    tokens: int
    size: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer."""
        return self.nats / math.log(2) / self.size


def held_out_texts() -> dict[str, str]:
    """The texts that ship in the package: the held-out part of every domain, then WikiText-2's test split."""
    folder = files("coterie.data") / "text"
    texts = {domain: (folder / f"{domain}.txt").read_text() for domain in DOMAINS}
    test = lzma.decompress((folder / "wikitext2-test.txt.xz").read_bytes())
    return texts | {"wikitext2-test": test.decode()}


@torch.inference_mode()
def measure(model: Any, ids: list[int], size: int) -> Quality:
    """Cross-entropy in windows of `SEQUENCE` tokens that do not overlap; the first token of the text is not predicted.

    Args:
        model: a causal language model, in evaluation mode.
        ids: the tokens of the text.
        size: its bytes.
    """
    nats, step = 0.0, ROWS * SEQUENCE
    for first in range(0, len(ids) - 1, step):
        inputs = torch.tensor(ids[first : min(first + step, len(ids) - 1)])
        targets = torch.tensor(ids[first + 1 : first + 1 + len(inputs)])
        whole = len(inputs) // SEQUENCE * SEQUENCE
        parts = [(inputs[:whole].view(-1, SEQUENCE), targets[:whole]), (inputs[whole:][None], targets[whole:])]
        for rows, wanted in parts:
            if wanted.numel():
                logits = model(input_ids=rows, use_cache=False).logits.flatten(0, 1)
                nats += float(functional.cross_entropy(logits.float(), wanted, reduction="none").double().sum())
    return Quality(nats, len(ids) - 1, size)


@torch.inference_mode()
def record(model: Any, name: str, ids: list[int]) -> RoutingTrace:
    """The routing of a model on a text, in windows of `SEQUENCE` tokens; the incomplete last window is left out."""
    chosen: list[list[Any]] = []
    weights: list[list[Any]] = []
    windows = torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE)
    with collect_routing(model) as routing:
        for rows in windows.split(ROWS):
            model(input_ids=rows, use_cache=False)
            chosen.append([ids_TK.numpy() for _, _, ids_TK in routing])
            weights.append([weights_TK.float().numpy() for _, weights_TK, _ in routing])
            num_experts = routing[0][0].shape[-1]
            routing.clear()
    ids_LTK = np.stack([np.concatenate(layer) for layer in zip(*chosen, strict=True)]).astype(np.uint8)
    weights_LTK = np.stack([np.concatenate(layer) for layer in zip(*weights, strict=True)])
    spec = MoESpec(name, num_layers=len(ids_LTK), num_experts=num_experts, top_k=ids_LTK.shape[-1])
    return RoutingTrace(expert_ids=ids_LTK, spec=spec, weights=weights_LTK)


def skew(trace: RoutingTrace) -> dict[str, list[float]]:
    """Layer by layer: uses held by the top 25% of anchor pairs, load max/mean, lowest load/mean."""
    load_LE = trace_load(trace)
    return {
        "top_quarter": [top_share(combination_counts(trace, layer)) for layer in range(trace.num_layers)],
        "max_mean": [float(imbalance(load_E)) for load_E in load_LE],
        "min_mean": [float(load_E.min() / load_E.mean()) for load_E in load_LE],
    }


def evaluate(model: Any, tok: Any, name: str) -> dict[str, Any]:
    """Everything that a model card reports, as JSON can hold it."""
    model.eval()
    result: dict[str, Any] = {"name": name, "domains": {}}
    ids_by_domain: dict[str, list[int]] = {}
    total = Quality(0.0, 0, 0)
    for domain, text in held_out_texts().items():
        ids_by_domain[domain] = tok(text, add_special_tokens=False)["input_ids"]
        found = measure(model, ids_by_domain[domain], len(text.encode()))
        result["domains"][domain] = {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
        if domain in DOMAINS:
            total = Quality(total.nats + found.nats, total.tokens + found.tokens, total.size + found.size)
    result["all"] = {"perplexity": total.perplexity, "bits_per_byte": total.bits_per_byte, "tokens": total.tokens}
    if any(hasattr(layer.mlp, "experts") for layer in model.model.layers):
        result["routing"] = skew(record(model, name, [token for domain in DOMAINS for token in ids_by_domain[domain]]))
    return result
