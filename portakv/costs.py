"""The table of what every compiled variant costs on every target, and what of it may change without a word.

A text of tab-separated lines under one that names the Triton whose code it is; the repository keeps `docs/costs.tsv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from portakv.compile import Report, triton_version

COLUMNS = ("op", "variant", "target", "registers", "spills", "load bytes", "store bytes", "instructions")

REGISTER_GROWTH = 4
"""By how many registers a variant may grow."""

Key = tuple[str, str, str]
"""Op, variant and target."""


class Cost(NamedTuple):
    """Of one lane: registers, spills of them, and the widest access in bytes; instructions of the machine.

    None where the target's code does not say.
    """

    registers: int | None
    spills: int | None
    load_bytes: int | None
    store_bytes: int | None
    instructions: int | None


def costs_of(reports: Sequence[Report]) -> dict[Key, Cost]:
    return {(r.op, r.variant, r.target): Cost(*(getattr(r, name) for name in Cost._fields)) for r in reports}


def read_costs(text: str) -> tuple[str, dict[Key, Cost]]:
    """The Triton version and the lines of a table; raises `ValueError` for a text that is none."""
    head, _, body = text.partition("\n")
    names, _, body = body.partition("\n")
    version = head.removeprefix("# Triton ")
    if version == head or names != "\t".join(COLUMNS):
        raise ValueError(f"costs: expected '# Triton …' and the columns {', '.join(COLUMNS)}, got {head!r}, {names!r}")
    costs: dict[Key, Cost] = {}
    for number, line in enumerate(body.splitlines(), 3):
        op, variant, target, *cells = line.split("\t") if line.count("\t") == len(COLUMNS) - 1 else ("", "", "")
        key = (op, variant, target)
        if not cells or not all(cell == "–" or cell.isdecimal() for cell in cells) or key in costs:
            expected = f"{len(COLUMNS)} cells, of a variant and target that no other line has"
            raise ValueError(f"costs: expected {expected}, got line {number}, {line!r}")
        costs[key] = Cost(*(None if cell == "–" else int(cell) for cell in cells))
    return version, costs


def update_costs(text: str, reports: Sequence[Report]) -> str:
    """The table with the lines of these targets replaced; an empty `text` makes a new one.

    Raises `ValueError` for one of another Triton that has other targets too: theirs cannot stay under a new version.
    """
    version, costs = read_costs(text) if text else (triton_version(), {})
    targets = {report.target for report in reports}
    kept = {key: cost for key, cost in costs.items() if key[2] not in targets}
    if kept and version != triton_version():
        others = ", ".join(sorted({target for _, _, target in kept}))
        raise ValueError(f"costs: expected {others} too, to replace Triton {version}'s by {triton_version()}'s")
    lines = (
        "\t".join((*key, *("–" if x is None else str(x) for x in cost)))
        for key, cost in (kept | costs_of(reports)).items()
    )
    return "\n".join((f"# Triton {triton_version()}", "\t".join(COLUMNS), *sorted(lines), ""))


def check_costs(costs: Mapping[Key, Cost], reports: Sequence[Report], same_triton: bool) -> Iterator[str]:
    """What is wrong with `reports`, and with their targets' lines, one by one.

    Nothing spills; a register count grows by `REGISTER_GROWTH` at most; the widest load and store do not get narrower;
    every line is of a variant that was compiled, and the reverse. Another Triton's code is asked for its spills only.
    """
    got = costs_of(reports)
    targets = {target for _, _, target in got}
    expected = {key: cost for key, cost in costs.items() if key[2] in targets}
    failed = {(r.op, r.variant, r.target) for r in reports if r.registers is None and r.problems}
    for key in sorted(expected.keys() | got.keys()):
        for problem in _differences(expected.get(key), got.get(key), same_triton, key in failed):
            yield f"{key[2]} {key[0]} {key[1]}: {problem}"


def _differences(old: Cost | None, new: Cost | None, same_triton: bool, failed: bool) -> Iterator[str]:
    for name, cost in (("spills of the table", old), ("spills", new)):
        if cost is not None and cost.spills:
            yield f"{name}: expected 0, got {cost.spills}"
    if not same_triton or failed:  # what does not compile has no cost, and its report says why
        return
    if old is None or new is None:
        yield "variant: expected in the table, got none" if old is None else "variant: expected compiled, got none"
        return
    if old.registers is not None and (new.registers is None or new.registers > old.registers + REGISTER_GROWTH):
        yield f"registers: expected {old.registers} + {REGISTER_GROWTH} at most, got {new.registers}"
    for name in ("load_bytes", "store_bytes"):
        before, now = getattr(old, name), getattr(new, name)
        if before is not None and (now is None or now < before):
            yield f"widest {name.removesuffix('_bytes')}: expected {before} bytes at least, got {now}"
