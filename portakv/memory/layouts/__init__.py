"""Every layout, a file and a value each."""

from __future__ import annotations

from collections.abc import Sequence

from portakv.arguments import shown
from portakv.formats import Layout
from portakv.memory.layouts.cpu_pages import CPU_AMX, CPU_VEC
from portakv.memory.layouts.flashmla import FLASHMLA, FLASHMLA_V32
from portakv.memory.layouts.mla import MLA
from portakv.memory.layouts.rows import ROWS

LAYOUTS: tuple[Layout, ...] = (ROWS, MLA, FLASHMLA, FLASHMLA_V32, CPU_AMX, CPU_VEC)

for _layout in LAYOUTS:
    setattr(Layout, _layout.name.upper(), _layout)


def find_layout(wanted: Layout | str, among: Sequence[Layout] = LAYOUTS, where: str = "") -> Layout:
    """The one of `among` that is `wanted` or has that name; raises `ValueError` for any other."""
    for layout in among:
        if wanted is layout or (isinstance(wanted, str) and wanted == layout.name):
            return layout
    raise ValueError(f"layout: expected one of {[layout.name for layout in among]}{where}, got {shown(wanted)}")
