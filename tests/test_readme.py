"""README.md: the example runs as shown, and the commands are the ones that CI runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_first_example_runs_as_shown(readme: str) -> None:
    example = blocks(readme, "python")[0]
    assert len(example.splitlines()) <= 25
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, "README.md", "exec"), {})
    (shown,) = re.findall(r"print\(.*\)  # (.+)", example)
    assert printed.getvalue().strip() == shown


def test_two_commands(readme: str) -> None:
    assert blocks(readme, "sh") == [
        "pip install -c constraints.txt '.[run]' && portakv run\n",
        "pip install -c constraints.txt '.[test,triton]' && pytest -n 2\n",
    ]


def test_ci_runs_the_test_command_verbatim(readme: str) -> None:
    command = blocks(readme, "sh")[1].strip()
    assert f'bash -c "{command}"\n' in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere(readme: str) -> None:
    links = re.findall(r"\]\(([^):]+)\)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_environment_table_is_complete() -> None:
    """Every PORTAKV_ variable that the code or the tests read has its row, and no row is of the past."""
    name = re.compile(r"""["'](PORTAKV_[A-Z_]+)["']""")
    files = [*ROOT.glob("portakv/**/*.py"), *ROOT.glob("tests/**/*.py")]
    read = {found for file in files for found in name.findall(file.read_text())}
    rows = re.findall(r"^\| `(PORTAKV_\w+)`", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    assert sorted(read) == sorted(rows)
