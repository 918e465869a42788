"""S22: a layer that aliases an earlier one's KV owns no bytes and cannot be stored to."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec


def layers():
    """Layers 3 and 5 are sliding, 5 reads 3's KV and 6 reads 4's."""
    swa, full = LayerSpec(8, 2, 16, 24), LayerSpec(None, 1, 32)
    return [
        full,
        swa,
        full,
        swa,
        full,
        LayerSpec(8, 2, 16, 24, alias_of=3),
        LayerSpec(None, 1, 32, alias_of=4),
    ]


@pytest.fixture
def pool(make_pool):
    return make_pool(layers(), size=32, swa_size=16)


def test_reads_resolve_to_the_producer(pool):
    for alias, producer in ((5, 3), (6, 4)):
        for mine, theirs in zip(pool.get_kv_buffer(alias), pool.get_kv_buffer(producer), strict=True):
            assert mine is theirs
    write_loc = pool.plan_write(pool.allocator.alloc(4))
    k, v = torch.randn(4, 2, 16, device=pool.device), torch.randn(4, 2, 24, device=pool.device)
    pool.set_kv_buffer(3, write_loc, k, v)
    for got, want in zip(pool.gather_kv(5, write_loc), (k, v), strict=True):
        assert torch.equal(got, want.to(pool.dtype))


def test_a_store_to_an_alias_is_refused(pool, unchanged):
    write_loc = pool.plan_write(pool.allocator.alloc(4))
    k, v = torch.randn(4, 2, 16, device=pool.device), torch.randn(4, 2, 24, device=pool.device)
    pool.set_kv_buffer(3, write_loc, k, v)
    with unchanged(pool), pytest.raises(ValueError, match=r"layer_id: .* got 5, which reads layer 3's"):
        pool.set_kv_buffer(5, write_loc, -k, -v)
    with unchanged(pool), pytest.raises(ValueError, match=r"layer_id: .* got 5, which reads layer 3's"):
        pool.set_scales(5, 2.0, 2.0)


def test_aliases_own_no_bytes(pool, make_pool):
    assert pool.kv_bytes == make_pool(layers()[:5], size=32, swa_size=16).kv_bytes
    assert pool.nbytes == make_pool(layers()[:5], size=32, swa_size=16).nbytes
    assert sorted(i for group in pool.describe() for i in group.layers) == [0, 1, 2, 3, 4]
    assert sum(size for g in pool.describe() for _, size in g.k_buffers + g.v_buffers) == pool.kv_bytes
    copy = pool.copy_to_host(pool.allocator.alloc(4))
    assert copy.nbytes == 4 * (2 * 2 * 40 * 2 + 3 * 2 * 32 * 2)


@pytest.mark.parametrize(
    ("alias", "match"),
    [
        (LayerSpec(8, 2, 16, 24, alias_of=0), "num_kv_heads"),
        (LayerSpec(8, 1, 32, alias_of=0), "expected one of its kind"),
        (LayerSpec(None, 2, 16, 24, alias_of=1), "expected one of its kind"),
        (LayerSpec(8, 2, 32, 24, alias_of=1), "head_dim 16, expected 32"),
        (LayerSpec(8, 2, 16, alias_of=1), "v_dim 24, expected 16"),
        (LayerSpec(8, 2, 16, 24, alias_of=7), "expected an earlier layer that stores its KV, got 7"),
        (LayerSpec(8, 2, 16, 24, alias_of=8), "expected an earlier layer that stores its KV, got 8"),
        (LayerSpec(8, 2, 16, 24, alias_of=-1), "expected an earlier layer that stores its KV, got -1"),
        (LayerSpec(8, 2, 16, 24, alias_of=5), "expected an earlier layer that stores its KV, got 5"),
    ],
)
def test_what_cannot_be_an_alias(make_pool, alias, match):
    with pytest.raises(ValueError, match=rf"layers\[7\]\.alias_of: .*{match}"):
        make_pool([*layers(), alias], size=32, swa_size=16)


@pytest.mark.parametrize("alias", [True, "3", 3.0, torch.tensor(3.0)], ids=repr)
def test_an_alias_is_an_int(alias):
    with pytest.raises(TypeError, match="alias_of: expected"):
        LayerSpec(8, 2, 16, 24, alias_of=alias)


def test_an_alias_of_the_other_kind_is_refused_without_an_swa_side_too(make_pool):
    """The kind is the layer's, not the storage's."""
    with pytest.raises(ValueError, match="expected one of its kind"):
        make_pool([LayerSpec(None, 1, 8), LayerSpec(8, 1, 8, alias_of=0)], size=32)
