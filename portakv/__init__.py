"""portakv: one KV-cache pool for hybrid models, with the same bytes on every device."""

from portakv import parallel
from portakv.allocator import HybridSlotAllocator
from portakv.compile import warmup
from portakv.consumers import CONSUMERS, ReadStyle
from portakv.device import DeviceKind
from portakv.dispatch import DEVICE, explain
from portakv.errors import (
    DeviceUnavailable,
    IntegrityError,
    MissingSwaLoc,
    NoKernel,
    OutOfMemory,
    OutOfSlots,
    PortaKVError,
    SlotFault,
    SlotOwnership,
    StaleWriteLoc,
)
from portakv.formats import Structure
from portakv.layers import LayerSpec, layers_from_config
from portakv.pool import HybridKVPool
from portakv.read_plan import ReadIndices, ReadPlan
from portakv.rope import Rope
from portakv.transfer import GroupDescription, HostCopy
from portakv.write_loc import GraphWriteLoc, KVWriteLoc, resolve_write_loc

__all__ = [
    "CONSUMERS",
    "DEVICE",
    "DeviceKind",
    "DeviceUnavailable",
    "GraphWriteLoc",
    "GroupDescription",
    "HostCopy",
    "HybridKVPool",
    "HybridSlotAllocator",
    "IntegrityError",
    "KVWriteLoc",
    "LayerSpec",
    "MissingSwaLoc",
    "NoKernel",
    "OutOfMemory",
    "OutOfSlots",
    "PortaKVError",
    "ReadIndices",
    "ReadPlan",
    "ReadStyle",
    "Rope",
    "SlotFault",
    "SlotOwnership",
    "StaleWriteLoc",
    "Structure",
    "explain",
    "layers_from_config",
    "parallel",
    "resolve_write_loc",
    "warmup",
]
