"""What each attention consumer is told to read, and how: CONSUMERS, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from portakv.arguments import as_choice, as_int, as_member, last_offset, require_index_dtype, shown
from portakv.formats import PAD, Structure

RAGGED, PAGES, ROWS, QUERY_ROWS = Structure


@dataclass(frozen=True, slots=True)
class ReadStyle:
    """How an attention consumer is told what it reads.

    `full` and `window` are the structures of full and of sliding-window layers, in `index_dtype`; unused places hold
    `pad`, 0 or -1. `write_dtype` is the width of the write locations it takes: `plan_write(loc, style.write_dtype)`. It
    computes element offsets into a cache in signed integers of `offset_bits`. Its page size must divide
    `page_divides`, and the columns of its QUERY_ROWS are a multiple of `column_multiple`. `decode_keys_short` is by how
    many keys SGLang's own plan for it falls short of the window in decode; plans here never do.
    """

    full: Structure
    window: Structure
    index_dtype: torch.dtype = torch.int32
    write_dtype: torch.dtype = torch.int64
    pad: int = PAD
    offset_bits: int = 64
    page_divides: int | None = None
    column_multiple: int = 1
    decode_keys_short: int = 0

    def __post_init__(self) -> None:
        for name in ("full", "window"):
            if not isinstance(getattr(self, name), Structure):
                raise TypeError(f"{name}: expected a Structure, got {shown(getattr(self, name))}")
        for name in ("index_dtype", "write_dtype"):
            require_index_dtype(name, getattr(self, name))
        for name, choices in (("pad", (0, -1)), ("offset_bits", (32, 64))):
            object.__setattr__(self, name, as_choice(name, getattr(self, name), choices))
        for name, least in (("column_multiple", 1), ("decode_keys_short", 0), ("page_divides", 1)):
            if (given := getattr(self, name)) is not None or name != "page_divides":
                object.__setattr__(self, name, as_int(name, given, least))


CONSUMERS: dict[str, ReadStyle] = {
    # What SGLang 0.5.23 hands each of its attention backends (srt/layers/attention/<name>_backend.py, and
    # srt/hardware_backend/npu for ascend), and where a public thread tells of a limit, that thread.
    "triton": ReadStyle(RAGGED, RAGGED, torch.int64, decode_keys_short=1),  # update_sliding_window_buffer: config - 1
    "flashinfer": ReadStyle(RAGGED, RAGGED),  # page offsets are size_t; MLA's since flashinfer #3136
    "flashattention": ReadStyle(PAGES, PAGES),
    # SGLang's page-table kernel works on 4096 tokens at a time (kernels/ops/attention/trtllm_mha_page_table.py).
    "trtllm_mha": ReadStyle(PAGES, PAGES, page_divides=4096),
    # Its paged decode takes no window (_reject_paged_decode_sliding_window); 32-bit offsets: aiter #2517, #2608.
    "aiter": ReadStyle(PAGES, RAGGED, offset_bits=32),
    "intel_xpu": ReadStyle(PAGES, PAGES),
    "intel_amx": ReadStyle(ROWS, ROWS, torch.int64),
    "torch_native": ReadStyle(ROWS, ROWS, torch.int64),
    "musa": ReadStyle(PAGES, PAGES),
    "ascend": ReadStyle(PAGES, PAGES, write_dtype=torch.int32),
    # FlashMLA has no window argument: its sparse kernels take a row of slots per query, -1 for none, in multiples of 64
    # (PAGE_INDEX_ALIGNED_SIZE of deepseek_v4_backend.py).
    "flashmla": ReadStyle(PAGES, QUERY_ROWS, write_dtype=torch.int32, pad=-1, column_multiple=64),
    "deepseek_v4": ReadStyle(PAGES, QUERY_ROWS, write_dtype=torch.int32, pad=-1, column_multiple=64),
}


def read_style(
    consumer: str | ReadStyle,
    structure: Structure | str | None = None,
    index_dtype: torch.dtype | None = None,
    pad: int | None = None,
) -> ReadStyle:
    """A consumer's style, with what is not None in place of its own choice. Raises `ValueError` and `TypeError`."""
    if isinstance(consumer, str):
        if consumer not in CONSUMERS:
            raise ValueError(f"consumer: expected one of {list(CONSUMERS)}, got {consumer!r}")
        consumer = CONSUMERS[consumer]
    if not isinstance(consumer, ReadStyle):
        raise TypeError(f"consumer: expected a name or a ReadStyle, got {shown(consumer)}")
    changes: dict[str, Any] = {}
    if structure is not None:
        changes = dict.fromkeys(("full", "window"), as_member("structure", structure, Structure))
    changes |= {name: x for name, x in (("index_dtype", index_dtype), ("pad", pad)) if x is not None}
    return replace(consumer, **changes) if changes else consumer


def check_offsets(style: ReadStyle, cache: torch.Tensor) -> None:
    """Raise `ValueError`, with the largest number of them that will do, if the consumer cannot address every row of
    `cache [rows, H, D]` or page of `cache [pages, …]`, of any strides; only its shape and strides are looked at."""
    limit = 2 ** (style.offset_bits - 1)
    rest = sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    if last_offset(cache) >= limit:
        most = (limit - 1 - rest) // cache.stride(0) + 1
        what = "rows" if cache.dim() == 3 else "pages"
        raise ValueError(
            f"consumer: expected at most {most} {what} for its {style.offset_bits}-bit offsets, got {cache.shape[0]}"
        )
