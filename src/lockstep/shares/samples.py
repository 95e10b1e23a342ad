"""Samples and their random numbers, which depend only on the sample and the epoch, not on the rank or worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch.utils.data import TensorDataset, default_collate, get_worker_info

from lockstep._base.seeds import derive_seed, generators, keep_generators


class ShareKey(NamedTuple):
    """A request for the samples of one share."""

    seed: int
    epoch: int
    batch: int
    share: int
    samples: tuple[int, ...]


class SeededShares:
    """A data set whose items are whole shares, loaded and collated; a request is a list with one :class:`ShareKey`.

    Before each sample, the default random generators (PyTorch's of the CPU, Python's, NumPy's) are seeded by the run's
    seed, the epoch and the sample's number, and before collating by the share. A data set that loads many samples at a
    time (``__getitems__``) is seeded once for all samples of a share.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        # Tensors are only indexed and stacked, which draws no numbers, and seeding takes longer than that.
        self._draws = type(dataset) is not TensorDataset or collate is not default_collate

    def __getitems__(self, keys: Sequence[ShareKey]) -> Any:
        (key,) = keys
        if not self._draws:
            return self._collate([self._dataset[sample] for sample in key.samples])
        with _generators_kept():
            samples = self._samples(key)
            _seed_all(derive_seed(key.seed, "collate", key.epoch, key.batch, key.share))
            return self._collate(samples)

    def _samples(self, key: ShareKey) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            _seed_all(derive_seed(key.seed, "samples", key.epoch, key.batch, key.share))
            return self._dataset.__getitems__(list(key.samples))
        return [self._load(key, sample) for sample in key.samples]

    def _load(self, key: ShareKey, sample: int) -> Any:
        _seed_all(derive_seed(key.seed, "sample", key.epoch, sample))
        return self._dataset[sample]

    def __len__(self) -> int:
        return len(self._dataset)


def as_it_is(share: Any) -> Any:
    """Return a share as it is: :class:`SeededShares` has collated it already."""
    return share


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the generators of the training process; in a worker, nothing else draws from them."""
    with ExitStack() as stack:
        if get_worker_info() is None:
            keep_generators(stack)
        yield


def _seed_all(seed: int) -> None:
    for seed_one in generators():
        seed_one(seed)
