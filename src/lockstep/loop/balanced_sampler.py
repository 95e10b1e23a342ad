"""``BalancedSampler``: deals the samples of each batch to the ranks so that all have about the same work.

The samples of a global batch do not depend on the ranks. So with a loss that is a sum, and
``accumulate(model, weight=tokens)``, the gradient is that of one process with the whole batch, whoever computes what.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import fsum
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lockstep._base.deal import Parts, costs_of, deal, deal_padded, digest_of
from lockstep._base.seeds import derive_seed, seed_cpu
from lockstep._base.texts import ranks_in_words
from lockstep.distributed.comm.agreement import Line
from lockstep.distributed.comm.groups import Group, global_ranks, resolve_group
from lockstep.errors import OptionError


class BalancedSampler(Sampler[list[int]]):
    """A batch sampler that deals each global batch to the ranks so that the most expensive rank costs as little as
    possible.

    The samples are shuffled as by ``DistributedSampler(seed=seed)``, and each global batch is the next part of that
    order: with ``batch_size`` equal to the ranks' batch sizes together it has the same samples, only on other ranks.
    Every sample comes once in an epoch. Each new loop is the next epoch.

    Ranks get unequal numbers of samples. So let the loss be a sum, and call it under
    ``lockstep.accumulate(model, weight=...)``, or the mean is weighted wrongly.

    Args:
        costs: The cost of each sample, in any unit: a sequence of numbers, such as lengths. Or a data set of sequences
            (lists, strings, tensors), which is read once: their lengths are the costs. The same on every rank.
        batch_size: The number of samples in a step, over all ranks.
        batch_cost: In place of ``batch_size``: a step has as many samples as cost no more than this together, over all
            ranks. At least the cost of the most expensive sample times the number of ranks.
        seed: The seed of the order.
        shuffle: If True, each epoch has a different order; if False, all have the order of the data set.
        drop_last: If True, a last batch that is not full is left out.
        padded: If True, a rank's batch costs the number of its samples times the largest cost, as after padding to the
            longest one; samples of similar cost go to the same rank. If False, it costs the sum.
        process_group: The ranks; the default group if None, or one rank if there is none.

    Attributes:
        epoch: The present epoch, from 0; ``while sampler.epoch < epochs`` continues in it after a resume.
        batch: The number of the next batch in it.

    Go through the loader by ``run.batches(loader)`` (or :func:`lockstep.batches`, or :meth:`batches`): then
    :meth:`state_dict` is the place in the data, without the batches that workers have fetched ahead, and it loads on
    any number of ranks. ``run.batches`` also compares the samplers of all ranks, and helps if the last batch has fewer
    samples than there are ranks: the ranks without one have one batch less. A plain loop over the loader works, too;
    then the place cannot be saved.

    Communicates nothing.

    Raises:
        OptionError: Invalid options or costs; ``batch_size`` or ``batch_cost`` is too small for the ranks.
        AgreementError: In ``run.batches``, on every rank: the samplers of the ranks differ, or are at other places.

    Example:
        >>> sampler = BalancedSampler([9, 1, 1, 7, 1, 1], batch_size=6)
        >>> [sorted(batch) for batch in sampler.batches(torch.utils.data.DataLoader(range(6), batch_sampler=sampler))]
        [[tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), tensor(5)]]
        >>> sampler.epoch
        1

    Stands for: ``DistributedSampler`` with ``set_epoch``, and samplers that group samples by length.
    """

    same_on_all_ranks = True
    """The place is the same on all ranks."""

    def __init__(
        self,
        costs: Any,
        batch_size: int | None = None,
        *,
        batch_cost: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        padded: bool = False,
        process_group: Group | None = None,
    ) -> None:
        if (batch_size is None) == (batch_cost is None):
            raise OptionError("BalancedSampler() needs either batch_size or batch_cost, over all ranks")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise OptionError(f"BalancedSampler(): batch_size is a whole number of samples, got {batch_size!r}")
        self.costs = costs_of(costs, None, "BalancedSampler()")
        self.batch_size = batch_size
        self.batch_cost = batch_cost
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.padded = padded
        self.epoch = 0
        self.batch = 0
        self._group = process_group
        self._digest = digest_of(self.costs)
        self._known: tuple[int, list[list[int]]] | None = None
        self._is_counted = False
        """True while a loader that :meth:`go_through` counts asks for an iterator."""
        self._has_plain_loop = False

    def __repr__(self) -> str:
        return f"BalancedSampler({len(self.costs)} samples, epoch {self.epoch}, batch {self.batch})"

    def __len__(self) -> int:
        """Return the number of batches of the whole present epoch on this rank."""
        return self._number_on(self._ranks()[0], self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's samples of each batch that is left in the epoch."""
        return self._rest(self.epoch, self.batch) if self._is_counted else self._in_plain_loop()

    def _in_plain_loop(self) -> Iterator[list[int]]:
        self._has_plain_loop = True  # not before the first batch: a loader may ask for two iterators, and use one
        epoch, first = self.epoch, self.batch
        self.epoch, self.batch = epoch + 1, 0
        yield from self._rest(epoch, first)

    def _rest(self, epoch: int, first: int) -> Iterator[list[int]]:
        rank, world = self._ranks()
        for batch in self._batches_of(epoch)[first : self._number_on(rank, epoch)]:
            yield [batch[place] for place in self._dealt(batch, world)[rank]]

    # ------------------------------------------------------------------------------------- batches

    def _ranks(self) -> tuple[int, int]:
        """Return this rank and the number of ranks; raise :class:`OptionError` if a batch is too small for them."""
        group = resolve_group(self._group)
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        if self.batch_size is not None and self.batch_size < world:
            raise OptionError(
                f"BalancedSampler(): batch_size counts the samples of all ranks, and {self.batch_size} are too few for "
                f"{world} ranks"
            )
        if self.batch_cost is not None and self.batch_cost < world * max(self.costs, default=0.0):
            raise OptionError(
                f"BalancedSampler(): batch_cost counts the samples of all ranks, so it is at least {world} times the "
                f"cost of the most expensive one, {max(self.costs):g}; got {self.batch_cost!r}"
            )
        return rank, world

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.costs)))
        generator = torch.Generator().manual_seed(self.seed + epoch)  # as DistributedSampler does
        return torch.randperm(len(self.costs), generator=generator, device="cpu").tolist()

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._cut(epoch)
        return self._known[1]

    def _cut(self, epoch: int) -> list[list[int]]:
        order = self._order(epoch)
        if self.batch_size is not None:
            ends = list(range(0, len(order) + 1, self.batch_size))
        else:
            ends = self._ends_by_cost(order)
        if not self.drop_last and ends[-1] < len(order):
            ends.append(len(order))
        return [order[begin:end] for begin, end in pairwise(ends)]

    def _ends_by_cost(self, order: list[int]) -> list[int]:
        """Return where batches end before which the next sample would cost more than ``batch_cost``, after 0."""
        assert self.batch_cost is not None
        ends, total = [0], 0.0
        for place, sample in enumerate(order):
            total += self.costs[sample]
            # Summed exactly, as many samples as there are ranks never cost more than the product that is the least
            # batch_cost, which is rounded once, too: no rank is without a sample.
            if (
                total > self.batch_cost
                and fsum(self.costs[each] for each in order[ends[-1] : place + 1]) > self.batch_cost
            ):
                ends.append(place)
                total = self.costs[sample]
        return ends

    def _dealt(self, batch: list[int], world: int) -> Parts:
        costs = [self.costs[sample] for sample in batch]
        return deal_padded(costs, world) if self.padded else deal(costs, world)

    def _number_on(self, rank: int, epoch: int) -> int:
        """Return the number of batches of an epoch that have a sample for a rank: all, or all but the last one."""
        batches = self._batches_of(epoch)
        return len(batches) - bool(batches and len(batches[-1]) <= rank)

    # ------------------------------------------------------------------------------------ progress

    def batches(self, loader: DataLoader[Any]) -> "BalancedBatches":
        """Return the batches of a loader that are left in the epoch; after the last one, the next epoch follows.

        A batch counts once it has been yielded, so save at the end of the loop's body. After ``break`` the next loop
        continues in the same epoch. ``run.batches(loader)`` calls this by itself.
        """
        if loader.batch_sampler is not self:
            raise OptionError("the loader has another batch sampler; pass DataLoader(..., batch_sampler=) this one")
        return BalancedBatches(self, loader)

    def go_through(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return the iterator of :meth:`batches`; workers of the loader start at once."""
        self._is_counted = True
        try:
            with torch.random.fork_rng(devices=()), torch.device("cpu"):
                seed_cpu(derive_seed("workers", self._ranks()[0], self.seed, self.epoch))
                return self._counted(iter(loader))
        finally:
            self._is_counted = False

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def left(self) -> int:
        """Return the number of batches that are left in the epoch on this rank."""
        return max(0, len(self) - self.batch)

    def repeat_last(self, loader: DataLoader[Any]) -> Any:
        """Return this rank's last batch of the epoch, without counting it; None if it has none."""
        last, place = len(self) - 1, self.batch
        if last < 0:
            return None
        self.batch = last
        try:
            return next(self.go_through(loader))
        finally:
            self.batch = place

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the present one. It need not be called: each new loop is the next epoch."""
        if epoch != self.epoch:
            self.epoch, self.batch = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, and the arguments that it belongs to; they load on any number of ranks.

        Raises :class:`OptionError` after a plain loop over the loader.
        """
        if self._has_plain_loop:
            raise OptionError(
                "a loop over a loader alone has gone through the BalancedSampler, so which of the batches have been "
                "trained on, and which have only been fetched, is not known; loop over run.batches(loader), or "
                "sampler.batches(loader), to save the place"
            )
        return {"epoch": self.epoch, "batch": self.batch, **self._fixed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the batch at which :meth:`state_dict` was called; raises :class:`OptionError` if its arguments
        are others."""
        for name, value in self._fixed().items():
            if state.get(name) != value:
                raise OptionError(
                    f"the state is of a BalancedSampler with {name}={state.get(name)!r}, this has {name}={value!r}, "
                    "so its batches have other samples; make it with the same arguments"
                )
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._has_plain_loop = False

    def _fixed(self) -> dict[str, Any]:
        return {
            "samples": len(self.costs),
            "costs": self._digest,
            "batch_size": self.batch_size,
            "batch_cost": self.batch_cost,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "padded": self.padded,
        }

    def describe(self) -> list[Line]:
        """Return the lines that must be the same on all ranks when a loop begins."""
        place = {"epoch": self.epoch, "batch": self.batch}
        return [Line(f"{name} of the BalancedSampler", str(value)) for name, value in (self._fixed() | place).items()]


class BalancedBatches:
    """The batches that :meth:`BalancedSampler.batches` returns."""

    def __init__(self, sampler: BalancedSampler, loader: DataLoader[Any]) -> None:
        self._sampler = sampler
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._sampler.go_through(self._loader)

    def __len__(self) -> int:
        """Return the number of batches that are left on this rank."""
        return self._sampler.left()

    def repeat_last(self) -> Any:
        """Return the epoch's last batch, for :func:`lockstep.batches` on a rank that has no batch left."""
        return self._sampler.repeat_last(self._loader)

    def check_served(self, served: Sequence[int]) -> None:
        """Raise :class:`OptionError` if samples are dealt to ranks that a loop, which serves some, does not serve."""
        group = resolve_group(self._sampler._group)
        dealt = [] if group is None else global_ranks(group)
        if not set(dealt) <= set(served):
            raise OptionError(
                f"batches(): the BalancedSampler deals its samples to {ranks_in_words(dealt)}, and "
                f"this loop is over {ranks_in_words(served)} alone, so no rank of it would train on the others: give "
                "the sampler the process group that the modules are replicated over, BalancedSampler(process_group=)"
            )

    def describe(self) -> list[Line]:
        """See :meth:`BalancedSampler.describe`."""
        return self._sampler.describe()


def counted(loader: Any) -> Any:
    """Return a loader; one whose batch sampler is a :class:`BalancedSampler` as that counts its batches."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.batches(loader) if isinstance(sampler, BalancedSampler) else loader
