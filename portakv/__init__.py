"""portakv: one KV-cache pool for hybrid models, with the same bytes on every device."""

import sys

try:
    from portakv.dispatch import DEVICE, explain
except (ValueError, RuntimeError) as error:  # what PORTAKV_DEVICE says, before the command line is there to tell it
    command = (sys.argv or [""])[0].rpartition("/")[2]
    if command == "-m":  # while Python looks for the module
        command = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if command != "portakv":
        raise
    print(f"portakv: {error}", file=sys.stderr)
    sys.exit(2)

from portakv import parallel
from portakv.allocator import HybridSlotAllocator
from portakv.compile import warmup
from portakv.consumers import CONSUMERS, ReadStyle
from portakv.device import DeviceKind
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
