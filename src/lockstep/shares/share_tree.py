"""PURE: the fixed binary tree over share numbers.

Eight shares are added as ``((0+1)+(2+3)) + ((4+5)+(6+7))``, on however many ranks they were computed. A *node* is
``(level, place)``: it stands for the shares from ``place * 2**level`` to before ``(place + 1) * 2**level``, as far as
these exist. If the number of shares is no power of two, a node whose right half has no share equals its left half.

Ranks compute neighbouring shares, so that each can add most of them by itself (:class:`PartialSums`); the rest is added
in the order that :func:`plan_additions` returns.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from lockstep._base.deal import Deal

T = TypeVar("T")


class ShareNode(NamedTuple):
    """A sum of neighbouring shares."""

    level: int
    place: int

    @property
    def parent(self) -> "ShareNode":
        """The node of which this node is a half."""
        return ShareNode(self.level + 1, self.place // 2)

    @property
    def halves(self) -> "tuple[ShareNode, ShareNode]":
        """The two nodes whose sum is this node."""
        return ShareNode(self.level - 1, 2 * self.place), ShareNode(self.level - 1, 2 * self.place + 1)

    @property
    def first(self) -> int:
        """The first share of the node."""
        return self.place << self.level


def shares_of(rank: int, deal: Deal) -> range:
    """Return the shares that a rank computes: neighbours, whoever has how many."""
    first = sum(deal[:rank])
    return range(first, first + deal[rank])


def nodes_of(own: range) -> list[ShareNode]:
    """Return the partial sums that remain when these shares have been added, in share order."""
    sums = PartialSums[None](lambda *_: None)
    for share in own:
        sums.add(share, None)
    return [node for node, _ in sums.sums]


class PartialSums(Generic[T]):
    """Adds the values of shares in the tree's order, as they come: a binary counter.

    ``merge(left, left_value, right, right_value)`` returns the sum of two nodes. After ``n`` neighbouring shares there
    are at most ``log2(n) + 1`` values, if the first share's number is a multiple of a power of two not below ``n``.
    """

    def __init__(self, merge: Callable[[ShareNode, T, ShareNode, T], T]) -> None:
        self._merge = merge
        self.sums: list[tuple[ShareNode, T]] = []
        """The sums that are not part of a larger one yet, in share order."""

    def add(self, share: int, value: T) -> None:
        """Add the value of the next share."""
        node = ShareNode(0, share)
        while node.place % 2 and self.sums and self.sums[-1][0].parent == node.parent:
            left, left_value = self.sums.pop()
            value = self._merge(left, left_value, node, value)
            node = node.parent
        self.sums.append((node, value))

    def terms_with(self, share: int, value: T) -> list[list[T]]:
        """Return :attr:`sums` as they would be after :meth:`add`, each as terms. Each term is to be added to the sum of
        all terms after it. Nothing is added yet."""
        node, rest, terms = ShareNode(0, share), list(self.sums), [value]
        while node.place % 2 and rest and rest[-1][0].parent == node.parent:
            terms.insert(0, rest.pop()[1])
            node = node.parent
        return [*([each] for _, each in rest), terms]


def plan_additions(nodes: Sequence[ShareNode], shares: int) -> list[tuple[int, int]]:
    """Return how to add up the ``nodes`` of all ranks, in share order, as pairs of list indices: the second node of a
    pair is to be added to the first. The whole sum is then at index 0."""
    places = {node: place for place, node in enumerate(nodes)}
    steps: list[tuple[int, int]] = []

    def place_of(node: ShareNode) -> int:
        if node in places:
            return places[node]
        left, right = node.halves
        place = place_of(left)
        if right.first < shares:
            steps.append((place, place_of(right)))
        return place

    if nodes:
        place_of(ShareNode(max(0, (shares - 1).bit_length()), 0))
    return steps


def add_up(sums: Sequence[tuple[ShareNode, T]], shares: int, add: Callable[[T, T], T]) -> T | None:
    """Return the sum over all shares, from partial sums that are all on one rank; None if there are none."""
    values = [value for _, value in sums]
    for into, place in plan_additions([node for node, _ in sums], shares):
        values[into] = add(values[into], values[place])
    return values[0] if values else None


def add_in_tree_order(numbers: Sequence[float]) -> float:
    """Return the sum of one number per share."""
    leaves = [(ShareNode(0, share), number) for share, number in enumerate(numbers)]
    return add_up(leaves, len(leaves), float.__add__) or 0.0
