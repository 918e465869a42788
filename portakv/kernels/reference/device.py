"""Every torch device without kernels of its own here (NPU, MUSA, MPS, meta): the reference rows run on its tensors."""

from __future__ import annotations

from portakv.device import Device

OTHER = Device(name="other", torch_type="", count=lambda: 0)
