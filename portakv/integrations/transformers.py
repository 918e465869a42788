"""PortaKVCache: a transformers cache whose keys and values live in a HybridKVPool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from portakv.arguments import (
    MOST,
    Ints,
    IntsLike,
    as_array,
    as_int,
    as_ints,
    require,
    require_plain,
    require_rows,
    shown,
    tracing,
)
from portakv.errors import OutOfSlots, PortaKVError
from portakv.layers import layers_from_model, require_heads
from portakv.pool import HybridKVPool
from portakv.write_loc import KVWriteLoc

Tensor = torch.Tensor
T = TypeVar("T")


class PortaKVCache(Cache):
    """A batch of sequences whose KV is in `pool`: `model.generate(..., cache=PortaKVCache(pool))`
    (`past_key_values=` in older versions of transformers).

    Layer i of the model is layer i of the pool. Geometry, and so every mask, is that of transformers'
    DynamicCache: a full layer returns all keys, a sliding-window layer the last `min(seen, window - 1)` and
    the new ones. All rows of the batch have one length: left padding owns slots. Each forward takes its
    slots, and translates them, once for all layers; before that it gives back the SWA slots that no query can
    see any more. So between forwards a sequence holds, on the SWA side, its window, the rest of a page, and
    the tokens of the last forward, which `crop` may take back; while the past is recorded, those of all forwards
    since the last `crop`.

    The slots return to the pool with `reset()` and when the cache is dropped; `copy.deepcopy` makes a second
    cache on the same pool. Do not `clear()` the allocator under a live cache. For inference: no gradient
    flows through it. Several threads may use caches of their own on one pool. In an encoder-decoder it serves the
    decoder's own attention: `EncoderDecoderCache(PortaKVCache(pool), DynamicCache())`.

    A call that raises, whatever it raises and where, leaves the cache and the pool as they were before it or as they
    are after it. Raises `OutOfSlots`; `ValueError` for another batch size or a layer that the pool does not have;
    `PortaKVError` where the last forward did not write every layer (`crop` its tokens, or `reset`), and where rows
    that `reorder_cache` moved could not be copied yet, which every call tries again.
    """

    def __init__(self, pool: HybridKVPool) -> None:
        if not isinstance(pool, HybridKVPool):
            raise TypeError(f"pool: expected a HybridKVPool, got {type(pool).__name__}")
        self.pool = pool
        require_heads(pool.layers)
        self._batch = _Batch(pool)
        super().__init__(layers=[_PoolLayer(self._batch, i) for i in range(len(pool.layers))])
        # The layers know the batch, not the cache: no cycle delays the return of a dropped cache's slots.
        pool.allocator.free_with(self, self._batch.held)

    @classmethod
    def for_model(
        cls,
        model: Any,
        batch_size: int,
        max_tokens: int,
        *,
        max_chunk: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> PortaKVCache:
        """A cache on a new pool with room for `batch_size` sequences (times beams) of `max_tokens` tokens.

        `max_tokens` counts prompt, padding and new tokens; `max_chunk` is the most tokens one forward adds (all
        between two crops, where the past is recorded), by default `max_tokens`: prefill in chunks to keep the SWA side
        small. `dtype` is the model's unless given; `options` go to HybridKVPool.

        Raises `ValueError`, in the words of its config, for a model that such a cache cannot serve: an encoder-decoder,
        layers of cross-attention, or of another state than K and V.
        """
        batch_size, max_tokens = as_int("batch_size", batch_size), as_int("max_tokens", max_tokens)
        page_size, chunk = (
            as_int("page_size", page_size),
            as_int("max_chunk", max_tokens if max_chunk is None else max_chunk),
        )
        layers = require_heads(layers_from_model(model))
        windows = [spec.window for spec in layers if spec.window is not None]
        full = -(-max_tokens // page_size) * page_size
        # A window that starts anywhere in a page, and the chunk behind it.
        swa = (-(-(max(windows) + chunk) // page_size) + 1) * page_size if windows else full
        options.setdefault("device", model.device)
        return cls(
            HybridKVPool(
                layers,
                size=batch_size * full,
                swa_size=batch_size * min(swa, full) if windows else None,
                page_size=page_size,
                dtype=model.dtype if dtype is None else dtype,
                **options,
            )
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store `[B, H, q, D]` and `[B, H, q, Dv]` of one layer; returns the K and V its attention reads."""
        try:
            layer_idx = as_int("layer_idx", layer_idx, 0, len(self.layers) - 1)
        except (TypeError, ValueError):
            expected = f"one of the pool's {len(self.layers)} layers"
            raise ValueError(f"layer_idx: expected {expected}, got {shown(layer_idx)}") from None
        return super().update(key_states, value_states, layer_idx)

    def reset(self) -> None:
        """Give all slots back; the cache is as new, for any batch size."""
        self._batch.release()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, as after a rejected draft.

        Always possible for the tokens of the last forward and, while the past is recorded, of all forwards since the
        last `crop`. Raises `ValueError` for a positive number, as transformers does, for more tokens than there are,
        and where the window behind them is evicted.
        """
        self._batch.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: rows change places, and only duplicates are copied."""
        self._batch.select("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Raises `OutOfSlots` before anything changes."""
        self._batch.select("repeats", np.arange(self._batch.num_rows).repeat(as_int("repeats", repeats)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (integers or a mask), in that order; the others' slots go back."""
        self._batch.select("indices", indices)

    def activate_past_recording(self) -> None:
        """From here on what `crop` needs to come back to the last one, or to here, is not evicted."""
        self._batch.record(True)

    def __deepcopy__(self, memo: dict[int, Any]) -> PortaKVCache:
        twin = memo[id(self)] = type(self)(self.pool)
        twin._batch.copy_from(self._batch)
        return twin

    def __reduce__(self) -> NoReturn:  # what copy.copy asks too
        raise TypeError("PortaKVCache: expected copy.deepcopy, which takes slots of its own, got another copy")


class _PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of the batch: how many of its tokens this layer, or the one it aliases, has written."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: _Batch, layer_id: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        spec = batch.pool.layers[layer_id]
        self.window = spec.window
        self.is_sliding = self.window is not None
        self.layer_id = layer_id
        self._stored = layer_id if spec.alias_of is None else spec.alias_of
        self._batch = batch

    @property
    def length(self) -> int:
        return self._batch.state.length_of(self._stored)

    @property
    def record_past(self) -> bool:
        """Whether what is to be cropped is kept; transformers sets it to False when it is done with it."""
        return self._batch.state.recorded is not None

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self._batch.record(on)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool owns the memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._stored != self.layer_id:
            self._batch.pool._stored(self.layer_id, False)  # raises
        return self._batch.update(self.layer_id, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.length
        offset = _first_visible(length, self.window)
        return length - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def _refuse(self, *args: Any) -> NoReturn:
        raise PortaKVError("a layer of a PortaKVCache has no slots of its own: copy the cache, crop or reset it")

    __deepcopy__ = crop = reset = batch_repeat_interleave = batch_select_indices = _refuse
    reorder_cache = _refuse  # type: ignore[assignment]


class _Forward(NamedTuple):
    """The forward in flight: no plan outlives it, and none is taken for another's."""

    past: int  # tokens before it
    missing: frozenset[int]  # the layers that have not written it
    write: KVWriteLoc
    reads: dict[int | None, KVWriteLoc]  # of a window, row after row


class _State(NamedTuple):
    """All that a batch knows. A call works on values of its own and publishes them together, last."""

    slots: Ints = np.empty((0, 0), np.int64)  # [B, capacity] full slots by row and position; past `length` anything
    length: int = 0
    evicted: int = 0  # positions below have no SWA peer any more, in any row
    recorded: int | None = None  # the length that `crop` must be able to come back to, while the past is recorded
    forward: _Forward | None = None
    moves: tuple[Ints, Ints] | None = None  # copies (to, from) that the rows in `slots` still need

    @property
    def held(self) -> Ints:
        return self.slots[:, : self.length]

    @property
    def past(self) -> int:
        """The tokens that every layer has written."""
        return self.length if self.forward is None else self.forward.past

    def length_of(self, layer_id: int) -> int:
        return self.past if self.forward is not None and layer_id in self.forward.missing else self.length

    def emptied(self) -> _State:
        return _State(recorded=None if self.recorded is None else 0)

    def require_whole(self) -> None:
        if self.forward is not None:
            missing = sorted(self.forward.missing)
            raise PortaKVError(f"layers {missing} did not write the last forward: crop its tokens, or reset")


class _Batch:
    """The slots of a batch of sequences of one length."""

    def __init__(self, pool: HybridKVPool) -> None:
        self.pool = pool
        self.allocator = pool.allocator
        self.stored = frozenset(i for i, spec in enumerate(pool.layers) if spec.alias_of is None)
        self.windows = {pool.layers[i].window for i in self.stored}
        self.state = _State()

    @property
    def num_rows(self) -> int:
        return len(self.state.slots)

    # A forward

    def update(self, layer_id: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("key_states", k), ("value_states", v)):
            require_plain(name, x)
            if x.dim() != 4 or not x.shape[0] * x.shape[2]:
                raise ValueError(f"{name}: expected [B, H, q, D] with rows and tokens, got {tuple(x.shape)}")
        if k.shape[::2] != v.shape[::2]:
            expected = f"the rows and tokens of key_states, {tuple(k.shape[::2])}"
            raise ValueError(f"value_states: expected {expected}, got {tuple(v.shape[::2])}")
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        state = self._settle()
        if state.forward is not None and layer_id in state.forward.missing:
            return self._write(state, state.forward, layer_id, k, v)
        state.require_whole()
        batch, num_tokens = k.shape[0], k.shape[2]
        if state.length and batch != state.slots.shape[0]:
            raise ValueError(f"key_states: expected the cache's {state.slots.shape[0]} rows, got {batch}")
        # What the store would refuse is refused before anything is evicted for it.
        rows, stored = (_token_rows(k), _token_rows(v)), self.pool._layers[layer_id]
        names, tails = ("key_states", "value_states", "key_states"), (stored.k_tail, stored.v_tail)
        require_rows(names, tails, rows[0], *rows, stored.sources, self.pool.device, mixed=True)
        self._make_room(state, batch, state.length + num_tokens)

        def start() -> tuple[Tensor, Tensor]:
            begun, forward = self._begin(self.state, batch, num_tokens)
            return self._write(begun, forward, layer_id, k, v)

        return self._change(start)

    def _begin(self, state: _State, batch: int, num_tokens: int) -> tuple[_State, _Forward]:
        """Take slots, evict, and translate what the layers will write and read."""
        past, length = state.length, state.length + num_tokens
        last = state.slots[:, past - 1] if past else np.full(batch, -1)
        if num_tokens == 1:
            loc = self.allocator.alloc_decode(np.full(batch, length), last)
        else:
            loc = self.allocator.alloc_extend(np.full(batch, past), np.full(batch, length), last)
        # Not before: slots that come back to the cache if the forward fails must not have been written by it.
        state, slots = self._evict(state), state.slots
        if length > slots.shape[1]:
            slots = np.empty((batch, max(length, 2 * slots.shape[1])), np.int64)
            if past:
                slots[:, :past] = state.held
        slots[:, past:length] = loc.numpy().reshape(batch, num_tokens)
        write, seen = self.pool.plan_write(loc), slots[:, :length]
        reads = {window: self._plan_read(seen[:, _first_visible(past, window) :], window) for window in self.windows}
        return state._replace(slots=slots, length=length), _Forward(past, self.stored, write, reads)

    def _plan_read(self, slots: Ints, window: int | None) -> KVWriteLoc:
        """What layers of `window` read, translated if they need it."""
        flat = torch.from_numpy(slots.flatten())
        pool = self.pool
        return KVWriteLoc(pool.kind.upload(flat, pool.device)) if window is None else pool.plan_write(flat)

    def _write(self, state: _State, forward: _Forward, layer_id: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's K and V, read what its attention asks for, and publish that the layer has been here."""
        (batch, heads, num_tokens, _), rows = k.shape, state.slots.shape[0]
        if batch != rows or num_tokens != state.length - forward.past:
            expected = f"{state.length - forward.past} tokens of {rows} rows, as this forward's first layer had"
            raise ValueError(f"key_states: expected {expected}, got {num_tokens} of {batch}")
        pool = self.pool
        pool.set_kv_buffer(layer_id, forward.write, _token_rows(k), _token_rows(v))
        if forward.past or not k.dtype is v.dtype is pool.dtype:  # otherwise they are all there is, as it was stored
            read = forward.reads[pool.layers[layer_id].window]
            # Heads of a row lie together: attention may view what it gets as [B * H, S, D].
            k, v = (x.new_empty((batch, heads, len(read) // batch, x.shape[3])) for x in (k, v))
            layer, outs = pool._read(layer_id, tracing()), (k.transpose(1, 2), v.transpose(1, 2))
            slots = read.swa_loc if layer.on_swa else read.loc
            if slots is not None and layer.gathers_batches and k.dtype is v.dtype and not pool.check:
                pool._gather(layer, slots, *outs)  # they are new, which `gather_kv` would look for in each layer
            else:
                pool.gather_kv(layer_id, read, *outs)
        missing = forward.missing - {layer_id}
        self.state = state._replace(forward=forward._replace(missing=missing) if missing else None)
        return k, v

    # Between forwards

    def crop(self, tokens_to_remove: int) -> None:
        state = self._settle()
        length = state.length + as_int("tokens_to_remove", tokens_to_remove, -MOST)
        if not 0 <= length <= state.length:
            raise ValueError(f"tokens_to_remove: expected {-state.length} to 0, got {tokens_to_remove}")
        if length > state.past:
            lacking = f"the {state.length - state.past} that some layer lacks"
            raise ValueError(f"tokens_to_remove: expected at least {lacking}, got {-tokens_to_remove}")
        if state.evicted > _first_visible(length, self.allocator.window):
            gone = f"the SWA slots below position {state.evicted} are given back"
            raise ValueError(f"tokens_to_remove: position {length} needs a whole window, but {gone}")

        def shrink() -> None:
            self.allocator.rewind(state.slots[:, length : state.length].ravel())
            recorded = None if state.recorded is None else length
            shrunk = state if length else state.emptied()
            self.state = shrunk._replace(length=length, recorded=recorded, forward=None)

        self._change(shrink)

    def select(self, name: str, source: IntsLike) -> None:
        """Make row i what row `source[i]` was: one of those that name a row keeps its slots, others copy."""
        state = self._settle()
        if not state.length:
            return
        state.require_whole()
        num_rows = state.slots.shape[0]
        rows = _named_rows(name, source, num_rows)
        if not rows:
            self.release()
            return
        keeper = {row: i for i, row in enumerate(rows)}
        copies = [i for i, row in enumerate(rows) if keeper[row] != i]
        spare = sorted(set(range(num_rows)) - keeper.keys())  # rows nobody keeps: the copies go there first

        def rearrange() -> None:
            fresh = self._new_rows(state, max(0, len(copies) - len(spare)))
            targets = np.concatenate((state.held[spare], fresh))
            slots = state.held[rows]
            moves = targets[: len(copies)].ravel(), slots[copies].ravel()
            slots[copies] = targets[: len(copies)]
            self.allocator.free(targets[len(copies) :].ravel())
            if copies and not spare:  # into new slots: what fails is taken back
                self._move(*moves)
            self.state = state._replace(slots=slots, moves=moves if copies and spare else None)

        self._change(rearrange)
        try:
            self._settle()
        except BaseException as error:
            self._settle()
            if not isinstance(error, Exception):  # an interrupt, not what the second try has mended
                raise

    def _settle(self) -> _State:
        """The state, once the copies that it still needs are made.

        They go to rows that nobody keeps, which cannot be taken back. But no source is a target: however far they came,
        they can be made again.
        """
        state = self.state
        if state.moves is not None:
            try:
                self._move(*state.moves)
            except Exception as error:
                raise PortaKVError(
                    f"rows of this cache are not copied yet, the next call tries again: {error}"
                ) from error
            self.state = state = state._replace(moves=None)
        return state

    def copy_from(self, other: _Batch) -> None:
        state = other._settle()
        state.require_whole()

        def duplicate() -> None:
            slots = self._new_rows(state, state.slots.shape[0])
            self._move(slots.ravel(), state.held.ravel())
            self.state = state._replace(slots=slots)

        self._change(duplicate)

    def record(self, on: bool) -> None:
        """Keep what `crop` needs to come back to here and, after each crop, to the length it left; or no longer."""
        state = self.state
        if on != (state.recorded is not None):
            self.state = state._replace(recorded=state.past if on else None)

    def release(self) -> None:
        state = self.state

        def free() -> None:
            self.allocator.free(state.held.ravel())
            self.state = state.emptied()

        self._change(free)

    def held(self) -> Ints:
        """The slots that go back when the cache is dropped, wherever the garbage collector comes by."""
        return self.state.held.ravel()

    # Slots

    def _change(self, steps: Callable[[], T]) -> T:
        """Run `steps`, which publish a new state last: with what the allocator does in them, or not at all."""
        state = self.state

        def undo() -> None:
            self.state = state

        return self.allocator.atomically(steps, undo)

    def _make_room(self, state: _State, batch: int, length: int) -> None:
        """Raise OutOfSlots for a forward that does not fit; where it needs what can be evicted, evict that first."""
        page_size = self.pool.page_size
        need = batch * page_size * (-(-length // page_size) - -(-state.length // page_size))
        evictable = batch * (self._frontier(state) - state.evicted)
        for side, extra in (("full", 0), ("swa", evictable)) if self.allocator.swa_size else (("full", 0),):
            free = self.allocator.available(side)
            if need > free + extra:
                raise OutOfSlots(side, need, free + extra)
            if need > free:

                def evict() -> None:
                    self.state = self._evict(state)

                self._change(evict)

    def _frontier(self, state: _State) -> int:
        """Positions below it are in no window of a query still to come, in whole pages."""
        if self.allocator.window is None:
            return 0
        query = state.length if state.recorded is None else state.recorded
        page_size = self.pool.page_size
        return max(state.evicted, _first_visible(query, self.allocator.window) // page_size * page_size)

    def _evict(self, state: _State) -> _State:
        frontier, rows = self._frontier(state), np.arange(state.slots.shape[0])
        if frontier == state.evicted:
            return state
        query = state.length if state.recorded is None else state.recorded
        cursors, queries = np.full((2, rows.size), [[state.evicted], [query]])
        self.allocator.evict_swa(state.slots, rows, cursors, queries)
        return state._replace(evicted=frontier)

    def _new_rows(self, state: _State, num_rows: int) -> Ints:
        """Slots `[num_rows, length]` with SWA peers at the positions where the batch has them."""
        prefix, lengths, last = np.full((3, num_rows), [[0], [state.length], [-1]])
        slots = self.allocator.alloc_extend(prefix, lengths, last, swa_tail=state.length - state.evicted)
        return slots.numpy().reshape(num_rows, state.length)

    def _move(self, to: Ints, source: Ints) -> None:
        self.pool.move_kv_cache(torch.from_numpy(to), torch.from_numpy(source))


def _named_rows(name: str, given: IntsLike, num_rows: int) -> list[int]:
    """The rows of a batch that integers, from -1 down the last ones, or a mask name."""
    array = as_array(name, given, (1,), kinds="iub")
    if array.dtype.kind == "b":
        if array.size != num_rows:
            raise ValueError(f"{name}: expected a mask of {num_rows} rows, got one of {array.size}")
        return np.flatnonzero(array).tolist()
    rows = as_ints(name, given)
    require((rows >= -num_rows) & (rows < num_rows), name, f"rows of 0 to {num_rows - 1}", rows)
    numbers: list[int] = (rows % num_rows).tolist()
    return numbers


def _first_visible(position: int, window: int | None) -> int:
    """The first key a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _token_rows(x: Tensor) -> Tensor:
    """`[B, H, q, D]` as `[B * q, H, D]`; a view where q is 1 or x is a transposed projection."""
    return x.transpose(1, 2).flatten(0, 1)
