"""Some instructions on given registers, to hold an opcode beside its description."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from portakv.conformance.executors.gcn.machine import begin, finish, parse
from portakv.conformance.executors.gcn.waves import Array, Waves
from portakv.conformance.executors.memory import Memory

_FRAME = """
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
probe:
{lines}
	s_endpgm
	.section .rodata
	.amdhsa_kernel probe
{directives}
	.end_amdhsa_kernel
"""


def probe(
    lines: Iterable[str],
    arch: str = "gfx942",
    vectors: Mapping[int, Array] | None = None,
    scalars: Mapping[int, Array] | None = None,
    waves: int = 1,
    waves_per_group: int = 1,
    memory: Memory | None = None,
    shared_bytes: int = 0,
    exec_mask: int = -1,
) -> Waves:
    """The waves after these lines.

    Args:
        vectors: of registers v0 …, uint32 `[waves, lanes]`.
        scalars: of s0 … (and of vcc and others, as `assembly` numbers them), uint32 `[waves]`.
        waves: in work-groups of `waves_per_group`.
        exec_mask: a bit for each active lane.
    """
    lanes = 64 if arch.startswith("gfx9") else 32
    directives = "\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n" + "\t.amdhsa_wavefront_size32 1" * (lanes == 32)
    program = parse(_FRAME.format(arch=arch, lines="\n".join(lines), directives=directives))
    program.registers = max(program.registers, 1 + max(vectors or (0,)))
    memory = memory or Memory(())
    grid = (waves // waves_per_group, 1, 1)
    m = begin(program, b"", grid, waves_per_group * lanes, shared_bytes, memory)
    for index, values in (vectors or {}).items():
        m.v[index] = values
    for index, value in (scalars or {}).items():
        m.s[:, index] = value
    m.restrict(exec_mask)
    finish(program, m)
    m.focus(slice(None))
    return m
