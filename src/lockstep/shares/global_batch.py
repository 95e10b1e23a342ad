"""One global batch and its shares, and the samples of each batch of an epoch."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from lockstep.errors import ShareError
from lockstep.seeds import derive_seed
from lockstep.shares.share_state import ShareWorld
from lockstep.shares.share_step import Step
from lockstep.shares.share_tree import shares_of

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


class GlobalBatch:
    """The shares of one batch that this rank computes: iterate over them, loaded; ``len()`` is their number. When the
    loop has ended, gradients are complete on every rank.

    Made by :class:`lockstep.shares.GlobalBatches`.
    """

    def __init__(self, world: ShareWorld, step: Step, loaded: Iterator[Any], done: Callable[[], None]) -> None:
        self._world = world
        self._step = step
        self._loaded = loaded
        self._done = done
        self._left = step.loaded_by(world.rank, world.size)
        self._is_begun = False

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._step.epoch

    @property
    def number(self) -> int:
        """The number of the batch in its epoch, from 0."""
        return self._step.batch

    @property
    def rows(self) -> int:
        """The number of rows of the batch, on all ranks together."""
        return sum(self._step.rows)

    @property
    def is_auditing(self) -> bool:
        """True if the share under way is computed for comparison only: see :func:`lockstep.shares.audit`."""
        return self._world.is_auditing

    def __len__(self) -> int:
        return len(shares_of(self._world.rank, self._world.size, self._step.count))

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            raise ShareError(
                f"the shares of {self._step} have been gone through already, or left out when the next batch was asked "
                "for; go through them once, before the next batch"
            )
        self._is_begun = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        with self._world.under_way(self._step):
            while self._left:
                share, again = self._left.pop(0)
                rows = next(self._loaded)
                with self._world.entered(share, again=again):
                    yield rows
        self._done()

    def skip(self) -> None:
        """Consume the shares that were not requested."""
        self._is_begun = True
        for _ in self._left:
            next(self._loaded)
        self._left = []
