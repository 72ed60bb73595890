"""The ``kvedge`` command: one file per subcommand, :mod:`kvedge.cli.app` puts them together."""

from kvedge.cli.app import main

__all__ = ["main"]
