"""The Triton kernels on CPU tensors, bit for bit against the reference.

Triton reads `TRITON_INTERPRET` when it is imported, so the checks run in a process of their own: run plainly,
this file starts two; with `TRITON_INTERPRET=1` set, it is such a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from portakv import buffers, dispatch, testing
from portakv.formats import FAULT_KINDS, FLOAT_DTYPES, FP8_DIALECTS, PAD, KVFormat, list_variants
from portakv.kernels.reference import rows as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
OPS = [op for op in dispatch.OPS if dispatch.rows(op, dispatch.CUDA)[0].name == "triton"]


def _caches(fmt: KVFormat, num_layers: int, num_rows: int) -> list[torch.Tensor]:
    return list(fmt.caches([torch.zeros((num_layers, num_rows, n), dtype=torch.uint8) for n in fmt.item_bytes]))


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test of the interpreting process; elsewhere there is none."""
    return test if INTERPRETED else None


if INTERPRETED:
    from triton.runtime.interpreter import interpreter_builder

    from portakv.kernels._triton import move_kv
    from portakv.kernels.cuda import kernels
    from portakv.kernels.hip import kernels as hip
    from portakv.kernels.xpu import kernels as xpu
else:

    def test_in_processes_of_their_own() -> None:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k"]
        env = os.environ | {"TRITON_INTERPRET": "1"}
        halves = [
            subprocess.Popen([*command, tests], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for tests in ("store_kv or gather_kv", "not (store_kv or gather_kv)")
        ]
        printed = [half.communicate()[0] for half in halves]
        assert [half.returncode for half in halves] == [0, 0], "".join(printed)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN and overflow


@interpreted
@pytest.mark.parametrize("op", OPS)
def test_matches_reference(op: str) -> None:
    for case in testing.cases(op):
        testing.check(op, getattr(kernels, op), case, CPU)


@interpreted
@pytest.mark.parametrize("device", ["hip", "xpu"])
@pytest.mark.parametrize("op", OPS)
def test_other_devices_launch_the_same_kernels(op: str, device: str) -> None:
    """Under the interpreter they differ from CUDA's in nothing but the launcher, so a sample is enough."""
    for case in list(testing.cases(op))[::10]:
        testing.check(op, getattr({"hip": hip, "xpu": xpu}[device], op), case, CPU)


@interpreted
@pytest.mark.parametrize("op", [op for op in OPS if op.startswith(("store_kv", "move_kv"))])
def test_a_slot_named_twice_is_of_its_rows_in_any_order_of_programs(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run last to first, chunks of odd number first to last: other rows win in other parts of a slot, and each
    element is still of one of them."""
    set_grid_idx = interpreter_builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        set_grid_idx(x if y % 2 else interpreter_builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    torn = 0
    for case in testing.cases(op):
        if any(testing._orders(case)):
            testing.check(op, getattr(kernels, op), case, CPU, last_wins=False)
            try:
                testing.check(op, getattr(kernels, op), case, CPU)
            except buffers.Mismatch:
                torn += 1
    assert torn


@interpreted
@pytest.mark.parametrize("kept", [*FP8_DIALECTS, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_bit_pattern(kept: torch.dtype) -> None:
    """All 16-bit floats in, and every value that results out again, under a scale that reaches subnormals."""
    fmt = KVFormat(1, 256, 256, kept)
    slots, scale = torch.arange(1, 257), torch.tensor([0.37])
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(256, 1, 256)
    for dtype in (torch.bfloat16, torch.float16):
        k = patterns.view(dtype)
        got, want = ([*(t[0] for t in _caches(fmt, 1, 257)), *_outs(dtype)] for _ in range(2))
        for module, (k_cache, v_cache, k_out, v_out) in ((kernels, got), (reference, want)):
            faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
            module.store_kv(k, k.flip(0), k_cache, v_cache, slots, scale, scale * 3, faults, fmt)
            module.gather_kv(k_cache, v_cache, slots, k_out, v_out, scale, scale, faults, fmt)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _outs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros((256, 1, 256), dtype=dtype) for _ in range(2)]


@interpreted
def test_offsets_past_2_31() -> None:
    """Slot 3 of a cache whose slot stride is 2**31 lies at 6.4e9 bytes; only touched memory pages exist."""
    fmt, stride = KVFormat(2, 16, 16, torch.float8_e4m3fn), 2**31
    storage = torch.empty(3 * stride + 32, dtype=torch.uint8).view(fmt.dtype)
    cache = storage.as_strided((4, 2, 16), (stride, 16, 1))
    v_cache = torch.zeros((4, 2, 16), dtype=torch.uint8).view(fmt.dtype)
    k = torch.arange(32, dtype=torch.uint8).view(1, 2, 16).view(fmt.dtype)
    ones, faults = torch.ones(2), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    for slot in (torch.tensor([3]), torch.tensor([3], dtype=torch.int32)):
        k_out, v_out = torch.zeros_like(k), torch.zeros_like(k)
        kernels.store_kv(k, k, cache, v_cache, slot, ones, ones, faults, fmt)
        kernels.gather_kv(cache, v_cache, slot, k_out, v_out, ones, ones, faults, fmt)
        assert torch.equal(storage[3 * stride :].view(torch.uint8), k.view(torch.uint8).flatten())
        assert torch.equal(k_out.view(torch.uint8), k.view(torch.uint8))


@interpreted
def test_strided_slots() -> None:
    """A column of a 2-D location tensor is a view with a stride, and so is an output."""
    mapping = torch.tensor([PAD, 5, 0, 7, 9, -1])
    loc = torch.tensor([[1, 4], [3, 2], [9, 1]])
    out, want = torch.full((3, 2), 77), torch.full((3, 2), 77)
    for module, outs in ((kernels, out), (reference, want)):
        faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
        module.translate_loc(mapping, loc[:, 0], outs[:, 1], None, None, None, faults)
        assert faults.nonzero().tolist() == [[FAULT_KINDS.index("translate_loc")]]
    assert torch.equal(out, want)
    assert out[:, 1].tolist() == [5, 7, -1]


@interpreted
def test_tail_without_tokens_is_still_written() -> None:
    out, faults = torch.full((3,), 7), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    none = torch.tensor([], dtype=torch.int64)
    kernels.translate_loc(torch.tensor([0, 5, -1]), none, out, None, None, None, faults)
    assert out.tolist() == [PAD] * 3


@interpreted
def test_moves_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little scratch: each layer takes its own pair of launches, and a fault still counts once."""
    fmt = KVFormat(2, 8, 16, torch.bfloat16)
    monkeypatch.setattr(move_kv, "SCRATCH_BYTES", 1)
    tgt, src = torch.tensor([2, 3, 4, 5, 99]), torch.tensor([5, 2, 3, 4, 1])
    results = []
    for module in (kernels, reference):
        torch.manual_seed(0)
        k, v = (torch.randn(3, 6, 2, dim, dtype=fmt.dtype) for dim in (8, 16))
        faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
        module.move_kv(k, v, tgt, src, faults, fmt)
        results.append((k, v, faults))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@interpreted
def test_no_tokens_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.LAUNCHER, "find", lambda *_: pytest.fail("looked for a kernel"))
    fmt, ones = KVFormat(1, 8, 8, torch.float32), torch.ones(1)
    k, v = _caches(fmt, 1, 2)
    none, faults = torch.zeros(0, dtype=torch.int64), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    rows = torch.empty(0, 1, 8)
    kernels.store_kv(rows, rows, k[0], v[0], none, ones, ones, faults, fmt)
    kernels.gather_kv(k[0], v[0], none, rows, rows, ones, ones, faults, fmt)
    kernels.move_kv(k, v, none, none, faults, fmt)
    kernels.cast_loc(none, none.int(), faults)
    kernels.patch_map(torch.tensor([0, -1]), none, none)
    kernels.translate_loc(torch.tensor([0, -1]), none, none, None, None, None, faults)


@interpreted
def test_one_kernel_is_for_one_dtype_and_one_paging() -> None:
    fmt, ones = KVFormat(1, 8, 8, torch.float32), torch.ones(1)
    k, v = (t[0] for t in _caches(fmt, 1, 4))
    row, loc = torch.ones(1, 1, 8), torch.tensor([1])
    faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    with pytest.raises(TypeError, match=r"v: expected the dtype of K, torch.float32, got torch.bfloat16"):
        kernels.store_kv(row, row.bfloat16(), k, v, loc, ones, ones, faults, fmt)
    with pytest.raises(ValueError, match=r"v_cache: expected .* of K, \(4, 1\), got \(4, 2\)"):
        kernels.store_kv(row, row, k, v.view(2, 2, 1, 8), loc, ones, ones, faults, fmt)
    with pytest.raises(TypeError, match="tgt: expected the dtype of src"):
        kernels.move_kv(k[None], v[None], loc.int(), loc, faults, fmt)
    with pytest.raises(TypeError, match="loc_out: expected the dtype of swa_out"):
        kernels.translate_loc(torch.tensor([0, -1]), loc, loc.clone(), loc.int(), None, None, faults)
    assert not any(t.any() for t in (k, v, faults))


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(x.nbytes + 1), dtype=x.dtype, offset=1)
    return raw.view(x.shape).copy_(x)


@interpreted
def test_a_tensor_between_its_elements_is_refused() -> None:
    """A GPU would end the process's context; whether interpreted or compiled, the launch is refused."""
    fmt, ones = KVFormat(1, 8, 8, torch.bfloat16), torch.ones(1)
    k, v = (t[0] for t in _caches(fmt, 1, 4))
    row, loc, faults = torch.ones(1, 1, 8).bfloat16(), torch.tensor([1]), torch.zeros(len(FAULT_KINDS)).long()
    tensors = {"k": row, "v": row, "k_cache": k, "v_cache": v, "loc": loc, "k_inv": ones, "v_inv": ones}
    tensors["faults"] = faults
    before = [x.clone() for x in tensors.values()]
    for name, x in tensors.items():
        words = f"^{name}: expected an address that is a multiple of {x.itemsize}, got one "
        with pytest.raises(ValueError, match=words):
            kernels.store_kv(*(tensors | {name: at_odd_address(x)}).values(), fmt)
    with pytest.raises(ValueError, match=r"^v_out: expected an address that is a multiple of 2"):
        kernels.gather_kv(k, v, loc, row, at_odd_address(row), ones, ones, faults, fmt)
    mapping = torch.tensor([0, 1, -1])
    with pytest.raises(ValueError, match=r"^loc: expected an address that is a multiple of 4"):
        kernels.translate_loc(mapping, at_odd_address(loc.int()), loc.clone(), None, None, None, faults)
    assert all(torch.equal(x, old) for x, old in zip(tensors.values(), before, strict=True))
    kernels.store_kv(row, row, k, v, torch.tensor([7, 1], dtype=torch.int32)[1:], ones, ones, faults, fmt)
    assert k[1].any()


@interpreted
def test_asks_only_for_listed_variants() -> None:
    """Random batches, strides, offsets and slot widths: what calls ask for stays inside the list."""
    torch.manual_seed(1)
    formats = [KVFormat(2, 8, 24, torch.bfloat16), KVFormat(1, 16, 32, torch.float8_e5m2, 4)]
    before = kernels.LAUNCHER.variants
    for fmt in formats:
        for i in range(24):
            tokens, pad, start = (int(torch.randint(1, 9, ())) for _ in range(3))
            dtype = fmt.source_dtypes[i % len(FLOAT_DTYPES)]
            k, v = (
                torch.zeros(tokens, fmt.num_kv_heads, start + dim + pad, dtype=dtype)[..., start : start + dim]
                for dim in (fmt.head_dim, fmt.v_head_dim)
            )
            caches = [t[0] for t in _caches(fmt, 1, 16)]
            loc = torch.zeros(tokens, dtype=(torch.int32, torch.int64)[i // 3 % 2])
            ones, faults = torch.ones(fmt.num_kv_heads), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
            kernels.store_kv(k, v, *caches, loc, ones, ones, faults, fmt)
            kernels.gather_kv(*caches, loc, k, v, ones, ones, faults, fmt)
            rope = torch.zeros(1, 8, dtype=(dtype, torch.float32)[i // 6 % 2]), torch.zeros_like(loc), False
            kernels.store_kv_rope(k, v, *caches, loc, ones, ones, *rope, faults, fmt)
    asked = kernels.LAUNCHER.variants - before
    assert len(asked) > 8
    assert asked <= set(list_variants(formats))
