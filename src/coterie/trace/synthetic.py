"""Synthetic traces: any shape, with the skew and the company of the real routing that the models were fitted to.

For sizes no recording is at hand for, and for tests. Their provenance says that they are synthetic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import coterie
from coterie.errors import ConfigError, unknown_name
from coterie.progress import Progress, silent
from coterie.spec import MoESpec
from coterie.trace.routing_trace import RoutingTrace
from coterie.trace.storage import describe, writing
from coterie.trace.synthetic_router import RoutingModel, TopicStream, route_layer

MAX_EXPERTS = 65_536
_TOKENS_AT_ONCE = 8_192
_LENGTHS = 5  # random stream of the sequences' lengths; the router has streams 0 to 4

# parameters from `benchmarks/synthetic.py --fit` on the whole published traces (some ship cut short), 150 steps
DEEPSEEK_LIKE = RoutingModel(
    name="deepseek-like",
    fitted_to="DeepSeek-V2-Lite (26 layers, 64 experts, top-6) on law, intent and summary prompts, mean over layers",
    popularity=0.367,
    company=9.52,
    num_topics=28,
    decay=1.76,
    sequence_share=0.081,
    drift_share=0.348,
    drift_correlation=0.807,
    weight_scale=0.118,
    normalized=False,
)
GPTOSS_LIKE = RoutingModel(
    name="gptoss-like",
    fitted_to="gpt-oss-20b (24 layers, 32 experts, top-4), decoding answers to 93 prompts, mean over layers",
    popularity=1.93,
    company=8.27,
    num_topics=23,
    decay=1.84,
    sequence_share=0.179,
    drift_share=0.463,
    drift_correlation=0.968,
    weight_scale=0.0958,
    normalized=True,
)
MODELS: Mapping[str, RoutingModel] = {"deepseek": DEEPSEEK_LIKE, "gpt-oss": GPTOSS_LIKE}


@dataclass(frozen=True)
class Recipe:
    """What a synthetic trace is made from; the same recipe makes the same trace.

    Attributes:
        num_layers: MoE layers, L.
        num_experts: experts of a layer, E.
        top_k: experts a token chooses, K.
        num_tokens: tokens, T.
        seed: of everything that is random.
        like: a name in `MODELS`, or a model of one's own.
        sequence_tokens: mean length of a sequence; lengths are geometric, the last is cut to fit.

    Raises:
        ConfigError: for numbers that make no trace, or an unknown name.
    """

    num_layers: int
    num_experts: int
    top_k: int
    num_tokens: int
    seed: int = 0
    like: str | RoutingModel = "deepseek"
    sequence_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "top_k", "num_tokens", "sequence_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}; a trace needs at least 1")
        if self.num_experts > MAX_EXPERTS:
            raise ConfigError(f"num_experts = {self.num_experts}; a trace stores ids of at most {MAX_EXPERTS} experts")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k = {self.top_k} is more than num_experts = {self.num_experts}; choose fewer")
        if self.seed < 0:
            raise ConfigError(f"seed = {self.seed}; a seed is at least 0")
        if isinstance(self.like, str) and self.like not in MODELS:
            raise unknown_name("synthetic model", self.like, MODELS)

    @property
    def model(self) -> RoutingModel:
        """The router to draw from."""
        return MODELS[self.like] if isinstance(self.like, str) else self.like

    def draw(self, progress: Progress = silent) -> RoutingTrace:
        """The trace, in memory: 3 or 4 bytes a decision."""
        arrays = {name: np.empty(shape, dtype=dtype) for name, (dtype, shape) in self._arrays().items()}
        _fill(self, arrays, progress)
        return self._trace(arrays)

    def save(self, path: str | Path, progress: Progress = silent) -> None:
        """Write the trace to one safetensors file, whole or not at all, without holding it in memory.

        Raises:
            ConfigError: when the file cannot be written.
        """
        shapes = self._arrays()
        empty = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (dtype, shape) in shapes.items()}
        with writing(Path(path), shapes, describe(self._trace(empty))) as arrays:
            _fill(self, arrays, progress)

    def _arrays(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Dtype and shape of every array of the trace."""
        decisions = (self.num_layers, self.num_tokens, self.top_k)
        return {
            "expert_ids": (np.uint8 if self.num_experts <= 256 else np.uint16, decisions),
            "weights": (np.float16, decisions),
            "sequence_ids": (np.int32, (self.num_tokens,)),
            "positions": (np.int32, (self.num_tokens,)),
        }

    def _trace(self, arrays: Mapping[str, NDArray[Any]]) -> RoutingTrace:
        """The trace that holds `arrays`."""
        model = asdict(self.model)
        provenance = {
            "synthetic": True,
            "source": f"synthetic routing, {model['name']}",
            "generator": "coterie.trace.synthetic",
            "coterie": coterie.__version__,
            "seed": self.seed,
            "sequence_tokens": self.sequence_tokens,
            "model": model,
        }
        spec = MoESpec(f"synthetic {model['name']}", self.num_layers, self.num_experts, self.top_k)
        return RoutingTrace(spec=spec, weight_ordered=True, provenance=provenance, **arrays)


def synthesize(
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    seed: int = 0,
    like: str | RoutingModel = "deepseek",
    sequence_tokens: int = 256,
    progress: Progress = silent,
) -> RoutingTrace:
    """A synthetic trace in memory, with weights, sequences and positions.

    Args:
        num_layers: MoE layers, L.
        num_experts: experts of a layer, E.
        top_k: experts a token chooses, K.
        num_tokens: tokens, T.
        seed: of everything that is random.
        like: a name in `MODELS`, or a model of one's own.
        sequence_tokens: mean length of a sequence, tokens.
        progress: told of every piece of tokens.

    Raises:
        ConfigError: for numbers that make no trace, or an unknown name.
    """
    return Recipe(num_layers, num_experts, top_k, num_tokens, seed, like, sequence_tokens).draw(progress)


def _fill(recipe: Recipe, arrays: Mapping[str, NDArray[Any]], progress: Progress) -> None:
    """Draw every decision, a bounded piece of tokens at a time, the layers of a piece in parallel."""
    _fill_sequences(recipe, arrays["sequence_ids"], arrays["positions"])
    topics = TopicStream(recipe.model, recipe.seed)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, recipe.num_tokens, _TOKENS_AT_ONCE):
            piece = slice(start, min(start + _TOKENS_AT_ONCE, recipe.num_tokens))
            topics_TD = topics.next(arrays["sequence_ids"][piece], arrays["positions"][piece])

            def draw(layer: int, piece: slice = piece, topics_TD: NDArray[np.float32] = topics_TD) -> None:
                ids_TK, weights_TK = route_layer(
                    recipe.model, recipe.seed, layer, topics_TD, piece.start, recipe.num_experts, recipe.top_k
                )
                arrays["expert_ids"][layer, piece] = ids_TK
                arrays["weights"][layer, piece] = weights_TK

            list(pool.map(draw, range(recipe.num_layers)))
            progress("drawing synthetic routing", piece.stop, recipe.num_tokens)


def _fill_sequences(recipe: Recipe, sequence_ids: NDArray[Any], positions: NDArray[Any]) -> None:
    rng = np.random.default_rng([recipe.seed, _LENGTHS])
    start = sequence = 0
    while start < recipe.num_tokens:
        stop = min(start + int(rng.geometric(1 / recipe.sequence_tokens)), recipe.num_tokens)
        sequence_ids[start:stop] = sequence
        positions[start:stop] = np.arange(stop - start)
        start, sequence = stop, sequence + 1
