"""``GlobalBatches``: the batches of all ranks together, cut into shares; each rank loads its shares."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.distributed.comm.groups import Group, resolve_group
from lockstep.errors import OptionError, ShareError
from lockstep.shares.balance import Balance, Pace
from lockstep.shares.cut import LASTS, Cut, Last, batches_in, order_of
from lockstep.shares.samples import SeededShares, ShareKey, as_it_is
from lockstep.shares.share_state import ShareWorld, check_shares, world_of
from lockstep.shares.share_step import ShareStep, plan_audit

_DECIDED = ("batch_sampler", "sampler", "drop_last", "generator")
"""Arguments of ``DataLoader`` that are decided here."""


class GlobalBatch:
    """The shares of one batch that this rank computes: iterate over them, loaded; ``len()`` is their number. When the
    loop has ended, gradients are complete on every rank.

    Made by :class:`lockstep.shares.GlobalBatches`.
    """

    def __init__(
        self,
        world: ShareWorld,
        step: ShareStep,
        loaded: Iterator[Any],
        ahead: Callable[[], int],
        done: Callable[[Sequence[Pace]], None],
    ) -> None:
        self._world = world
        self._step = step
        self._loaded = loaded
        self._ahead = ahead
        self._done = done
        self._left = step.loaded_by(world.rank)
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
        return self._step.deal[self._world.rank]

    def __iter__(self) -> Iterator[Any]:
        if self._is_begun:
            raise ShareError(
                f"the shares of {self._step} have been gone through already, or left out when the next batch was asked "
                "for; go through them once, before the next batch"
            )
        self._is_begun = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        with self._world.under_way(self._step, self._ahead) as paces:
            while self._left:
                share, again = self._left.pop(0)
                rows = next(self._loaded)
                with self._world.entered(share, again=again):
                    yield rows
        self._done(paces)

    def skip(self) -> None:
        """Consume the shares that were not requested."""
        self._is_begun = True
        for _ in self._left:
            next(self._loaded)
        self._left = []


class GlobalBatches:
    """The global batches of a run, cut into shares; each rank computes some of the shares.

    Iterate over this object to get the batches of one epoch. Iterate over a batch to get this rank's shares of it,
    loaded and collated as by ``DataLoader``. Run forward and backward of a share inside that loop; when the loop has
    ended, gradients are complete on every rank.

    The samples of a batch, their order and their random numbers depend only on ``seed`` and the epoch, not on the
    number of ranks or workers, and not on a resume. Each new iteration is the next epoch; after ``break`` the next
    iteration continues the same epoch.

    Args:
        dataset: A map-style data set: ``len(dataset)`` and ``dataset[number]``, the same on every rank.
        batch_size: The number of rows in one step, over all ranks.
        shares: The same number as in ``replicate(model, shares=...)``: at least the largest number of ranks that the
            run will ever have.
        seed: The seed of the order, of the samples' random numbers, and of random numbers in the model (dropout).
        shuffle: If True, each epoch has a different order; if False, all epochs have the order of the data set.
        last: The treatment of rows that do not fill a last batch: ``"drop"``, or ``"smaller"`` shares, whose sizes
            differ by at most one.
        cost: The cost of each sample, in any unit: numbers, such as lengths; a function of the sample's number, which
            is called for each of them now; or sequences, whose lengths are the costs. Then the rows of a batch are put
            into shares of about equal cost, in place of equal size. That depends on the costs, ``seed`` and ``shares``
            alone, not on the ranks. It is not for ``replicate(loss="mean")``, whose shares have equal weight.
        padded: If True, a share costs the number of its rows times the largest cost, as after padding to the longest
            one; rows of similar cost are put into one share. If False, it costs the sum.
        balance: ``"speed"``: faster ranks compute more shares of a batch than slower ones, so that all are ready at the
            same time. If None, all compute equally many, or one more. Bits do not depend on it.
        process_group: The ranks; the default group if None, or one rank if there is none.
        **loader_options: Options of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``
            and so on.

    Communicates nothing while loading. When the loop over a batch's shares ends, gradients are exchanged: see
    :func:`lockstep.replicate`.

    Raises:
        OptionError: Invalid options, or an ``IterableDataset``.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # not needed after init_process_group()
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1, bias=False), shares=4, process_group=group)
        >>> rows = torch.utils.data.TensorDataset(torch.arange(16.0).view(16, 1))
        >>> for batch in GlobalBatches(rows, batch_size=8, shares=4, process_group=group):
        ...     model.zero_grad()
        ...     for (x,) in batch:
        ...         model(x).sum().backward()
        ...     print(len(batch), model.weight.grad.shape)
        4 torch.Size([1, 1])
        4 torch.Size([1, 1])

    Stands for: ``DistributedSampler`` with ``set_epoch``, and ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shares: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        last: Last = "drop",
        cost: Any = None,
        padded: bool = False,
        balance: Literal["speed"] | None = None,
        process_group: Group | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **loader_options: Any,
    ) -> None:
        _check(dataset, batch_size, shares, last, loader_options)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shares = shares
        self.seed = seed
        self.shuffle = shuffle
        self.last = last
        self._cut = Cut(cost, padded, self._samples)
        if balance not in (None, "speed"):
            raise OptionError(f'GlobalBatches(): balance must be "speed" or None, got {balance!r}')
        self.balance = balance
        self._balance = Balance()
        self._is_under_way = False
        self._group = process_group
        self._loader: DataLoader[Any] = DataLoader(
            SeededShares(dataset, collate_fn or default_collate),  # type: ignore[arg-type]
            batch_sampler=_Keys(self._keys),
            collate_fn=as_it_is,
            generator=torch.Generator(),  # of seeds for workers, which are not used
            **loader_options,
        )
        self._epoch = self._batch = 0
        self._audits_every: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch, from 0."""
        return self._batch

    @property
    def batches_left(self) -> int:
        """The number of batches that the next iteration yields: fewer than in an epoch if it continues within one."""
        return len(self) - self._batch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return batches_in(self._samples, self.batch_size, self.last)

    @property
    def _samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[GlobalBatch]:
        world = self._world()
        self._audits_every = world.audits_every
        epoch, loaded = self._epoch, None
        if self._is_under_way:  # it was left, perhaps by one rank before the last reports
            self._balance = Balance()
        self._is_under_way = True
        for step, _ in self._steps(epoch, self._batch):
            if loaded is None:
                with torch.device("cpu"):  # where the loader's generator is, whatever the default device is
                    loaded = iter(self._loader)
            number = self._number(epoch, step.batch)
            batch = GlobalBatch(world, step, loaded, partial(self._balance.ahead, number), partial(self._done, step))
            yield batch
            batch.skip()
            self._advance(epoch, step.batch)
        self._is_under_way = False

    def _world(self) -> ShareWorld:
        world = world_of(resolve_group(self._group))
        check_shares(self.shares, world.size, "GlobalBatches()")
        return world

    def _steps(self, epoch: int, first: int) -> Iterator[tuple[ShareStep, list[Sequence[int]]]]:
        """Yield the steps from batch ``first`` to the end of an epoch, with the samples of the shares of each."""
        order, world = self._order(epoch), self._world().size
        for number in range(first, len(self)):
            parts = self._cut.split(self._rows(order, number), self.shares)
            place = self._number(epoch, number)
            deal = self._balance.deal(place, len(parts), world)
            audit = plan_audit(self._audits_every, self.seed, epoch, number, deal)
            upcoming = (number + 1) % len(self)
            # Fewer shares if not enough rows are left.
            next_count = min(self.shares, self.batch_size, self._samples - upcoming * self.batch_size)
            step = ShareStep(
                seed=self.seed,
                epoch=epoch,
                batch=number,
                rows=tuple(map(len, parts)),
                shares=self.shares,
                deal=deal,
                next_deal=self._balance.deal(place + 1, next_count, world),
                samples=self._samples,
                is_shuffled=self.shuffle,
                cut=self._cut.digest(parts),
                audit=audit,
            )
            yield step, parts

    def _order(self, epoch: int) -> list[int]:
        return order_of(self._samples, self.seed, epoch, self.shuffle)

    def _rows(self, order: list[int], number: int) -> list[int]:
        return order[number * self.batch_size : (number + 1) * self.batch_size]

    def _number(self, epoch: int, batch: int) -> int:
        """Return the number of a batch, counted through all epochs."""
        return epoch * len(self) + batch

    def _done(self, step: ShareStep, paces: Sequence[Pace]) -> None:
        """Move on after a batch, of which all ranks have reported their paces; none if no module has taken part."""
        if self.balance is not None and paces:
            self._balance.decide(self._number(step.epoch, step.batch), step.deal, paces)
        self._advance(step.epoch, step.batch)

    def _advance(self, epoch: int, number: int) -> None:
        """Move on after a batch has been consumed."""
        if (self._epoch, self._batch) == (epoch, number):
            self._epoch, self._batch = self._place(epoch, number + 1)

    def _place(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the epoch and the number of a batch that is counted from the beginning of an epoch."""
        further, number = divmod(batch, len(self))
        return epoch + further, number

    def _keys(self) -> Iterator[list[ShareKey]]:
        """Yield the keys of the shares that this rank loads, from the next batch to the end of its epoch."""
        world, epoch = self._world(), self._epoch
        for step, parts in self._steps(epoch, self._batch):
            self._balance.ask_for(self._number(epoch, step.batch))
            for share, _ in step.loaded_by(world.rank):
                yield [ShareKey(self.seed, epoch, step.batch, share, tuple(parts[share]))]

    # ------------------------------------------------------------------------------------ progress

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch: ``epoch`` and ``batch``; and the arguments that belong to them.

        It is the same on every rank, and may be loaded on any number of ranks. A batch counts once the loop over its
        shares has ended, or the next batch is requested; batches that workers have loaded ahead do not count.
        """
        return {"epoch": self._epoch, "batch": self._batch, **self._fixed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, with the next iteration, at the batch at which :meth:`state_dict` was called.

        Raises :class:`OptionError` if the state is of other batches.
        """
        for name, value in self._fixed().items():
            if state.get(name, value) != value:
                raise OptionError(
                    f"the state is of batches with {name}={state[name]!r}, these have {name}={value!r}, so its epoch "
                    f"and batch number other samples; make GlobalBatches with {name}={state[name]!r}"
                )
        self._epoch, self._batch = self._place(int(state["epoch"]), int(state["batch"]))
        self._balance = Balance()

    def _fixed(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "batch_size": self.batch_size,
            "shares": self.shares,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "last": self.last,
            "cost": self._cut.name,
        }


class _Keys:
    """The batch sampler of the loader, called anew in each epoch."""

    def __init__(self, keys: Callable[[], Iterator[list[ShareKey]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[ShareKey]]:
        return self._keys()


def _check(dataset: Any, batch_size: int, shares: int, last: Last, loader_options: dict[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise OptionError(
            "GlobalBatches() needs a map-style data set, with len() and numbered samples, got "
            f"{type(dataset).__name__}: which samples of a stream a rank has read depends on the number of ranks and "
            "workers, so nothing can be promised for another number, or for a run that is resumed. Write the stream to "
            "a list, a file or a memory map first"
        )
    check_shares(shares, None, "GlobalBatches()")
    if not isinstance(batch_size, int) or batch_size < shares:
        raise OptionError(
            f"GlobalBatches(): batch_size is a whole number of rows, one for each of the {shares} shares at least, got "
            f"{batch_size!r}"
        )
    if last not in LASTS:
        raise OptionError(f"GlobalBatches(): last must be one of {', '.join(LASTS)}, got {last!r}")
    if not batches_in(len(dataset), batch_size, last):
        raise OptionError(
            f"GlobalBatches(): {len(dataset)} samples do not fill one batch of {batch_size} rows; make it smaller, or "
            "use last='smaller'"
        )
    for name in _DECIDED:
        if name in loader_options:
            raise OptionError(
                f"GlobalBatches() got {name}, which it decides by itself, so that batches are the same on any number "
                "of ranks; use shuffle=, last= and seed="
            )
