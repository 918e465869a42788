"""What the tests run on: the CPU, and every kind named in PORTAKV_TEST_DEVICES, which must then be there."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from portakv import dispatch

# OpenMP threads that spin on a busy machine make these small tensors 30 times slower; tests of threads set their own.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels go into TRITON_CACHE_DIR, which CI shares among its steps, or away: not into the user's cache."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def _kinds() -> list[str]:
    return ["cpu", *filter(None, os.environ.get("PORTAKV_TEST_DEVICES", "").split(","))]


@pytest.fixture(params=dict.fromkeys(_kinds()))
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device under test; one that was asked for and is missing raises DeviceUnavailable."""
    return dispatch.resolve(request.param)[1]


@pytest.fixture
def in_threads() -> Callable[..., None]:
    """`in_threads(call, …)`: each call in a thread of its own, all at once and often interrupted; the first error."""

    def run(*calls: Callable[[], object]) -> None:
        errors: list[BaseException] = []

        def guarded(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        for error in errors:
            raise error

    return run
