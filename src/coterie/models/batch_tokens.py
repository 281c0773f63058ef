"""Which tokens a forward call holds: real ones or padding, of which sequence, at which position, in which phase."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.trace.routing_trace import DECODE, PREFILL


@dataclass(frozen=True)
class BatchTokens:
    """The tokens of one forward call: B rows of S slots, T = B x S flattened, of which R hold a token to record.

    Attributes:
        keep_T: [T] bool, which slots hold a token to record.
        sequence_ids_R: [R] int32, counted from 0 over all calls.
        positions_R: [R] int32, how many real tokens of the sequence come before.
        phase: `PREFILL` or `DECODE`.
        padding: slots that the attention mask leaves out.
        finished: other slots, of rows that generation has finished and runs on for the others' sake.
    """

    keep_T: NDArray[np.bool_]
    sequence_ids_R: NDArray[np.int32]
    positions_R: NDArray[np.int32]
    phase: int
    padding: int
    finished: int


@dataclass
class _Rows:
    """What is known of the rows of a key-value cache.

    Attributes:
        sequence_ids_B: [B] the sequence of each row.
        ended_B: [B] bool, the row was fed an end token while decoding.
        keys: the cached keys of the first layer, as the last call left them; None: unknown.
    """

    sequence_ids_B: NDArray[np.int32]
    ended_B: NDArray[np.bool_]
    keys: weakref.ref[Any] | None = None


class TokenTracker:
    """Follows sequences through forward calls by the key-value cache that a call is given and leaves behind.

    A call without a cache, or with an empty one, starts a new sequence in every row; a call that goes on with a cache
    goes on with its sequences. One token a row on a filled cache is decoding, everything else prefill (the chunks of a
    chunked prefill too).

    `generate` goes on feeding a row that is done until the last row is done. Such a row is known by its input in
    decoding: from an end token on it is done (no engine would run it on); and padding tokens are skipped, since a row
    that ended by another rule, such as a stop string, is fed nothing else. A generation that is told to run past end
    tokens takes `end_token_ids=()`.

    Args:
        end_token_ids: ids that end a sequence.
        pad_token_ids: ids that fill a row up.
    """

    def __init__(self, end_token_ids: Collection[int], pad_token_ids: Collection[int] = ()) -> None:
        self._end = np.array(sorted(end_token_ids), dtype=np.int64)
        self._pad = np.array(sorted(pad_token_ids), dtype=np.int64)
        self._rows: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()
        self._num_sequences = 0
        self._open: tuple[_Rows, int] | None = None  # the rows of the call that runs, and the sequences it starts

    def begin(self, call: Mapping[str, Any]) -> BatchTokens:
        """The tokens of a call that is about to run; `end` makes it count.

        Args:
            call: the arguments of the model's forward, by name.

        Raises:
            ConfigError: for a mask that is not [B, cached + S], or a cache whose rows were changed between calls.
        """
        ids, cache = call.get("input_ids"), _cache(call)
        num_rows, width = (ids if ids is not None else call["inputs_embeds"]).shape[:2]
        past = 0 if cache is None else int(cache.get_seq_length())
        real_BS, before_B = _real_tokens(call.get("attention_mask"), num_rows, width, past)
        starts_BS = _sequence_starts(call, num_rows, width, past)
        rows, new = self._rows_of(cache, past, starts_BS)
        decoding = past > 0 and width == 1
        ended_B = filled_B = np.zeros(num_rows, dtype=np.bool_)
        if decoding and ids is not None:
            fed_B = _numpy(ids)[:, 0]
            ended_B, filled_B = rows.ended_B | np.isin(fed_B, self._end), np.isin(fed_B, self._pad)
        self._open = (_Rows(rows.sequence_ids_B, ended_B), new)

        finished_B = ended_B | filled_B
        keep_BS = real_BS & ~finished_B[:, None]
        positions_BS = np.cumsum(real_BS, axis=1, dtype=np.int32) - 1 + before_B[:, None]
        sequences_BS = np.broadcast_to(rows.sequence_ids_B[:, None], keep_BS.shape)
        if past == 0:
            flat_T = np.cumsum(starts_BS.ravel(), dtype=np.int32) - 1 + self._num_sequences
            sequences_BS = flat_T.reshape(keep_BS.shape)
            if new > num_rows:
                positions_BS = np.broadcast_to(_numpy(call["position_ids"]), keep_BS.shape).astype(np.int32)
        return BatchTokens(
            keep_BS.ravel(), sequences_BS[keep_BS].astype(np.int32), positions_BS[keep_BS].astype(np.int32),
            DECODE if decoding else PREFILL, int((~real_BS).sum()), int((real_BS & finished_B[:, None]).sum()),
        )  # fmt: skip

    def end(self, call: Mapping[str, Any], output: Any) -> None:
        """The call that `begin` was told of has run; its cache goes on with its sequences."""
        assert self._open is not None
        rows, new = self._open
        self._open = None
        self._num_sequences += new
        cache = _cache(call)
        if cache is None:
            cache = getattr(output, "cache", None)
        if cache is None:
            cache = getattr(output, "past_key_values", None)
        if cache is not None:
            keys = _first_keys(cache)
            rows.keys = None if keys is None else weakref.ref(keys)
            self._rows[cache] = rows

    def _rows_of(self, cache: Any, past: int, starts_BS: NDArray[np.bool_]) -> tuple[_Rows, int]:
        """The rows of this call, and how many sequences it starts."""
        num_rows = len(starts_BS)
        known = self._rows.get(cache) if past else None
        if known is None:
            ends_B = np.cumsum(starts_BS.sum(axis=1), dtype=np.int32)
            sequence_ids_B = ends_B - 1 + self._num_sequences  # a row's last sequence is the one that goes on
            return _Rows(sequence_ids_B.astype(np.int32), np.zeros(num_rows, dtype=np.bool_)), int(ends_B[-1])
        same = known.keys is None or known.keys() is _first_keys(cache)
        if len(known.sequence_ids_B) != num_rows or (num_rows > 1 and not same):
            raise ConfigError(
                "the rows of the key-value cache were changed between two forward calls, as beam search does, so that "
                "tokens cannot be told apart by sequence; record greedy decoding or sampling (num_beams=1)"
            )
        return known, 0


def _cache(call: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, by its newer or its older name; an empty one is falsy."""
    cache = call.get("cache")
    return call.get("past_key_values") if cache is None else cache


def _first_keys(cache: Any) -> Any:
    """The keys of the cache's first layer: what replaces them between calls moved, dropped or copied rows."""
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "keys", None) if layers else None


def _numpy(tensor: Any) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()  # type: ignore[no-any-return]


def _real_tokens(mask: Any, num_rows: int, width: int, past: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which slots are no padding, [B, S], and how many real tokens each row's cache holds, [B]."""
    if mask is None:
        return np.ones((num_rows, width), dtype=np.bool_), np.full(num_rows, past, dtype=np.int64)
    shape = tuple(getattr(mask, "shape", ()))
    if shape != (num_rows, past + width):
        raise ConfigError(
            f"attention_mask is a {type(mask).__name__} of shape {list(shape)}; recording tells padding by a mask of "
            f"shape {[num_rows, past + width]} (rows, cached and new tokens): give that, and no static cache"
        )
    real = _numpy(mask) != 0
    return real[:, past:], real[:, :past].sum(axis=1)


def _sequence_starts(call: Mapping[str, Any], num_rows: int, width: int, past: int) -> NDArray[np.bool_]:
    """Where a sequence starts, [B, S] bool: in every row's first slot, and within a row of packed sequences.

    Transformers reads packed sequences from position ids that break off, where there is neither mask nor cache.
    """
    starts_BS = np.zeros((num_rows, width), dtype=np.bool_)
    starts_BS[:, 0] = True
    positions = call.get("position_ids")
    if past == 0 and positions is not None and call.get("attention_mask") is None:
        starts_BS[:, 1:] |= np.diff(np.broadcast_to(_numpy(positions), starts_BS.shape), axis=1) != 1
    return starts_BS
