"""`import portakv` loads no DSL, creates no context and takes little time; and which module imports which."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import portakv

ROOT = Path(__file__).parents[1]
PACKAGE = Path(portakv.__file__).parent
OPTIONAL = ("triton", "intel_extension_for_pytorch", "transformers", "typer", "rich")


def python(code: str) -> str:
    """Output of `code` in a fresh interpreter with every optional package blocked."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL}))\n"
    done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="outside CI the source tree may be under test")
def test_the_installed_package_is_under_test() -> None:
    assert not PACKAGE.is_relative_to(ROOT)


def test_import_works_alone_and_loads_nothing_else() -> None:
    loaded = python(
        "import torch\n"
        "before = set(sys.modules)\n"
        "import portakv\n"
        "portakv.explain()\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    assert set(loaded.split()) <= {"portakv", "numpy"}


def test_import_loads_no_kernels() -> None:
    loaded = python("import portakv\nprint(*sys.modules)").split()
    assert "portakv.pool" in loaded
    assert {name.rpartition(".")[2] for name in loaded if name.count(".") > 2 and ".kernels." in name} == {"device"}


def test_import_creates_no_context_and_survives_a_fork() -> None:
    python(
        "import os, torch, portakv\n"
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, dtype=torch.float32)\n"
        "    rows = torch.ones((4, 1, 8), device=pool.device)\n"
        "    loc = pool.plan_write(pool.allocator.alloc(4))\n"
        "    pool.set_kv_buffer(0, loc, rows, rows)\n"
        "    os._exit(not torch.equal(pool.gather_kv(0, loc)[0], rows))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0"
    )


def test_import_takes_under_200_ms() -> None:
    """On top of `import torch`, in processor time: what else runs on the machine does not count."""
    code = "import time, torch\nstart = time.process_time()\nimport portakv\nprint(time.process_time() - start)"
    assert statistics.median(float(python(code)) for _ in range(5)) < 0.2


def imports(file: Path) -> set[str]:
    """Modules of portakv that `file` imports when it runs, at any depth of nesting."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            # `from portakv import device` imports a module, `from portakv.device import probe` part of one.
            of_package = node.module is not None and (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{alias.name}" if of_package else f"{node.module}" for alias in node.names}
    return {name for name in found if name.startswith("portakv.")}


KERNEL_FILES = sorted(PACKAGE.glob("kernels/**/*.py"))


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_kernels_import_nothing_above_them(file: Path) -> None:
    folder = file.relative_to(PACKAGE / "kernels").parts[0]
    allowed = ("portakv.device", "portakv.formats", "portakv.errors", "portakv.kernels._triton")
    if file.name == "device.py":
        allowed = ("portakv.device",)
    allowed += (f"portakv.kernels.{folder}",)
    assert [name for name in imports(file) if not name.startswith(allowed)] == []


LAYERS = (
    {"errors", "formats", "host_memory"},
    {"arguments"},
    {"device", "layers"},
    {"consumers"},
    {"dispatch", "pages"},
    {"ops"},
    {"allocator", "write_loc", "groups", "checks"},
    {"transfer", "read_plan"},
    {"pool"},
    {"parallel"},
)
"""Each module imports from its own set and from those above, never from one below."""


def test_imports_go_one_way() -> None:
    rank = {f"portakv.{name}": i for i, names in enumerate(LAYERS) for name in names}
    upward = [
        (module, name)
        for module, i in rank.items()
        for name in imports(PACKAGE / f"{module.removeprefix('portakv.')}.py")
        if rank.get(name, i) > i
    ]
    assert upward == []
