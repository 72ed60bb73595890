"""Which cases of a product of parameters the quick suite runs: enough that all pairs occur.

A test of three or more parameters, fixtures among them, runs in so many cases that each value of a
parameter meets each value of every other. Marked ``covering(1)`` (``pytestmark`` for a file), each
value occurs: for what does not depend on two at once, as where one check serves all formats.
``KVEDGE_SLOW=1`` runs the whole product; ``KVEDGE_TEST_SHORT=1`` each value alone, of all tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

import pytest

Case = Sequence[Hashable]


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Indices of cases in which every combination of `strength` values that occurs, occurs.

    Greedy, and the same for the same cases: of the cases with the most new combinations the one
    whose values have been used least, so that values of a parameter take turns.
    """
    factors = range(len(cases[0]))
    columns = list(itertools.combinations(factors, min(strength, len(factors))))
    combinations = [{(c, *(case[i] for i in c)) for c in columns} for case in cases]
    missing = set().union(*combinations)
    used: dict[tuple[int, Hashable], int] = {}
    left, chosen = set(range(len(cases))), []
    while missing:
        best = max(
            left,
            key=lambda at: (
                len(combinations[at] & missing),
                -sum(used.get(value, 0) for value in enumerate(cases[at])),
                -at,
            ),
        )
        left.remove(best)
        missing -= combinations[best]
        chosen.append(best)
        for value in enumerate(cases[best]):
            used[value] = used.get(value, 0) + 1
    return sorted(chosen)


def left_out(items: Sequence[pytest.Item], most: int = 2) -> set[pytest.Item]:
    """Of the collected tests those that the quick suite leaves out; `most` is the strength."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out: set[pytest.Item] = set()
    for product in products.values():
        marker = product[0].get_closest_marker("covering")
        cases = [_values(item) for item in product]
        kept = {product[at] for at in covering(cases, min(most, marker.args[0] if marker else 2))}
        out.update(item for item in product if item not in kept)
    return out


def _values(item: pytest.Item) -> Case:
    """The case of a test: an entry for each list of parameters and for each fixture with some."""
    params = {name: id(value) for name, value in item.callspec.params.items()}
    case = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        case.append(tuple(params.pop(name) for name in names))
    return (*case, *params.values())
