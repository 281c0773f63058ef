"""Run a model over a text and record its routing: the text itself (prefill), or what it generates from pieces of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie.errors import CheckpointError, ConfigError
from coterie.models.backend import quiet
from coterie.models.record import recorder
from coterie.progress import Progress, silent
from coterie.trace.routing_trace import RoutingTrace

Around = Callable[[Sequence[int]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class TextRun:
    """How a model is run over a text.

    Attributes:
        tokens: tokens to record; with `generate` at least so many, since a sequence may end early.
        length: tokens of a sequence: consecutive windows of the text or, with `generate`, half prompt and half answer.
        batch: sequences that run together.
        generate: let the model go on from prompts, by sampling.
        seed: of the sampling.
    """

    tokens: int = 8192
    length: int = 256
    batch: int = 4
    generate: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("length", 2), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}; it must be at least {least}")


def record_text(
    model: Any,
    tokenizer: Any,
    text: str,
    run: TextRun,
    path: str | Path,
    *,
    source: str,
    pruning: Mapping[str, Any] | None = None,
    around: Around | None = None,
    progress: Progress = silent,
) -> RoutingTrace:
    """Record a model's routing on a text.

    Every sequence begins with the tokenizer's begin-of-sequence token, where it has one. With `run.generate` the model
    samples as its generation config says.

    Args:
        model: a Transformers model in eval mode.
        tokenizer: its tokenizer.
        text: the text.
        run: how much of it, and how.
        path: the trace file to write.
        source: what to call the text in the provenance.
        pruning: as for `record`.
        around: changes the model for a batch: it is given the numbers of the batch's sequences and returns a context
            manager.
        progress: told of the tokens recorded.

    Returns:
        The written trace, memory-mapped.

    Raises:
        ConfigError: when the text is too short, or a sequence longer than the model's limit.
        CheckpointError: when the tokenizer is not the model's.
        TraceError: for an impossible decision.
    """
    torch = importlib.import_module("torch")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and run.length > limit:
        raise ConfigError(f"sequences of {run.length} tokens, and the model's limit is {limit}; use a smaller length")
    pieces = _Pieces(model, tokenizer, text, run)
    told = {"source": source, "run": asdict(run)}
    devices = [] if model.device.type == "cpu" else [model.device]
    with (
        recorder(model, path=path, provenance=told, pruning=pruning) as recording,
        torch.random.fork_rng(devices=devices), torch.inference_mode(), quiet(),
    ):  # fmt: skip
        torch.manual_seed(run.seed)
        sequences = 0
        while recording.num_tokens < run.tokens:
            lengths = _lengths(run, run.tokens - recording.num_tokens)
            numbers = range(sequences, sequences + len(lengths))
            with nullcontext() if around is None else around(numbers), recording.attached():
                _run_batch(model, pieces, lengths, run.generate)
            sequences += len(lengths)
            progress("recording", min(recording.num_tokens, run.tokens), run.tokens)
    return recording.trace()


def _lengths(run: TextRun, missing: int) -> list[int]:
    """The tokens of each sequence of the next batch; all of full length where they are generated and may end early."""
    length = min(run.length, run.tokens)
    count = min(run.batch, -(-missing // length))
    return [length if run.generate else min(length, missing - index * length) for index in range(count)]


def _run_batch(model: Any, pieces: _Pieces, lengths: list[int], generate: bool) -> None:
    if not generate:
        ids, mask = pieces.batch(lengths)
        model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
        return
    prompt = max(1, lengths[0] // 2)
    ids, mask = pieces.batch([prompt] * len(lengths))
    # the last token that is sampled is never run, hence one more
    model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, num_beams=1, max_new_tokens=lengths[0] - prompt + 1,
        pad_token_id=pieces.pad_id,
    )  # fmt: skip


def token_ids(model: Any, tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, and what the tokenizer begins every text with (nothing, or its begin token).

    Raises:
        CheckpointError: when the tokenizer is not the model's.
    """
    with quiet():  # a text longer than the model's window is what we are here for
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        bare: list[int] = tokenizer("")["input_ids"]
    begin, size = tokenizer.bos_token_id, model.get_input_embeddings().weight.shape[0]
    prefix = [begin] if begin is not None and begin in bare else []
    largest = max([*ids, *prefix], default=0)
    if largest >= size:
        raise CheckpointError(
            f"the tokenizer gives the id {largest}, the model has {size} embeddings; use the model's own tokenizer"
        )
    return ids, prefix


class _Pieces:
    """Consecutive pieces of a text as batches of token ids."""

    def __init__(self, model: Any, tokenizer: Any, text: str, run: TextRun) -> None:
        self._torch = importlib.import_module("torch")
        self._device, self._run = model.device, run
        self._ids, self._prefix = token_ids(model, tokenizer, text)
        known = (tokenizer.pad_token_id, model.generation_config.pad_token_id, tokenizer.eos_token_id)
        self.pad_id = next((each for each in known if each is not None), 0)
        self._next = 0
        if not run.generate:
            self._require(run.tokens - len(self._prefix) * -(-run.tokens // run.length))

    def batch(self, lengths: list[int]) -> tuple[Any, Any]:
        """The next sequences, padded on the right: ids and mask, both [B, longest] int64."""
        rows = [[*self._prefix, *self._take(length - len(self._prefix))] for length in lengths]
        ids = [row + [self.pad_id] * (max(lengths) - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (max(lengths) - len(row)) for row in rows]
        tensor = self._torch.tensor
        return tensor(ids, device=self._device), tensor(mask, device=self._device)

    def _take(self, count: int) -> list[int]:
        self._require(self._next + count)
        self._next += count
        return self._ids[self._next - count : self._next]

    def _require(self, count: int) -> None:
        if count > len(self._ids):
            raise ConfigError(
                f"the text has {len(self._ids):,} tokens and at least {count:,} are needed for --tokens "
                f"{self._run.tokens:,}; give a longer text or ask for fewer tokens"
            )
