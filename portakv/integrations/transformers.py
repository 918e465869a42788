"""PortaKVCache: a transformers cache whose keys and values live in a HybridKVPool."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from portakv import checks
from portakv import device as devices
from portakv.errors import OutOfSlots, PortaKVError
from portakv.integrations import dropped
from portakv.layers import check_positive, layers_from_config, require_heads
from portakv.pool import HybridKVPool
from portakv.write_loc import KVWriteLoc

Tensor = torch.Tensor


class PortaKVCache(Cache):
    """A batch of sequences whose KV is in `pool`: `model.generate(..., cache=PortaKVCache(pool))`.

    Layer i of the model is layer i of the pool. Geometry, and so every mask, is that of transformers'
    DynamicCache: a full layer returns all keys, a sliding-window layer the last `min(seen, window - 1)` and
    the new ones. All rows of the batch have one length: left padding owns slots. Each forward takes its
    slots, and translates them, once for all layers; before that it gives back the SWA slots that no query can
    see any more. So between forwards a sequence holds, on the SWA side, its window, the rest of a page, and
    the tokens of the last forward, which `crop` may take back.

    The slots return to the pool with `reset()` and when the cache is dropped; `copy.deepcopy` makes a second
    cache on the same pool. Do not `clear()` the allocator under a live cache. For inference: no gradient
    flows through it. Not thread-safe, as the pool's allocator.

    Raises, and leaves the pool as it was: `OutOfSlots`; `ValueError` for another batch size or a layer that
    the pool does not have; `PortaKVError` where the last forward did not write every layer (`crop` its
    tokens, or `reset`).
    """

    def __init__(self, pool: HybridKVPool) -> None:
        if not isinstance(pool, HybridKVPool):
            raise TypeError(f"pool: expected a HybridKVPool, got {type(pool).__name__}")
        self.pool = pool
        require_heads(pool.layers)
        self._batch = _Batch(pool)
        super().__init__(
            layers=[
                DummyLayer()  # type: ignore[no-untyped-call]
                if spec.alias_of is not None
                else _PoolLayer(self._batch, i)
                for i, spec in enumerate(pool.layers)
            ]
        )
        # The layers know the batch, not the cache: no cycle delays the return of a dropped cache's slots.
        weakref.finalize(self, dropped.release, self._batch).atexit = False

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

        `max_tokens` counts prompt, padding and new tokens; `max_chunk` is the most tokens one forward adds,
        by default `max_tokens`: prefill in chunks to keep the SWA side small. `dtype` is the model's unless
        given; `options` go to HybridKVPool.
        """
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens), ("page_size", page_size)):
            check_positive(name, value)
        chunk = max_tokens if max_chunk is None else check_positive("max_chunk", max_chunk)
        layers = require_heads(layers_from_config(model.config))
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
        if type(layer_idx) is not int or not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx: expected one of the pool's {len(self.layers)} layers, got {layer_idx!r}")
        return super().update(key_states, value_states, layer_idx)

    def reset(self) -> None:
        """Give all slots back; the cache is as new, for any batch size."""
        self._batch.release()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, as after a rejected draft.

        Always possible for the tokens of the last forward. Raises `ValueError` for a positive number, as
        transformers does, for more tokens than there are, and where the window behind them is evicted.
        """
        self._batch.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: rows change places, and only duplicates are copied."""
        self._batch.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Raises `OutOfSlots` before anything changes."""
        check_positive("repeats", repeats)
        self._batch.select(np.arange(self._batch.size).repeat(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (integers or a mask), in that order; the others' slots go back."""
        self._batch.select(indices)

    def activate_past_recording(self) -> None:
        """Nothing to do: eviction waits for the next forward, and what one added can always be cropped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PortaKVCache:
        twin = memo[id(self)] = type(self)(self.pool)
        twin._batch.copy_from(self._batch)
        return twin


class _PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's view of the batch: how many of its tokens this layer has written."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: _Batch, layer_id: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = batch.pool.layers[layer_id].window
        self.is_sliding = self.window is not None
        self.layer_id = layer_id
        self.length = 0
        self._batch = batch
        batch.layers.append(self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool owns the memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._batch.update(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = _first_visible(self.length, self.window)
        return self.length - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def __deepcopy__(self, memo: dict[int, Any]) -> _PoolLayer:
        raise PortaKVError("a layer of a PortaKVCache has no slots of its own: copy the cache")


class _Batch:
    """The slots of a batch of sequences of one length, and the plan of the forward in flight."""

    def __init__(self, pool: HybridKVPool) -> None:
        self.pool = pool
        self.allocator = pool.allocator
        self.thread = threading.get_ident()
        self.layers: list[_PoolLayer] = []
        self.write: KVWriteLoc
        self.reads: dict[int | None, KVWriteLoc]
        self._forget()

    def _forget(self) -> None:
        # [B, capacity] full slots by row and position, on the host.
        self.slots = torch.empty((0, 0), dtype=torch.int64)
        self.length = 0
        self.evicted = 0  # positions below have no SWA peer any more, in any row
        self._set_layers(0)

    @property
    def size(self) -> int:
        return self.slots.shape[0]

    def update(self, layer: _PoolLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in (("key_states", k), ("value_states", v)):
            if not isinstance(x, Tensor) or x.dim() != 4 or not x.shape[0] * x.shape[2]:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: expected [B, H, q, D] with rows and tokens, got {got}")
        if k.shape[::2] != v.shape[::2]:
            expected = f"the rows and tokens of key_states, {tuple(k.shape[::2])}"
            raise ValueError(f"value_states: expected {expected}, got {tuple(v.shape[::2])}")
        batch, heads, num_tokens, _ = k.shape
        past, starts, pool = layer.length, layer.length == self.length, self.pool
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        rows = (_token_rows(k), _token_rows(v))
        if starts:
            # What the store would refuse is refused before anything is evicted for it; there are no slots yet.
            stored = pool._layers[layer.layer_id]
            checks.check_rows(("k", "v", "k"), stored, rows[0], *rows, stored.sources, pool.device)
            self._begin(batch, num_tokens)
        elif batch != self.size or past + num_tokens != self.length:
            expected = f"{self.length - past} tokens of {self.size} rows, as this forward's first layer had"
            raise ValueError(f"key_states: expected {expected}, got {num_tokens} of {batch}")
        try:
            pool.set_kv_buffer(layer.layer_id, self.write, *rows)
        except BaseException:
            if starts:
                self._set_layers(past)
                self._shrink(past)
            raise
        layer.length += num_tokens
        self.unwritten -= 1
        if not past and k.dtype is pool.dtype:
            return k, v  # all that there is to read, as it was stored
        read = self.reads[layer.window]
        # Heads outermost: what a gather can write token by token and attention can read head by head.
        k_out, v_out = (x.new_empty((heads, len(read), x.shape[3])) for x in (k, v))
        pool.gather_kv(layer.layer_id, read, k_out.transpose(0, 1), v_out.transpose(0, 1))
        return _batched(k_out, batch), _batched(v_out, batch)

    def crop(self, tokens_to_remove: int) -> None:
        length = self.length + tokens_to_remove
        if not 0 <= length <= self.length:
            raise ValueError(f"tokens_to_remove: expected {-self.length} to 0, got {tokens_to_remove}")
        least = self.length - min(layer.length for layer in self.layers)
        if -tokens_to_remove < least:
            lacking = f"the {least} that some layer lacks"
            raise ValueError(f"tokens_to_remove: expected at least {lacking}, got {-tokens_to_remove}")
        if self.evicted > _first_visible(length, self.pool.window):
            gone = f"the SWA slots below position {self.evicted} are given back"
            raise ValueError(f"tokens_to_remove: position {length} needs a whole window, but {gone}")
        self._shrink(length)
        self._set_layers(length)

    def select(self, source: Tensor | np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Make row i what row `source[i]` was: one of those that name a row keeps its slots, others copy."""
        if not self.length:
            return
        self._require_whole()
        try:
            given = source.cpu().numpy() if isinstance(source, Tensor) else source
            rows = np.arange(self.size)[given].tolist()
        except IndexError as error:
            raise ValueError(f"indices: expected rows of 0 to {self.size - 1}: {error}") from None
        if not rows:
            self.release()
            return
        keeper = {row: i for i, row in enumerate(rows)}
        copies = [i for i, row in enumerate(rows) if keeper[row] != i]
        spare = sorted(set(range(self.size)) - keeper.keys())  # rows nobody keeps: the copies go there first
        old = self.slots[:, : self.length]
        targets = torch.cat((old[spare], self._new_rows(max(0, len(copies) - len(spare)))))
        new = old[rows]
        if copies:
            self.pool.move_kv_cache(targets[: len(copies)].flatten(), new[copies].flatten())
            new[copies] = targets[: len(copies)]
        self.allocator.free(targets[len(copies) :].flatten())
        self.slots = new

    def copy_from(self, other: _Batch) -> None:
        other._require_whole()
        self.length, self.evicted = other.length, other.evicted
        try:
            slots = self._new_rows(other.size)
        except BaseException:
            self._forget()
            raise
        self.pool.move_kv_cache(slots.flatten(), other.slots[:, : other.length].flatten())
        self.slots = slots
        self._set_layers(other.length)

    def release(self) -> None:
        slots = self.slots[:, : self.length].flatten()
        self._forget()
        self.allocator.free(slots)

    def _begin(self, batch: int, num_tokens: int) -> None:
        """Start a forward: evict, take slots, and translate what the layers will write and read."""
        self._require_whole()
        past, length = self.length, self.length + num_tokens
        if past and batch != self.size:
            raise ValueError(f"key_states: expected the cache's {self.size} rows, got {batch}")
        dropped.free_orphans(self.allocator)
        frontier = self._frontier(past)
        self._require_room(batch, length, batch * (frontier - self.evicted))
        if frontier > self.evicted:
            cursors, queries = np.full((2, batch), [[self.evicted], [past]])
            self.allocator.evict_swa(self.slots, np.arange(batch), cursors, queries)
            self.evicted = frontier
        last = self.slots[:, past - 1] if past else np.full(batch, -1)
        if num_tokens == 1:
            loc = self.allocator.alloc_decode(np.full(batch, length), last)
        else:
            loc = self.allocator.alloc_extend(np.full(batch, past), np.full(batch, length), last)
        if length > self.slots.shape[1]:
            grown = torch.empty((batch, max(length, 2 * self.slots.shape[1])), dtype=torch.int64)
            if past:
                grown[:, :past] = self.slots[:, :past]
            self.slots = grown
        self.slots[:, past:length] = loc.view(batch, num_tokens)
        self.length, self.unwritten = length, len(self.layers)
        self.write = self.pool.plan_write(loc)
        self.reads = {window: self._plan_read(past, window) for window in {layer.window for layer in self.layers}}

    def _plan_read(self, query: int, window: int | None) -> KVWriteLoc:
        """What layers of `window` read when the first new token is at `query`, translated if they need it."""
        slots = self.slots[:, _first_visible(query, window) : self.length].flatten()
        return KVWriteLoc(devices.upload(slots, self.pool.device)) if window is None else self.pool.plan_write(slots)

    def _frontier(self, query: int) -> int:
        """Positions below it are in no window of a query at `query` or later, in whole pages."""
        if self.pool.window is None:
            return 0
        page_size = self.pool.page_size
        return max(self.evicted, _first_visible(query, self.pool.window) // page_size * page_size)

    def _require_room(self, batch: int, length: int, evictable: int) -> None:
        """Raise OutOfSlots before the eviction: a forward that does not fit changes nothing."""
        page_size = self.pool.page_size
        need = batch * page_size * (-(-length // page_size) - -(-self.length // page_size))
        for side, extra in (("full", 0), ("swa", evictable)) if self.pool.has_swa else (("full", 0),):
            if need > (free := self.allocator.available(side) + extra):
                raise OutOfSlots(side, need, free)

    def _new_rows(self, num_rows: int) -> Tensor:
        """Slots `[num_rows, length]` with SWA peers at the positions where this batch has them."""
        prefix, lengths, last = np.full((3, num_rows), [[0], [self.length], [-1]])
        slots = self.allocator.alloc_extend(prefix, lengths, last, swa_tail=self.length - self.evicted)
        return slots.view(num_rows, self.length)

    def _shrink(self, length: int) -> None:
        self.allocator.rewind(self.slots[:, length : self.length].flatten())
        self.length = length
        if not length:
            self._forget()

    def _set_layers(self, length: int) -> None:
        """Every layer has written `length` tokens, and no forward is in flight."""
        for layer in self.layers:
            layer.length = length
        self.unwritten = 0

    def _require_whole(self) -> None:
        if self.unwritten:
            lagging = [layer.layer_id for layer in self.layers if layer.length < self.length]
            raise PortaKVError(f"layers {lagging} did not write the last forward: crop its tokens, or reset")


def _first_visible(position: int, window: int | None) -> int:
    """The first key a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _token_rows(x: Tensor) -> Tensor:
    """`[B, H, q, D]` as `[B * q, H, D]`; a view where q is 1 or x is a transposed projection."""
    return x.transpose(1, 2).flatten(0, 1)


def _batched(x: Tensor, batch: int) -> Tensor:
    """`[H, B * S, D]` as `[B, H, S, D]`, a view."""
    return x.view(x.shape[0], batch, -1, x.shape[2]).transpose(0, 1)
