"""S50: XPU probing needs no extension, survives whatever torch.xpu does, and wakes no driver at import."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from portakv.device import DeviceFacts, Package
from portakv.dispatch import OPS, XPU, select


@pytest.mark.parametrize(
    ("xpu", "built"),
    [
        (types.SimpleNamespace(_is_compiled=lambda: True), "XPU"),
        (types.SimpleNamespace(_is_compiled=lambda: False), None),
        (types.SimpleNamespace(is_available=lambda: True), None),
        (None, None),
    ],
    ids=["compiled", "not compiled", "another API", "none"],
)
def test_what_torch_was_built_for(monkeypatch, xpu, built):
    monkeypatch.setattr(torch, "xpu", xpu)
    assert XPU.built() == built


def test_a_torch_without_xpu(monkeypatch):
    monkeypatch.delattr(torch, "xpu")
    assert XPU.built() is None
    assert XPU.probe().count == 0


def test_a_probe_that_raises_is_a_reason(monkeypatch):
    def device_count():
        raise RuntimeError("Level Zero: no driver")

    monkeypatch.setattr(torch, "xpu", types.SimpleNamespace(device_count=device_count, _is_compiled=lambda: True))
    probe = XPU.probe()
    assert probe.count == 0
    assert "counting its devices failed: Level Zero: no driver" in probe.reason


def test_no_extension_is_needed(monkeypatch):
    """torch with native XPU and no IPEX: offered, and served by our rows."""
    xpu = types.SimpleNamespace(device_count=lambda: 2, _is_compiled=lambda: True)
    monkeypatch.setattr(torch, "xpu", xpu)
    assert XPU.probe().reason == "built for XPU; 2 visible"
    packages = {"triton": Package("3.3.0"), "ipex": Package(problem="not installed")}
    found = DeviceFacts(XPU, "PVC", packages=packages)
    for op in OPS:
        # Packed pages are for CPUs.
        assert select(op, found).row.name == ("reference" if op.endswith("_packed") else "triton")


HYGIENE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "intel_extension_for_pytorch", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import os
import torch
import portakv

assert not torch.cuda.is_initialized()
assert not torch.xpu.is_initialized()

def serve(device):
    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 2, 8)], size=8, device=device)
    write_loc = pool.plan_write(pool.allocator.alloc(3))
    x = torch.ones(3, 2, 8, dtype=torch.bfloat16, device=pool.device)
    pool.set_kv_buffer(0, write_loc, x, x)
    assert (pool.gather_kv(0, write_loc)[0] == 1).all()

child = os.fork()
if child == 0:
    try:
        serve(sys.argv[1])
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
serve(sys.argv[1])
"""


def run_hygiene(*device):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PORTAKV_")}
    command = [sys.executable, "-P", "-c", HYGIENE, *device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_creates_no_context_and_a_forked_child_can_serve():
    run_hygiene("cpu")


def test_a_forked_child_can_use_the_device(accelerator):
    run_hygiene(str(accelerator))
