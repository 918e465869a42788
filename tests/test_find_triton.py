"""Is there a Triton that serves a device? Asked of the module and its drivers, whatever else is installed."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portakv import HybridKVPool, LayerSpec, dispatch
from portakv.device import DeviceFacts, Package, find_triton
from portakv.dispatch import select

triton = pytest.importorskip("triton")
backends = importlib.import_module("triton.backends").backends
driver = importlib.import_module("triton.runtime").driver
SetActive = Callable[..., None]


@pytest.fixture
def set_active(monkeypatch: pytest.MonkeyPatch) -> SetActive:
    """Let Triton's drivers find devices of these backends, and no others."""
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)

    def activate(*names: str) -> None:
        for name, backend in backends.items():
            monkeypatch.setattr(backend.driver, "is_active", lambda found=name in names: found)

    return activate


def test_no_driver_is_told(set_active: SetActive) -> None:
    set_active()
    found = find_triton("cuda")
    assert found.version == triton.__version__
    assert (found.problem or "").startswith("no active driver for cuda: RuntimeError: 0 active drivers")
    chosen = select("store_kv", DeviceFacts(dispatch.CUDA, packages={"triton": found}))
    assert chosen.row.name == "reference"
    assert found.problem == chosen.rejected[0][1]


def test_a_verdict_is_not_remembered(set_active: SetActive) -> None:
    """A driver may be set after a first pool was built."""
    set_active()
    assert find_triton("cuda").problem is not None
    set_active("nvidia")
    assert find_triton("cuda") == Package(triton.__version__)


def test_the_distribution_may_have_any_name(set_active: SetActive, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's fbtriton, nightlies and Windows builds have others than "triton"."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    set_active("nvidia")
    assert find_triton("cuda") == Package(triton.__version__)


def test_of_two_active_drivers_the_vendors_serves(set_active: SetActive) -> None:
    set_active("nvidia", "amd")
    assert find_triton("cuda").problem is None
    assert find_triton("hip").problem is None
    assert "has no backend for xpu, only ['amd', 'nvidia']" in (find_triton("xpu").problem or "")


def test_a_default_backend_is_for_other_kernels(set_active: SetActive, monkeypatch: pytest.MonkeyPatch) -> None:
    set_active("nvidia", "amd")
    for name in ("amd", "cpu"):  # the second is none of this Triton's
        monkeypatch.setenv("TRITON_DEFAULT_BACKEND", name)
        assert find_triton("cuda").problem is None


def test_a_backend_may_come_from_an_entry_point(set_active: SetActive, monkeypatch: pytest.MonkeyPatch) -> None:
    set_active("nvidia")
    monkeypatch.setitem(backends, "vendors_own", backends["nvidia"])
    monkeypatch.delitem(backends, "nvidia")
    assert find_triton("cuda").problem is None


def test_kernels_are_loaded_under_their_own_driver(set_active: SetActive, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another vendor's active, or two and so none; what was active is put back."""
    from portakv.kernels._triton.driver import _own_driver, driving

    made = []

    def init(self: Any) -> None:
        made.append(self)

    for backend in backends.values():
        monkeypatch.setattr(backend.driver, "__init__", init)
    _own_driver.cache_clear()
    set_active("nvidia", "amd")
    with driving("hip") as own:
        assert driver.active is own is made[0]
    assert driver._active is None
    others = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="hip"))
    driver.set_active(others)
    with driving("cuda") as own, driving("cuda"):
        assert driver.active is own is made[1]
    assert driver.active is others
    with driving("hip") as own:
        assert own is others
    set_active("amd")
    _own_driver.cache_clear()
    with pytest.raises(ValueError, match="expected an active driver of Triton's for cuda, got none"), driving("cuda"):
        pass


@pytest.mark.parametrize("version", [None, "main", 3])
def test_an_unknown_version_is_not_an_old_one(
    version: object, set_active: SetActive, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_active("nvidia")
    monkeypatch.setattr(triton, "__version__", version)
    found = DeviceFacts(dispatch.CUDA, packages={"triton": find_triton("cuda")})
    assert select("store_kv", found).row.name == "triton"


def test_a_stand_in_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines put a module without a spec where Triton is missing."""
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    for name in [name for name in sys.modules if name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    assert "no active driver for cuda: ModuleNotFoundError" in (find_triton("cuda").problem or "")
    assert HybridKVPool([LayerSpec(None, 1, 8)], size=8, device="cpu").device.type == "cpu"
