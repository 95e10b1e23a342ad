"""Which samples the shares of a batch have."""

import pytest

from lockstep._base.seeds import derive_seed
from lockstep.shares.cut import batches_in, order_of, split


def test_an_epoch_has_every_sample_once_and_its_own_order():
    first, second = order_of(20, 3, 0, True), order_of(20, 3, 1, True)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == order_of(20, 3, 0, True)
    assert first != order_of(20, 4, 0, True)
    assert order_of(5, 3, 1, False) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("last", "batches"), [("drop", 2), ("smaller", 3)])
def test_what_does_not_fill_a_batch_is_dropped_or_a_smaller_one(last, batches):
    assert batches_in(20, 8, last) == batches
    assert batches_in(16, 8, last) == 2


def test_shares_differ_by_one_sample_at_most_and_none_is_empty():
    assert split(range(8), 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert list(map(list, split(range(6), 4))) == [[0, 1], [2, 3], [4], [5]]
    assert list(map(list, split(range(3), 4))) == [[0], [1], [2]]


def test_seeds_differ_with_each_part_and_its_place():
    seeds = {derive_seed(1, "share", 0, 2), derive_seed(1, "share", 2, 0), derive_seed("1", "share", 0, 2)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, "share", 0, 2) == derive_seed(1, "share", 0, 2)
