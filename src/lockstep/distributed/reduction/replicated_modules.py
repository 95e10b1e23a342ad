"""The modules replicated over one group, and the exchange that tells which of them take part in a pass.

Modules have numbers that are the same on all ranks. If a pass may go through several modules, the ranks exchange the
modules that they have reached in one small collective: one number for each module, two bits for each rank, and one
number for what concerns the pass.

A rank begins the exchange when backward comes to the first module, with those that its graph leads to, and does not
wait for it (:class:`EarlyAgreement`). Once it has arrived, full buckets leave, in an order that is the same on all
ranks: those of the module that was replicated last are first, since backward usually reaches it first. What has to wait
for the end of backward follows then, module by module. A rank that cannot begin early, for instance because it has run
out of batches in ``Join``, exchanges the same at its end; until then the others keep their buckets.

If any rank has begun early, all exchange once more when these buckets have left: a function that runs a pass of its
own, as reentrant checkpointing does, may have reached modules that the graph did not show. They are reduced next. And a
rank that has failed since says so.
"""

import operator
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.distributed.comm.collectives import Collectives, Pending
from lockstep.distributed.reduction.autograd.engine import BackwardPass, is_autograd_compiled
from lockstep.distributed.reduction.autograd.graph import has_means

Module = Any
"""What is registered for a module: its reducer."""


class Mark(IntEnum):
    """What a rank sends for a module. The marks of all ranks are added: each has 20 bits of the sum for itself."""

    TAKES_PART = 1
    FAILED = 1 << 20
    """Its backward pass has failed."""
    SKIPS = 1 << 40
    """It leaves out the batch."""


class PassMark(IntEnum):
    """What a rank sends for the pass; added as those for modules are."""

    AT_END = 0
    """The pass has ended, or has failed; or there is none."""
    EARLY = 1
    """It is under way, and the module marks are those of the modules that it will reach."""
    INSIDE = 1 << 20
    """It was begun inside of another one, by a hook."""
    ONE_BY_ONE = 1 << 40
    """Some module has other parameters than the ranks have agreed on, a parameter of another one, or a communication
    hook."""


_RANKS_AT_ONCE = 31
"""The number of ranks that share a number of 64 bits, each with two bits for what it sends for itself."""
_ONE_RANK = 1 << 32
"""A rank that has failed adds this to its number."""
_lock = threading.Lock()
_orders = 0  # the highest order of a group in this process


class PassAgreement(NamedTuple):
    """The answers of all ranks."""

    packed: Sequence[int]
    """What each rank has sent for itself, from 0 to 3."""
    modules: list[Module]
    """The modules that take part on any rank and still exist on this one, in the order of their creation."""
    failed: int
    """The number of ranks on which the backward pass has failed."""
    numbers_of_failed: int
    """The sum of their numbers in the group: its number, if only one has failed."""
    skipped: bool
    """True if some rank leaves out the batch."""
    early: bool
    """True if some rank has begun the exchange before its pass had ended: it may have sent buckets since."""
    inside: bool
    """True if the pass of some rank was inside of another one."""
    one_by_one: bool
    """True if the round of each module ends before that of the next one begins, and nothing leaves early: a parameter
    may have moved from one module to another, or be in both, and a module takes the gradients of all of its parameters
    while its round goes on; or a communication hook may begin collectives when others have ended."""

    @property
    def ends_pass(self) -> bool:
        """True if no module is reduced, but all ranks end the pass."""
        return self.failed > 0 or self.skipped or self.are_mixed_up

    @property
    def asks_again(self) -> bool:
        """True if the ranks exchange once more, when buckets that do not wait for the end of backward have left."""
        return self.early and not self.ends_pass

    @property
    def are_mixed_up(self) -> bool:
        """True if the ranks have exchanged different things, as those know that agree early."""
        return self.early and (self.inside or any(self.packed))

    def marks(self, world: int) -> list[int]:
        """Return the number that each rank has sent for itself."""
        return [self.packed[rank // _RANKS_AT_ONCE] >> 2 * (rank % _RANKS_AT_ONCE) & 3 for rank in range(world)]


def in_sending_order(modules: Sequence[Module]) -> Sequence[Module]:
    """Return modules in the order in which buckets leave that do not wait for the end of backward."""
    return modules[::-1]


class ReplicatedModules:
    """The modules replicated over one group in this process."""

    def __init__(self, collectives: Collectives) -> None:
        self.exclusive = True
        """True if there is at most one, on all ranks: agreed, see :meth:`register`."""
        self.next_id = 0
        """The number of the next module; ranks agree on the highest of their proposals."""
        self.order = 0
        """The group's number among those of this process, the same on all of its ranks."""
        self.early: EarlyAgreement | None = None
        """The exchange that this rank has begun in the pass under way, or None."""
        self._considered: BackwardPass | None = None  # the last pass in which it was decided if the exchange may begin
        self._collectives = collectives
        self._links: dict[int, weakref.ref[Module]] = {}

    def __iter__(self) -> Iterator[Module]:
        """Iterate over the modules in the order of their creation."""
        return filter(None, map(operator.call, list(self._links.values())))

    def numbered(self) -> dict[int, Module]:
        """Return the modules by number, in the order of their creation."""
        return {number: module for number, link in list(self._links.items()) if (module := link()) is not None}

    def propose_order(self) -> int:
        """Return the number that this rank wants for the group; ranks take the highest of theirs."""
        return self.order or _orders + 1

    def ids(self, leaving: Collection[object] = ()) -> list[int]:
        """Return the numbers of those that are still there on this rank, and not about to be replaced by another."""
        return [n for n, module in self.numbered().items() if not any(module is each for each in leaving)]

    def restore_later(self, undo: ExitStack) -> None:
        """Let ``undo`` restore what :meth:`register` sets beside the module, which :meth:`unregister` forgets."""
        for name in ("exclusive", "next_id", "order"):
            undo.callback(setattr, self, name, getattr(self, name))

    def register(self, module: Module, module_id: int, others: Collection[int], order: int) -> None:
        """Add a module under a number on which all ranks agree.

        ``others``: numbers of other modules on any rank; ``order``: the agreed place of the group.
        """
        global _orders
        with _lock:
            self.order, _orders = order, max(order, _orders)
        self.unregister(module)
        self._links = dict(sorted({**self._links, module_id: weakref.ref(module)}.items()))
        self.next_id = module_id + 1
        self.exclusive = not others

    def unregister(self, module: Module) -> None:
        """Forget a module that is no longer reduced."""
        self._links = {number: link for number, link in self._links.items() if link() not in (None, module)}

    # --------------------------------------------------------------------- what ranks tell each other

    def tell(
        self, modules: Sequence[Module], mark: Mark, own: int = 0, of_pass: PassMark = PassMark.AT_END
    ) -> "Exchange":
        """Send ``mark`` for some modules, ``own`` for this rank, and what concerns the pass, without waiting."""
        head, place = self._head, divmod(self._collectives.rank, _RANKS_AT_ONCE)
        row = torch.zeros(head + 2 + self.next_id, dtype=torch.int64)
        row[place[0]] = own << 2 * place[1]
        row[head] = of_pass + PassMark.ONE_BY_ONE * any(module.goes_alone for module in self)
        row[head + 1] = _ONE_RANK + self._collectives.rank if mark is Mark.FAILED else 0
        for number, module in self.numbered().items():
            if any(module is each for each in modules):
                row[head + 2 + number] = mark
        row = row.to(self._collectives.device)
        return Exchange(row, self._collectives.all_reduce(row, "which modules take part"))

    @property
    def _head(self) -> int:
        return -(-self._collectives.world // _RANKS_AT_ONCE)

    def ask(self, modules: Sequence[Module], own: int = 0, of_pass: PassMark = PassMark.AT_END) -> PassAgreement:
        """Tell the other ranks that these modules take part, and wait for their answers; ``own``: sent for this
        rank."""
        return self.read(self.tell(modules, Mark.TAKES_PART, own, of_pass))

    def read(self, exchange: "Exchange") -> PassAgreement:
        """Wait for the answers to what :meth:`tell` has sent."""
        exchange.pending.wait()
        packed, (of_pass, failed, *counts) = exchange.row[: self._head].tolist(), exchange.row[self._head :].tolist()
        taking_part = (module for number, module in self.numbered().items() if number < len(counts) and counts[number])
        return PassAgreement(
            packed=packed,
            modules=list(taking_part),
            failed=failed // _ONE_RANK,
            numbers_of_failed=failed % _ONE_RANK,
            skipped=any(count >= Mark.SKIPS for count in counts),
            early=of_pass % PassMark.INSIDE > 0,
            inside=of_pass % PassMark.ONE_BY_ONE >= PassMark.INSIDE,
            one_by_one=of_pass >= PassMark.ONE_BY_ONE,
        )

    # --------------------------------------------------------------------- while backward runs

    def launch_early(self, this: BackwardPass) -> None:
        """Launch full buckets of the modules that take part in the pass ``this``, which has come to outputs or to a
        gradient of a module; as long as these are not known, begin the exchange. Waits for nothing."""
        if self.early is None and self._considered is not this:
            self._considered = this
            if self._may_agree_early(this):
                self._agree_early(this)
        answer = None if self.early is None else self.early.answer_if_known()
        if answer is None or answer.ends_pass or answer.one_by_one:
            return
        for module in in_sending_order(answer.modules):
            module.launch_ready_buckets()
            if not module.has_sent_early:
                return

    def _agree_early(self, this: BackwardPass) -> None:
        """Begin the exchange, unless no bucket could leave early."""
        reached = [module for module in self if module.will_be_reached(this)]
        if any(module.may_send_early for module in reached):
            exchange = self.tell(reached, Mark.TAKES_PART, of_pass=PassMark.EARLY)
            self.early = EarlyAgreement(self, this, reached, exchange)

    def _may_agree_early(self, this: BackwardPass) -> bool:
        """Return False if the exchange has to wait for the end of the pass.

        It has to inside of another pass, as it might overtake the exchange of that one; and if means over the ranks may
        be taken in the pass, at a time that depends on the rank. Compiled autograd does not tell what the graph leads
        to. On an accelerator the host is ahead of the device, so that nothing would leave earlier.
        """
        if this.outer is not None or not this.accumulates or has_means() or is_autograd_compiled():
            return False
        modules = list(self)
        if any(each.is_on_accelerator or each.goes_alone for each in modules):
            return False
        return any(each.may_send_early for each in modules)


class Exchange(NamedTuple):
    """An exchange that :meth:`ReplicatedModules.tell` has begun."""

    row: Tensor
    """The row being summed, to be kept until it has arrived."""
    pending: Pending


class EarlyAgreement:
    """The exchange that this rank has begun while a pass runs."""

    def __init__(
        self, modules: ReplicatedModules, this: BackwardPass, reached: Sequence[Module], exchange: Exchange
    ) -> None:
        self.this = this
        self.reached = reached
        """The modules that this rank has named."""
        self.is_broken = False
        """True if a pass inside of this one was to be reduced, which is refused."""
        self._modules = modules
        self._exchange = exchange
        self._answer: PassAgreement | None = None

    def answer(self) -> PassAgreement:
        """Return what the ranks have agreed on; waits for it."""
        if self._answer is None:
            self._answer = self._modules.read(self._exchange)
        return self._answer

    def answer_if_known(self, seconds: float = 0.0) -> PassAgreement | None:
        """Return what the ranks have agreed on, or None if it is not known yet; waits so many seconds for it."""
        if seconds:
            self._exchange.pending.linger(seconds)
        return self.answer() if self._answer is not None or self._exchange.pending.done() else None
