"""The Triton kernels on such a device."""

from __future__ import annotations

from functools import partial

from portakv.kernels import _triton
from portakv.kernels.cuda.device import CUDA

LAUNCHER = _triton.launcher(CUDA.gpu)

translate_loc = partial(_triton.translate_loc.launch, LAUNCHER)
cast_loc = partial(_triton.cast_loc.launch, LAUNCHER)
patch_map = partial(_triton.patch_map.launch, LAUNCHER)
build_read = partial(_triton.build_read.launch, LAUNCHER)
store_kv = partial(_triton.store_kv.launch, LAUNCHER)
gather_kv = partial(_triton.gather_kv.launch, LAUNCHER)
move_kv = partial(_triton.move_kv.launch, LAUNCHER)
store_kv_rope = partial(_triton.store_kv_rope.launch, LAUNCHER)
store_kv_rope_flashmla = partial(_triton.store_flashmla.launch_rope, LAUNCHER)
store_kv_flashmla = partial(_triton.store_flashmla.launch, LAUNCHER)
gather_kv_flashmla = partial(_triton.gather_flashmla.launch, LAUNCHER)
