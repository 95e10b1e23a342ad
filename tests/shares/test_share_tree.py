"""The tree over share numbers: one order of additions, whoever has which share."""

from math import log2

import pytest

from lockstep._base.deal import equal_deal
from lockstep.shares.share_tree import PartialSums, ShareNode, add_in_tree_order, nodes_of, plan_additions, shares_of


def added_by(world: int, shares: int) -> str:
    """Return what the ranks add, as a formula."""
    parts: list[str] = []
    nodes: list[ShareNode] = []
    for rank in range(world):
        sums: PartialSums[str] = PartialSums(lambda _, left, __, right: f"({left}+{right})")
        for share in shares_of(rank, equal_deal(shares, world)):
            sums.add(share, str(share))
        nodes += [node for node, _ in sums.sums]
        parts += [value for _, value in sums.sums]
    for into, place in plan_additions(nodes, shares):
        parts[into] = f"({parts[into]}+{parts[place]})"
    return parts[0]


def test_eight_shares_are_added_in_pairs():
    assert added_by(1, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_a_share_without_a_neighbour_waits_for_it():
    assert added_by(1, 6) == "(((0+1)+(2+3))+(4+5))"
    assert added_by(1, 5) == "(((0+1)+(2+3))+4)"
    assert added_by(1, 1) == "0"


@pytest.mark.parametrize("shares", range(1, 20))
def test_the_order_is_the_same_on_any_number_of_ranks(shares):
    assert {added_by(world, shares) for world in range(1, shares + 3)} == {added_by(1, shares)}


def test_ranks_have_neighbouring_shares_and_one_more_at_most():
    assert [list(shares_of(rank, equal_deal(8, 3))) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_where_shares_divide_evenly_a_rank_has_one_partial_sum():
    assert [len(nodes_of(shares_of(rank, equal_deal(32, 4)))) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_a_rank_keeps_few_partial_sums(world):
    most = 0
    for rank in range(world):
        sums: PartialSums[int] = PartialSums(lambda _, left, __, right: left + right)
        for share in shares_of(rank, equal_deal(8, world)):
            most = max(most, len(sums.sums) + 1)  # the share's own gradient
            sums.add(share, 1)
    assert most <= log2(8) + 1


def test_numbers_are_added_in_the_order_of_the_tree():
    assert add_in_tree_order([1.0, 2.0**60, -(2.0**60), 1.0]) == (1.0 + 2.0**60) + (-(2.0**60) + 1.0)
    assert add_in_tree_order([]) == 0.0
