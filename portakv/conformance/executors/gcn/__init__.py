"""Executes the assembly text that Triton emits for AMD GPUs: CDNA (waves of 64 lanes) and RDNA 3 and 4 (32).

    program = gcn.parse(compiled.asm["amdgcn"])
    gcn.run(program, [t.data_ptr(), 5, 0, 0], (4, 1, 1), 256, 0, Memory.of_tensors([t]))

All waves of a grid are numpy arrays. `assembly` reads the text, `waves` holds the registers, `arithmetic` says what an
opcode computes, `lanes` and `accesses` those that read other lanes and memory; `steps` makes functions of instructions,
`machine` runs them. What is unknown raises `UnknownInstruction`. An assembler's encodings, the order of memory accesses
and missing waits are not seen.
"""

from portakv.conformance.executors.gcn.compiler import prepare
from portakv.conformance.executors.gcn.machine import Program, parse, run

__all__ = ["Program", "parse", "prepare", "run"]
