"""Samples and their random numbers: what augmentation draws depends on the sample and the epoch, not on who loads."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, get_worker_info

from lockstep.seeds import derive_seed


class ShareKey(NamedTuple):
    """Asks for the samples of one share."""

    seed: int
    epoch: int
    batch: int
    share: int
    samples: tuple[int, ...]


class _Loaded(NamedTuple):
    key: ShareKey
    samples: Any


class SeededSamples:
    """A data set whose samples are asked for by :class:`ShareKey`, one a list.

    Before each sample the generators that programs draw from without naming one - PyTorch's of the CPU, Python's,
    NumPy's - are seeded by the run's seed, the epoch and the sample's number. A data set that loads many samples at a
    time (``__getitems__``) is seeded once for those of a share.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = type(dataset) is not TensorDataset  # which only indexes; seeding takes longer than that

    def __getitems__(self, keys: Sequence[ShareKey]) -> _Loaded:
        (key,) = keys
        with _generators_kept():
            if hasattr(self._dataset, "__getitems__"):
                _seed_all(derive_seed(key.seed, "samples", key.epoch, key.batch, key.share))
                return _Loaded(key, self._dataset.__getitems__(list(key.samples)))
            return _Loaded(key, [self._load(key, sample) for sample in key.samples])

    def _load(self, key: ShareKey, sample: int) -> Any:
        if self._draws:
            _seed_all(derive_seed(key.seed, "sample", key.epoch, sample))
        return self._dataset[sample]

    def __len__(self) -> int:
        return len(self._dataset)


class SeededCollate:
    """A function that makes a batch of a list of samples, seeded by the share."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, loaded: _Loaded) -> Any:
        """The batch."""
        key = loaded.key
        with _generators_kept():
            _seed_all(derive_seed(key.seed, "collate", key.epoch, key.batch, key.share))
            return self._collate(loaded.samples)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the generators of the training process as they were; a worker has none that anybody else draws from."""
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    before = torch.random.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def _seed_all(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)  # type: ignore[attr-defined]
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])
