"""The parameters of a reducer: those that the ranks have agreed on, and what this rank has besides."""

import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep.distributed.agreement import Description, check_same_on_all_ranks
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.reduction.arrivals import Arrivals
from lockstep.distributed.reduction.graph import Reach
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import is_marked, take_mark


class Membership(Protocol):
    """Which parameters a module has, as they come and go."""

    @property
    def parameters(self) -> list[ManagedParameter]:
        """All that the ranks have agreed on, in their order."""

    @property
    def trained(self) -> list[int]:
        """Those, by number, that are trained on any rank."""

    @property
    def arrivals(self) -> Arrivals:
        """Which of their gradients come in a pass."""

    @property
    def last(self) -> list[int]:
        """Those, by number, whose gradients leave last."""

    @property
    def present(self) -> list[ManagedParameter]:
        """Those that are still there on this rank."""

    def has(self, parameter: Parameter) -> bool:
        """Whether the parameter is there on this rank, agreed on or not."""

    def owns(self, module: Module) -> bool:
        """Whether the own parameters of ``module``, a part, are among them."""

    def changed(self) -> bool:
        """Whether there are others on this rank now, by a look at references."""

    def sample(self) -> object:
        """What stands now in the slot of one of them."""

    def is_own(self, sample: object) -> bool:
        """Whether that, as a forward has found it, was the module's own parameter, and not lent to it meanwhile."""

    def welcome(self) -> tuple[Sequence[ManagedParameter], Collection[int]]:
        """Hook those that are new on this rank, and return them, numbered as they will be, and the identities of those
        that have gone."""

    def hook_again(self, idle: Sequence[int]) -> list[int]:
        """Hook those among ``idle`` that had lost their hook; returns which of them have a gradient."""

    def renew(self, collectives: Collectives) -> list[ManagedParameter]:
        """Agree with all ranks on which there are; returns the new ones that any rank has a gradient of."""


class Members:
    """Follows the :class:`Membership` of a module, for as long as there is one."""

    def __init__(self, membership: Membership) -> None:
        self._membership = weakref.ref(membership)  # it leads to modules, which hold the reducer
        self._take(membership)
        self.newcomers: Sequence[ManagedParameter] = ()
        """Parameters of this rank that the ranks have not agreed on yet."""
        self.departed: Collection[int] = ()
        """The identities of those that they have agreed on, and that this rank has no more."""

    def _take(self, membership: Membership) -> None:
        self.parameters, self.arrivals = membership.parameters, membership.arrivals
        self.trained, self.last = membership.trained, membership.last

    @property
    def current(self) -> list[ManagedParameter]:
        """The parameters as they will be from the next round on."""
        membership = self._membership()
        return self.parameters if membership is None else membership.parameters

    @property
    def present(self) -> list[ManagedParameter]:
        """The parameters that the module still has on this rank."""
        membership = self._membership()
        return self.parameters if membership is None else membership.present

    def have(self, parameter: Parameter) -> bool:
        """Whether the module has the parameter on this rank, agreed on or not."""
        membership = self._membership()
        if membership is None:
            return any(each.parameter is parameter for each in self.parameters)
        return membership.has(parameter)

    def belong_to(self, module: Module) -> bool:
        """Whether what is registered in ``module``, a part, will be one of them."""
        membership = self._membership()
        return membership is not None and membership.owns(module)

    def look(self) -> bool:
        """Look for parameters that have come or gone on this rank; returns whether any have."""
        membership = self._membership()
        changed = membership is not None and membership.changed()
        self.newcomers, self.departed = membership.welcome() if membership is not None and changed else ((), ())
        return changed

    @property
    def is_dropped(self) -> bool:
        """Whether the module is there no more, only parts of it."""
        return self._membership() is None

    def sample(self) -> object:
        """What stands now in the slot of one parameter, for :meth:`is_own`."""
        membership = self._membership()
        return None if membership is None else membership.sample()

    def is_own(self, sample: object) -> bool:
        """Whether a forward that has found ``sample`` ran on the module's own parameters, and not on others that
        ``torch.func.functional_call`` had lent it.

        Asked later, when those are there again; new ones of its own, on which the ranks have not agreed yet, stay.
        """
        membership = self._membership()
        return membership is None or membership.is_own(sample)

    def find_swapped(self, used: bytearray) -> list[int]:
        """The parameters whose tensor was swapped, and that have a gradient, among those that are not ``used``; they
        are from now on, and have their hook again."""
        membership = self._membership() if 0 in used else None
        found = (
            [] if membership is None else membership.hook_again([i for i, is_used in enumerate(used) if not is_used])
        )
        for index in found:
            used[index] = 1
        return found

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses the gradient of any of the parameters."""
        known = {id(member.parameter) for member in (*self.parameters, *self.newcomers)}
        return any(id(each) in known for group in optimizer.param_groups for each in group["params"])

    def are_marked(self) -> bool:
        """Whether compiled autograd has run hooks of the parameters."""
        return any(is_marked(member.parameter) for member in self.parameters)

    def take_marks(self) -> set[int]:
        """The parameters, by identity, whose hooks compiled autograd has run since this was last asked."""
        return {id(member.parameter) for member in self.parameters if take_mark(member.parameter)}

    def agree_anew(self, collectives: Collectives) -> list[ManagedParameter]:
        """Agree with all ranks on which parameters there are; returns the new ones that any rank has a gradient of."""
        membership = self._membership()
        if membership is not None:
            return membership.renew(collectives)
        gone = "the replicated module has been dropped, and only parts of it are left"
        check_same_on_all_ranks(Description([], gone), [], collectives)
        return []

    def take_over(self) -> bool:
        """Go on with the parameters that have been agreed on; returns whether they are others."""
        membership = self._membership()
        if membership is None or membership.parameters is self.parameters:
            return False
        self._take(membership)
        self.newcomers, self.departed = (), ()
        return True

    def are_within(self, reach: Reach, expected: bool, own: bool) -> bool:
        """Whether a pass of that reach accumulates into a parameter; it does, and be it zeros, if it goes through the
        module's forward on its ``own`` parameters. ``expected``: it goes through it in any way."""
        known = [member.parameter for member in (*self.parameters, *self.newcomers)]
        trained = [parameter for parameter in known if parameter.requires_grad]
        return any(id(p) in reach.leaves for p in trained) or bool(trained and (own or (expected and reach.hidden)))
