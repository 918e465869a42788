"""The CPU ops in C++, one build per instruction set; same signatures and bits as `portakv.kernels.reference`."""

import torch  # noqa: F401 (first, so that the extension shares torch's OpenMP runtime)

from portakv.kernels.cpu_amx.device import build_problem

if problem := build_problem():
    raise ImportError(f"{__name__}: {problem}")

from portakv.kernels.cpu_amx._native import *  # noqa: F403
