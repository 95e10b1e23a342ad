"""Texts of messages."""

from __future__ import annotations

import pytest

from lockstep._base.texts import ranks_in_words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        ([1, 2, 3], "ranks 1, 2, 3"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([*range(1, 8192)], "ranks 1 to 8191"),
        ([0, 2, 3, 9, *range(20, 25)], "ranks 0, 2, 3, 9, 20 to 24"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(ranks) == words
