"""`warmup(pool)` compiles all that calls of the pool ask for, whatever their batch, strides, dtypes and slot widths.

Kernels are Triton's, on the CPU through its interpreter, so the checks run in a process of their own: run plainly, this
file starts one; with `TRITON_INTERPRET=1` set, it is that process.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from portakv import CONSUMERS, HybridKVPool, LayerSpec
from portakv.compile import warmup
from portakv.device import Device, Row
from portakv.formats import INDEX_DTYPES, PAD, list_variants

LAYERS = (LayerSpec(None, 2, 16), LayerSpec(8, 2, 16), LayerSpec(8, 1, 8, v_head_dim=24))

if os.environ.get("TRITON_INTERPRET") == "1":
    from portakv.kernels.cuda.kernels import LAUNCHER

    TRITON = Row("triton", "portakv.kernels.cuda.kernels:{op}", "portakv")
    INTERPRETED = Device(name="interpreted", torch_type="cpu", count=lambda: 1, rows=(TRITON,))

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN and overflow
    @pytest.mark.parametrize(("dtype", "page_size"), [(torch.bfloat16, 1), (torch.float8_e4m3fnuz, 4)])
    def test_nothing_compiles_after_it(dtype: torch.dtype, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LAUNCHER, "_kernels", {})
        monkeypatch.setattr(LAUNCHER, "_hot", {})
        options = {"size": 96, "swa_size": 64, "page_size": page_size, "dtype": dtype, "device": INTERPRETED}
        pool = HybridKVPool(LAYERS, **options)
        warmup(pool)
        assert LAUNCHER.variants == set(list_variants(group.fmt for group in pool.groups))
        monkeypatch.setattr(LAUNCHER, "_build", lambda variant, device: pytest.fail(f"compiled {variant}"))
        known = []
        for other in (pool, HybridKVPool(LAYERS, **options)):
            rng = random.Random(0)
            graph = other.graph_write_loc(32, int32_twin=True)
            for _ in range(20):
                _use(other, graph, rng)
            known.append(len(LAUNCHER._hot))
        assert known[0] == known[1]  # nothing is remembered per pool

    def _use(pool: HybridKVPool, graph: object, rng: random.Random) -> None:
        """One of every call that launches, on a random batch."""
        tokens = pool.page_size * rng.randint(1, 4)
        slots = pool.allocator.alloc(2 * tokens)
        loc, other = slots[:tokens].to(rng.choice(INDEX_DTYPES)), slots[tokens:]
        write_loc = pool.plan_write(loc, rng.choice(INDEX_DTYPES))
        graph.fill(loc)
        pool.cast_write_loc(write_loc)
        for layer_id, layer in enumerate(pool.layers):
            source, out = (rng.choice(pool.groups[0].fmt.source_dtypes) for _ in range(2))
            k, v = (_rows(tokens, layer.num_kv_heads, dim, source, rng) for dim in (layer.head_dim, layer.v_dim))
            pool.set_kv_buffer(layer_id, write_loc, k, v)
            k, v = (_rows(tokens, layer.num_kv_heads, dim, out, rng) for dim in (layer.head_dim, layer.v_dim))
            pool.gather_kv(layer_id, write_loc, k, v)
        requests = slots.view(2, tokens).to(rng.choice(INDEX_DTYPES))
        rows, lens = torch.stack((torch.arange(2), torch.full((2,), tokens))).to(rng.choice(INDEX_DTYPES))
        style = rng.choice(list(CONSUMERS.values()))
        pool.plan_read(requests, rows, lens, consumer=style, index_dtype=rng.choice(INDEX_DTYPES))
        pool.move_kv_cache(other.to(loc.dtype), loc)
        restored = pool.load_from_host(pool.copy_to_host(slots))
        pool.allocator.free(torch.cat([slots, restored]))
        assert not any(pool.faults().values())
        assert graph.loc[tokens:].eq(PAD).all()

    def _rows(tokens: int, heads: int, dim: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
        """A slice of a fused tensor, aligned to 16 bytes or not."""
        before, after = rng.choice((0, 8, 1)), rng.choice((0, 16, 3))
        fused = torch.zeros((tokens, heads, before + dim + after), dtype=torch.uint8).to(dtype)
        return fused[..., before : before + dim]

else:

    def test_in_a_process_of_its_own() -> None:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr

    def test_rows_that_need_no_compiling_load_nothing() -> None:
        code = (
            "import sys, portakv\n"
            "from portakv.compile import warmup\n"
            "warmup(portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device='cpu'))\n"
            "assert 'triton' not in sys.modules"
        )
        subprocess.run([sys.executable, "-P", "-c", code], check=True)
