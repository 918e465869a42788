"""The `portakv` script, also `python -m portakv`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without the packages of the extra `run`, say so on one line and exit with 2."""
    try:
        from portakv.cli import app
    except ModuleNotFoundError as e:
        if e.name not in ("rich", "typer"):
            raise
        print(f"portakv: the command line needs {e.name}: pip install 'portakv[run]'", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
