"""A device that joins from outside: its value, and one kernel of its own on torch's CPU tensors."""

from portakv.device import Device, Row
from portakv.kernels.reference import rows as reference

STORED = []

TOY = Device(
    name="toy",
    torch_type="cpu",
    count=lambda: 1,
    rows=(Row("toy", f"{__name__}:{{op}}", "a test", ops=("store_kv",), layouts=("rows",), proof="a test"),),
)


def store_kv(*args):
    STORED.append(len(args[4]))
    reference.store_kv(*args)
