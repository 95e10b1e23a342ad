"""Cases of a product that hold every pair of values."""

from __future__ import annotations

import itertools

import pytest

import pairwise


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2), (5, 5, 5), (2, 2, 2, 2, 2), (10, 3, 2, 2)])
def test_every_pair_is_held_by_fewer_cases(sizes):
    rows = list(itertools.product(*map(range, sizes)))
    chosen = [rows[number] for number in pairwise.covering(rows)]
    assert set().union(*map(pairwise.pairs, chosen)) == set().union(*map(pairwise.pairs, rows))
    largest, second = sorted(sizes)[:-3:-1]
    assert largest * second <= len(chosen) < len(rows)
    assert chosen == [rows[number] for number in pairwise.covering(rows)]


def test_combinations_that_were_left_out_by_hand_are_not_made_up():
    rows = [(0, 0, 0), (0, 1, 1), (1, 0, 1)]
    assert pairwise.covering(rows) == [0, 1, 2]


class Case:
    def __init__(self, test, *values, row=False):
        self.nodeid = f"{test}[{'-'.join(map(str, values))}]"
        self.callspec = type("CallSpec", (), {"params": dict(zip("abc", values, strict=False))})
        self.marks = [pytest.mark.parametrize(("a", "b", "c"), []).mark] if row else []

    def iter_markers(self, name):
        return self.marks


def test_tests_of_two_parameters_of_few_cases_and_of_rows_keep_all():
    of_two = [Case("two", *values) for values in itertools.product(range(5), range(5))]
    few = [Case("few", *values) for values in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)]]
    many = [Case("many", *values) for values in itertools.product(range(3), range(3), range(3))]
    rows = [Case("rows", *values, row=True) for values in itertools.product(range(3), range(3), range(3))]
    left_out = pairwise.left_out([*of_two, *few, *many, *rows])
    assert {each.nodeid.partition("[")[0] for each in left_out} == {"many"}
    assert 9 <= len(many) - len(left_out) <= 12
