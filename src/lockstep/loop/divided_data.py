"""Warns of loaders whose data is not divided among the ranks, or divided twice, or lost when the run goes on."""

import warnings
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lockstep._base.digests import slice_digest, text_digest
from lockstep._base.tree import tensors_in
from lockstep.distributed.comm.groups import Group
from lockstep.errors import StructureError

_MOST_NUMBERS = 1 << 14

first_rows: "weakref.WeakKeyDictionary[Group, int]" = weakref.WeakKeyDictionary()
"""By group the digest of the first batch of its last loop, which the ranks tell each other when the next one begins."""


def rows_digest(loader: object, batch: object) -> int:
    """Return a digest of the tensors of a ``DataLoader``'s batch, at most of their first 16,384 numbers; 0 if there is
    none on the CPU."""
    if not isinstance(loader, DataLoader):
        return 0
    try:
        plain = [each for each in tensors_in(batch) if each.layout is torch.strided and each.is_cpu and each.numel()]
    except StructureError:
        return 0
    parts = [each.detach().reshape(-1)[:_MOST_NUMBERS] for each in plain]
    return text_digest(repr([int(slice_digest(each)) for each in parts]), bits=64) if parts else 0


def warn_of_same_rows(global_rank: int) -> None:
    """Warn that all ranks have had the same first batch."""
    warnings.warn(
        f"rank {global_rank}: batches() has given all ranks the same first batch, so they train on the same rows. Give "
        "each rank its part, by DataLoader(run.shard(dataset), ...) or by a DistributedSampler; an IterableDataset has "
        "to leave out what other ranks load. If the rows are drawn by chance, in the sampler or in the loader's "
        "workers, pass DataLoader(generator=run.generator), whose numbers differ by rank",
        stacklevel=4,
    )


def warn_of_two_divisions(loader: Any) -> None:
    """Warn if a data set is divided among the ranks, and a sampler divides this rank's part once more."""
    if not isinstance(loader, DataLoader):
        return
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = next((each for each in samplers if isinstance(each, DistributedSampler)), None)
    dataset: Any = loader.dataset
    part = dataset.indices if isinstance(dataset, Subset) else None
    if found is not None and isinstance(part, range) and part.step == found.num_replicas > 1:
        warnings.warn(
            f"batches() got a DataLoader of shard()'s part of a {type(dataset.dataset).__name__}, with a "
            f"{type(found).__name__} over {part.step} ranks, which divides that part once more: 1/{part.step} of the "
            "data is trained on. Leave out the sampler, or shard()",
            stacklevel=4,
        )


def warn_of_prefetching(global_rank: int) -> None:
    """Warn of what reads the batches of the loop ahead, on a rank that has run out."""
    warnings.warn(
        f"rank {global_rank}: of each batch of batches(), the backward came after the next batch was read. So the last "
        "batch of this rank counts nothing, and a repeated one counts in its place. Put what reads ahead, such as a "
        "prefetcher, around the loader: batches(prefetch(loader)). If the first batch is left out, ignore this",
        stacklevel=4,
    )


def warn_of_state_ahead(loader: object) -> None:
    """Warn of a loader with a ``state_dict()`` that is read one batch ahead."""
    warnings.warn(
        f"batches() reads this {type(loader).__name__} one batch ahead, as it has no length, so a run that resumes "
        "from its state_dict() leaves a batch out. Loop over batches((batch, loader.state_dict()) for batch in loader) "
        "and save the state that comes with the batch",
        stacklevel=5,
    )
