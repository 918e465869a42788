"""S46: importing portakv needs no kernel DSL, loads none, and puts no stand-in in its place."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types

import pytest

from portakv import dispatch

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""

DSLS = ("triton", "intel_extension_for_pytorch", "flash_attn", "transformers")

IMPORT_AND_STORE = f"""
import sys, torch, portakv

layers = [portakv.LayerSpec(None, 2, 8)]
pool = portakv.HybridKVPool(layers, size=8, device="cpu")
write_loc = pool.plan_write(pool.allocator.alloc(3))
x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
pool.set_kv_buffer(0, write_loc, x, x)
assert torch.equal(pool.gather_kv(0, write_loc)[0], x)
assert portakv.explain("cpu")

try:
    portakv.HybridKVPool(layers, size=8, device="cpu", kernels={{"store_kv": "triton"}})
except portakv.NoKernel as error:
    assert "native" in str(error) and "reference" in str(error) and "'triton' was requested" in str(error)
else:
    raise SystemExit("a CPU pool took triton")
assert not [name for name in {DSLS} if name in sys.modules]
"""

REQUEST = """
from portakv import device, dispatch

for gpu in (dispatch.CUDA, dispatch.HIP, dispatch.XPU):
    found = device.DeviceFacts(gpu, "some", packages={name: find() for name, find in gpu.packages.items()})
    try:
        dispatch.select("store_kv", found, dispatch.Request(wanted="triton"))
    except portakv.NoKernel as error:
        assert "triton: not installed" in str(error), error
    else:
        raise SystemExit("triton was chosen")
    assert dispatch.select("store_kv", found).row.name == "reference"
"""

FOUND = """
from portakv import device

found = device.find_triton("cuda")
assert found.version, found
assert "no active driver for cuda" in found.problem, found
"""


def run(code, blocked=()):
    """Run `code` in a fresh interpreter that finds the same portakv, with top-level packages blocked."""
    code = BLOCK.format(blocked=set(blocked)) + code if blocked else code
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PORTAKV_")}
    command = [sys.executable, "-P", "-c", code]  # -P: the portakv under test, not a folder of that name here
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_everything_installed():
    """A CPU pool loads no DSL; triton without a GPU is found, and has no active driver."""
    run(IMPORT_AND_STORE + (FOUND if importlib.util.find_spec("triton") else ""))


def test_everything_blocked():
    """An import, a store and an explicit request; torch sees that triton is missing: there is no stand-in."""
    stand_in = "from torch.utils._triton import has_triton_package\nassert not has_triton_package()\n"
    run(IMPORT_AND_STORE + stand_in, DSLS)


def test_an_explicit_request_says_what_is_missing():
    run("import portakv" + REQUEST, DSLS)


def test_a_broken_import_of_ours_is_not_taken_for_a_missing_package(monkeypatch):
    """Only the named package may be missing: what goes wrong inside a kernel module goes to the caller."""
    selection = dispatch.select("store_kv", dispatch.facts("cpu"), dispatch.Request(wanted="reference"))
    monkeypatch.setitem(sys.modules, "portakv.kernels.reference.rows", types.ModuleType("broken"))
    with pytest.raises(AttributeError, match="store_kv"):
        dispatch.load("store_kv", selection)
