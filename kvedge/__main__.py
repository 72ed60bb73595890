"""``python -m kvedge``: the same as the ``kvedge`` command."""

import sys

from kvedge.cli import main

if __name__ == "__main__":
    sys.exit(main())
