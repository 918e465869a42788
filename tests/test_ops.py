"""Every op on every row of the table that runs on this machine, bit for bit against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from portakv import buffers, dispatch, testing
from portakv.formats import CANONICAL_NAN, FP8_DIALECTS, KVFormat, Layout, list_variants
from portakv.kernels.reference import rows as reference


def rows(device: torch.device, op: str) -> list[str]:
    """Rows that can serve on `device`; the reference is the oracle, so it is compared with itself only elsewhere."""
    found = dispatch.facts(device)
    names = [row.name for row in dispatch.rows(op, found.device)]
    return [name for name in names if name != "reference" or found.device is not dispatch.CPU]


@pytest.mark.parametrize("op", dispatch.OPS)
def test_row_matches_reference(op: str, device: torch.device) -> None:
    for name in rows(device, op):
        selection = dispatch.select(op, dispatch.facts(device), dispatch.Request(wanted=name))
        kernel = dispatch.load(op, selection)
        count = 0
        for case in testing.cases(op):
            testing.check(op, kernel, case, device)
            count += 1
        assert count


def test_every_cpu_row_is_exercised() -> None:
    """A row added to the CPU column is run by the test above or is the oracle itself."""
    cpu = torch.device("cpu")
    for op in dispatch.OPS:
        assert {row.name for row in dispatch.rows(op, dispatch.CPU)} == {*rows(cpu, op), "reference"}


def test_cases_cover_every_variant() -> None:
    """Those left out are of plain rows: rotated in one more shape, or under the other slot width, which serves the same
    op, layout and dtypes elsewhere."""
    covered = {case.variant for op in dispatch.OPS for case in testing.cases(op)}
    every = {v for v in list_variants(testing.formats()) if v.op in dispatch.OPS}
    assert covered <= every
    assert all(v.fmt and v.fmt.layout is Layout.ROWS for v in every - covered)
    for kind in (
        lambda v: (v.op, v.dtype, v.rope, v.index_dtype),
        lambda v: v.fmt and (v.op, v.fmt.layout, v.fmt.dtype, v.index_dtype),
        lambda v: v.fmt and (v.op, v.fmt.layout, v.alignment, v.index_dtype),
        lambda v: not v.rope and (v.op, v.fmt, v.dtype, v.alignment),
    ):
        assert {kind(v) for v in covered} == {kind(v) for v in every}


def _drop_last_row(*args):
    """A store that forgets its last token."""
    k, v, k_cache, v_cache, loc, *rest = args
    reference.store_kv(k[:-1], v[:-1], k_cache, v_cache, loc[:-1], *rest)


def _writes_pad(*args):
    """A store that writes padded rows to the reserved page."""
    k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt = args
    reference.store_kv(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt)
    if len(loc) and k_cache.dim() == 3:
        k_cache.view(torch.uint8)[0] = 1


def _swaps_scales(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt):
    reference.store_kv(k, v, k_cache, v_cache, loc, v_inv, k_inv, faults, fmt)


def _truncates(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt):
    """Rounds toward zero by dropping the low byte, as a bit copy would."""
    if k.dtype == torch.float32 and fmt.dtype == torch.bfloat16:
        k, v = ((x.view(torch.int32) >> 16 << 16).view(torch.float32) for x in (k, v))
    reference.store_kv(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt)


def _counts_nothing(*args):
    counted = args[-2].clone()
    reference.store_kv(*args)
    args[-2].copy_(counted)


@pytest.mark.parametrize("wrong", [_drop_last_row, _writes_pad, _swaps_scales, _truncates, _counts_nothing])
def test_comparer_objects_to_a_wrong_store(wrong) -> None:
    with pytest.raises(buffers.Mismatch):
        for case in testing.cases("store_kv"):
            testing.check("store_kv", wrong, case, torch.device("cpu"))


def test_comparer_objects_to_a_move_in_order() -> None:
    """Copying row after row loses a source that was overwritten before it was read."""

    def in_order(k_caches, v_caches, tgt, src, faults, fmt):
        for i in range(len(tgt)):
            reference.move_kv(k_caches, v_caches, tgt[i : i + 1], src[i : i + 1], faults, fmt)

    with pytest.raises(buffers.Mismatch):
        for case in testing.cases("move_kv"):
            testing.check("move_kv", in_order, case, torch.device("cpu"))


def _cases_with_repeats(op: str) -> list[testing.Case]:
    found = [case for case in testing.cases(op) if any(testing._orders(case))]
    assert found
    return found


@pytest.fixture
def four_threads() -> Iterator[None]:
    """torch cuts a copy of 32768 elements and more among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("op", [op for op in dispatch.OPS if op.startswith("store_kv")])
def test_the_reference_stores_as_if_token_by_token(op: str, four_threads: None) -> None:
    """So the last row of a slot is there, whole."""
    for case in _cases_with_repeats(op):
        want, got, define = testing.build(case), testing.build(case), testing._definition(op)
        define(*testing._tensors(got))
        for token in range(case.tokens):
            testing._run_on(define, want, [token])
        _compare(want, got)


@pytest.mark.parametrize("op", ["move_kv", "move_kv_packed"])
def test_the_reference_moves_the_last_source_of_a_slot(op: str, four_threads: None) -> None:
    for case in _cases_with_repeats(op):
        want, got, define = testing.build(case), testing.build(case), testing._definition(op)
        define(*testing._tensors(got))
        tgt, src = (x.tensor.tolist() for x in want[2:4])
        num_rows = testing._num_rows(case, case.variant.fmt)
        moved = [i for i in range(case.tokens) if 0 <= src[i] < num_rows and 0 < tgt[i] < num_rows]
        last = {tgt[i]: i for i in moved}
        testing._run_on(define, want, [i for i in range(case.tokens) if i not in moved or last[tgt[i]] == i])
        _compare(want, got)


def _compare(want: list[testing.Arg], got: list[testing.Arg]) -> None:
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if isinstance(a, buffers.Buffer):
            buffers.compare(f"argument {i}", a, b)


def _first_wins(k, v, k_cache, v_cache, loc, *rest):
    """Another row than the last, whole."""
    order = list(range(len(loc)))[::-1]
    k, v = (reference.as_bytes(x)[order].view(x.dtype) for x in (k, v))
    reference.store_kv(k, v, k_cache, v_cache, loc[order], *rest)


def _another_v(k, v, k_cache, v_cache, loc, *rest):
    """V of another row than K, as by programs that end in any order."""
    reference.store_kv(k, v, k_cache, v_cache, loc, *rest)
    counted = rest[2].clone()
    _first_wins(k, v, k_cache.clone(), v_cache, loc, *rest)
    rest[2].copy_(counted)


def _mixed_bits(k, v, k_cache, v_cache, loc, *rest):
    """Elements of bits of several rows."""
    copies, counted = [x.clone() for x in (k_cache, v_cache)], rest[2].clone()
    _first_wins(k, v, *copies, loc, *rest)
    rest[2].copy_(counted)
    reference.store_kv(k, v, k_cache, v_cache, loc, *rest)
    for cache, copy in zip((k_cache, v_cache), copies, strict=True):
        a, b = reference.as_bytes(cache), reference.as_bytes(copy)
        a.copy_(a & 0xF0 | b & 0x0F)


def test_comparer_allows_what_a_gpu_may_do_with_a_slot_named_twice() -> None:
    """Each element of any of the rows where that is asked for; only the last row, whole, elsewhere."""
    cpu, dense = torch.device("cpu"), [case for case in _cases_with_repeats("store_kv") if case.style == "dense"]
    for torn in (_first_wins, _another_v):
        for case in dense:
            testing.check("store_kv", torn, case, cpu, last_wins=False)
            with pytest.raises(buffers.Mismatch):
                testing.check("store_kv", torn, case, cpu)
    for case in dense:
        with pytest.raises(buffers.Mismatch):
            testing.check("store_kv", _mixed_bits, case, cpu, last_wins=False)


@pytest.mark.parametrize("row", ["native", "reference"])
def test_offsets_past_2_31(row: str) -> None:
    """Row 3 of a cache whose token stride is 2**31 elements lies at 6.4e9 elements; only touched pages exist."""
    fmt = KVFormat(2, 8, 8, torch.float8_e4m3fn)
    chosen = dispatch.select_all(dispatch.facts("cpu"), dict.fromkeys(dispatch.OPS, row))
    store, gather = (dispatch.load(op, chosen[op]) for op in ("store_kv", "gather_kv"))
    stride = 2**31
    storage = torch.empty(3 * stride + 16, dtype=torch.uint8).view(fmt.dtype)
    cache = storage.as_strided((4, 2, 8), (stride, 8, 1))
    k = torch.arange(16, dtype=torch.uint8).view(1, 2, 8).view(fmt.dtype)
    v = (torch.arange(16, dtype=torch.uint8) + 32).view(1, 2, 8).view(fmt.dtype)
    v_cache = torch.zeros((4, 2, 8), dtype=torch.uint8).view(fmt.dtype)
    ones, faults = torch.ones(2), testing.faults().tensor
    store(k, v, cache, v_cache, torch.tensor([3]), ones, ones, faults, fmt)
    assert torch.equal(storage[3 * stride :].view(torch.uint8), k.view(torch.uint8).flatten())
    k_out, v_out = torch.zeros_like(k), torch.zeros_like(v)
    gather(cache, v_cache, torch.tensor([3]), k_out, v_out, ones, ones, faults, fmt)
    assert torch.equal(k_out.view(torch.uint8), k.view(torch.uint8))
    assert torch.equal(v_out.view(torch.uint8), v.view(torch.uint8))


@pytest.mark.parametrize("dialect", FP8_DIALECTS, ids=str)
def test_reference_quantiser_against_float64(dialect: torch.dtype) -> None:
    """The reference itself: the nearest of the dialect's numbers, ties to the even one, for every bf16 input."""
    fp8 = FP8_DIALECTS[dialect]
    inputs = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = reference.quantise(inputs.view(-1, 1, 1), fp8, torch.ones(1)).view(torch.uint8).flatten()
    numbers = torch.arange(256, dtype=torch.uint8).view(dialect).double()
    numbers = numbers[numbers.isfinite()].unique()
    nan = inputs.isnan()
    assert (got[nan] == fp8.nan_byte).all()
    x, got = inputs[~nan].double().clamp(-fp8.max, fp8.max), got[~nan]
    above = numbers[torch.searchsorted(numbers, x)]
    below = numbers[torch.searchsorted(numbers, x, right=True) - 1]
    picked = got.view(dialect).double()
    assert torch.equal((x - picked).abs(), torch.minimum(above - x, x - below))
    tie = (above - x == x - below) & (above != below)
    assert tie.any()
    assert (got[tie] % 2 == 0).all()


@pytest.mark.parametrize("dtype", CANONICAL_NAN, ids=str)
def test_reference_writes_one_nan(dtype: torch.dtype) -> None:
    fmt = KVFormat(1, 1, 1, dtype)
    for source in CANONICAL_NAN:
        if source != dtype:
            nan = torch.full((1, 1, 1), -float("nan"), dtype=source)
            bits = reference.convert(nan, fmt, torch.ones(1)).view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
            assert bits.item() == CANONICAL_NAN[dtype]
