"""The packed stores write the bytes that vLLM's own store writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from portakv import HybridKVPool, LayerSpec

PAGES = 8


@pytest.mark.parametrize("order", ["consecutive", "pages", "scattered"])
@pytest.mark.parametrize("page", [32, 96, 128])
@pytest.mark.parametrize("layout", ["cpu_amx", "cpu_vec"])
def test_bytes_are_vllms(vllm: Any, layout: str, page: int, order: str) -> None:
    pool = HybridKVPool([LayerSpec(None, 3, 64)], size=PAGES * page, page_size=page, layout=layout)
    torch.manual_seed(0)
    slots = torch.arange(page, page + PAGES * page)
    if order == "pages":
        slots = slots.view(PAGES, page)[torch.randperm(PAGES)].flatten()
    elif order == "scattered":
        slots = slots[torch.randperm(len(slots))]
    slots = slots[5 : 5 * page]
    k, v = torch.randn(2, len(slots), 3, 64).bfloat16().unbind()
    pool.set_kv_buffer(0, pool.plan_write(slots), k, v)
    ours = pool.get_kv_buffer(0)
    theirs = [torch.zeros_like(cache) for cache in ours]
    vllm.cpu_attn_reshape_and_cache(k, v, *theirs, slots, layout.removeprefix("cpu_"), 1.0, 1.0, "auto")
    for a, b in zip(ours, theirs, strict=True):
        assert b.any()
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
