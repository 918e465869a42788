"""Where a forward writes: KVWriteLoc, a snapshot made once per forward, and its twin for captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from portakv import device as devices
from portakv.arguments import MOST, as_int, require_bool, require_index_dtype, require_plain, require_slots, shown
from portakv.formats import INDEX_DTYPES

if TYPE_CHECKING:
    from portakv.pool import HybridKVPool

Translate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], None]
"""`(loc, swa_out, loc_out, swa_twin, loc_twin)`: op `translate_loc` with a pool's mapping and faults bound; `loc` is on
the device."""


@dataclass(frozen=True, slots=True, eq=False)
class KVWriteLoc:
    """The write locations of one forward: `loc` on the full side, `swa_loc` on the sliding-window side.

    Both are 1-D int32 or int64, in token order, on the pool's device. It is a snapshot: nothing on the pool
    remembers it, and a later edit of the mapping does not reach it. A `swa_loc` longer than `loc` is cut (padded
    metadata over a shrunk batch); a shorter one is a `ValueError`. Take columns or fewer tokens with a slice:
    `write_loc[a:b]` shares memory with `write_loc`.
    """

    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None

    def __post_init__(self) -> None:
        require_slots("loc", self.loc)
        if self.swa_loc is None:
            return
        require_slots("swa_loc", self.swa_loc)
        if self.swa_loc.device != self.loc.device:
            raise ValueError(f"swa_loc: expected a tensor on {self.loc.device}, got {self.swa_loc.device}")
        n, n_swa = self.loc.shape[0], self.swa_loc.shape[0]
        if n_swa < n:
            raise ValueError(f"swa_loc: expected at least {n} slots, got {n_swa}")
        if n_swa > n:
            object.__setattr__(self, "swa_loc", self.swa_loc[:n])

    def __len__(self) -> int:
        return int(self.loc.shape[0])

    def __getitem__(self, tokens: slice) -> KVWriteLoc:
        if not isinstance(tokens, slice):
            raise TypeError(f"tokens: expected a slice, got {shown(tokens)}")
        for bound in (tokens.start, tokens.stop, tokens.step):
            if bound is not None and not isinstance(bound, torch.SymInt):
                as_int("tokens", bound, -MOST)
        if tokens.step is not None and tokens.step < 1:
            raise ValueError(f"tokens: expected a step of at least 1, got {tokens.step}")
        return KVWriteLoc(self.loc[tokens], None if self.swa_loc is None else self.swa_loc[tokens])


_new = KVWriteLoc.__new__
_set_loc, _set_swa_loc = (KVWriteLoc.__dict__[name].__set__ for name in ("loc", "swa_loc"))


def planned(loc: torch.Tensor, swa_loc: torch.Tensor | None) -> KVWriteLoc:
    """A KVWriteLoc of tensors the pool made itself, without the checks: they would be a third of a plan's time."""
    if is_dynamo_compiling():  # cannot follow what comes below
        return KVWriteLoc(loc, swa_loc)
    write_loc = _new(KVWriteLoc)
    _set_loc(write_loc, loc)
    _set_swa_loc(write_loc, swa_loc)
    return write_loc


class GraphWriteLoc:
    """Write locations at fixed addresses, for captured graphs; made by `pool.graph_write_loc(max_tokens)`.

    `loc` and `swa_loc` are int64 `[max_tokens]` and start as PAD; `int32` holds int32 copies at fixed addresses
    too, where asked for. `set_kv_buffer` takes it as it is, or a slice of it for a smaller captured batch.
    """

    __slots__ = ("_kind", "_translate", "int32", "loc", "swa_loc")

    @torch.inference_mode(False)  # as the pool's own tensors: filled in any mode
    def __init__(
        self,
        translate: Translate,
        max_tokens: int,
        kind: devices.Device,
        device: torch.device,
        int32_twin: bool = False,
    ) -> None:
        require_bool("int32_twin", int32_twin)
        dtypes = INDEX_DTYPES if int32_twin else (torch.int64,)
        needs = {device: 2 * max_tokens * sum(dtype.itemsize for dtype in dtypes)}
        made = devices.allocate(
            lambda: {dtype: torch.zeros((2, max_tokens), dtype=dtype, device=device) for dtype in dtypes}, needs
        )
        self.loc, self.swa_loc = made[torch.int64]
        self.int32 = KVWriteLoc(*made[torch.int32]) if int32_twin else None
        self._translate, self._kind = translate, kind

    def __len__(self) -> int:
        return int(self.loc.shape[0])

    def __getitem__(self, tokens: slice) -> KVWriteLoc:
        return KVWriteLoc(self.loc, self.swa_loc)[tokens]

    def fill(self, loc: torch.Tensor) -> None:
        """Write `loc`, its translation and the int32 copies, and reset every tail to PAD, in one launch.

        Call it before a replay with the live tokens, or capture it over a PAD-padded device tensor of full
        length. Raises `ValueError` for more tokens than it holds, and in checked mode `SlotFault` for a slot out
        of range; nothing is written then.
        """
        require_slots("loc", loc)
        if loc.shape[0] > len(self):
            raise ValueError(f"loc: expected at most {len(self)} slots, got {loc.shape[0]}")
        loc_twin, swa_twin = (None, None) if self.int32 is None else (self.int32.loc, self.int32.swa_loc)
        self._translate(to_device(loc, self._kind, self.loc.device), self.swa_loc, self.loc, swa_twin, loc_twin)


WriteLoc = KVWriteLoc | GraphWriteLoc


def resolve_write_loc(
    pool: HybridKVPool,
    loc: torch.Tensor | None,
    plan: WriteLoc | None = None,
    *,
    idle: bool = False,
    index_dtype: torch.dtype = torch.int32,
) -> WriteLoc:
    """The write locations of a forward that may have come with a plan; called once, when it starts.

    `loc` is the batch's full slots `[T]` as `pool.plan_write` takes them, `None` without any; `plan` the locations that
    travelled with the batch; `idle` says that this rank has no requests, only padding. Four cases, those of SGLang's
    DeepSeek-V4 backend (`get_swa_out_cache_loc` in `layers/attention/deepseek_v4_backend.py`):

    - no plan: translated now;
    - a plan for as many tokens: taken as it is, but cast if it has another width than `index_dtype`, so that who plans
      ahead had better say `pool.plan_write(loc, torch.int32)`;
    - a plan for another number of tokens, as before DP padding, or without the SWA side: translated now;
    - idle: a plan is left over from another batch, so padding is translated now; no tokens need no launch at all.

    The result has as many tokens as `loc`. Raises as `pool.plan_write` does, and `TypeError` for another kind of plan.
    """
    require_index_dtype("index_dtype", index_dtype)
    if not hasattr(pool, "plan_write"):
        raise TypeError(f"pool: expected a HybridKVPool, got {shown(pool)}")
    require_bool("idle", idle)
    if plan is not None:
        require_location("plan", plan, pool.device)
    if loc is not None:
        require_slots("loc", loc)
    if loc is None or loc.shape[0] == 0:
        empty = torch.empty(0, dtype=index_dtype, device=pool.device)
        return planned(empty, empty if pool.has_swa else None)
    usable = (
        plan is not None and not idle and len(plan) == loc.shape[0] and (plan.swa_loc is not None or not pool.has_swa)
    )
    if plan is None or not usable:
        return pool.plan_write(loc, index_dtype)
    if all(slots is None or slots.dtype is index_dtype for slots in (plan.loc, plan.swa_loc)):
        return plan
    for slots in (plan.loc, plan.swa_loc):
        if slots is not None:
            require_plain("plan", slots)
    if index_dtype is torch.int32:
        return pool.cast_write_loc(plan)
    return planned(plan.loc.long(), None if plan.swa_loc is None else plan.swa_loc.long())


def require_location(name: str, locations: WriteLoc, device: torch.device | None = None) -> None:
    """Raise unless `locations` are write locations, on `device` where one is given."""
    if not isinstance(locations, (KVWriteLoc, GraphWriteLoc)):
        raise TypeError(f"{name}: expected a KVWriteLoc or GraphWriteLoc, got {type(locations).__name__}")
    if device is not None and locations.loc.device != device:
        raise ValueError(f"{name}: expected slots on {device}, got {locations.loc.device}")


def to_device(loc: torch.Tensor, kind: devices.Device, device: torch.device, name: str = "loc") -> torch.Tensor:
    """Slots of the host or of `device`, one of `kind`, on `device`."""
    if loc.device == device:
        return loc
    require_plain(name, loc)  # what copies it would read past its end
    if not devices.shares_host_memory(loc.device):
        raise ValueError(f"{name}: expected a tensor on the host or on {device}, got {loc.device}")
    if devices.is_capturing(device):
        # A replay would read the host's buffer again, whatever it holds by then.
        raise ValueError(f"{name}: expected slots on {device} while a graph is captured, got {loc.device}")
    return kind.upload(loc, device)
