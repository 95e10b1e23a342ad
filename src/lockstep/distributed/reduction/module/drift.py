"""Watches that what optimizers do keeps the replicas of a module alike: their numbers, the weights, and their state.

Each rank looks when an optimizer's step is over, and tells two numbers of 64 bits in the next round (``status.py``):

- a digest of the *numbers* of the optimizers that have stepped the module's parameters (learning rates and all others
  in ``param_groups``), which is made anew only where one has changed;
- a digest of the *values* of some parameters and of what the optimizer keeps of them, after each seventh round: other
  slices each time, in an order that follows from the number of the round. All are looked at within 256 rounds, and
  again and again. After the first step it is a digest of all.

Only what is there after a step counts: between two steps a rank may change its weights for a while, as sharpness-aware
minimisation and weight noise do. If the digests of two ranks differ, all ranks compare everything, and raise an error
that names what differs; if nothing does, replicas are alike by now, as they are where a program averages weights itself
after steps that differ by design.

On an accelerator the digests travel to the host without a wait, and are told in a later round: all ranks read in the
reports whether one had not arrived somewhere, and then all wait one round longer from there on.

What may differ by design is not told: without ``init_sync``, with a communication hook that is not known to give all
ranks the same, of optimizers other than PyTorch's own the state, and any state once an optimizer has stepped on
gradients of one rank alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from lockstep._base.devices import is_accelerator
from lockstep._base.identity_map import IdentityMap
from lockstep._base.optimizer_steps import observe_steps, stop_observing
from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.module.equal_values import compare
from lockstep.distributed.reduction.module.optimizer_numbers import (
    SAME_NUMBERS,
    Known,
    difference_in_numbers,
    numbers_of,
)
from lockstep.distributed.reduction.module.value_digests import APART, Look, Table, comparable_state, in_bytes, told
from lockstep.errors import OutOfSyncError

MOST_LATE = 16
"""The most rounds by which the digests of an accelerator are told later."""


class Told(NamedTuple):
    """What a rank tells in a round; 0 if it has nothing to tell."""

    numbers: int = 0
    values: int = 0


class _Steps:
    """What is known of an optimizer that makes steps."""

    __slots__ = ("known", "optimizer", "table")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = ref(optimizer)
        self.table: Table | None = None
        """The module's parameters when its numbers were read last."""
        self.known: Known | None = None
        """Its numbers; none if it has no parameter of the module."""

    def stepped(self) -> Optimizer | None:
        """Return its optimizer, if that still exists and has parameters of the module."""
        return self.optimizer() if self.known is not None and self.known.numbers.groups else None


class DriftWatch:
    """Watches one module on one rank; an observer of optimizer steps."""

    def __init__(
        self,
        named: Callable[[], Sequence[tuple[str, Tensor]]],
        collectives: Collectives,
        *,
        compares: bool,
    ) -> None:
        """``named``: returns the parameters; ``compares``: replicas are to be alike."""
        self.compares = compares and collectives.world > 1
        """True if replicas are to be alike."""
        self.is_alike = True
        """True if all ranks get the same gradients, as far as is known."""
        self.round = 0
        """The number of the module's last round, set by who counts them."""
        self._named = named
        self._collectives = collectives
        self._table: Table | None = None
        self._optimizers: IdentityMap[_Steps] = IdentityMap()
        # Steps under way, by the optimizer's id: the round in which it has begun; how many steps had ended before,
        # since that round; how many of its own have begun inside, as hooks are around each ``step`` of its classes.
        # One that fails never ends.
        self._begun: dict[int, tuple[int, int, int]] = {}
        self._ended: dict[int, tuple[_Steps, Known]] = {}  # steps since the last round, by the optimizer's id
        self._looks: dict[int, Look] = {}  # by round
        self._late = 0  # rounds by which digests of values are told later than in the next one, alike on all ranks
        self._told = Told()
        self._told_look: Look | None = None
        self._is_under_way = False  # what it was to tell has not arrived on the host
        self._told_steps: list[tuple[_Steps, Known]] = []
        self._number = 0  # of the round in which it told that
        self.is_first = True
        """True until all values have been compared after a step that has had the same gradients on all ranks."""
        self._alike: dict[int, int] = {-1: 0}  # the last round after which each slice (-1: all) was alike
        self._after_step: bytes | Tensor | None = None  # a sample of the values
        self._local_since: int | None = None  # collectives begun before a pass that did not synchronise
        self.has_local_steps = False
        """True if an optimizer has stepped on gradients of this rank alone."""
        self.has_missed_steps = False
        """True if this rank has run out of batches in ``Join``: its optimizers have made less steps."""
        if self.compares:
            observe_steps(self)

    def stop(self) -> None:
        """Watch no longer."""
        self.compares = False
        stop_observing(self)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped the module's parameters."""
        return [optimizer for each in self._optimizers.values() if (optimizer := each.stepped()) is not None]

    @property
    def is_written_since_step(self) -> bool:
        """True if the program has written to the module after its last step, as to test averaged weights, or has freed
        its memory: seen in a sample of the values."""
        earlier = in_bytes(self._after_step)
        return earlier is not None and in_bytes(self.table.sample()) != earlier  # perhaps on another device since

    @property
    def alike_after(self) -> int:
        """The last round after which all slices are known to have been alike; 0 if that is not known of any."""
        return min((self._alike.get(each, self._alike[-1]) for each in range(len(self.table.slices))), default=0)

    # ------------------------------------------------------------------------------------ steps of optimizers

    def has_parameter_of(self, optimizer: Optimizer) -> None:
        """Return None: others tell that."""

    @property
    def table(self) -> Table:
        """The parameters as they are agreed on now."""
        if self._table is None:
            self._table = Table(self._named())
        return self._table

    def parameters_changed(self) -> None:
        """Note that the ranks have agreed on other parameters, or on others of a layout."""
        self._table = None

    # What runs in each step is short: after a step nothing is cached, and a call takes longer than what it does.

    def step_begins(self, optimizer: Optimizer, closure: bool) -> None:
        """Note that an optimizer begins a step; there may be rounds in it, and steps of other optimizers."""
        begun = self._begun.get(key := id(optimizer))
        if begun is None or begun[0] != self.round:
            self._begun[key] = self.round, len(self._ended), 0
        else:
            self._begun[key] = *begun[:2], begun[2] + 1

    def step_ended(self, optimizer: Optimizer, closure: bool) -> None:
        """Look at the numbers of an optimizer that has made a step, and at what is due of its values.

        A step that another optimizer has made inside of it does not count: it may be one of a part of the parameters.
        """
        key, ended = id(optimizer), self._ended
        begun = self._begun.pop(key, None)
        if begun is None or not self.compares:
            return
        round_, before, inside = begun
        if inside:
            self._begun[key] = round_, before, inside - 1
        steps, table = self._optimizers.get(optimizer), self._table or self.table
        if steps is None:
            steps = self._optimizers[optimizer] = _Steps(optimizer)
        known = steps.known
        if known is None or steps.table is not table or not known.is_as_before(optimizer.param_groups):
            known = self._read(optimizer)
            steps.table, steps.known = table, known
        if not known.numbers.groups:  # it has no parameter of the module
            return
        if ended:
            for inner in list(ended)[before if round_ == self.round else 0 :]:
                del ended[inner]
            ended.pop(key, None)
        ended[key] = steps, known
        self._after_step = table.sample()
        if self.is_first or self.round % APART == 0:
            self._look(optimizer, table)

    def _look(self, optimizer: Optimizer, table: Table) -> None:
        look, stepped = self._looks.get(self.round), frozenset[int]()
        if look is None:
            look = self._looks[self.round] = Look(table, self.round, self.is_first)
        else:  # an earlier step has been looked at
            stepped = frozenset(id(each) for group in optimizer.param_groups for each in group["params"])
        if look.concerns(stepped) and not table.is_captured():
            optimizers = [each for some, _ in self._ended.values() if (each := some.optimizer()) is not None]
            tensors = [each for _, other in self._ended.values() for each in other.tensors]
            look.take(optimizers, stepped, tensors, state=not self.has_local_steps)

    def _read(self, optimizer: Optimizer) -> Known:
        groups = optimizer.param_groups
        own = [group for group in groups if self._is_own(group)]
        tensors = [each for group in own for name, each in group.items() if isinstance(each, Tensor)]
        numbers = numbers_of(optimizer, self._is_own)
        on_accelerator = [each for each in tensors if is_accelerator(each.device) and each.numel() == 1]
        is_fixed = len(on_accelerator) == len(tensors)
        copies = [{**group, "params": [*group["params"]]} for group in groups] if is_fixed else []
        return Known(copies, numbers, told(numbers), on_accelerator)

    def _is_own(self, group: dict[str, Any]) -> bool:
        return not self.table.ids.isdisjoint(map(id, group["params"]))

    # ---------------------------------------------------------------------- gradients of this rank alone

    def note_local_pass(self) -> None:
        """Note that a backward pass accumulates gradients, and does not synchronise them."""
        self._local_since = self._collectives.program_begun()

    def note_local_step(self) -> bool:
        """Note that an optimizer steps on gradients of this rank alone; return True unless the program has communicated
        by itself since the pass that brought them, perhaps to sum them."""
        self.has_local_steps = self.is_first = True
        return self._local_since is None or self._local_since == self._collectives.program_begun()

    # -------------------------------------------------------------------------------------------- rounds

    def tell(self, number: int, *, known: bool) -> Told:
        """Return what this rank tells in a round; ``known``: all ranks that do the same have made as many steps as this
        one since the last round."""
        if not self.compares:
            return Told()
        self._number, looks = number, self._looks
        ended, self._ended = [*self._ended.values()], {}
        if not (known and self.is_alike):
            ended = []
            looks.pop(number - 1, None)
            if not self.is_alike:
                looks.clear()
        self._told_steps = ended
        digest = ended[0][1].digest if len(ended) == 1 else told([each.digest for _, each in ended]) if ended else 0
        look: Look | None = None
        values: int | None = 0
        if looks:  # one that has not arrived everywhere is told again
            round_ = number - 1 - self._late
            look = looks.get(round_)
            values = 0 if look is None else look.digest()
            self._looks = {key: each for key, each in looks.items() if key >= min(round_, number - 1)}
        self._told_look = look
        self._is_under_way = values is None
        if self._told != (digest, values or 0):
            self._told = Told(digest, values or 0)
        return self._told

    def heard(self, some_told: bool) -> None:
        """Note that a round has ended well; ``some_told``: some ranks have told a digest of values, others have not."""
        if not self.compares:
            return
        look = self._told_look
        if look is not None and self._told.values and not some_told:
            if look.whole:
                self.is_first, self._alike = False, {-1: look.round}
            elif look.numbers:
                self._alike[look.numbers.start] = look.round
        elif self._late < MOST_LATE and (self._is_under_way or (some_told and self.table.is_on_accelerator)):
            # All ranks wait a round longer from here on: those where it is under way, and those that have told it.
            self._late += 1

    def compare(self, told: Sequence[Told]) -> None:
        """Examine everything if ranks have told different digests, in a round that ends well otherwise; ``told``: by
        all ranks."""
        if any(len({*column} - {0}) > 1 for column in zip(*told, strict=True)):
            self.examine(takes_part=True)
        self.heard(len({each.values > 0 for each in told}) > 1)

    # ------------------------------------------------------------------------------------- differences

    def everything(self, *, state: bool) -> list[tuple[str, Tensor]]:
        """Return the parameters, and with ``state`` what optimizers keep of them, with their names."""
        table = self.table
        named = [(f"parameter {name}", tensor) for name, tensor in zip(table.names, table.tensors, strict=True)]
        for optimizer in self.optimizers if state else ():
            for name, parameter in zip(table.names, table.tensors, strict=True):
                kept = comparable_state(optimizer, parameter)
                named += [(f"{key} of parameter {name} in {type(optimizer).__name__}", each) for key, each in kept]
        return named

    def examine(self, *, takes_part: bool) -> None:
        """Compare everything, after ranks have told different numbers; raise :class:`OutOfSyncError`, on every rank, if
        they differ in numbers of optimizers, or in values now.

        Communicates what :func:`all_gather_object` does, up to three times. ``takes_part``: False on a rank that has
        run out of batches in ``Join``.
        """
        ranks, collectives, number = self._collectives.global_ranks, self._collectives, self._number
        lines = [line for _, each in self._told_steps for line in each.numbers.lines()]
        row = [takes_part, self.has_local_steps, lines, self._late]
        rows = all_gather_object(row, "numbers of optimizers", collectives)
        self._late = max(each[3] for each in rows)  # digests of different rounds were compared if these differ
        present = [rank for rank, each in enumerate(rows) if each[0]]
        has_local = any(each[1] for each in rows)
        told_by = {ranks[rank]: dict(map(tuple, rows[rank][2])) for rank in present if rows[rank][2]}
        if difference := difference_in_numbers(told_by):
            raise OutOfSyncError(
                f"{difference} (after step {number - 1}), so the replicas drift apart. {SAME_NUMBERS}. No gradient has "
                "been handed out"
            )
        look = self._told_look
        found = compare(self.everything(state=not has_local), collectives, present)
        if found is None:
            return
        since = self._alike.get(-1 if look is None or look.whole else look.numbers.start, self._alike[-1])
        upto = number - 1 if look is None else look.round
        cause = _LOCAL if has_local else found.cause if since else _SINCE_REPLICATED
        raise OutOfSyncError(
            f"{found}. They have become different between {f'step {since}' if since else 'replicate()'} and step "
            f"{upto}. {cause}. What counts is what is there after the optimizer's step. If each rank is to have its "
            "own values, pass replicate(init_sync=False); of a part of the module, ignored_modules=[...]. No gradient "
            "has been handed out"
        )


_LOCAL = (
    "An optimizer has stepped on gradients of one rank alone: the last backward before it was under no_sync() or "
    "set_requires_gradient_sync(False)"
)
_SINCE_REPLICATED = (
    "Weights differ since replicate(): one rank has loaded a checkpoint, or initialised weights with its own seed, "
    "after it; or forward has chosen weights by its first batch, of which each rank has its own: run one forward on "
    "the same batch on every rank before"
)
