"""What Triton must leave out where only its assembly is wanted."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from triton.backends import backends


@functools.cache
def prepare() -> None:
    """Have an older Triton stop at the assembly: it links with an ld.lld of ROCm's, which need not be here.

    What it compiles then is no kernel for a GPU, and goes into a cache apart.
    """
    backend = backends["amd"].compiler
    if hasattr(backend, "path_to_rocm_lld"):
        backend.make_hsaco = staticmethod(lambda *_: b"")
        backend.hash = lambda self: f"assembly-{self.target}"
        cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        os.environ["TRITON_CACHE_DIR"] = str(Path(cache, "assembly"))
