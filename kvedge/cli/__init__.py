"""The ``kvedge`` command: one file per subcommand, :mod:`kvedge.cli.app` puts them together."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``kvedge`` command; see :func:`kvedge.cli.app.main`."""
    from kvedge.cli import app  # not at import: kvedge itself imports this package's exit codes

    return app.main(argv)
