"""``ResumableSampler``: saves the position in an epoch: the batches that were trained on, not those fetched ahead."""

import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from lockstep._base.seeds import derive_seed, seed_cpu
from lockstep.checkpoints.streams import read_streams, set_streams
from lockstep.errors import CheckpointError, OptionError


class ResumableSampler(Sampler[Any]):
    """A sampler around another one that knows the position of the training in the data, and continues from there.

    It counts the epochs itself, and calls ``set_epoch``. It counts the samples of the batches that :meth:`batches` has
    yielded, but not those that the loader's workers have fetched ahead. The order of an epoch depends only on ``seed``
    and the epoch, so a run that continues within an epoch gets the rest of it.

    Args:
        sampler: ``DistributedSampler``, ``RandomSampler``, or any sampler without a generator of its own. It is
            iterated once in each epoch. If its order is random, it must draw it from PyTorch's random numbers.
        seed: The seed of a random order, and of the loader's workers.

    Attributes:
        epoch: The present epoch, from 0; ``for epoch in range(sampler.epoch, epochs)`` continues in it.
        consumed: The number of samples in this rank's batches of the epoch so far.

    After a resume within an epoch, the random numbers of a loader's *workers* start anew; without workers they
    continue. If the number of ranks has changed, a ``DistributedSampler`` continues with samples that no rank has had;
    fewer samples than there are ranks may come twice.

    Example:
        >>> from torch.utils.data import DataLoader, SequentialSampler
        >>> numbers = list(range(6))
        >>> sampler = ResumableSampler(SequentialSampler(numbers))
        >>> batches = iter(sampler.batches(DataLoader(numbers, batch_size=2, sampler=sampler)))
        >>> next(batches)
        tensor([0, 1])
        >>> resumed = ResumableSampler(SequentialSampler(numbers))
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> next(iter(resumed.batches(DataLoader(numbers, batch_size=2, sampler=resumed))))
        tensor([2, 3])

    Stands for: ``DistributedSampler.set_epoch`` at the top of every epoch, and skipping batches by hand.
    """

    def __init__(self, sampler: Sampler[Any], *, seed: int = 0) -> None:
        if getattr(sampler, "generator", None) is not None:
            raise OptionError(
                f"the {type(sampler).__name__} has a generator of its own, of which nothing tells where it was at the "
                "start of the epoch; leave it out: ResumableSampler(seed=) decides on the order"
            )
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self.consumed = 0
        self._open = False

    def __repr__(self) -> str:
        place = f"epoch {self.epoch}, {self.consumed} samples consumed"
        return f"ResumableSampler({type(self.sampler).__name__}, {place})"

    @property
    def same_on_all_ranks(self) -> bool:
        """True if the position is the same on all ranks, as with a ``DistributedSampler``."""
        return hasattr(self.sampler, "num_replicas")

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch on this rank."""
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch; for a loader that :meth:`batches` iterates over."""
        if not self._open:
            raise OptionError(
                "a loader with a ResumableSampler is gone through by `for batch in sampler.batches(loader)`, so that "
                "the batches that training has had are counted"
            )
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with _drawing_from(derive_seed("order", self.seed, self.epoch)):
            return iter(list(self.sampler)[self.consumed :])

    def batches(self, loader: DataLoader[Any]) -> "EpochBatches":
        """Return the remaining batches of the epoch; after the last one, the next epoch follows.

        A batch counts as consumed once it has been yielded, so save at the end of the loop's body. After ``break`` the
        next loop continues in the same epoch. The result has a length, so that ``run.batches`` does not read ahead,
        which would count a batch that has not been trained on.
        """
        if loader.sampler is not self:
            raise OptionError("the loader has another sampler; pass DataLoader(..., sampler=) this one")
        return EpochBatches(self, loader)

    def go_through(self, loader: DataLoader[Any]) -> Generator[Any]:
        """Return the iterator of :meth:`batches`; workers of the loader start at once."""
        self._open = True
        with _drawing_from(derive_seed("workers", _rank(), self.seed, self.epoch)):
            return self._counted(iter(loader), loader.batch_size or 1)

    def repeat_last(self, loader: DataLoader[Any]) -> Any:
        """Return the last batch of the present epoch, without counting it; None if the epoch has none on this rank."""
        size, consumed = loader.batch_size or 1, self.consumed
        number = _batches_in(len(self), size, loader.drop_last)
        if not number:
            return None
        streams, self.consumed = read_streams(), (number - 1) * size
        batches = self.go_through(loader)
        try:
            return next(batches)
        finally:
            batches.close()
            self.consumed = consumed
            set_streams(streams)

    def _counted(self, batches: Iterator[Any], size: int) -> Generator[Any]:
        try:
            for batch in batches:
                self.consumed = min(self.consumed + size, len(self))
                yield batch
        finally:
            self._open = False
        self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position, with the sizes and the seed that belong to it."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "length": len(self),
            "ranks": getattr(self.sampler, "num_replicas", 1),
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position, which may have been saved by a different number of ranks."""
        ranks = getattr(self.sampler, "num_replicas", 1)
        if state["length"] != len(self) and state["ranks"] == ranks:
            raise CheckpointError(
                f"the position was saved for {state['length']} samples an epoch on this rank, and the sampler has "
                f"{len(self)}; resume with the same data"
            )
        if state["seed"] != self.seed:
            warnings.warn(
                f"the position was saved with seed {state['seed']}, and the sampler has {self.seed}: it goes on "
                "in another order, in which some samples come twice in this epoch and others not at all",
                stacklevel=2,
            )
        self.epoch = state["epoch"]
        self.consumed = min(state["consumed"] * state["ranks"] // ranks, len(self))


class EpochBatches:
    """The batches that :meth:`ResumableSampler.batches` returns."""

    def __init__(self, sampler: ResumableSampler, loader: DataLoader[Any]) -> None:
        self._sampler = sampler
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.go_through(self._loader)

    def repeat_last(self) -> Any:
        """Return the epoch's last batch, for :func:`lockstep.batches` on a rank that was out of batches at the stop."""
        return self._sampler.repeat_last(self._loader)

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        size = self._loader.batch_size or 1
        left = len(self._sampler) - self._sampler.consumed
        return _batches_in(left, size, self._loader.drop_last)


def _batches_in(samples: int, size: int, drops_last: bool) -> int:
    return samples // size if drops_last else -(-samples // size)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed PyTorch's random numbers on the CPU inside the block, and restore their state after it."""
    with torch.random.fork_rng(devices=()):
        seed_cpu(seed)
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
