"""The C++ `build_read`: every instruction set against the reference, threads, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from portakv import testing
from portakv.formats import ReadFormat, Structure
from portakv.kernels.cpu_amx import kernels as cpu_amx
from portakv.kernels.reference import rows as reference

if problem := cpu_amx.build_problem():
    pytest.fail(problem, pytrace=False)

from portakv.kernels.cpu_amx import _native

Tensor = torch.Tensor


@pytest.mark.parametrize("isa", _native.isas())
def test_every_instruction_set_matches_the_reference(isa: str) -> None:
    best = _native.isa()
    _native.set_isa(isa)
    try:
        for case in testing.cases("build_read"):
            testing.check("build_read", _native.build_read, case, torch.device("cpu"))
    finally:
        _native.set_isa(best)


def arguments(structure: Structure, batch: int = 3, width: int = 40, page_size: int = 1, **fmt: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch)
    num_slots = 500
    table = torch.randint(0, num_slots + 1, (batch, width), generator=generator, dtype=torch.int32)
    mapping = torch.randint(0, 99, (num_slots + 1,), generator=generator)
    mapping[0] = 0
    lens = torch.randint(0, width + 2, (2, batch), generator=generator)
    ragged = structure is Structure.RAGGED
    return {
        "mapping": mapping,
        "table": table,
        "rows": torch.randperm(batch, generator=generator),
        "seq_lens": lens[0],
        "extra_lens": lens[1] % 3,
        "query_lens": lens[1] % 4,
        "out": torch.full((batch * width,) if ragged else (batch, width), -7),
        "indptr": torch.full((batch + 1,), -7) if ragged else None,
        "lens": torch.full((batch,), -7),
        "starts": torch.full((batch,), -7),
        "faults": testing.faults().tensor,
        "num_slots": num_slots,
        "fmt": ReadFormat(structure, page_size=page_size, **fmt),
    }


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("structure", Structure)
@pytest.mark.parametrize("page_size", [3, 16])
def test_large_batches_at_any_thread_count(structure: Structure, threads: int, page_size: int) -> None:
    got, want = (arguments(structure, 101, 997, page_size, window=800) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    _native.build_read(**got)
    torch.set_num_threads(before)
    reference.build_read(**want)
    for name in ("out", "lens", "starts", "faults"):
        assert torch.equal(got[name], want[name]), name
    assert want["faults"].any()


BAD: list[tuple[str, Callable[[Any], Any], type[Exception]]] = [
    ("mapping", lambda x: x.int(), TypeError),
    ("mapping", lambda x: x[:499], ValueError),
    ("mapping", lambda x: torch.zeros(1002, dtype=x.dtype)[::2], ValueError),
    ("table", lambda x: x.short(), TypeError),
    ("table", lambda x: x[0], ValueError),
    ("table", lambda x: x.t().contiguous().t(), ValueError),
    ("table", lambda x: x.tolist(), TypeError),
    ("rows", lambda x: x.float(), TypeError),
    ("rows", lambda x: x[None], ValueError),
    ("seq_lens", lambda x: x.int(), TypeError),
    ("seq_lens", lambda x: None, TypeError),
    ("extra_lens", lambda x: x[:2], ValueError),
    ("query_lens", lambda x: x.int(), TypeError),
    ("out", lambda x: x.short(), TypeError),
    ("out", lambda x: x[None], ValueError),
    ("out", lambda x: torch.zeros(80, dtype=x.dtype)[::2], ValueError),
    ("indptr", lambda x: x[:3], ValueError),
    ("indptr", lambda x: None, TypeError),
    ("lens", lambda x: x.int(), TypeError),
    ("lens", lambda x: x[:2], ValueError),
    ("starts", lambda x: x[:2], ValueError),
    ("faults", lambda x: x[:5], ValueError),
    ("num_slots", lambda x: -1, ValueError),
    ("fmt", lambda x: replace(x, page_size=0), ValueError),
    ("fmt", lambda x: replace(x, window=0), ValueError),
    ("fmt", lambda x: replace(x, structure="ragged"), TypeError),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_bad_argument_is_named_and_nothing_is_written(case: int) -> None:
    name, spoil, error = BAD[case]
    args = arguments(Structure.RAGGED)
    watched = [args[key] for key in ("out", "indptr", "lens", "starts", "faults")]
    before = [x.clone() for x in watched]
    args[name] = spoil(args[name])
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        _native.build_read(**args)
    assert all(torch.equal(x, y) for x, y in zip(watched, before, strict=True))


def test_rows_refuse_an_indptr_and_other_lengths() -> None:
    args = arguments(Structure.ROWS)
    with pytest.raises(TypeError, match=r"^indptr: expected None"):
        _native.build_read(**args | {"indptr": args["lens"]})
    with pytest.raises(ValueError, match=r"^out: expected shape \[3, columns\], got \[2, 40\]"):
        _native.build_read(**args | {"out": args["out"][:2]})
    assert (args["out"] == -7).all()
