"""Sends items from ranks that have them to ranks that need them: the plan (PURE), and the transfer in pieces."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from lockstep.checkpoints.ranks import Ranks

PIECE = 1 << 22
"""Number of bytes that a rank sends, or receives, at once."""


class Transfer(NamedTuple):
    """The sending of one item from one rank to another."""

    item: str
    source: int
    target: int


def plan_waves(has: Sequence[Collection[str]], needs: Sequence[Collection[str]]) -> list[list[Transfer]]:
    """PURE: plan the transfers after which every rank has what it needs, from the items of each rank, in rank order.

    In one wave, a rank sends at most one item and receives at most one. It can send a received item in the next wave,
    so that an item of one rank reaches many others in few waves. Raises ``ValueError`` for an item that no rank has.

    Example:
        >>> plan_waves([{"model"}, set(), set()], [set(), {"model"}, {"model"}])
        [[Transfer(item='model', source=0, target=1)], [Transfer(item='model', source=0, target=2)]]
    """
    there = [set(own) for own in has]
    left = [sorted(set(wanted) - own) for wanted, own in zip(needs, there, strict=True)]
    waves: list[list[Transfer]] = []
    while any(left):
        wave: list[Transfer] = []
        for target, items in enumerate(left):
            free = set(range(len(there))) - {each.source for each in wave}
            found = next(((item, rank) for item in items for rank in sorted(free) if item in there[rank]), None)
            if found is not None:
                wave.append(Transfer(*found, target))
        if not wave:
            raise ValueError(f"no rank has {', '.join(sorted({item for items in left for item in items}))}")
        for each in wave:
            there[each.target].add(each.item)
            left[each.target].remove(each.item)
        waves.append(wave)
    return waves


def move(
    waves: Sequence[Sequence[Transfer]],
    sizes: Mapping[str, int],
    ranks: Ranks,
    what: str,
    read: Callable[[str, int, int], bytes],
    write: Callable[[str, bytes], object],
) -> None:
    """Carry out the plan; every rank calls this, with the same ``waves`` and ``sizes`` in bytes.

    ``read(item, begin, length)`` returns a piece of an item that this rank sends, and ``write`` gets the pieces of an
    item that it receives, in order. Holds two pieces in memory. If either raises on some rank, raises
    :class:`CheckpointError` on every rank at the end of the wave.

    Communicates an all-to-all for each piece of the largest item of a wave, in which every rank takes part.
    """
    for wave in waves:
        problem = _move_wave(wave, sizes, ranks, what, read, write)
        ranks.together(what, partial(_raise, problem))


def _move_wave(
    wave: Sequence[Transfer],
    sizes: Mapping[str, int],
    ranks: Ranks,
    what: str,
    read: Callable[[str, int, int], bytes],
    write: Callable[[str, bytes], object],
) -> Exception | None:
    """Return the error of this rank, if any. It takes part to the end, since the others wait for its pieces."""
    sent = next((each for each in wave if each.source == ranks.rank), None)
    taken = next((each for each in wave if each.target == ranks.rank), None)
    problem: Exception | None = None
    for begin in range(0, max(sizes[each.item] for each in wave), PIECE):
        outgoing, incoming = (0 if each is None else _left(sizes[each.item], begin) for each in (sent, taken))
        data = bytes(outgoing)
        if sent is not None and problem is None:
            try:
                data = _exactly(outgoing, read(sent.item, begin, outgoing), sent.item)
            except Exception as error:
                problem = error
        received = ranks.exchange(
            data, 0 if sent is None else sent.target, incoming, 0 if taken is None else taken.source, what
        )
        if taken is not None and problem is None:
            try:
                write(taken.item, received)
            except Exception as error:
                problem = error
    return problem


def _left(size: int, begin: int) -> int:
    return max(0, min(PIECE, size - begin))


def _exactly(length: int, data: bytes, item: str) -> bytes:
    if len(data) != length:
        raise EOFError(f"{item} has become shorter while it was sent: {len(data)} bytes where there were {length}")
    return data


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem
