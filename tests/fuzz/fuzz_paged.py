#!/usr/bin/env python3
"""The state machines of the contract tests for pools, with choices taken from the fuzzer's bytes.

What they promise and hold results against stands at the head of
``tests/contract/test_paged_properties.py`` and ``test_paged_recent.py``. A program's first byte
chooses the machine; how the others are read depends on the version of Hypothesis.
"""

from __future__ import annotations

import sys
from pathlib import Path

from driver import instrumented, run
from hypothesis import settings
from hypothesis.stateful import get_state_machine_test

TESTS = Path(__file__).resolve().parents[1]
sys.path.extend([str(TESTS), str(TESTS / "helpers")])

with instrumented():
    from contract import test_paged_properties, test_paged_recent

MACHINES = [
    test_paged_properties.PagedMachine,
    test_paged_properties.Float32Machine,
    test_paged_properties.ExtremeFloat16ScaleMachine,
    test_paged_recent.RecentMachine,
]
CALLS = settings(stateful_step_count=60, database=None)
PROGRAMS = [
    get_state_machine_test(machine, settings=CALLS).hypothesis.fuzz_one_input
    for machine in MACHINES
]


def target(data: bytes) -> None:
    if data:
        PROGRAMS[data[0] % len(PROGRAMS)](data[1:])


if __name__ == "__main__":
    run(target)
