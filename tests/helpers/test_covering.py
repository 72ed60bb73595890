"""The quick suite's choice of cases."""

import itertools

import pytest
from helpers.covering import covering

SIZES = [(7, 5, 3), (7, 8, 4, 2), (10, 10), (3, 1, 3, 2, 2), (1,)]


def combinations(cases, strength):
    return {
        (columns, *(case[i] for i in columns))
        for case in cases
        for columns in itertools.combinations(range(len(cases[0])), strength)
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_all_combinations_of_so_many_parameters_occur(sizes, strength):
    cases = list(itertools.product(*map(range, sizes)))
    chosen = covering(cases, strength)
    strength = min(strength, len(sizes))
    kept = [cases[at] for at in chosen]
    assert combinations(kept, strength) == combinations(cases, strength)
    least = 1
    for size in sorted(sizes)[-strength:]:
        least *= size
    assert least <= len(chosen) <= 1.5 * least and chosen == sorted(set(chosen))
    assert covering(cases, strength) == chosen


def test_cases_that_are_not_a_product_keep_what_they_have():
    cases = [("int8", 1), ("int8", 2), ("kivi4", 2), ("float32", 3)]
    assert covering(cases, 2) == [0, 1, 2, 3]
    assert {cases[at][0] for at in covering(cases, 1)} == {"int8", "kivi4", "float32"}
