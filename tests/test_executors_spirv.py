"""The executor of SPIR-V refuses what Intel's compilers might round otherwise. `nox -s xpu` has what it needs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pyopencl", reason="only in the environment of scripts/xpu_requirements.txt")

from portakv.compile import Target
from portakv.conformance.executors import spirv
from portakv.conformance.executors.errors import UnknownInstruction
from portakv.conformance.executors.spirv import CONTRACTION_OFF, Op, is_op
from portakv.formats import KVFormat, Variant
from portakv.kernels.xpu import kernels as xpu


def test_what_may_fuse_or_is_broken_is_refused() -> None:
    variant = Variant("gather_kv", KVFormat(1, 256, 256, torch.float8_e4m3fn), torch.float16)
    module = xpu.LAUNCHER.compile(variant, Target.parse("pvc").triton()).asm["spv"]
    header, good = spirv.read_spirv(module)
    assert spirv.write_spirv(header, good) == module
    spirv.validate(module)
    fused = [i for i in good if not is_op(i, Op.EXECUTION_MODE, CONTRACTION_OFF)]
    untyped = [i for i in good if not is_op(i, Op.TYPE_VECTOR)]
    for bad, says in ((fused, "may be fused"), (untyped, "spirv-val")):
        with pytest.raises(UnknownInstruction, match=says):
            spirv.validate(spirv.write_spirv(header, bad))


def test_pointers_are_told_from_numbers() -> None:
    variant = Variant("patch_map", None)
    program = spirv.parse(xpu.LAUNCHER.compile(variant, Target.parse("pvc").triton()).asm["spv"])
    assert program.pointers == (True,) * 3 + (False,) * 4
