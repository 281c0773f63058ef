"""Record what a live model routes where, in prefill and in generation, without holding it in memory."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import coterie
from coterie.errors import ConfigError, TraceError
from coterie.models.backend import import_transformers
from coterie.models.batch_tokens import BatchTokens, TokenTracker
from coterie.models.decision_buffer import DecisionBuffer
from coterie.models.intercept import intercept
from coterie.models.layers import spec_of
from coterie.placement.numbering import EXPERT_ORDER_KEY
from coterie.spec import MoESpec
from coterie.trace.growing import GrowingTrace
from coterie.trace.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_TOKENS = 8192


@contextmanager
def record(
    model: Any,
    *,
    path: str | Path | None = None,
    provenance: Mapping[str, Any] | None = None,
    pruning: Mapping[str, Any] | None = None,
    end_token_ids: Collection[int] | None = None,
    buffer_tokens: int = BUFFER_TOKENS,
) -> Iterator[Recorder]:
    """Record the routing decisions of every MoE layer while the block runs the model.

    Each forward call, by itself or inside `generate` (greedy or sampling), adds its tokens: the experts and weights
    that the experts modules are given, sequence, position, phase and step (the forward call). Which tokens count is
    told by `TokenTracker`: slots that the attention mask leaves out are padding, rows that generation has finished are
    known by the end tokens they are fed, and both are dropped and counted in the provenance. A call without a filled
    key-value cache starts new sequences, so `generate(use_cache=False)` makes one of every step. Speculative decoding
    records the drafts that the model checked, rejected ones too. Beam search is refused.

    Afterwards the model is as it was. An error inside the block leaves no file. Memory holds `buffer_tokens` tokens a
    layer (or one forward call's, if it has more); the rest is on disk. Not for a model that other threads run at once.

    Args:
        model: a Transformers model in eval mode.
        path: the trace file to write when the block ends, .safetensors; None: only `Recorder.trace` gives it.
        provenance: what to say of the run in the trace: the text's source, the seed.
        pruning: what prunes the model while it is recorded, for the provenance; a weight of zero is then a dropped
            expert (`kept` false). Enter the pruning's block before this one, so that its result is what is seen. A
            trace takes sequence i to be at home on device i mod G: prune with homes to match.
        end_token_ids: ids by which a finished row is known; None: as the model's (generation) config says. What it
            calls padding is known anyway.
        buffer_tokens: tokens, padding included, that wait in memory.

    Yields:
        The recorder.

    Raises:
        CheckpointError: when the model has no MoE layers that are recognised.
        ConfigError: for a model in training mode or with gradient checkpointing, for beam search, and when a file
            cannot be written.
        TraceError: when the block ends and nothing was recorded, or a decision is impossible.
    """
    with (
        recorder(
            model, path=path, provenance=provenance, pruning=pruning, end_token_ids=end_token_ids,
            buffer_tokens=buffer_tokens,
        ) as made,
        made.attached(),
    ):  # fmt: skip
        yield made


@contextmanager
def recorder(
    model: Any,
    *,
    path: str | Path | None = None,
    provenance: Mapping[str, Any] | None = None,
    pruning: Mapping[str, Any] | None = None,
    end_token_ids: Collection[int] | None = None,
    buffer_tokens: int = BUFFER_TOKENS,
) -> Iterator[Recorder]:
    """As `record`, for a caller who says when: it records inside blocks of `Recorder.attached`.

    So what changes the model for a batch can be entered first, and its result is what is recorded.
    """
    if buffer_tokens < 1:
        raise ConfigError(f"buffer_tokens = {buffer_tokens}; it must be at least 1")
    out = None if path is None else check_output(Path(path))
    refuse_training(model)
    _refuse_checkpointing(model)
    ends = _token_ids(model, "eos_token_id") if end_token_ids is None else end_token_ids
    tracker = TokenTracker(ends, _token_ids(model, "pad_token_id"))
    spec = spec_of(model)
    told = {**_versions(model, spec), **(provenance or {}), **({} if pruning is None else {"pruning": dict(pruning)})}
    folder = None if out is None else out.parent
    trace = GrowingTrace(spec, folder, zero_is_dropped=pruning is not None)
    buffer = DecisionBuffer(spec.num_layers, spec.top_k, buffer_tokens)
    made = Recorder(model, tracker, buffer, trace, told)
    try:
        yield made
        made.finish(out)
    finally:
        made.close()


class Recorder:
    """What `record` yields."""

    def __init__(
        self, model: Any, tracker: TokenTracker, buffer: DecisionBuffer, trace: GrowingTrace, told: Mapping[str, Any]
    ) -> None:
        self._model, self._decoder = model, model.get_decoder()
        self._tracker, self._buffer, self._growing, self._told = tracker, buffer, trace, told
        self._names = tuple(inspect.signature(self._decoder.forward).parameters)
        self._running = False  # a forward call
        self._num_calls = 0
        self._unwritten: list[BatchTokens] = []  # of the forward calls in the buffer, as far as looked at
        self._num_tokens = 0
        self._dropped = {"padding": 0, "finished": 0}
        self._result: RoutingTrace | None = None
        self._closed = False

    @property
    def num_tokens(self) -> int:
        """Tokens recorded so far."""
        self._look()
        return self._num_tokens

    @property
    def dropped(self) -> dict[str, int]:
        """Slots left out so far: "padding", and "finished" for rows that generation ran on after their end."""
        self._look()
        return dict(self._dropped)

    def trace(self) -> RoutingTrace:
        """What was recorded so far or, after the block, all of it; memory-mapped.

        Raises:
            TraceError: when nothing was recorded, or the block ended with an error.
        """
        if self._result is not None:
            return self._result
        if self._closed:
            raise TraceError("the recording ended with an error and was dropped; record again")
        with tempfile.TemporaryDirectory(prefix=".coterie-") as folder:
            return self._save(Path(folder) / "trace.safetensors")  # mapped, so that it outlives its name

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside the block the model is recorded; the hooks see what earlier hooks decided."""
        with ExitStack() as stack:
            stack.enter_context(intercept(self._model, self._decide))
            for add, hook in (
                (self._decoder.register_forward_pre_hook, self._before),
                (self._decoder.register_forward_hook, self._after),
            ):
                stack.callback(add(hook, with_kwargs=True).remove)
            yield

    def finish(self, path: Path | None) -> None:
        """The block ended well: make the trace, in the file `path` or in one without a name."""
        self._result = self.trace() if path is None else self._save(path)

    def close(self) -> None:
        """Give memory and scratch file back."""
        self._closed = True
        self._growing.close()

    def _save(self, path: Path) -> RoutingTrace:
        self._spill()
        if self._num_tokens == 0:
            raise TraceError("nothing was recorded: run the model on at least one token inside the block")
        self._growing.save(path, {**self._told, "tokens": self._num_tokens, "dropped": dict(self._dropped)})
        return RoutingTrace.load(path)

    def _look(self) -> None:
        """Find out which tokens the latest forward calls held."""
        for tokens in self._tracker.resolve():
            self._unwritten.append(tokens)
            self._num_tokens += tokens.sequence_ids_R.size
            self._dropped["padding"] += tokens.padding
            self._dropped["finished"] += tokens.finished

    def _spill(self) -> None:
        """Move the buffer's decisions to the growing trace."""
        self._look()
        if not self._unwritten:
            return
        calls = self._unwritten
        sizes = [tokens.sequence_ids_R.size for tokens in calls]
        first = self._num_calls - len(calls)
        columns = {
            "sequence_ids": np.concatenate([tokens.sequence_ids_R for tokens in calls]),
            "positions": np.concatenate([tokens.positions_R for tokens in calls]),
            "phase": np.repeat([tokens.phase for tokens in calls], sizes),
            "step": np.repeat(np.arange(first, self._num_calls), sizes),
        }
        self._growing.append(self._buffer.layers(np.concatenate([tokens.keep_T for tokens in calls])), columns)
        self._buffer.clear()
        self._unwritten = []

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_training(self._model)
        size = self._tracker.begin(self._by_name(args, kwargs))
        if not self._buffer.has_room(size):
            self._spill()
        self._buffer.begin(size)
        self._running = True

    def _decide(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        if not self._running:
            raise ConfigError(
                f"MoE layer {layer} ran outside a forward call of {type(self._decoder).__name__}; recording needs the "
                "batch's mask and cache: run the model itself and not parts of it"
            )
        self._buffer.put(layer, ids_TK, weights_TK)

    def _after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._running = False
        self._buffer.end()
        self._tracker.end(self._by_name(args, kwargs), output)
        self._num_calls += 1

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward call by name."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs


def refuse_training(model: Any) -> None:
    """Refuse a model in training mode.

    Raises:
        ConfigError: when it is.
    """
    if model.training:
        raise ConfigError("the model is in training mode, where routing may be noisy or dropped; call model.eval()")


def _refuse_checkpointing(model: Any) -> None:
    kind = "activation" if hasattr(type(model), "is_activation_checkpointing") else "gradient"  # its name up to 5.23
    if getattr(model, f"is_{kind}_checkpointing", False):
        raise ConfigError(
            f"{kind} checkpointing runs layers twice, so decisions too; call model.{kind}_checkpointing_disable()"
        )


def _token_ids(model: Any, name: str) -> set[int]:
    """Every id that the model's configuration, or that of its generation, gives under a name."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        value = getattr(config, name, None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [int(value)])
    return found


def _versions(model: Any, spec: MoESpec) -> dict[str, Any]:
    transformers = import_transformers()
    torch = importlib.import_module("torch")
    return {
        "format": "recorded",
        "model": spec.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        EXPERT_ORDER_KEY: getattr(model.config, EXPERT_ORDER_KEY, None),
        "versions": {
            "coterie": coterie.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip


def check_output(path: Path) -> Path:
    """The path of a trace to write, refused before anything runs when it cannot be one.

    Raises:
        ConfigError: when it is a folder, or in none.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: {path.parent} is no folder; create it or choose another")
    return path
