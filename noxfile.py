"""What CI checks, as sessions: `nox` for tests, lint, types and hygiene, `nox -l` for the names of all."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nox

nox.options.sessions = ["tests", "lint", "types", "hygiene"]

CONSTRAINTS = ("-c", "constraints.txt")
TARGETS = "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,gfx90a,gfx942,gfx950,gfx1100,gfx1201"
"""What `portakv compile` compiles for with the stock Triton; here nothing of portakv can be imported."""


@nox.session
def tests(session: nox.Session) -> None:
    """The suite on the installed package."""
    session.install(*CONSTRAINTS, ".[test,triton]")
    session.run("pytest", "-n", "2", *session.posargs, env={"CI": "true"})


@nox.session(name="tests-torch28")
def tests_torch28(session: nox.Session) -> None:
    """The suite on the oldest torch that serves.

    PyPI's brings several GB of CUDA libraries on x86-64 Linux; PIP_EXTRA_INDEX_URL may name PyTorch's CPU builds.
    """
    session.install("-c", _pin(session, "torch==2.8.0"), ".[test,triton]")
    session.run("pytest", *session.posargs, env={"CI": "true"})


@nox.session(name="transformers-oldest")
def transformers_oldest(session: nox.Session) -> None:
    """The cache on the oldest transformers that serves; the suite has the newest."""
    session.install("-c", _pin(session, "transformers==5.19.0"), ".[test]")
    tests = (f"tests/test_{name}.py" for name in ("transformers", "transformers_failures", "layers_from_config"))
    # Cohere Compass cannot be built there from a small config.
    session.run("pytest", *tests, "-k", "not cohere_compass", *session.posargs, env={"CI": "true"})


@nox.session
def lint(session: nox.Session) -> None:
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on host code; it reads the types of everything that is imported."""
    session.install(*CONSTRAINTS, ".[test,triton]", "mypy")
    session.run("mypy")


@nox.session
def hygiene(session: nox.Session) -> None:
    """The import checks where no optional package is installed at all."""
    session.install(*CONSTRAINTS, ".", "pytest")
    session.run("pytest", "tests/test_imports.py", env={"CI": "true"})


@nox.session(name="compile")
@nox.parametrize("triton", ["triton", "triton==3.6.0"], ids=["newest", "3.6.0"])
def compile_matrix(session: nox.Session, triton: str) -> None:
    """Under one Triton: its interpreter's suite, and every variant for every NVIDIA and AMD target."""
    session.install(*CONSTRAINTS, ".[test]", triton)
    tests = ("tests/test_triton_interpreter.py", "tests/test_triton_compile.py", "tests/test_compile_command.py")
    session.run("pytest", *tests, env={"CI": "true"})
    _compile(session, triton.replace("==", "-"), {})


@nox.session
@nox.parametrize("triton", ["triton", "triton==3.6.0", "triton==3.3.0"], ids=["newest", "3.6.0", "3.3.0"])
def execute(session: nox.Session, triton: str) -> None:
    """Under one Triton: the conformance suite on compiled code for every NVIDIA and AMD target, executed on a CPU."""
    session.install(*CONSTRAINTS, ".[run]", triton)
    with TemporaryDirectory() as cache:
        env = {"TRITON_CACHE_DIR": cache}
        session.run("portakv", "check", "--target", TARGETS, *session.posargs, env=env)


@nox.session
@nox.parametrize("triton", ["triton", "triton==3.6.0"], ids=["newest", "3.6.0"])
def prove(session: nox.Session, triton: str) -> None:
    """Under one Triton: that no variant leaves its tensors, for every NVIDIA and AMD target."""
    session.install(*CONSTRAINTS, ".[test,prove]", triton)
    session.run("pytest", "tests/test_prove.py", env={"CI": "true"})
    session.run("portakv", "prove", "--all", "--target", TARGETS)


@nox.session(name="compile-xpu")
def compile_matrix_xpu(session: nox.Session) -> None:
    """Every variant for Intel GPUs. Needs Debian's libze-dev and libze1: the backend builds a parser of its own."""
    session.install(*CONSTRAINTS, ".[run]", "triton-xpu==3.3.0b1", "intel-sycl-rt==2025.0.5")
    _compile(session, "triton-xpu", {"CC": "g++", "ZE_PATH": "/usr"}, "--target", "pvc,bmg")


@nox.session
def xpu(session: nox.Session) -> None:
    """Every XPU kernel variant, executed on Intel's OpenCL runtime for CPUs.

    PIP_EXTRA_INDEX_URL must name PyTorch's index of CPU builds, unless pip finds a CPU build of torch anyway.
    """
    session.install("-r", "scripts/xpu_requirements.txt")
    session.run("pytest", "tests/test_executors_spirv.py", env={"PYTHONPATH": "."})
    session.run("python", "-m", "portakv", "check", "--target", "pvc", *session.posargs, env={"PYTHONPATH": "."})


def _pin(session: nox.Session, pin: str) -> str:
    """The path of constraints.txt with `pin` in place of what it has for that package."""
    name = pin.partition("==")[0]
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("".join(f"{pin if line.startswith(f'{name}==') else line}\n" for line in pins))
    return str(constraints)


def _compile(session: nox.Session, name: str, env: dict[str, str], *options: str) -> None:
    """Write `build/NAME.json`, a record for each variant, with no help from kernels that were cached before."""
    artefact = Path("build", f"{name}.json")
    artefact.parent.mkdir(exist_ok=True)
    with artefact.open("w") as out, TemporaryDirectory() as cache:
        env = env | {"TRITON_CACHE_DIR": cache}
        # Targets without a backend are named on stderr, which nox would mix into the file.
        session.run("portakv", "compile", "--json", *options, env=env, stdout=out, stderr=None)


@nox.session
def peers(session: nox.Session) -> None:
    """vLLM's CPU attention on a pool's packed pages, from its library alone. Needs AVX-512.

    PIP_EXTRA_INDEX_URL must name PyTorch's index of CPU builds, unless pip finds a CPU build of torch anyway.
    """
    session.install(*CONSTRAINTS, ".[test]")
    extras = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    session.install("--no-deps", *extras["peers"])
    session.run("pytest", "tests/peers", *session.posargs, env={"CI": "true"})


@nox.session(name="executors-oracle")
def executors_oracle(session: nox.Session) -> None:
    """The AMD executor's opcodes beside AMD's pseudocode, which tinygrad ships as data."""
    session.install(*CONSTRAINTS, ".[test,triton]", "tinygrad==0.14.0")
    session.run("pytest", "tests/oracle", *session.posargs, env={"CI": "true"})


@nox.session(venv_backend="none")
def arm(session: nox.Session) -> None:
    """The generic CPU kernels on an emulated Arm. Needs Debian's g++-aarch64-linux-gnu and qemu-user."""
    session.run("bash", "scripts/arm/check.sh", external=True)
