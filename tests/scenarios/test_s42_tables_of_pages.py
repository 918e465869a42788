"""S42: a page table names pages, of slots translated before they were divided; a partial last page is one too."""

from __future__ import annotations

import pytest
import torch

from portakv import CONSUMERS, LayerSpec, Structure

LAYERS = [LayerSpec(None, 1, 8), LayerSpec(100, 1, 8)]
PAGED = [name for name, style in CONSUMERS.items() if style.full is Structure.PAGES]


@pytest.mark.parametrize(("page", "full", "swa"), [(16, [2, 3, 4], [12, 13, 14]), (1, range(32, 71), range(192, 231))])
@pytest.mark.parametrize("consumer", PAGED)
def test_both_sides_and_padded_columns(make_pool, consumer, page, full, swa):
    pool = make_pool(LAYERS, size=256, swa_size=256, page_size=page)
    slots = torch.arange(32, 71)
    pool.full_to_swa[32:80] = torch.arange(192, 240).to(pool.device)
    table = torch.full((2, 64), -1)
    table[1, :39] = slots
    plan = pool.graph_read_plan(2, 64, consumer=consumer, structure=Structure.PAGES)
    eager = pool.plan_read(
        table.to(pool.device), torch.tensor([1]), torch.tensor([39]), consumer=consumer, structure="pages"
    )
    pool.plan_read(table.to(pool.device), torch.tensor([1]), torch.tensor([39]), out=plan)
    for layer, pages in enumerate((full, swa)):
        indices, pad = plan.for_layer(layer).indices, plan.style.pad
        assert indices.dtype == torch.int32
        assert indices.shape == (2, 64 // page)
        assert indices[0].tolist() == [*pages, *[pad] * (64 // page - len(pages))]
        assert indices[1].tolist() == [pad] * (64 // page)
        assert eager.for_layer(layer).indices.tolist() == [list(pages)]


@pytest.mark.parametrize("consumer", PAGED)
def test_a_page_without_a_peer_is_padding_before_it_is_divided(make_pool, consumer):
    """Divided first, the slot -1 of a lookup past the sequence would be page -1, and PAD 0 page 0 only by luck."""
    pool = make_pool(LAYERS, size=64, swa_size=64, page_size=4)
    slots = pool.allocator.alloc(12, swa_tail=4)
    plan = pool.plan_read(
        slots[None].to(pool.device), torch.tensor([0]), torch.tensor([12]), consumer=consumer, structure="pages"
    )
    pad = CONSUMERS[consumer].pad
    assert plan.for_layer(0).indices.tolist() == [(slots[::4] // 4).tolist()]
    assert plan.for_layer(1).indices.tolist() == [[pad, pad, int(pool.full_to_swa[slots[8]]) // 4]]
