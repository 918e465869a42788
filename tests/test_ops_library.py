"""The torch.library ops: the kernels' bytes, schemas that name every write, and nothing of them on the eager path."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import portakv
from portakv import KVWriteLoc, LayerSpec, dispatch, ops, testing
from portakv.formats import FP8_DIALECTS, KVFormat, Layout

CPU = torch.device("cpu")
LAYERS = [LayerSpec(None, 2, 16), LayerSpec(8, 2, 16)]


def call(case: testing.Case, row: str | None = None, device: torch.device = CPU) -> ops.Kernel:
    """The op of `case`, called on the row that serves it."""
    op, fmt = case.variant.op, case.variant.fmt
    found = dispatch.facts(device)
    return ops.traced({op: dispatch.select(op, found, dispatch.Request(fmt, row))}, {op: fmt})[op]


def one_of_each(op: str) -> list[testing.Case]:
    """A case of every layout, plain and quantised, and way the rows lie, with a few tokens."""
    found: dict[object, testing.Case] = {}
    for case in testing.cases(op):
        fmt = case.variant.fmt
        if 0 < case.tokens < 10:
            found.setdefault((fmt and (fmt.fp8 is None, fmt.layout), case.variant.structure, case.style), case)
    return list(found.values())


def test_every_op_of_the_table_is_there() -> None:
    assert list(ops.SCHEMAS) == list(dispatch.OPS)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_an_op_runs_its_kernel(op: str, device: torch.device) -> None:
    for row in dispatch.rows(op, dispatch.device_of(device)):
        for case in [*one_of_each(op), *(case for case in testing.cases(op) if case.tokens == 0)][:40]:
            testing.check(op, call(case, row.name, device), case, device)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_opcheck(op: str) -> None:
    """Writes are declared and all of them, outputs alias nothing, the fake agrees, and AOTAutograd keeps the bytes."""
    for case in one_of_each(op):
        seen = arguments(case)
        torch.library.opcheck(getattr(torch.ops.portakv, op).default, seen)


def arguments(case: testing.Case) -> tuple[object, ...]:
    """What the op gets when the case's kernel is called with its arguments."""
    seen: list[tuple[object, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "portakv":
                seen.append(args)
                return None
            return func(*args, **(kwargs or {}))

    args = testing.build(case)
    with Watch():
        call(case)(*(arg.tensor if isinstance(arg, testing.Buffer) else arg for arg in args))
    return seen[0]


def test_opcheck_objects_to_an_undeclared_write() -> None:
    (case, *_) = one_of_each("cast_loc")
    with torch.library._scoped_library("portakv_test", "DEF") as library:
        library.define("cast_loc(Tensor loc, Tensor out, Tensor(a!) faults, str kernel) -> ()")
        library.impl("cast_loc", functools.partial(ops._run, "cast_loc"), "CompositeExplicitAutograd")
        torch.library.register_fake("portakv_test::cast_loc", lambda *args: None, lib=library)
        with pytest.raises(Exception, match="out is not defined as mutable but was mutated"):
            torch.library.opcheck(torch.ops.portakv_test.cast_loc.default, arguments(case))


@pytest.mark.parametrize("fmt", [*testing.formats(), KVFormat(2, 16, 24, torch.bfloat16, 32, Layout.CPU_AMX)], ids=str)
def test_a_format_survives_as_text(fmt: KVFormat) -> None:
    assert ops.decode(ops.encode(fmt)) == fmt


TEXT = ops.encode(KVFormat(2, 16, 16, torch.bfloat16))


@pytest.mark.parametrize(
    "text",
    [
        *("", "rows", TEXT.replace("=", ":"), TEXT.rpartition("/")[0], TEXT + "/layout=rows", TEXT + "/window=8"),
        *(TEXT.replace("=2/", f"={heads}/") for heads in ("two", "-2", "0", "02", 2**63)),
        *(TEXT.replace("bfloat16", dtype) for dtype in ("float9", "nn", "int32")),
        TEXT.replace("rows", "columns"),
    ],
)
def test_other_text_is_refused(text: str, pool: portakv.HybridKVPool) -> None:
    rows, loc, ones = torch.ones(1, 2, 16, dtype=torch.bfloat16), torch.tensor([1]), torch.ones(2)
    k_cache, v_cache = pool.get_kv_buffer(0)
    with pytest.raises(ValueError, match=r"^fmt: expected a format as `ops.encode` writes it, got '"):
        torch.ops.portakv.store_kv(
            rows, rows, k_cache, v_cache, loc, ones, ones, pool._faults, text, "portakv.kernels.reference.rows:store_kv"
        )
    assert not k_cache.any()


def shrunk(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 1)
    return x


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shrunk": shrunk,
    "of another dtype": lambda x: x.to(torch.int16),
    "with an axis more": lambda x: x[None],
    "a number": lambda x: x.flatten()[0],
}


@pytest.mark.parametrize("row", ["native", "reference"])
@pytest.mark.parametrize("op", dispatch.OPS)
def test_what_no_kernel_takes_is_refused_by_its_name(op: str, row: str) -> None:
    case = one_of_each(op)[0]
    *given, _ = arguments(case)
    target = next(each.target for each in dispatch.rows(op, dispatch.CPU) if each.name == row).format(op=op)
    names = ops._names(op)
    watched = [x for x in given if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in watched]
    for at, x in enumerate(given):
        if not isinstance(x, torch.Tensor) or (names[at].endswith(("_inv", "_scale")) and case.variant.fmt.block):
            continue
        for spoil in SPOILT.values():
            args = [*given[:at], spoil(x), *given[at + 1 :], target]
            with pytest.raises((TypeError, ValueError), match=r"^\w+: expected [^\n]*, got [^\n]*$"):
                getattr(torch.ops.portakv, op)(*args)
    for name in (
        "os:system",
        "portakv.kernels.reference.rows:nothing",
        "",
        "portakv.kernels.reference.rows:" + ("store_kv" if op != "store_kv" else "move_kv"),
    ):
        with pytest.raises(ValueError, match=r"^kernel: expected one of .*, got '"):
            getattr(torch.ops.portakv, op)(*given, name)
    assert all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in zip(watched, before, strict=True))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)


@pytest.mark.parametrize("row", ["native", "reference"])
@pytest.mark.parametrize("op", [op for op in dispatch.OPS if op.startswith("gather_kv")])
def test_outputs_lie_apart(op: str, row: str) -> None:
    case = next(case for case in one_of_each(op) if case.tokens > 1)
    *given, _ = arguments(case)
    target = next(each.target for each in dispatch.rows(op, dispatch.CPU) if each.name == row).format(op=op)
    k_out = given[3]
    assert isinstance(k_out, torch.Tensor)
    expanded = k_out[:1].expand(k_out.shape)
    before = k_out.clone()
    with pytest.raises(ValueError, match=r"^k_out: expected rows with memory of their own, got strides"):
        getattr(torch.ops.portakv, op)(*given[:3], expanded, *given[4:], target)
    assert torch.equal(bytes_of(k_out), bytes_of(before))


def test_fp8_travels_as_bytes() -> None:
    for case in one_of_each("store_kv"):
        assert not any(isinstance(x, torch.Tensor) and x.dtype in FP8_DIALECTS for x in arguments(case))


@pytest.fixture
def pool() -> portakv.HybridKVPool:
    return portakv.HybridKVPool(LAYERS, size=64, swa_size=32)


def forward(pool: portakv.HybridKVPool, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    write_loc = pool.plan_write(loc)
    out = []
    for layer in (0, 1):
        pool.set_kv_buffer(layer, write_loc, k, v)
        out += pool.gather_kv(layer, write_loc)
    return out


class Names(TorchDispatchMode):
    """The ops of portakv that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "portakv":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_every_call(pool: portakv.HybridKVPool) -> None:
    k, v = torch.randn(2, 3, 2, 16, dtype=torch.bfloat16).unbind()
    loc = pool.allocator.alloc(3)
    with Names() as names:
        out = forward(pool, loc, k, v)
        pool.plan_write(loc, torch.int32)
        pool.cast_write_loc(pool.plan_write(loc))
        pool.graph_write_loc(4).fill(loc)
        pool.move_kv_cache(loc, loc.flip(0))
    assert all(torch.equal(got, want) for got, want in zip(out, (k, v, k, v), strict=True))
    assert names.seen == [
        *("translate_loc", "store_kv", "gather_kv", "store_kv", "gather_kv"),
        *("translate_loc", "translate_loc", "cast_loc", "cast_loc", "translate_loc"),
        *("translate_loc", "translate_loc", "move_kv", "move_kv"),
    ]
    forward(pool, loc, k, v)
    assert len(names.seen) == 14


def test_eager_calls_pass_the_ops_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an op was called")

    monkeypatch.setattr(ops, "_call", refuse)
    pool = portakv.HybridKVPool(LAYERS, size=64, swa_size=32)
    loc = pool.allocator.alloc(3)
    rows = torch.ones(3, 2, 16, dtype=torch.bfloat16)
    forward(pool, loc, rows, rows)
    pool.move_kv_cache(loc, loc.flip(0))
    pool.cast_write_loc(pool.plan_write(loc))
    with Names(), pytest.raises(AssertionError, match="an op was called"):
        forward(pool, loc, rows, rows)


def test_make_fx_records_the_ops(pool: portakv.HybridKVPool) -> None:
    loc = pool.allocator.alloc(3)
    k, v = torch.randn(2, 3, 2, 16, dtype=torch.bfloat16).unbind()
    graph = make_fx(lambda loc, k, v: forward(pool, loc, k, v))(loc, k, v)
    names = [node.target.__name__.partition(".")[0] for node in graph.graph.nodes if "portakv" in str(node.target)]
    assert names == ["translate_loc", "store_kv", "gather_kv", "store_kv", "gather_kv"]
    for got, want in zip(graph(loc, v, k), (v, k, v, k), strict=True):
        assert torch.equal(got, want)


def test_fake_tensors_touch_no_memory(pool: portakv.HybridKVPool) -> None:
    before = [buffer.clone() for group in pool.groups for buffer in group.buffers]
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.ones(3, 2, 16, dtype=torch.bfloat16)
        slots = torch.ones(3, dtype=torch.int64)
        out = forward(pool, slots, rows, rows)
        with pytest.raises(ValueError, match="k: expected shape"):
            pool.set_kv_buffer(0, KVWriteLoc(slots), rows[:2], rows)
    assert all(x.shape == (3, 2, 16) for x in out)
    for old, buffer in zip(before, (buffer for group in pool.groups for buffer in group.buffers), strict=True):
        assert torch.equal(old, buffer)


def test_checked_pools_are_traced_unchecked() -> None:
    pool = portakv.HybridKVPool(LAYERS, size=64, swa_size=32, check=True)
    loc = torch.tensor([7, 7, 1 << 40])
    rows = torch.ones(3, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(portakv.SlotFault):
        pool.plan_write(loc)
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    compiled(pool, loc, rows, rows)
    assert pool.faults()["translate_loc"] == 1


def test_export_holds_the_ops(pool: portakv.HybridKVPool) -> None:
    class Step(torch.nn.Module):
        def forward(self, loc, k, v):
            return forward(pool, loc, k, v)

    loc = pool.allocator.alloc(3)
    rows = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    program = torch.export.export(Step(), (loc, rows, rows))
    assert str(program.graph).count("portakv.store_kv") == 2
