"""What `.ci/run` checks, as sessions: `nox`, or `nox -s lint`."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types", "hygiene"]

CONSTRAINTS = ("-c", "constraints.txt")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


@nox.session
def tests(session: nox.Session) -> None:
    """The suite on the installed package."""
    session.install(*CONSTRAINTS, ".[test,triton]")
    session.run("pytest", *session.posargs, env={"CI": "true"})


@nox.session(name="tests-torch28")
def tests_torch28(session: nox.Session) -> None:
    """The suite on the oldest torch that serves.

    From the index of CPU builds: PyPI's torch 2.8.0 brings several GB of CUDA libraries on x86-64 Linux.
    """
    pins = Path("constraints.txt").read_text().splitlines()
    pins = [line if not line.startswith("torch==") else "torch==2.8.0" for line in pins]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    session.install("-c", str(constraints), "torch", "--index-url", CPU_WHEELS)
    session.install("-c", str(constraints), ".[test,triton]")
    session.run("pytest", *session.posargs, env={"CI": "true"})


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
