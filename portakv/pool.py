"""HybridKVPool: the one API. A forward is `plan_write` once, then per layer `set_kv_buffer` and `get_kv_buffer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from portakv import checks, dispatch, ops, transfer
from portakv import device as devices
from portakv.allocator import HybridSlotAllocator
from portakv.arguments import (
    as_dtype,
    as_int,
    as_ints,
    as_layer,
    as_scales,
    as_switch,
    require_apart,
    require_bool,
    require_disjoint,
    require_index_dtype,
    require_plain,
    require_rows,
    require_slots,
    tracing,
)
from portakv.consumers import ReadStyle
from portakv.formats import FAULT_KINDS, SLOT_OPS, Layout, Structure
from portakv.groups import (
    Layer,
    LayerGroup,
    allocate_group,
    allocate_slots,
    as_ratio,
    buffer_rows,
    check_kernels,
    choose_layout,
    fit_sizes,
    name_rows,
    plan_groups,
    pool_bytes,
    storage_dtype,
    widest_window,
)
from portakv.kernels import SlotOps
from portakv.layers import LayerSpec, as_layers
from portakv.read_plan import Lengths, ReadPlan, ReadPlanner
from portakv.rope import Rope, store_rotated
from portakv.transfer import HostCopy
from portakv.write_loc import GraphWriteLoc, KVWriteLoc, WriteLoc, planned, require_location, to_device

Tensor = torch.Tensor
Out = Tensor | None
Scale = float | Tensor | None


class HybridKVPool:
    """K and V of a model's layers: full-attention layers on one side, sliding-window layers on a smaller one.

    `layers` has one LayerSpec per model layer. `size` and `swa_size` count tokens and are rounded down to whole
    pages; each side has one reserved page more, whose first slot is PAD. Without `swa_size` every layer lives on the
    full side; its window stays what it is, a property of the layer. `dtype` is a float dtype, an fp8 dialect, or "fp8"
    for the e4m3 dialect the device reads natively. `layout` is the name of one of `memory.layouts.LAYOUTS`, where
    "rows" holds MLA layers as "mla" rows, or "auto": on a CPU its packed pages if they hold every layer, else rows.
    `check` (or `PORTAKV_CHECK=1`) validates every slot before a launch, which waits for the device. `kernels` maps ops
    that this pool runs to the rows that must serve them; `strict` forbids automatic reference rows. `slots_of` attaches
    this pool to another one's slots, as a draft model's beside its target's: one allocator and mapping, no smaller.

    The SWA side keeps the largest window of the layers and `swa_window`, which says what the layers do not: a pipeline
    rank with none but full layers, or a target whose draft has the wider window, then evicts as its peers do. An SWA
    side that no layer lives on is ids without buffers.

    Raises `TypeError` and `ValueError` for arguments that make no pool, or one that could never serve one request,
    `DeviceUnavailable`, `NoKernel`, and `OutOfMemory` if memory, without swap, does not hold the pool; nothing is
    allocated then.
    """

    @torch.inference_mode(False)  # what is made here must stay writable outside of an engine's inference mode
    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        size: int,
        swa_size: int | None = None,
        page_size: int = 1,
        dtype: torch.dtype | str = torch.bfloat16,
        layout: Layout | str = "rows",
        device: dispatch.AnyDevice = None,
        check: bool | None = None,
        kernels: Mapping[str, str] | None = None,
        strict: bool = False,
        slots_of: HybridKVPool | None = None,
        swa_window: int | None = None,
    ) -> None:
        self.layers = as_layers(layers)
        self.page_size = page_size = as_int("page_size", page_size)
        size, swa_size = as_int("size", size), None if swa_size is None else as_int("swa_size", swa_size)
        self.has_swa = swa_size is not None
        self.kind, self.device = dispatch.resolve(device)
        self.check = as_switch("check", check, "PORTAKV_CHECK")
        found = self.kind.facts(self.device)
        self.dtype = storage_dtype(dtype, found)
        self.layout = choose_layout(layout, self.layers, self.dtype, page_size, found)
        groups = plan_groups(self.layers, self.has_swa, self.dtype, page_size, self.layout)
        if swa_window is not None and not self.has_swa:
            raise ValueError(f"swa_window: expected None without swa_size, got {swa_window}")
        self.window = widest_window(self.layers, swa_window) if self.has_swa else None
        common = dispatch.select_all(found, kernels, strict, dict.fromkeys(SLOT_OPS))
        rows = buffer_rows(size, swa_size, page_size)
        chosen = {key: dispatch.select_all(found, kernels, strict, key[1].ops, rows[key[0]]) for key in groups}
        check_kernels(kernels, groups)
        self.kernels = name_rows((common, *chosen.values()))
        self._slot_kernels = {op: dispatch.load(op, selection) for op, selection in common.items()}
        # Eager, and as a tracer sees them: `tracing()` says which.
        every = self._slot_kernels, ops.traced(common, dict.fromkeys(common))
        self._slot_ops = cast(tuple[SlotOps, SlotOps], every)
        self._slot_checks = all(selection.row.checks for selection in common.values())

        self._owns_slots = slots_of is None
        if slots_of is not None:
            checks.check_attachable(self, slots_of, size, swa_size)

        def make() -> tuple[HybridSlotAllocator, Tensor, Tensor, tuple[LayerGroup, ...]]:
            if slots_of is None:
                where = self.kind, self.device
                slots = allocate_slots(size, swa_size, page_size, self.window, *where, self._slot_ops)
            else:
                slots = slots_of.allocator, slots_of.full_to_swa
            faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64, device=self.device)
            of_group = ((key, ids, self.layers, rows[key[0]], self.device, chosen[key]) for key, ids in groups.items())
            return *slots, faults, tuple(allocate_group(*each) for each in of_group)

        needs = pool_bytes(groups, size, swa_size, page_size, self.device, self._owns_slots)
        self.allocator, self.full_to_swa, self._faults, self.groups = devices.allocate(make, needs)
        self.size = size // page_size * page_size
        self.swa_size = None if swa_size is None else swa_size // page_size * page_size
        self._bound = tuple(
            {i: group.layer(at, traced) for group in self.groups for at, i in enumerate(group.layers)}
            for traced in (False, True)
        )
        owner = [i if spec.alias_of is None else spec.alias_of for i, spec in enumerate(self.layers)]
        self._readable = tuple({i: bound[at] for i, at in enumerate(owner)} for bound in self._bound)
        self._layers = self._bound[False]
        self._stores_swa = any(group.side == "swa" for group in self.groups)
        self._planner = ReadPlanner(
            *(self.layers, self._readable[False], self.full_to_swa, self._faults, self.kind, self._slot_ops),
            self.allocator,
        )

    @classmethod
    def fit(
        cls,
        layers: Sequence[LayerSpec],
        budget: int,
        *,
        swa_ratio: float | None = None,
        page_size: int = 1,
        dtype: torch.dtype | str = torch.bfloat16,
        layout: Layout | str = "rows",
        device: dispatch.AnyDevice = None,
        swa_window: int | None = None,
        **options: Any,
    ) -> HybridKVPool:
        """The largest pool whose `nbytes` stay within `budget` bytes.

        `swa_ratio` is `swa_size / size`, in (0, 1]; `None` keeps every layer on the full side. Layers without a window
        get no SWA side, whatever the ratio, as it would only limit them; with `swa_window` they get one, of ids alone,
        as a pipeline rank needs whose peers have windows. Ranks that must agree take the smallest sizes that any of
        them fits, and build their pools with these. Raises `ValueError` if the budget does not hold a pool that can
        serve one request.
        """
        kind, target = dispatch.resolve(device)
        specs, found, page_size = as_layers(layers), kind.facts(target), as_int("page_size", page_size)
        storage = storage_dtype(dtype, found)
        lies = choose_layout(layout, specs, storage, page_size, found)
        swa_ratio = as_ratio(swa_ratio)
        if swa_window is not None and swa_ratio is None:
            raise ValueError(f"swa_window: expected None without swa_ratio, got {swa_window}")
        if widest_window(specs, swa_window) is None:
            swa_ratio = None
        groups = plan_groups(specs, swa_ratio is not None, storage, page_size, lies)
        size, swa_size = fit_sizes(groups, budget, swa_ratio, page_size, target)
        options |= {"page_size": page_size, "dtype": storage, "layout": lies, "device": device}
        return cls(layers, size=size, swa_size=swa_size, swa_window=swa_window, **options)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all K and V buffers, reserved pages included."""
        return sum(group.kv_bytes for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of everything the pool allocated, on host and device; attached slots are the other pool's."""
        slots = self.allocator.nbytes if self._owns_slots else 0
        if self._owns_slots and not devices.shares_host_memory(self.device):
            slots += self.full_to_swa.nbytes
        return self.kv_bytes + slots + self._faults.nbytes + sum(group.scales.nbytes for group in self.groups)

    # A forward: one plan, then per layer a store and a read.

    def plan_write(self, loc: Tensor, index_dtype: torch.dtype = torch.int64) -> KVWriteLoc:
        """Translate full slots `loc [T]` (int32 or int64, on the host or the pool's device), once per forward.

        Returns locations of `index_dtype` on the pool's device; `loc` itself is part of them where it needs no copy.
        A slot out of range gives -1 on the SWA side and a counted fault, in checked mode a `SlotFault`; one that
        does not fit int32 gives -1 and a fault.
        """
        require_slots("loc", loc)
        require_index_dtype("index_dtype", index_dtype)
        return self._plan(loc, index_dtype, self._checking())

    def _plan(self, loc: Tensor, index_dtype: torch.dtype, checking: bool) -> KVWriteLoc:
        loc = to_device(loc, self.kind, self.device)
        if loc.dtype is index_dtype and not self.has_swa:
            if checking:
                checks.check_slots("loc", checks.read_back(loc)[0], self.full_to_swa.shape[0] - 1)
            return planned(loc, None)
        try:
            copy = None if loc.dtype is index_dtype else torch.empty_like(loc, dtype=index_dtype)
            swa_loc = torch.empty_like(loc, dtype=index_dtype)
        except RuntimeError:
            require_plain("loc", loc)  # of torch.func, or no memory is left
            raise
        self._translate(loc, swa_loc, copy, None, None, checking)
        return planned(loc if copy is None else copy, swa_loc if self.has_swa else None)

    def graph_write_loc(self, max_tokens: int, int32_twin: bool = False) -> GraphWriteLoc:
        """Write locations at fixed addresses for `max_tokens` tokens of a captured graph."""
        max_tokens = as_int("max_tokens", max_tokens)
        return GraphWriteLoc(self._translate, max_tokens, self.kind, self.device, int32_twin)

    def cast_write_loc(self, write_loc: WriteLoc) -> KVWriteLoc:
        """An int32 copy of locations, for consumers that index in 32 bits; what does not fit becomes -1 and a fault."""
        require_location("write_loc", write_loc, self.device)
        for slots in (write_loc.loc, write_loc.swa_loc):
            if slots is not None:
                require_plain("write_loc", slots)
        loc = torch.empty_like(write_loc.loc, dtype=torch.int32)
        cast_loc = self._slot_ops[tracing()]["cast_loc"]
        cast_loc(write_loc.loc, loc, self._faults)
        if write_loc.swa_loc is None:
            return planned(loc, None)
        swa_loc = torch.empty_like(write_loc.swa_loc, dtype=torch.int32)
        cast_loc(write_loc.swa_loc, swa_loc, self._faults)
        return planned(loc, swa_loc)

    def plan_read(
        self,
        req_to_token: Tensor,
        req_rows: Tensor,
        seq_lens: Tensor,
        query_lens: Lengths = None,
        *,
        extra_lens: Lengths = None,
        prefix_only: bool = False,
        consumer: str | ReadStyle | None = None,
        structure: Structure | str | None = None,
        index_dtype: torch.dtype | None = None,
        pad: int | None = None,
        max_len: int | None = None,
        max_query_len: int | None = None,
        out: ReadPlan | None = None,
    ) -> ReadPlan:
        """What each layer's attention reads, once per forward: one launch for each side and window of the layers.

        In prefill pass `query_lens`: windows are clipped for a sequence's first query, and the default is one query.

        `req_to_token [R, C]`, on the pool's device, holds the full slot of each request and position; sequence b is its
        row `req_rows[b]`. `seq_lens [B]` counts tokens, the queries among them: the last `query_lens` (default 1).
        `extra_lens` tokens come on top, where seq_lens counts what is committed only (a verify's drafts, a chunk in
        prefill), and are the queries unless said otherwise. `prefix_only` leaves out the queries' own keys. Lengths are
        tensors, or one int for all.

        `consumer` (default "flashattention") is a name of CONSUMERS or a ReadStyle; `structure`, `index_dtype` and
        `pad` override its choices. Lengths on the host are checked, and buffers fit them. Those on the device are not
        read back: `max_len` (default C) and `max_query_len` bound each sequence, and what goes past is cut and counted.
        `out`, a plan of this pool and style, is filled in place and all its tails are reset.

        torch.compile can trace it where all lengths are on a device; those on the host break its graph.

        Raises `ValueError` and `TypeError`, before anything is written.
        """
        choice = (consumer, structure, index_dtype, pad)
        columns = {"req_rows": req_rows, "seq_lens": seq_lens, "extra_lens": extra_lens, "query_lens": query_lens}
        bounds = (max_len, max_query_len)
        return self._planner.plan(req_to_token, columns, choice, prefix_only, *bounds, out, self._checking())

    def graph_read_plan(
        self,
        max_reqs: int,
        max_len: int,
        *,
        max_query_len: int = 1,
        consumer: str | ReadStyle | None = None,
        structure: Structure | str | None = None,
        index_dtype: torch.dtype | None = None,
        pad: int | None = None,
    ) -> ReadPlan:
        """A plan at fixed addresses for captured graphs; `plan_read(…, out=plan)` fills it, before a replay or inside.

        It holds `max_reqs` sequences of `max_len` tokens with `max_query_len` queries, and starts empty.
        """
        return self._planner.graph_plan((consumer, structure, index_dtype, pad), max_reqs, max_len, max_query_len)

    def set_kv_buffer(self, layer_id: int, write_loc: WriteLoc, k: Tensor, v: Tensor, rope: Rope | None = None) -> None:
        """Store `k [T, H, D]` and `v [T, H, Dv]` at the layer's locations, in one launch.

        A full layer writes `write_loc.loc`, a sliding-window layer `write_loc.swa_loc`; nothing is translated here. Any
        strides with a dense last axis. k and v are each of a float dtype, converted or quantised with the layer's
        scales, or of the storage dtype, moved byte for byte; with `rope`, or in layouts of blocks, both of one.
        They must not overlap the cache. Rows for PAD, the reserved page, negative slots, and tokens that `rope` has no
        angle for (these are counted) go nowhere.

        The same slot twice in one store is an error in checked mode. Otherwise that slot, and no other, holds one whole
        row on CPUs and in the reference: the last of them, all of K and V, values and scales, in every layout. On GPUs
        each element of that slot (in FlashMLA's layouts each byte) is of one of the rows named for it, but heads, K and
        V, neighbours or a block's values and scale may be of different ones. PAD and negatives may repeat.

        Raises `MissingSwaLoc`, and in checked mode `SlotFault`, `StaleWriteLoc`, `ValueError` for a position, or
        `SlotOwnership` for a full layer's slot that is free; one that another request has by now cannot be told apart.
        """
        traced = tracing()
        layer = self._bound[traced].get(layer_id) if type(layer_id) is int else None
        if layer is None:
            layer = self._stored(layer_id, traced)
        try:
            loc: Any = write_loc.swa_loc if layer.on_swa else write_loc.loc
            if not layer.store_checks:
                self._check_rows(layer, loc, k, v)
            slots = None
            if self.check and not traced and not devices.is_capturing(self.device):
                slots = checks.check_store(layer, write_loc, loc, self.allocator)
            if rope is not None:
                return store_rotated(layer, rope, loc, k, v, self._faults, slots)
            return layer.store(
                k, v, layer.k_cache, layer.v_cache, loc, layer.k_inv, layer.v_inv, self._faults, layer.fmt
            )
        except (AttributeError, TypeError, ValueError):
            # Refused: once more in full, to name this call's arguments.
            loc = checks.side_slots("write_loc", layer_id, layer, write_loc)
            self._check_rows(layer, loc, k, v, mixed=rope is None and layer.fmt.dtype in layer.sources)
            if k.dtype is v.dtype:
                raise
        # Of two dtypes, as under autocast: kernels take one, so each is converted on its own first.
        from portakv.kernels.reference.rows import convert  # `import portakv` loads no kernels

        k, v = convert(k, layer.fmt, layer.k_inv), convert(v, layer.fmt, layer.v_inv)
        return self.set_kv_buffer(layer_id, write_loc, k, v)

    def _check_rows(self, layer: Layer, loc: Tensor, k: Tensor, v: Tensor, mixed: bool = False) -> None:
        """Raise for what a store cannot take, as the kernels do that look themselves."""
        names = ("k", "v", "write_loc")
        tails, eager = (layer.k_tail, layer.v_tail), bool(layer.spans)
        require_rows(names, tails, loc, k, v, layer.sources, self.device, mixed, plain=eager)
        if eager:
            require_apart("k", k, layer.spans)
            require_apart("v", v, layer.spans)

    def get_kv_buffer(self, layer_id: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The layer's K `[rows, H, D]` and V `[rows, H, Dv]` themselves, the reserved page's rows first; other layouts
        as `KVFormat.readable` says.

        A layer that aliases another gets that layer's. `dtype` is what the reader takes the bytes for: anything but the
        storage dtype is a `TypeError`, as e4m3fn and e4m3fnuz read the same byte as different numbers.
        """
        layer = self._read(layer_id)
        if dtype is not None and dtype is not self.dtype:
            as_dtype("dtype", dtype, (self.dtype,), "the pool's {}")
        return layer.fmt.readable(layer.k_cache, layer.v_cache) if is_dynamo_compiling() else layer.readable

    def gather_kv(
        self,
        layer_id: int,
        locations: WriteLoc,
        k_out: Tensor | None = None,
        v_out: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Copy the layer's rows at `locations` to `k_out [T, H, D]` and `v_out [T, H, Dv]`, or to `[B, S, H, D]` and
        `[B, S, H, Dv]`, the rows of B sequences one after another.

        Outputs may have any strides with a dense last axis; without them, zeroed ones of `dtype` are made. `dtype`
        defaults to the storage dtype, and any other float dtype is read by value, times the scale where the pool is
        quantised. Negative slots leave their row as it is.
        """
        layer = self._read(layer_id, tracing())
        loc = checks.side_slots("locations", layer_id, layer, locations)
        if dtype is not None:
            dtype = as_dtype("dtype", dtype, layer.sources)
        made = dtype or layer.fmt.read_dtype
        if k_out is None:
            k_out = torch.zeros((loc.shape[0], *layer.k_tail), dtype=made, device=self.device)
        if v_out is None:
            made = k_out.dtype if isinstance(k_out, Tensor) and k_out.dtype in layer.sources else made
            v_out = torch.zeros((loc.shape[0], *layer.v_tail), dtype=made, device=self.device)
        dtypes = layer.sources if dtype is None else {dtype}
        names, tails = ("k_out", "v_out", "locations"), (layer.k_tail, layer.v_tail)
        looks = bool(layer.spans) and not layer.gather_checks
        require_rows(names, tails, loc, k_out, v_out, dtypes, self.device, mixed=True, batched=True, plain=looks)
        if layer.spans and (looks or not (k_out.is_contiguous() and v_out.is_contiguous())):
            require_disjoint(k_out=k_out, v_out=v_out)
            require_apart("k_out", k_out, layer.spans)
            require_apart("v_out", v_out, layer.spans)
        if k_out.dtype is not v_out.dtype:  # kernels write one dtype: once for each, beside what nobody reads
            self.gather_kv(layer_id, locations, k_out, torch.empty_like(v_out, dtype=k_out.dtype))
            self.gather_kv(layer_id, locations, torch.empty_like(k_out, dtype=v_out.dtype), v_out)
            return k_out, v_out
        if self._checking():
            checks.check_slots("locations", checks.read_back(loc)[0], layer.num_rows)
        if k_out.dim() == 4 and not layer.gathers_batches:
            # Kernels that know no batches get rows of their own where the batch's do not lie evenly.
            k_rows, v_rows = k_out.flatten(0, 1), v_out.flatten(0, 1)
            self.gather_kv(layer_id, locations, k_rows, v_rows, dtype)
            for x, rows in ((k_out, k_rows), (v_out, v_rows)):
                if x.data_ptr() != rows.data_ptr():
                    x.copy_(rows.view(x.shape))
            return k_out, v_out
        try:
            self._gather(layer, loc, k_out, v_out)
        except (TypeError, ValueError):
            require_plain("locations", loc)  # by this call's name for it
            raise
        return k_out, v_out

    def _gather(self, layer: Layer, loc: Tensor, k_out: Tensor, v_out: Tensor) -> None:
        """The launch of `gather_kv` into outputs that are known to lie apart."""
        layer.gather(
            *(layer.k_cache, layer.v_cache, loc, k_out, v_out, layer.k_scale, layer.v_scale),
            *(self._faults, layer.fmt),
        )

    def set_scales(self, layer_id: int, k_scale: Scale = None, v_scale: Scale = None) -> None:
        """Set what a quantised layer's stored numbers are multiplied with when read; stores divide by it.

        A float, a tensor of one element, or one of H per KV head; `None` is 1. Values are copied, in place, so captured
        graphs see them. Unquantised pools and FlashMLA's, whose blocks have scales of their own, check them and make no
        use of them. Raises `ValueError` unless every scale and its float32 reciprocal are finite and positive.
        """
        layer = self._stored(layer_id, False)
        k, v = (as_scales(*named, layer.k_tail[0]) for named in (("k_scale", k_scale), ("v_scale", v_scale)))
        # In one step, as a scale and its reciprocal belong together.
        layer.scales.copy_(torch.stack([x.expand(layer.k_tail[0]) for x in (k, v, 1 / k, 1 / v)]))

    # Between forwards.

    def move_kv_cache(self, tgt: Tensor, src: Tensor) -> None:
        """Copy full slots `src [N]` to `tgt [N]` and their SWA peers, in every layer, as if all reads came first.

        The same slot twice in `tgt` is what the same slot twice in one store is, see `set_kv_buffer`.
        """
        for name, slots in (("tgt", tgt), ("src", src)):
            require_slots(name, slots)
            require_plain(name, slots)
        if tgt.shape != src.shape:
            raise ValueError(f"src: expected {tgt.shape[0]} slots as in tgt, got {src.shape[0]}")
        tgt, src = (to_device(x, self.kind, self.device, name) for name, x in (("tgt", tgt), ("src", src)))
        if self._checking():
            targets, sources = checks.read_back(tgt, src)
            checks.check_move(targets, sources, self.allocator, self._stores_swa)
        to, source = (self._plan(slots, torch.int64, False) for slots in (tgt, src))
        for group in self.groups:
            write, read = (to.swa_loc, source.swa_loc) if group.side == "swa" else (to.loc, source.loc)
            group.kernel("move_kv")(group.k_caches, group.v_caches, write, read, self._faults, group.raw)

    def copy_to_host(self, slots: Tensor) -> HostCopy:
        """Copy a sequence's full slots, and their SWA peers where they are live, to the host. Waits for the device.

        Raises `SlotOwnership` for a slot that is not handed out, and `ValueError` for slots whose copy could not be
        loaded again: a token without SWA bytes follows live ones in a page, counted from the first slot.
        """
        require_slots("slots", slots)
        values = as_ints("slots", slots)
        self.allocator.require_owned(values)
        live = self.allocator.is_live(values)
        transfer.check_pages("slots", live, self.page_size)
        return transfer.copy_to_host(self.groups, self._plan(slots, torch.int64, False), live, self._faults)

    def load_from_host(self, copy: HostCopy, slots: Tensor | None = None) -> Tensor:
        """Allocate slots for a host copy and fill them; tokens whose SWA side was gone stay without one.

        Returns the full slots. With `slots`, as of a pool that shares them and was loaded first, those are filled and
        nothing is allocated; they have SWA peers where the copy has SWA bytes, and live ones nowhere else. Raises
        `OutOfSlots`, `SlotFault` for a slot that stands twice, `SlotOwnership`, or `ValueError` where formats or scales
        differ.
        """
        transfer.check_copy(self.groups, copy, slots)

        def load() -> Tensor:
            to = transfer.take_slots(copy, self.allocator) if slots is None else slots
            values = as_ints("slots", to)
            if slots is not None:
                checks.check_load(values, copy.live if self._stores_swa else None, self.allocator)
            transfer.load_from_host(self.groups, copy, self._plan(to, torch.int64, False), self._faults)
            if slots is None or self._stores_swa:
                self.allocator.mark_written(values[copy.live])
            return to

        return self.allocator.atomically(load)

    def describe(self) -> tuple[transfer.GroupDescription, ...]:
        """Each layer group as a transfer engine needs it: geometry, item bytes, id space, buffers."""
        return tuple(transfer.describe(group) for group in self.groups)

    def faults(self, clear: bool = False) -> dict[str, int]:
        """Slots out of range that were skipped, reads that were cut or found no peer, by op. Waits for the device."""
        counts = dict(zip(FAULT_KINDS, self._faults.tolist(), strict=True))
        if require_bool("clear", clear):
            self._faults.zero_()
        return counts

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every slot is free or owned, exactly once, the device's mapping is the
        allocator's, and the reserved pages are still zero."""
        self.allocator.check_integrity()
        checks.check_storage(self.groups, self.full_to_swa, self.allocator.mapping)

    def _translate(
        self, loc: Tensor, swa: Tensor, copy: Out, swa_twin: Out, loc_twin: Out, checking: bool | None = None
    ) -> None:
        if not self._slot_checks:
            require_plain("loc", loc)
        if self._checking() if checking is None else checking:
            checks.check_slots("loc", checks.read_back(loc)[0], self.full_to_swa.shape[0] - 1)
        translate_loc = self._slot_ops[tracing()]["translate_loc"]
        translate_loc(self.full_to_swa, loc, swa, copy, swa_twin, loc_twin, self._faults)

    def _stored(self, layer_id: int, traced: bool) -> Layer:
        """A layer that stores its KV."""
        at = as_layer(layer_id, len(self.layers))
        layer = self._bound[traced].get(at)
        if layer is None:
            reads = f"got {at}, which reads layer {self.layers[at].alias_of}'s"
            raise ValueError(f"layer_id: expected a layer that stores its KV, {reads}")
        return layer

    def _read(self, layer_id: int, traced: bool = False) -> Layer:
        """A layer, or the one whose KV it reads."""
        layer = self._readable[traced].get(layer_id) if type(layer_id) is int else None
        return self._readable[traced][as_layer(layer_id, len(self.layers))] if layer is None else layer

    def _checking(self) -> bool:
        """Checked mode reads slots back, which nothing can do while a graph is captured or traced."""
        return self.check and not tracing() and not devices.is_capturing(self.device)
