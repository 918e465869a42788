"""Context parallelism over real gloo processes, the zigzag order by its definition, and tensor-parallel head slices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portakv import HybridKVPool, LayerSpec, dispatch
from portakv.parallel import zigzag_split

RANKS = Path(__file__).with_name("parallel_ranks.py")
TIMEOUT = 180


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: Path) -> None:
    """Every case of `parallel_ranks.py`, on all ranks at once. Ranks that hang are ended and have not passed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", RANKS, str(rank), str(world), tmp_path / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in enumerate(outputs):
        assert out, f"rank {rank}: {err}"
        report = json.loads(out.splitlines()[-1])
        for case, outcome in report.items():
            assert outcome == "passed", f"rank {rank}, {case}: {outcome}"
        assert len(report) == 14


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("lens", [[0], [1], [7], [8], [9], [24], [5, 0, 1, 30]])
def test_zigzag_is_chunks_r_and_2n_minus_1_minus_r(lens: list[int], world: int) -> None:
    """numpy's array_split makes the first chunks one longer, too."""
    x = torch.arange(sum(lens))
    chunks = [np.array_split(part.numpy(), 2 * world) for part in x.split(lens)]
    parts = [zigzag_split(x, rank, world, lens).tolist() for rank in range(world)]
    for rank, part in enumerate(parts):
        pair = (rank, 2 * world - 1 - rank)
        assert part == np.concatenate([sequence[chunk] for chunk in pair for sequence in chunks]).tolist()
    assert sorted(token for part in parts for token in part) == x.tolist()


def test_zigzag_takes_rows_of_any_shape() -> None:
    x = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(zigzag_split(x, 1, 2), x[[3, 4, 5, 6]])
    assert zigzag_split(x[:0], 1, 2).shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2, 2), ValueError, "rank: expected one below 2, got 2"),
        ((-1, 2), ValueError, "rank: expected at least 0, got -1"),
        ((0, 0), ValueError, "world: expected at least 1, got 0"),
        ((0.0, 2), TypeError, "rank: expected an int, got float"),
        ((0, 2, [4]), ValueError, "seq_lens: expected 5 tokens in all, got 4"),
        ((0, 2, [6, -1]), ValueError, r"seq_lens\[1\]: expected lengths of at least 0, got -1"),
        ((0, 2, [2**62] * 4 + [5]), ValueError, r"seq_lens\[0\]: expected at most 5 tokens, got 4611686018427387904"),
        ((0, 2, [2.5, 2.5]), TypeError, "seq_lens: expected integers, got float64"),
    ],
)
def test_zigzag_refuses(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        zigzag_split(torch.arange(5), *arguments)


@pytest.mark.parametrize(("x", "got"), [([1, 2], "list"), (np.arange(2), "ndarray"), (torch.tensor(1), "a number")])
def test_zigzag_takes_tensors_of_rows_only(x: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"x: expected a tensor( of rows)?, got {got}"):
        zigzag_split(x, 0, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("row", ["native", "reference"])
def test_tensor_parallel_heads_are_stored_as_slices(
    row: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's pool has its share of the heads and is given `k[:, first:last]` itself, not a copy of it."""
    heads, ranks, tokens = 8, 4, 11
    seen: list[tuple[int, tuple[int, ...]]] = []
    load = dispatch.load

    def watched(op: str, selection: dispatch.Selection) -> Callable[..., None]:
        run = load(op, selection)

        def call(*args: Any) -> None:
            if op == "store_kv":
                seen.extend((x.data_ptr(), x.stride()) for x in args[:2])
            run(*args)

        return call

    def make_pool(share: int) -> HybridKVPool:
        layers = [LayerSpec(None, share, 32, 16), LayerSpec(4, share, 32, 16)]
        return HybridKVPool(layers, size=32, swa_size=16, dtype=dtype, device="cpu", kernels={"store_kv": row})

    monkeypatch.setattr(dispatch, "load", watched)
    whole, parts = make_pool(heads), [make_pool(heads // ranks) for _ in range(ranks)]
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(tokens, heads, dim, generator=generator).bfloat16() for dim in (32, 16))
    for layer in range(2):
        whole.set_kv_buffer(layer, whole.plan_write(whole.allocator.alloc(tokens)), k, v)
        whole.allocator.free(torch.arange(1, tokens + 1))
        for rank, pool in enumerate(parts):
            own = slice(rank * 2, rank * 2 + 2)
            loc = pool.allocator.alloc(tokens)
            seen.clear()
            pool.set_kv_buffer(layer, pool.plan_write(loc), k[:, own], v[:, own])
            assert seen == [(x[:, own].data_ptr(), x.stride()) for x in (k, v)]
            pool.allocator.free(loc)
            for all_heads, share in zip(whole.get_kv_buffer(layer), pool.get_kv_buffer(layer), strict=True):
                assert torch.equal(all_heads[:, own].view(torch.uint8), share.view(torch.uint8))
