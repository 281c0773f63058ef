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


class _Rows:
    """The rows of a key-value cache, or of a call without one.

    Attributes:
        past: tokens in the cache, padding included, after the latest call.
        keys: the cached keys of the first layer, as that call left them; None: unknown.
        sequence_ids_B: [B] int32, the sequence of each row; empty until its first call is resolved.
        lengths_B: [B] int64, real tokens so far.
        ended_B: [B] bool, the row was fed an end token in decoding.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.past = 0
        self.keys: weakref.ref[Any] | None = None
        self.sequence_ids_B: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.lengths_B: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.ended_B: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)


@dataclass(frozen=True)
class _Call:
    """What a forward call was given, copied: small, and on the device it came on.

    Attributes:
        rows: its rows, shared by all calls with the same cache.
        width: new tokens a row, S.
        past: tokens in the cache before it.
        mask_BS: the attention mask's columns of the new tokens; None: no mask.
        fed_BS: the new token ids, in decoding; None: not needed.
        positions: position ids that may mark packed sequences; None: there are none.
        lengths_B: [B] real tokens in the cache before it, where `rows` does not know.
    """

    rows: _Rows
    width: int
    past: int
    mask_BS: Any
    fed_BS: Any
    positions: Any
    lengths_B: NDArray[np.int64] | None

    @property
    def decoding(self) -> bool:
        """One new token a row on a filled cache."""
        return self.past > 0 and self.width == 1


class TokenTracker:
    """Follows sequences through forward calls by the key-value cache that a call is given and leaves behind.

    A call without a cache, or with an empty one, starts a new sequence in every row; a call that goes on with a cache
    goes on with its sequences. One token a row on a filled cache is decoding, everything else prefill (the chunks of a
    chunked prefill too).

    `generate` goes on feeding a row that is done until the last row is done. Such a row is known by its input in
    decoding: from an end token on it is done (no engine would run it on); and padding tokens are skipped, since a row
    that ended by another rule, such as a stop string, is fed nothing else. A generation that is told to run past end
    tokens takes `end_token_ids=()`.

    While the model runs, calls are only noted (`begin`, `end`): reading mask and tokens would wait for the device, and
    would cost more between a model's layers than later at a stretch (`resolve`).

    Args:
        end_token_ids: ids that end a sequence.
        pad_token_ids: ids that fill a row up.
    """

    def __init__(self, end_token_ids: Collection[int], pad_token_ids: Collection[int] = ()) -> None:
        self._end = np.array(sorted(end_token_ids), dtype=np.int64)
        self._pad = np.array(sorted(pad_token_ids), dtype=np.int64)
        self._rows: weakref.WeakKeyDictionary[Any, _Rows] = weakref.WeakKeyDictionary()
        self._num_sequences = 0
        self._open: _Call | None = None  # the call that runs
        self._calls: list[_Call] = []

    def begin(self, call: Mapping[str, Any]) -> int:
        """A call is about to run; `end` makes it count.

        Args:
            call: the arguments of the model's forward, by name.

        Returns:
            Its slots, T.

        Raises:
            ConfigError: for a mask that is not [B, cached + S], or a cache whose rows were changed between calls.
        """
        ids, mask, cache = call.get("input_ids"), call.get("attention_mask"), _cache(call)
        num_rows, width = (ids if ids is not None else call["inputs_embeds"]).shape[:2]
        past = 0 if cache is None else int(cache.get_seq_length())
        if mask is not None:
            _check_mask(mask, (num_rows, past + width))
        known = self._rows.get(cache) if past else None
        if known is not None:
            _check_rows(known, num_rows, cache)
        lengths_B = None
        if past and (known is None or known.past != past):  # filled, or cut short, where nobody watched
            lengths_B = np.full(num_rows, past) if mask is None else (_numpy(mask[:, :past]) != 0).sum(axis=1)
        positions = call.get("position_ids") if past == 0 and mask is None else None
        self._open = _Call(
            known or _Rows(num_rows), width, past,
            mask_BS=None if mask is None else mask[:, past:].clone(),
            fed_BS=ids.clone() if past and width == 1 and ids is not None else None,
            positions=None if positions is None else positions.clone(),
            lengths_B=lengths_B,
        )  # fmt: skip
        return int(num_rows * width)

    def end(self, call: Mapping[str, Any], output: Any) -> None:
        """The call that `begin` was told of has run; its cache goes on with its sequences."""
        done, self._open = self._open, None
        assert done is not None
        self._calls.append(done)
        cache = _cache(call)
        if cache is None:
            cache = getattr(output, "cache", None)
        if cache is None:
            cache = getattr(output, "past_key_values", None)
        if cache is not None:
            rows, keys = done.rows, _first_keys(cache)
            rows.past = done.past + done.width
            rows.keys = None if keys is None else weakref.ref(keys)
            self._rows[cache] = rows

    def resolve(self) -> list[BatchTokens]:
        """The tokens of every call since the last time, in order."""
        calls, self._calls = self._calls, []
        return [self._resolve(call) for call in calls]

    def _resolve(self, call: _Call) -> BatchTokens:
        rows, shape = call.rows, (call.rows.num_rows, call.width)
        real_BS = np.ones(shape, dtype=np.bool_) if call.mask_BS is None else _numpy(call.mask_BS) != 0
        finished_B = self._finished(call)
        before_B = rows.lengths_B if call.lengths_B is None else call.lengths_B
        positions_BS = np.cumsum(real_BS, axis=1, dtype=np.int64) - 1 + before_B[:, None]
        sequences_BS = self._sequences(call, shape)
        if call.positions is not None and sequences_BS[-1, -1] - sequences_BS[0, 0] >= shape[0]:  # packed
            positions_BS = np.broadcast_to(_numpy(call.positions), shape)
        rows.sequence_ids_B = sequences_BS[:, -1]
        rows.lengths_B = before_B + real_BS.sum(axis=1)
        keep_BS = real_BS & ~finished_B[:, None]
        return BatchTokens(
            keep_BS.ravel(), sequences_BS[keep_BS], positions_BS[keep_BS].astype(np.int32),
            DECODE if call.decoding else PREFILL, int((~real_BS).sum()), int((real_BS & finished_B[:, None]).sum()),
        )  # fmt: skip

    def _finished(self, call: _Call) -> NDArray[np.bool_]:
        """Which rows generation has finished, [B]; more than one new token takes a row up again."""
        if not call.decoding:
            call.rows.ended_B = np.zeros(call.rows.num_rows, dtype=np.bool_)
        if call.fed_BS is None:
            return call.rows.ended_B
        fed_B = _numpy(call.fed_BS)[:, 0]
        call.rows.ended_B = call.rows.ended_B | np.isin(fed_B, self._end)
        return call.rows.ended_B | np.isin(fed_B, self._pad)

    def _sequences(self, call: _Call, shape: tuple[int, int]) -> NDArray[np.int32]:
        """The sequence of every slot, [B, S].

        Where there is neither mask nor cache, position ids that break off start another sequence within a row: that is
        how Transformers is given packed sequences.
        """
        if call.rows.sequence_ids_B.size and call.past:
            return np.broadcast_to(call.rows.sequence_ids_B[:, None], shape)
        starts_BS = np.zeros(shape, dtype=np.bool_)
        starts_BS[:, 0] = True
        if call.positions is not None:
            starts_BS[:, 1:] = np.diff(np.broadcast_to(_numpy(call.positions), shape), axis=1) != 1
        sequences_BS = self._num_sequences - 1 + np.cumsum(starts_BS.ravel(), dtype=np.int32).reshape(shape)
        self._num_sequences += int(starts_BS.sum())
        return sequences_BS.astype(np.int32)


def _cache(call: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, by its newer or its older name; an empty one is falsy."""
    cache = call.get("cache")
    return call.get("past_key_values") if cache is None else cache


def _first_keys(cache: Any) -> Any:
    """The keys of the cache's first layer: what replaces them between calls moved, dropped or copied rows."""
    layers = getattr(cache, "layers", None)
    return getattr(layers[0], "keys", None) if layers else None


def _numpy(tensor: Any) -> NDArray[Any]:
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def _check_mask(mask: Any, expected: tuple[int, int]) -> None:
    shape = tuple(getattr(mask, "shape", ()))
    if shape != expected:
        raise ConfigError(
            f"attention_mask is a {type(mask).__name__} of shape {list(shape)}; recording tells padding by a mask of "
            f"shape {list(expected)} (rows, cached and new tokens): give that, and no static cache"
        )


def _check_rows(rows: _Rows, num_rows: int, cache: Any) -> None:
    same = rows.keys is None or rows.keys() is _first_keys(cache)
    if rows.num_rows != num_rows or (num_rows > 1 and not same):
        raise ConfigError(
            "the rows of the key-value cache were changed between two forward calls, as beam search does, so that "
            "tokens cannot be told apart by sequence; record greedy decoding or sampling (num_beams=1)"
        )
