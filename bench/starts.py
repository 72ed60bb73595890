"""Measures starts: processor time of ``import kvedge``, of each command, and of opening models.

python bench/starts.py [--rounds 5] [MODEL.gguf ...]

Prints the table of bench/README.md. Each figure is the smallest and the median of user and system
time over the rounds, each a process of its own; all are run in turn.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from kvedge import system

_SHAPE = ["--layers", "16", "--kv-heads", "8", "--head-dim", "64", "--context", "131072"]
_LOAD = """\
import resource, sys
from kvedge.llama import LlamaModel, gguf_file
def weights(self, config):
    raise SystemExit
gguf_file.GgufModel.weights = weights  # all that loading does beside the weights
LlamaModel.from_file(sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args()
    command = ["-m", "kvedge"]
    cases = {
        "`import numpy`": ["-c", "import numpy"],
        "`import kvedge`": ["-c", "import kvedge"],
        "`kvedge --help`": [*command, "--help"],
        "`kvedge info`": [*command, "info"],
        "`kvedge plan --layers ...`": [*command, "plan", *_SHAPE],
    }
    for name in ("generate", "doctor", "eval", "bench"):
        cases[f"`kvedge {name} --help`"] = [*command, name, "--help"]
    for model in options.models:
        cases[f"`kvedge plan -m {model.name}`"] = [*command, "plan", "-m", str(model)]
        cases[f"loading {model.name}, all but the weights"] = ["-c", _LOAD, str(model)]
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, arguments in cases.items():
            times[name].append(processor_time(arguments))
    print(f"{system.machine().cpu}, Python {sys.version.split()[0]}, {options.rounds} rounds\n")
    print("| start | smallest, s | median, s |\n|:--|--:|--:|")
    for name, found in times.items():
        print(f"| {name} | {min(found):.2f} | {statistics.median(found):.2f} |")


def processor_time(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
