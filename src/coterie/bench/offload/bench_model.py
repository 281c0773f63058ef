"""A model to time: a real Transformers class with random weights, made on the spot as an expert store.

What a runtime costs depends on shapes and on what is chosen, not on what the weights are; the choices are replayed from
a trained model of the same layers, experts and top-k.
"""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.checkpoint.eight_bits import in_eight_bits
from coterie.checkpoint.expert_store import ExpertStore, StoreHeader, open_store
from coterie.checkpoint.expert_tensors import neuron_axes
from coterie.checkpoint.pack_store import is_finished, pack_store
from coterie.checkpoint.safetensors_io import read_headers
from coterie.checkpoint.store_layout import EIGHT_BITS, PARTS, StoreLayout
from coterie.errors import ConfigError
from coterie.families import read_config
from coterie.models.backend import import_transformers, quiet
from coterie.models.checkpoint_identity import identity_of_checkpoint
from coterie.models.layers import spec_of
from coterie.progress import Progress, silent
from coterie.spec import MoESpec

_COARSE = 16  # experts of a layer up to which a model is Mixtral's kind
_MOST_BYTES = 5 * 10**9  # of all experts
_VOCABULARY = 4096
_PLACEHOLDER = 8  # neurons of the experts that the skeleton is built with, and that are left out


@dataclass(frozen=True)
class BenchShape:
    """The shape of a model to time.

    Attributes:
        layers: MoE layers, all layers of the model.
        experts: experts in a layer.
        top_k: chosen of them.
        hidden: hidden size, H.
        width: neurons of an expert, I.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def coarse(self) -> bool:
        """Whether it is Mixtral's kind: few and large experts."""
        return self.experts <= _COARSE

    @property
    def layout(self) -> StoreLayout:
        """Of its store, in bfloat16."""
        return StoreLayout(self.layers, self.experts, self.width, self.hidden, "BF16")

    def layout_in(self, bits: int | None) -> StoreLayout:
        """Of its store in so many bits; None: as they are."""
        return self.layout if bits is None else replace(self.layout, dtype=EIGHT_BITS)

    def share_in(self, share: float, bits: int | None) -> float:
        """The share of its experts in so many bits that fit where a share of them as they are does, scales counted."""
        own = self.layout_in(bits)
        return min(1.0, (share * self.layout.total_bytes - own.num_records * own.scale_bytes) / own.total_bytes)


def bench_shape(spec: MoESpec) -> BenchShape:
    """The shape to time a model's routing with.

    Few experts: Mixtral-8x7B's, halved both ways (an expert has 88 MB in bfloat16). Many: Qwen3-30B-A3B's (9.4 MB).
    Narrower where all experts would take more than 5 GB.
    """
    hidden, widest = 2048, 7168 if spec.num_experts <= _COARSE else 768
    fits = _MOST_BYTES // (spec.num_layers * spec.num_experts * PARTS * hidden * 2)
    width = max(64, min(widest, fits // 64 * 64))
    return BenchShape(spec.num_layers, spec.num_experts, spec.top_k, hidden, width)


def make_bench_store(
    out: Path, shape: BenchShape, seed: int = 0, progress: Progress = silent, bits: int | None = None
) -> ExpertStore:  # fmt: skip
    """Write a store of random experts and its skeleton; one that is there already and of this shape is used again.

    Experts are written one at a time as `coterie pack` writes them, checksums included; no checkpoint is in between.

    Args:
        out: its folder.
        shape: of the model.
        seed: of the weights.
        progress: told of every expert, in bytes.
        bits: 8: rounded to eight bits; None: bfloat16.

    Raises:
        ConfigError: when the folder holds something else, or the disk is too small.
    """
    if is_finished(out):
        return _opened(out, shape, bits)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        spec, config = _write_skeleton(source, shape, seed)
        identity, _ = identity_of_checkpoint(source)
        tensors = read_headers(source)
        names = neuron_axes(tensors, config["model_type"], spec.layer_ids, (shape.layers, shape.experts, _PLACEHOLDER))
        width_key = "intermediate_size" if shape.coarse else "moe_intermediate_size"
        header = StoreHeader(replace(spec, model=_name(shape)), identity, None, None, shape.layout_in(bits))
        pack_store(
            out, source, tensors, RandomRecords(shape.layout, seed, frozenset(names)), header, None,
            {**config, width_key: shape.width}, {"coterie": coterie.__version__, "random_weights": True}, progress,
            None if bits is None else partial(in_eight_bits, dtype=shape.layout.dtype),
        )  # fmt: skip
    return open_store(out)


class RandomRecords:
    """Experts of random weights: one is drawn, the others are it from another point on.

    Args:
        layout: of the store.
        seed: of the weights.
        names: tensors of the skeleton's source that are the experts'.
    """

    def __init__(self, layout: StoreLayout, seed: int, names: frozenset[str] = frozenset()) -> None:
        if layout.dtype != "BF16":
            raise ConfigError(f"random experts of {layout.dtype}; they are made as BF16 alone")
        self.names, self._layout = names, layout
        self._rng = np.random.default_rng(seed)
        drawn = self._rng.standard_normal(layout.width * PARTS * layout.hidden_size, np.float32) * np.float32(0.02)
        self._first = (drawn.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is the upper half of float32

    def record(self, layer: int, expert: int, order_I: NDArray[Any] | None = None) -> NDArray[Any]:
        """[I, 3, H] uint16, bfloat16's bits."""
        shape = (self._layout.width, PARTS, self._layout.hidden_size)
        return np.roll(self._first, int(self._rng.integers(self._first.size))).reshape(shape)

    def ordered_biases(self, order_LEI: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """None: random experts have no biases."""
        return {}


def _write_skeleton(folder: Path, shape: BenchShape, seed: int) -> tuple[MoESpec, dict[str, Any]]:
    """A checkpoint with placeholders for experts; its routing's shape and its config."""
    transformers, torch = import_transformers(), importlib.import_module("torch")
    sizes = {
        "vocab_size": _VOCABULARY, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": max(1, shape.hidden // 128), "num_key_value_heads": max(1, shape.hidden // 512),
        "head_dim": 128, "max_position_embeddings": 8192, "num_experts_per_tok": shape.top_k,
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if shape.coarse:
        config = transformers.MixtralConfig(
            num_local_experts=shape.experts, intermediate_size=_PLACEHOLDER, sliding_window=None, **sizes
        )
    else:
        config = transformers.Qwen3MoeConfig(
            num_experts=shape.experts, moe_intermediate_size=_PLACEHOLDER, intermediate_size=_PLACEHOLDER,
            norm_topk_prob=True, **sizes,
        )  # fmt: skip
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return spec_of(model), read_config(folder / "config.json")


def _name(shape: BenchShape) -> str:
    kind = "mixtral" if shape.coarse else "qwen3-moe"
    return f"random-{kind}-{shape.layers}x{shape.experts}-top{shape.top_k}-H{shape.hidden}-I{shape.width}"


def _opened(out: Path, shape: BenchShape, bits: int | None) -> ExpertStore:
    store = open_store(out)
    if store.layout != shape.layout_in(bits) or store.header.spec.model != _name(shape):
        raise ConfigError(
            f"{out} holds a store of {store.header.spec.model}, the routing needs {_name(shape)}; name another folder"
        )
    return store
