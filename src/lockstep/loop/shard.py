"""``shard()``: this rank's part of a data set, or of a stream of samples."""

import itertools
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.errors import OptionError

B = TypeVar("B")
_END: Any = object()


@overload
def shard(  # type: ignore[overload-overlap]
    dataset: "IterableDataset[B] | Iterator[B]", group: Group | None = None
) -> "IterableDataset[B]": ...
@overload
def shard(dataset: "Dataset[B]", group: Group | None = None) -> "Subset[B]": ...
def shard(dataset: Any, group: Group | None = None) -> Any:
    """Return this rank's part of a data set or stream; sizes differ by at most one sample, with nothing padded or
    dropped.

    Args:
        dataset: A data set with a length; or a stream: an ``IterableDataset``, an iterator, or another iterable without
            a length. It has the same samples in the same order on every rank, and in every worker of a loader. So a
            stream draws its order from numbers that are the same everywhere, and does not divide itself by ranks. If it
            divides itself by workers (``get_worker_info()``), it is told that there are none.
        group: The ranks; the default group if None.

    Returns:
        Of a data set a ``Subset``; of a stream an ``IterableDataset`` with every W-th sample, W being the number of
        ranks. Each worker of a ``DataLoader`` goes through the whole stream, and yields its part of the rank's samples.

    Communicates nothing. Raises :class:`OptionError` for a loader, and for samples in no order. Several workers of a
    loader raise it for an iterator, of which each has a copy that is not a whole stream.

    Example:
        >>> import torch.distributed as dist, lockstep
        >>> list(lockstep.loop.shard([10, 11, 12], dist.ProcessGroupGloo(dist.HashStore(), 0, 1)))
        [10, 11, 12]

    Stands for: ``DistributedSampler``, which pads, or drops with ``drop_last=True``, and takes no streams.
    """
    ranks = needed_group(group)
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise OptionError(
            f"shard() got a {kind}: shard the data set that it loads, DataLoader(run.shard(dataset), ...)"
        )
    if isinstance(dataset, IterableDataset) or (isinstance(dataset, Iterable) and not isinstance(dataset, Sized)):
        return _PartOfStream(dataset, ranks.rank(), ranks.size())
    if not isinstance(dataset, Sized):
        raise OptionError(f"shard() got a {kind} without a length; expected a map-style data set, or a stream")
    if not hasattr(dataset, "__getitem__") or type(dataset).__getitem__ is Dataset.__getitem__:
        raise OptionError(f"shard() got a {kind}, whose samples have no indices; expected a map-style data set")
    samples: Any = dataset
    return Subset(samples, range(ranks.rank(), len(dataset), ranks.size()))


class _PartOfStream(IterableDataset[B]):
    """Every W-th sample of a stream; in a worker of a loader, that worker's part of these."""

    def __init__(self, stream: Iterable[B], rank: int, ranks: int) -> None:
        self.stream = stream
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[B]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > 1 and isinstance(self.stream, Iterator):
            raise OptionError(
                f"shard() got a {type(self.stream).__name__}, an iterator, and {workers} workers of a loader would "
                "share it; give an IterableDataset, whose __iter__ begins anew in each, or use one worker"
            )
        with _without_worker():
            samples = iter(self.stream)
        for number in itertools.count():
            with _without_worker():
                sample = next(samples, _END)
            if sample is _END:
                return
            if number % self.ranks == self.rank and number // self.ranks % workers == worker:
                yield sample


@contextmanager
def _without_worker() -> Iterator[None]:
    """Hide the loader's worker from a stream that would divide itself by workers, and lose samples if divided again."""
    info = loader_worker._worker_info
    loader_worker._worker_info = None
    try:
        yield
    finally:
        loader_worker._worker_info = info
