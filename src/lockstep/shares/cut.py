"""PURE: the order of the samples in an epoch, and which of them are in each share of a batch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from lockstep._base.deal import costs_of, deal, deal_padded, digest_of
from lockstep._base.digests import text_digest
from lockstep._base.seeds import derive_seed
from lockstep.errors import OptionError

Last = Literal["drop", "smaller"]
LASTS: tuple[Last, ...] = ("drop", "smaller")


def order_of(samples: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order of the samples in an epoch."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(samples, generator=generator, device="cpu").tolist()


def batches_in(samples: int, batch_size: int, last: Last) -> int:
    """Return the number of batches in an epoch."""
    return samples // batch_size if last == "drop" else -(-samples // batch_size)


def split(samples: Sequence[int], shares: int) -> list[Sequence[int]]:
    """Return the samples of each share, in order; sizes differ by at most one, and empty shares are left out."""
    each, more = divmod(len(samples), shares)
    ends = [share * each + min(share, more) for share in range(shares + 1)]
    parts = [samples[begin:end] for begin, end in pairwise(ends)]
    return [part for part in parts if part]


_MOST_KNOWN = 32


class Cut:
    """How the samples of a batch are put into shares: equally many, or of equal ``cost``."""

    def __init__(self, cost: Any, padded: bool, samples: int) -> None:
        if padded and cost is None:
            raise OptionError("GlobalBatches(): padded=True needs the cost of each sample, cost=lengths")
        self._costs = None if cost is None else costs_of(cost, samples, "GlobalBatches()")
        self._padded = padded
        self._known: dict[tuple[int, ...], list[Sequence[int]]] = {}
        """The shares of some batches: the loader asks for them, and later the training."""
        self.name = "" if self._costs is None else f"{'padded ' if padded else ''}{digest_of(self._costs)}"
        """A text that is another one for other costs; empty without."""

    def split(self, samples: Sequence[int], shares: int) -> list[Sequence[int]]:
        """Return the samples of each share; shares without a sample are left out."""
        if self._costs is None:
            return split(samples, shares)
        key = shares, *samples
        if key not in self._known:
            costs = [self._costs[sample] for sample in samples]
            dealt = deal_padded(costs, shares) if self._padded else deal(costs, shares)
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = [[samples[place] for place in part] for part in dealt if part]
        return self._known[key]

    def digest(self, parts: Sequence[Sequence[int]]) -> int | None:
        """Return a number that tells these shares from others with as many rows; None if no others exist."""
        return None if self._costs is None else text_digest(repr([*map(tuple, parts)]))
