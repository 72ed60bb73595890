"""``python -m bench NAME``: ``kvedge bench`` with the benchmarks of this folder besides."""

from __future__ import annotations

import sys
from typing import Any

from bench import distributed, paged, push, state
from kvedge.bench.catalog import BENCHMARKS
from kvedge.cli import main

PROGRAMS: tuple[Any, ...] = (push, paged, state, distributed)

if __name__ == "__main__":
    BENCHMARKS.extend(PROGRAMS)
    sys.exit(main(["bench", *sys.argv[1:]]))
