"""The ``kvedge`` command: one file per subcommand, :mod:`kvedge.cli.app` puts them together."""

from __future__ import annotations

from collections.abc import Sequence

import kvedge
from kvedge.console import exits
from kvedge.console.terminal import report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``kvedge`` command; see :func:`kvedge.cli.app.main`."""
    if kvedge._failure is not None:  # no backend, so no app either
        report(f"kvedge: {exits.message_of(kvedge._failure)}")
        return exits.code_of(kvedge._failure)
    from kvedge.cli import app

    return app.main(argv)
