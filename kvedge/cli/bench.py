"""``kvedge bench``: how fast kvedge is here, and how its peers are, measured side by side."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from kvedge.bench import llama_cpp, show, store, whole
from kvedge.bench.benchmark import run_benchmark
from kvedge.bench.catalog import BENCHMARKS
from kvedge.console import exits
from kvedge.console.help import HelpFormatter
from kvedge.console.output import Output

NAME = "bench"
SUMMARY = "measure this machine: kvedge, its peers, and the speed of memory"
DESCRIPTION = """\
Benchmarks of kvedge on this machine, beside its peers where they are installed (PyTorch, ONNX
Runtime, ggml through llama-cpp-python: pip install 'kvedge[bench]') and beside the speed at
which the machine reads memory. 'kvedge bench NAME --help' describes each.
"""
EXAMPLES = """\
  kvedge bench decode --shape Llama-3.2-1B --context 32768
  kvedge bench prefill --shape Llama-3.2-1B --context 4096
  kvedge bench decode --peers none --formats all
  kvedge bench llama.cpp -m model.gguf
  kvedge bench store -m model.gguf
  kvedge bench report --out report.html
  kvedge bench decode --save run.json && kvedge bench show run.json --plot run.png
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks."""
    names = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", title="benchmarks", required=True
    )
    for module in BENCHMARKS:
        command = _add_parser(names, module)
        command.set_defaults(run=functools.partial(run_benchmark, module))
    for module in (llama_cpp, store, whole, show):
        _add_parser(names, module).set_defaults(run=module.run)


def _add_parser(names: Any, module: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        module.NAME,
        help=module.SUMMARY,
        description=module.DESCRIPTION,
        epilog=f"examples:\n{module.EXAMPLES}\n{exits.HELP}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("output")
    # No default of their own: they would undo what stands before the benchmark's name.
    absent = argparse.SUPPRESS
    group.add_argument(
        "--json", action="store_true", default=absent, help="print one JSON object instead of text"
    )
    group.add_argument(
        "--debug", action="store_true", default=absent, help="show the traceback of an error"
    )
    module.add_options(parser)
    return parser


def run(options: argparse.Namespace, output: Output) -> int:
    """Never called: each benchmark has its own."""
    raise AssertionError(options.benchmark)
