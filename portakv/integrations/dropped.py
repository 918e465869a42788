"""Slots of caches that were dropped instead of released, wherever the garbage collector came by."""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING

import torch

from portakv.allocator import HybridSlotAllocator

if TYPE_CHECKING:
    from portakv.integrations.transformers import _Batch

_orphans: weakref.WeakKeyDictionary[HybridSlotAllocator, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""Slots of dropped caches that could not be freed on the spot."""


def release(batch: _Batch) -> None:
    """Free the slots of a dropped cache.

    The garbage collector drops caches at any time and in any thread: also inside a call of the allocator,
    which must not be entered twice. Those slots are freed at the start of the next forward on the same pool.
    """
    if threading.get_ident() == batch.thread and not _inside_allocator():
        batch.release()
    else:
        _orphans.setdefault(batch.allocator, []).append(batch.slots[:, : batch.length].flatten())


def free_orphans(allocator: HybridSlotAllocator) -> None:
    for slots in _orphans.pop(allocator, ()):
        allocator.free(slots)


def _inside_allocator() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != HybridSlotAllocator.__module__:
        frame = frame.f_back
    return frame is not None
