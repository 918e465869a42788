from portakv.kernels.reference.flashmla import gather_kv_flashmla as gather_kv_flashmla
from portakv.kernels.reference.flashmla import store_kv_flashmla as store_kv_flashmla
from portakv.kernels.reference.flashmla import store_kv_rope_flashmla as store_kv_rope_flashmla
from portakv.kernels.reference.packed import gather_kv_packed as gather_kv_packed
from portakv.kernels.reference.packed import move_kv_packed as move_kv_packed
from portakv.kernels.reference.packed import store_kv_packed as store_kv_packed
from portakv.kernels.reference.rows import build_read as build_read
from portakv.kernels.reference.rows import cast_loc as cast_loc
from portakv.kernels.reference.rows import gather_kv as gather_kv
from portakv.kernels.reference.rows import measure_read as measure_read
from portakv.kernels.reference.rows import move_kv as move_kv
from portakv.kernels.reference.rows import patch_map as patch_map
from portakv.kernels.reference.rows import store_kv as store_kv
from portakv.kernels.reference.rows import store_kv_rope as store_kv_rope
from portakv.kernels.reference.rows import translate_loc as translate_loc

def isa() -> str: ...
def isas() -> tuple[str, ...]: ...
def set_isa(name: str) -> None: ...
def use_reader(reader: int) -> bool: ...
