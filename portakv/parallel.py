"""Context parallelism: each rank computes a zigzag part of a batch's new K and V, and every rank stores all of it.

Of n ranks, rank r has chunks r and 2n-1-r of the 2n chunks of each sequence, so that causal attention costs every rank
about the same. A sequence of T tokens is cut into chunks of T // 2n tokens, the first T % 2n of them one token longer.
A rank's rows are the chunks r of all sequences in batch order, then the chunks 2n-1-r, as SGLang orders them
(`prepare_context_parallel_metadata` in `layers/utils/cp_utils.py`).

Tensor parallelism needs nothing of this: a pool whose LayerSpecs count a rank's KV heads stores `k[:, first:last]`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from portakv import checks, dispatch
from portakv import device as devices
from portakv.arguments import Ints, IntsLike, as_dtype, as_int, as_ints, require, require_plain, require_rows
from portakv.errors import MissingSwaLoc
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS
from portakv.groups import Layer
from portakv.pages import ranges
from portakv.pool import HybridKVPool
from portakv.write_loc import KVWriteLoc, WriteLoc, require_location

Tensor = torch.Tensor

DTYPES = (*FLOAT_DTYPES, *FP8_DIALECTS)
HEADER_BYTES = 8
"""A rank's first row begins with 1 + its layer as int64, or 0 where it was refused; no row is shorter."""


@dataclass(frozen=True, slots=True, eq=False)
class ZigzagWriteLoc:
    """The write locations of a forward in the order in which `group` gathers rows; made by `plan_zigzag_write`.

    `rows[r]` is how many rows rank r brings. In `write_loc` each rank's slots stand behind a -1 for its header and are
    padded with -1 to the most rows that any rank has. `dtype` is that of the K and V rows.
    """

    write_loc: KVWriteLoc
    rows: tuple[int, ...]
    rank: int
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    _buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.inference_mode(False)  # kept for layers that may be stored outside of it
    def buffers(self, row_bytes: int) -> tuple[Tensor, Tensor]:
        """Bytes to send `[1 + most rows, row_bytes]` and to get, `[ranks * that, row_bytes]`; kept for later layers."""
        if row_bytes not in self._buffers:
            shape = (1 + max(self.rows), row_bytes)
            self._buffers[row_bytes] = (
                torch.empty(shape, dtype=torch.uint8, device=self.write_loc.loc.device),
                torch.empty(
                    (len(self.rows) * shape[0], row_bytes), dtype=torch.uint8, device=self.write_loc.loc.device
                ),
            )
        return self._buffers[row_bytes]


def zigzag_split(x: Tensor, rank: int, world: int, seq_lens: IntsLike | None = None) -> Tensor:
    """The rows of `x [T, ...]` that `rank` of `world` ranks computes, in the order in which it hands K and V over.

    `seq_lens [B]` are the tokens of each sequence, one after another in `x`; without them `x` is one sequence. Raises
    `ValueError` for lengths that do not add up to T, or no such rank.
    """
    require_plain("x", x)
    if x.dim() == 0:
        raise TypeError("x: expected a tensor of rows, got a number")
    world, rank = as_int("world", world), as_int("rank", rank, 0)
    if rank >= world:
        raise ValueError(f"rank: expected one below {world}, got {rank}")
    order = _zigzag_order(_lens(seq_lens, x.shape[0]), rank, world)
    index = dispatch.device_of(x.device).upload(torch.from_numpy(order), x.device)
    # Indexed copies of fp8 are missing on several devices and in older torch.
    return x.view(torch.uint8)[index].view(x.dtype) if x.dtype in FP8_DIALECTS else x[index]


def plan_zigzag_write(
    pool: HybridKVPool,
    write_loc: WriteLoc,
    dtype: torch.dtype,
    seq_lens: IntsLike | None = None,
    group: dist.ProcessGroup | None = None,
) -> ZigzagWriteLoc:
    """The gathered order of a forward's locations; each rank of `group` calls it, once per forward.

    `write_loc` are the locations of all T tokens of the batch in token order, `dtype` that of the K and V to come,
    `seq_lens [B]` as for `zigzag_split`. One small all-reduce compares the arguments, and waits for the device: where
    ranks disagree, or one of them was refused, every rank raises `ValueError` or its own refusal.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected a process group that this rank belongs to")
    try:
        require_location("write_loc", write_loc, pool.device)
        for slots in (write_loc.loc, write_loc.swa_loc):
            if slots is not None:
                require_plain("write_loc", slots)
        lens, dtype = _lens(seq_lens, len(write_loc)), as_dtype("dtype", dtype, DTYPES)
    except (TypeError, ValueError):
        _compare(None, pool.device, group)  # the others would wait for this rank
        raise
    formats = ",".join(f"{g.side}/{g.fmt.tag}/{g.layers}" for g in pool.groups)
    _compare(
        {
            "write_loc": len(write_loc),
            "seq_lens": zlib.crc32(lens.tobytes()),
            "dtype": DTYPES.index(dtype),
            "pool": zlib.crc32(formats.encode()),
            "check": _hears(pool),
        },
        pool.device,
        group,
    )
    parts = [_zigzag_order(lens, r, world) for r in range(world)]
    most = max(part.size for part in parts)
    order = np.full((world, 1 + most), len(write_loc))  # the index of the -1 that is added behind the slots
    for r, part in enumerate(parts):
        order[r, 1 : 1 + part.size] = part
    index = pool.kind.upload(torch.from_numpy(order).flatten(), pool.device)
    rows = {g.side: g.num_rows for g in pool.groups}
    loc, swa_loc = (
        None if slots is None else torch.cat((_keep_last(pool, slots, num_rows), slots.new_full((1,), -1)))[index]
        for slots, num_rows in ((write_loc.loc, rows.get("full", 0)), (write_loc.swa_loc, rows.get("swa", 0)))
    )
    assert loc is not None
    return ZigzagWriteLoc(KVWriteLoc(loc, swa_loc), tuple(part.size for part in parts), rank, dtype, group)


def cp_allgather_and_save_kv(
    pool: HybridKVPool,
    layer_id: int,
    write_loc: WriteLoc | ZigzagWriteLoc,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Gather all ranks' K and V of one layer in one all-gather and store the whole batch, in one launch.

    `k [T_r, H, D]` and `v [T_r, H, Dv]` are this rank's rows as `zigzag_split` cuts them, with any strides but a dense
    last axis. `write_loc` is what `plan_zigzag_write` made for this forward; the locations of all T tokens of one
    sequence will do too and are planned in the call, at the price of that plan for every layer. `group` is read only
    then; None is the default group.

    Rows travel in their own dtype and byte for byte, and rank order is undone by the order of the locations, so every
    rank's pool ends up with the bytes of one `set_kv_buffer` of the whole batch: the last token's where a slot is named
    twice.

    Raises as `set_kv_buffer` does. A rank whose arguments are refused still takes part, and every other rank raises
    `ValueError`; nothing is written then. To know that, a pool on an accelerator would have to wait for each gather: it
    does so in checked mode, and otherwise a refused rank raises at once and leaves the others to the group's timeout.
    """
    if isinstance(write_loc, ZigzagWriteLoc):
        plan = write_loc
    else:
        plan = plan_zigzag_write(pool, write_loc, getattr(k, "dtype", None), group=group)  # type: ignore[arg-type]
    layer, refusal = _look(pool, layer_id, plan, k, v)
    hears = _hears(pool)
    if refusal is not None and not (hears and any(plan.rows)):
        raise refusal
    if not any(plan.rows):
        return
    # Where ranks hear of each other all rows are as wide as the widest layer's: those of another layer still arrive.
    formats = [group.fmt for group in pool.groups] if layer is None or hears else [layer.fmt]
    width = max(fmt.num_kv_heads * (fmt.head_dim + fmt.v_head_dim) for fmt in formats)
    send, gathered = plan.buffers(max(width * plan.dtype.itemsize, HEADER_BYTES))
    if layer is not None and refusal is None:
        own = _split(send[1 : 1 + plan.rows[plan.rank]], layer, plan.dtype.itemsize)
        for part, x in zip(own, (k, v), strict=True):
            part.copy_(x.view(torch.uint8))
    if hears:
        send[0, :HEADER_BYTES].view(torch.int64).fill_(0 if refusal else 1 + layer_id)
    # torch 2.13 renamed it.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, send, group=plan.group)
    if refusal is not None:
        raise refusal
    assert layer is not None
    if hears:
        headers = gathered[:: send.shape[0], :HEADER_BYTES].contiguous().view(torch.int64).flatten().tolist()
        odd = [rank for rank, header in enumerate(headers) if header != headers[plan.rank]]
        if odd:
            raise ValueError(f"k, v: expected rows of layer {layer_id} from every rank, refused or of another on {odd}")
    pool.set_kv_buffer(layer_id, plan.write_loc, *_split(gathered.view(plan.dtype), layer))


def _keep_last(pool: HybridKVPool, slots: Tensor, num_rows: int) -> Tensor:
    """`slots` with -1 for one that a later token of the batch names again, as ranks' rows arrive in another order;
    checked mode refuses it and gets it as it is."""
    if pool.check:
        return slots
    from portakv.kernels.reference.rows import named_again  # not at import, which loads no kernels

    lost = named_again(slots) & (slots >= pool.page_size) & (slots < num_rows)
    return torch.where(lost, -1, slots)


def _hears(pool: HybridKVPool) -> bool:
    """Whether a rank waits for each gather, to learn whether another one was refused."""
    return pool.check or devices.shares_host_memory(pool.device)


def _look(
    pool: HybridKVPool, layer_id: int, plan: ZigzagWriteLoc, k: Tensor, v: Tensor
) -> tuple[Layer | None, Exception | None]:
    """This rank's layer, and what is wrong with it, its rows or locations."""
    layer = None
    try:
        layer = pool._stored(layer_id, False)
        own = checks.side_slots("write_loc", layer_id, layer, plan.write_loc)[: plan.rows[plan.rank]]
        tails = layer.k_tail, layer.v_tail
        require_rows(("k", "v", "write_loc"), tails, own, k, v, layer.sources, pool.device)
    except (TypeError, ValueError, MissingSwaLoc) as e:
        return layer, e
    return layer, None if k.dtype is plan.dtype else TypeError(f"k: expected {plan.dtype} as planned, got {k.dtype}")


def _split(rows: Tensor, layer: Layer, unit: int = 1) -> tuple[Tensor, Tensor]:
    """The K and V rows by head in `rows [n, width]`, whose element is one of `unit` parts of theirs."""
    (heads, dim), (_, v_dim) = layer.k_tail, layer.v_tail
    k, v, _ = rows.tensor_split((heads * dim * unit, heads * (dim + v_dim) * unit), dim=1)
    return k.view(len(rows), heads, dim * unit), v.view(len(rows), heads, v_dim * unit)


def _lens(seq_lens: IntsLike | None, num_tokens: int) -> Ints:
    lens = as_ints("seq_lens", [num_tokens] if seq_lens is None else seq_lens)
    require(lens >= 0, "seq_lens", "lengths of at least 0", lens)
    require(lens <= num_tokens, "seq_lens", f"at most {num_tokens} tokens", lens)  # so that no sum wraps around
    if lens.sum() != num_tokens:
        raise ValueError(f"seq_lens: expected {num_tokens} tokens in all, got {lens.sum()}")
    return lens


def _zigzag_order(lens: Ints, rank: int, world: int) -> Ints:
    """The token that each row of `rank` is, in a batch of sequences of `lens` tokens."""
    short, longer = np.divmod(lens, 2 * world)
    first = np.cumsum(lens) - lens
    chunks = (rank, 2 * world - 1 - rank)
    starts = [first + chunk * short + np.minimum(chunk, longer) for chunk in chunks]
    return ranges(np.concatenate(starts), np.concatenate([short + (chunk < longer) for chunk in chunks]))


_COMPARED = ("write_loc", "seq_lens", "dtype", "pool", "check")


def _compare(mine: dict[str, int] | None, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless all have the same numbers; with None, only let the others know of a refusal."""
    given = [-1] * len(_COMPARED) if mine is None else [mine[name] for name in _COMPARED]
    values = torch.tensor(given, dtype=torch.int64, device="cpu")
    both = torch.cat((values, -values)).to(device)
    dist.all_reduce(both, dist.ReduceOp.MIN, group=group)
    if mine is None:
        return
    low, high = both.view(2, -1).tolist()
    if min(low) < 0:
        raise ValueError("write_loc, seq_lens, dtype: expected arguments that every rank takes, refused on another")
    for name, least, most in zip(_COMPARED, low, high, strict=True):
        if least != -most:
            got = f"{least} to {-most} tokens" if name == "write_loc" else "others"
            raise ValueError(f"{name}: expected the same on every rank, got {got}")
