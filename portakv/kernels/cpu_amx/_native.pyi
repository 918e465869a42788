from portakv.kernels.reference import build_read as build_read
from portakv.kernels.reference import cast_loc as cast_loc
from portakv.kernels.reference import gather_kv as gather_kv
from portakv.kernels.reference import measure_read as measure_read
from portakv.kernels.reference import move_kv as move_kv
from portakv.kernels.reference import patch_map as patch_map
from portakv.kernels.reference import store_kv as store_kv
from portakv.kernels.reference import store_kv_rope as store_kv_rope
from portakv.kernels.reference import translate_loc as translate_loc
from portakv.kernels.reference_flashmla import gather_kv_flashmla as gather_kv_flashmla
from portakv.kernels.reference_flashmla import store_kv_flashmla as store_kv_flashmla
from portakv.kernels.reference_flashmla import store_kv_rope_flashmla as store_kv_rope_flashmla
from portakv.kernels.reference_packed import gather_kv_packed as gather_kv_packed
from portakv.kernels.reference_packed import move_kv_packed as move_kv_packed
from portakv.kernels.reference_packed import store_kv_packed as store_kv_packed

def isa() -> str: ...
def isas() -> tuple[str, ...]: ...
def set_isa(name: str) -> None: ...
def use_reader(reader: int) -> bool: ...
