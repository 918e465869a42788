"""One rank of `test_parallel.py`: `python parallel_ranks.py RANK WORLD STORE` runs every case and prints a report.

The report is one JSON line: for each case "passed" or its traceback. A case is a function of the rank and the number of
ranks that every rank runs at the same time; what it compares with is a pool of its own, stored to without parallelism.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from portakv import HybridKVPool, KVWriteLoc, LayerSpec, MissingSwaLoc, SlotFault, dispatch
from portakv.parallel import cp_allgather_and_save_kv, plan_zigzag_write, zigzag_split

LAYERS = [
    LayerSpec(None, 2, 16, 8),
    LayerSpec(6, 2, 16, 8),
    LayerSpec(None, 3, 8),
    LayerSpec(6, 2, 16, 8),
    LayerSpec(6, 1, 24, 8, mla=True),
]
TOKENS = 29


def make_pool(dtype: torch.dtype = torch.bfloat16, page_size: int = 1, **options: Any) -> HybridKVPool:
    pool = HybridKVPool(LAYERS, size=64, swa_size=48, dtype=dtype, page_size=page_size, device="cpu", **options)
    pool.allocator.alloc(page_size, swa_tail=0)  # so that no slot equals its peer
    for layer in range(len(LAYERS)):
        pool.set_scales(layer, 0.5, torch.linspace(1, 2, LAYERS[layer].num_kv_heads))
    return pool


def make_rows(layer: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """K and V of the whole batch, the same on every rank, as slices of a wider projection."""
    spec, generator = LAYERS[layer], torch.Generator().manual_seed(layer)
    heads = torch.randn(tokens, spec.num_kv_heads, spec.head_dim + spec.v_dim, generator=generator) * 3
    return [x.to(dtype) for x in heads.split([spec.head_dim, spec.v_dim], dim=2)]


def same_bytes(pool: HybridKVPool, expected: HybridKVPool) -> None:
    for layer in range(len(LAYERS)):
        for got, want in zip(pool.get_kv_buffer(layer), expected.get_kv_buffer(layer), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"layer {layer}"
    assert not any(pool.faults().values())


def stores(rank: int, world: int, tokens: int, seq_lens: list[int] | None = None, **options: Any) -> None:
    """A forward over all layers, by one plan and by the locations themselves, against plain stores."""
    source = options.pop("source", torch.bfloat16)
    index = options.pop("index", torch.int64)
    planned, direct, expected = make_pool(**options), make_pool(**options), make_pool(**options)
    # Backwards, so that slots are no run of numbers.
    loc = expected.allocator.alloc(tokens).flip(0)
    for pool in (planned, direct):
        assert torch.equal(pool.allocator.alloc(tokens).flip(0), loc)
    write_loc = expected.plan_write(loc, index)
    plan = plan_zigzag_write(planned, write_loc, source, seq_lens)
    for layer in range(len(LAYERS)):
        whole = make_rows(layer, tokens, source)
        k, v = (zigzag_split(x, rank, world, seq_lens) for x in whole)
        expected.set_kv_buffer(layer, write_loc, *whole)
        cp_allgather_and_save_kv(planned, layer, plan, k, v)
        if seq_lens is None:
            cp_allgather_and_save_kv(direct, layer, write_loc, k, v, dist.group.WORLD)
    same_bytes(planned, expected)
    if seq_lens is None:
        same_bytes(direct, expected)
    assert tokens == 0 or any(x.view(torch.uint8).any() for x in expected.get_kv_buffer(1))


def every_number_of_tokens(rank: int, world: int) -> None:
    for tokens in (0, 1, 2, world, 2 * world - 1, 2 * world, 2 * world + 1, TOKENS):
        stores(rank, world, tokens)


def every_dtype(rank: int, world: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2fnuz):
        for source in (torch.bfloat16, torch.float32, dtype):
            stores(rank, world, TOKENS, dtype=dtype, source=source)


def int32_slots_and_pages(rank: int, world: int) -> None:
    stores(rank, world, TOKENS, index=torch.int32)
    stores(rank, world, TOKENS, page_size=4)
    stores(rank, world, TOKENS, dtype=torch.float8_e4m3fn, page_size=8, index=torch.int32)


def several_sequences(rank: int, world: int) -> None:
    for lens in ([TOKENS], [10, 19], [3, 0, 1, 17, 8], [1] * 7, [0, 0]):
        stores(rank, world, sum(lens), seq_lens=lens)


def checked_mode(rank: int, world: int) -> None:
    stores(rank, world, TOKENS, check=True)


def strided_rows(rank: int, world: int) -> None:
    """Rows that are slices of a fused projection are sent without a copy by the caller."""
    pool, expected = make_pool(), make_pool()
    loc = pool.allocator.alloc(TOKENS)
    expected.allocator.alloc(TOKENS)
    whole = make_rows(0, TOKENS)
    k, v = (zigzag_split(x, rank, world) for x in whole)
    wide = torch.full((len(k), 2, 40), 9.0, dtype=k.dtype)
    wide[..., 4:20], wide[..., 24:32] = k, v
    cp_allgather_and_save_kv(pool, 0, pool.plan_write(loc), wide[..., 4:20], wide[..., 24:32])
    expected.set_kv_buffer(0, expected.plan_write(loc), *whole)
    same_bytes(pool, expected)


def rows_for_no_tokens(rank: int, world: int) -> None:
    pool = make_pool()
    empty = pool.plan_write(torch.empty(0, dtype=torch.int64))
    with refused(ValueError, "k: expected shape (0, 2, 16)"):
        cp_allgather_and_save_kv(pool, 0, empty, *make_rows(0, 3))


def padding_is_skipped(rank: int, world: int) -> None:
    """A batch padded to the captured size: PAD and -1 write nothing."""
    pool, expected = make_pool(), make_pool()
    loc = torch.cat((pool.allocator.alloc(20), torch.tensor([0, 0, -1, 0])))
    expected.allocator.alloc(20)
    whole = make_rows(1, len(loc))
    whole[0][20:] = torch.nan
    cp_allgather_and_save_kv(pool, 1, pool.plan_write(loc), *(zigzag_split(x, rank, world) for x in whole))
    expected.set_kv_buffer(1, expected.plan_write(loc), *whole)
    same_bytes(pool, expected)
    pool.check_integrity()


def a_slot_named_twice(rank: int, world: int) -> None:
    """The last token of the batch wins, in whatever order ranks bring it; checked mode refuses it."""
    for tokens, dtype, index in ((TOKENS, torch.bfloat16, torch.int64), (24, torch.float8_e4m3fn, torch.int32)):
        pool, expected, checked = make_pool(dtype), make_pool(dtype), make_pool(dtype, check=True)
        slots = expected.allocator.alloc(5)
        picks = torch.randint(0, 5, (tokens,), generator=torch.Generator().manual_seed(tokens))
        loc = torch.cat((slots[picks][:-4], torch.tensor([0, -1, 1000, 1000])))
        write_loc = expected.plan_write(loc, index)
        plan = plan_zigzag_write(pool, write_loc, torch.bfloat16)
        for layer in range(len(LAYERS)):
            whole = make_rows(layer, tokens)
            expected.set_kv_buffer(layer, write_loc, *whole)
            cp_allgather_and_save_kv(pool, layer, plan, *(zigzag_split(x, rank, world) for x in whole))
            for got, want in zip(pool.get_kv_buffer(layer), expected.get_kv_buffer(layer), strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"layer {layer}"
        assert pool.faults()["store_kv"] == expected.faults()["store_kv"] > 0
        twice = checked.plan_write(checked.allocator.alloc(tokens)[:1].repeat(tokens))
        parts = [zigzag_split(x, rank, world) for x in make_rows(0, tokens)]
        with refused(SlotFault, "loc: expected each slot once"):
            cp_allgather_and_save_kv(checked, 0, twice, *parts)


def subgroups(rank: int, world: int) -> None:
    """Two ranks each, with batches of their own; `group` says who belongs together."""
    pairs = [[first, first + 1] for first in range(0, world, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    mine = rank // 2
    pool, expected = make_pool(), make_pool()
    tokens = TOKENS - 5 * mine
    loc = pool.allocator.alloc(tokens)
    expected.allocator.alloc(tokens)
    plan = plan_zigzag_write(pool, pool.plan_write(loc), torch.bfloat16, group=groups[mine])
    for layer in range(len(LAYERS)):
        whole = make_rows(layer, tokens)
        cp_allgather_and_save_kv(pool, layer, plan, *(zigzag_split(x, rank % 2, 2) for x in whole))
        expected.set_kv_buffer(layer, expected.plan_write(loc), *whole)
    same_bytes(pool, expected)
    for other, group in enumerate(groups):
        if other != mine:
            with refused(ValueError, "group: expected a process group that this rank belongs to"):
                plan_zigzag_write(pool, pool.plan_write(loc), torch.bfloat16, group=group)


def one_gather_and_one_launch(rank: int, world: int) -> None:
    """Per layer, with a plan: one collective and one store; per forward: one translation and one comparison."""
    counts: Counter[str] = Counter()
    with counted(counts):
        pool = make_pool(torch.float8_e4m3fn)
        loc = pool.allocator.alloc(TOKENS)
        counts.clear()
        plan = plan_zigzag_write(pool, pool.plan_write(loc), torch.bfloat16)
        assert counts == {"translate_loc": 1, "all_reduce": 1}, counts
        counts.clear()
        for layer in range(len(LAYERS)):
            k, v = (zigzag_split(x, rank, world) for x in make_rows(layer, TOKENS))
            cp_allgather_and_save_kv(pool, layer, plan, k, v)
        assert counts == {"store_kv": len(LAYERS), "all_gather": len(LAYERS)}, counts


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count collectives, and the kernels of pools that are made inside."""

    def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return run(*args, **kwargs)

        return call

    real = {name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "broadcast", "gather"))}
    load = dispatch.load
    dispatch.load = lambda op, selection: counting(op, load(op, selection))
    for name, run in real.items():
        if callable(run):
            plain = "all_gather" if name in ("all_gather_single", "all_gather_into_tensor") else name
            setattr(dist, name, counting(plain, run))
    try:
        yield
    finally:
        dispatch.load = load
        for name, run in real.items():
            setattr(dist, name, run)


@contextmanager
def refused(error: type[Exception], words: str) -> Iterator[None]:
    """As `pytest.raises` with plain words."""
    try:
        yield
    except error as e:
        if words not in str(e):
            raise AssertionError(f"expected {words!r}, got {e!r}") from e
    else:
        raise AssertionError(f"no {error.__name__}: {words}")


def disagreements(rank: int, world: int) -> None:
    """The last rank is wrong in one thing: every rank raises, none writes, and the group can still be used."""
    wrong = rank == world - 1
    pool, expected = make_pool(), make_pool()
    loc = pool.allocator.alloc(TOKENS)
    expected.allocator.alloc(TOKENS)
    write_loc = pool.plan_write(loc)
    plan = plan_zigzag_write(pool, write_loc, torch.bfloat16)
    k, v = (zigzag_split(x, rank, world) for x in make_rows(0, TOKENS))
    wide = make_rows(2, len(k))[0]

    # Rows that do not fit their layer: the rank itself says what, the others say who.
    rows = f"refused or of another on [{world - 1}]"
    for locations in (plan, write_loc):
        for bad in ((k[1:], v), (k, v[:-1]), (wide, v), (k, k), (k[..., :8], v), (k.transpose(1, 2), v)):
            with refused(ValueError, ("k: expected", "v: expected")[bad[0] is k] if wrong else rows):
                cp_allgather_and_save_kv(pool, 0, locations, *(bad if wrong else (k, v)))
        with refused(TypeError if wrong else ValueError, "v: expected" if wrong else rows):
            cp_allgather_and_save_kv(pool, 0, locations, k, v.float() if wrong else v)
    with refused(TypeError if wrong else ValueError, "k: expected torch.bfloat16 as planned" if wrong else rows):
        cp_allgather_and_save_kv(pool, 0, plan, *((k.half(), v.half()) if wrong else (k, v)))
    with refused(TypeError if wrong else ValueError, "k: expected a tensor, got NoneType" if wrong else rows):
        cp_allgather_and_save_kv(pool, 0, plan, None if wrong else k, v)
    odd = list(range(world - 1)) if wrong else [world - 1]
    with refused(
        ValueError, f"k, v: expected rows of layer {int(wrong)} from every rank, refused or of another on {odd}"
    ):
        cp_allgather_and_save_kv(pool, int(wrong), plan, k, v)
    # A layer whose rows are of another width, and one that there is not.
    narrow = [x[: len(k)] for x in make_rows(4, TOKENS)]
    with refused(ValueError, f"expected rows of layer {4 * wrong} from every rank, refused or of another on {odd}"):
        cp_allgather_and_save_kv(pool, 4 * wrong, plan, *(narrow if wrong else (k, v)))
    for locations in (plan, write_loc):
        with refused(ValueError, "layer_id: expected 0 to 4, got 5" if wrong else rows):
            cp_allgather_and_save_kv(pool, 5 * wrong, locations, k, v)
    bare = plan_zigzag_write(pool, KVWriteLoc(loc) if wrong else write_loc, torch.bfloat16)
    with refused(MissingSwaLoc if wrong else ValueError, "write_loc: layer 1" if wrong else rows):
        cp_allgather_and_save_kv(pool, 1, bare, k, v)

    # What a plan compares.
    with refused(ValueError, f"write_loc: expected the same on every rank, got {TOKENS - 2} to {TOKENS} tokens"):
        cp_allgather_and_save_kv(pool, 0, write_loc[: TOKENS - 2 * wrong], k, v)
    with refused(ValueError, "dtype: expected the same on every rank, got others"):
        cp_allgather_and_save_kv(pool, 0, write_loc, *((k.half(), v.half()) if wrong else (k, v)))
    with refused(ValueError, "seq_lens: expected the same on every rank, got others"):
        plan_zigzag_write(pool, write_loc, torch.bfloat16, [1 + wrong, TOKENS - 1 - wrong])
    other = HybridKVPool(LAYERS[: 4 + (not wrong)], size=64, swa_size=48, device="cpu")
    with refused(ValueError, "pool: expected the same on every rank, got others"):
        plan_zigzag_write(other, write_loc, torch.bfloat16)
    everyone = "write_loc, seq_lens, dtype: expected arguments that every rank takes"
    for bad, error, words in (
        ((write_loc, torch.bfloat16, [TOKENS - 1]), ValueError, f"seq_lens: expected {TOKENS} tokens in all, got 28"),
        ((write_loc, torch.bfloat16, [-1, TOKENS + 1]), ValueError, "seq_lens[0]: expected lengths of at least 0"),
        ((write_loc, torch.int64, None), TypeError, "dtype: expected one of"),
        ((write_loc, torch.bfloat16, [2**62] * 4 + [TOKENS]), ValueError, f"seq_lens[0]: expected at most {TOKENS}"),
        ((KVWriteLoc(loc.to("meta")), torch.bfloat16, None), ValueError, "write_loc: expected slots on cpu, got meta"),
        ((loc, torch.bfloat16, None), TypeError, "write_loc: expected a KVWriteLoc or GraphWriteLoc, got Tensor"),
    ):
        with refused(error if wrong else ValueError, words if wrong else everyone):
            plan_zigzag_write(pool, *(bad if wrong else (write_loc, torch.bfloat16)))
    with refused(TypeError if wrong else ValueError, "dtype: expected one of" if wrong else everyone):
        cp_allgather_and_save_kv(pool, 0, write_loc, None if wrong else k, v)
    same_bytes(pool, expected)

    cp_allgather_and_save_kv(pool, 0, plan, k, v)
    expected.set_kv_buffer(0, write_loc, *make_rows(0, TOKENS))
    same_bytes(pool, expected)


def layers_of_any_number(rank: int, world: int) -> None:
    """Rows of two bytes name their layer whole: no two of them are taken for each other."""
    layers = [LayerSpec(None, 1, 1)] * 512
    pool = HybridKVPool(layers, size=16, dtype=torch.float8_e4m3fn, device="cpu")
    loc = pool.allocator.alloc(2 * world)
    plan = plan_zigzag_write(pool, pool.plan_write(loc), pool.dtype)
    k, v = (torch.full((2 * world, 1, 1), x).to(pool.dtype) for x in (2.0, 3.0))
    own = [x.view(torch.uint8)[:2].view(pool.dtype) for x in (k, v)]
    for one, another in ((0, 255), (0, 256), (1, 256), (255, 511), (0, 510)):
        with refused(ValueError, "from every rank, refused or of another on"):
            cp_allgather_and_save_kv(pool, another if rank == world - 1 else one, plan, *own)
    assert not any(x.view(torch.uint8).any() for layer in range(512) for x in pool.get_kv_buffer(layer))
    cp_allgather_and_save_kv(pool, 511, plan, *own)
    for got, want in zip(pool.get_kv_buffer(511), (k, v), strict=True):
        assert torch.equal(got[loc.tolist()].view(torch.uint8), want.view(torch.uint8))


def whatever_the_process_has_set(rank: int, world: int) -> None:
    """A default device and dtype, and a plan that is made in inference mode and used outside of it."""
    pool, expected = make_pool(), make_pool()
    write_loc = pool.plan_write(pool.allocator.alloc(TOKENS))
    expected.allocator.alloc(TOKENS)
    every = [make_rows(layer, TOKENS) for layer in range(len(LAYERS))]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            plan = plan_zigzag_write(pool, write_loc, torch.bfloat16)
            split = [[zigzag_split(x, rank, world) for x in whole] for whole in every]
            cp_allgather_and_save_kv(pool, 0, plan, *split[0])
        for layer in range(1, len(LAYERS)):
            cp_allgather_and_save_kv(pool, layer, plan, *split[layer])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for layer, whole in enumerate(every):
        expected.set_kv_buffer(layer, write_loc, *whole)
    same_bytes(pool, expected)


CASES = [
    every_number_of_tokens,
    every_dtype,
    int32_slots_and_pages,
    several_sequences,
    checked_mode,
    strided_rows,
    rows_for_no_tokens,
    padding_is_skipped,
    a_slot_named_twice,
    subgroups,
    one_gather_and_one_launch,
    disagreements,
    layers_of_any_number,
    whatever_the_process_has_set,
]


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    report = {}
    for case in CASES:
        try:
            case(rank, world)
            report[case.__name__] = "passed"
        except Exception:
            report[case.__name__] = traceback.format_exc()
            break  # the ranks are no longer in step
    print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
