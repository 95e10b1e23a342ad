"""The parameters of a reducer: those that the ranks have agreed on, and what this rank has besides."""

import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep.distributed.agreement import Description, agree
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.reduction.graph import Reach
from lockstep.distributed.reduction.owners import owner_of
from lockstep.distributed.reduction.parameter import ManagedParameter
from lockstep.distributed.reduction.parameter_hooks import can_have_gradient


class Membership(Protocol):
    """Which parameters a module has, as they come and go."""

    @property
    def parameters(self) -> list[ManagedParameter]:
        """All that the ranks have agreed on, in their order."""

    @property
    def trained(self) -> list[int]:
        """Those, by number, that are trained on any rank."""

    @property
    def last(self) -> list[int]:
        """Those, by number, whose gradients leave last."""

    @property
    def present(self) -> list[ManagedParameter]:
        """Those that are still there on this rank."""

    def has(self, parameter: Parameter) -> bool:
        """Whether the parameter is there on this rank, agreed on or not."""

    @property
    def owners(self) -> "list[weakref.ref[Module]]":
        """The modules whose own parameters they are."""

    def changed(self) -> bool:
        """Whether there are others on this rank now, by a look at references."""

    def sample(self) -> object:
        """What stands now in the slot of one of them."""

    def is_own(self, sample: object) -> bool:
        """Whether that, as a forward has found it, was the module's own parameter, and not lent to it meanwhile."""

    def welcome(self) -> tuple[Sequence[ManagedParameter], Collection[int]]:
        """Claim those that are new on this rank, and return them, numbered as they will be, and the identities of those
        that have gone."""

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
        self.parameters = membership.parameters
        self.trained = membership.trained
        self.last = membership.last
        self._owners = membership.owners
        self._agreed = [each.parameter for each in self.parameters]
        self._known = {id(parameter): parameter for parameter in self._agreed}
        self._tracked = self._agreed

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

    @property
    def tracked(self) -> list[Parameter]:
        """The parameters whose gradients are looked at: those that the ranks have agreed on, by number, and then those
        that are new on this rank."""
        return self._tracked

    def tracks(self, parameter: Parameter) -> bool:
        """Return True if the parameter is one of :attr:`tracked`."""
        known = self._known.get(id(parameter)) is parameter
        return known or any(each.parameter is parameter for each in self.newcomers)

    def is_newcomer(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and the ranks have not agreed on it yet."""
        return any(each.parameter is parameter for each in self.newcomers)

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter that is tracked."""
        return next(each.name for each in (*self.newcomers, *self.parameters) if each.parameter is parameter)

    def look(self) -> bool:
        """Look for parameters that have come or gone on this rank; returns whether any have."""
        membership = self._membership()
        changed = membership is not None and membership.changed()
        if changed and membership is not None:
            self.newcomers, self.departed = membership.welcome()
        else:
            self.newcomers = self._orphans() if membership is None else ()
            self.departed = ()
        self._tracked = (
            [*self._agreed, *(each.parameter for each in self.newcomers)] if self.newcomers else self._agreed
        )
        return changed

    def _orphans(self) -> list[ManagedParameter]:
        """Return parameters that were put into parts of the module when that was there no more."""
        parts = [part for link in self._owners if (part := link()) is not None]
        found = {
            id(tensor): (f"{name}.{key}" if name else key, tensor)
            for part in parts
            for name, owner in part.named_modules()
            for key, tensor in owner._parameters.items()
            if tensor is not None and id(tensor) not in self._known and can_have_gradient(tensor)
        }
        unowned = [(name, tensor) for name, tensor in found.values() if owner_of(tensor) is None]
        count = len(self._agreed)
        return [ManagedParameter(count + i, name, tensor, False) for i, (name, tensor) in enumerate(unowned)]

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

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer uses the gradient of any of the parameters."""
        known = {id(member.parameter) for member in (*self.parameters, *self.newcomers)}
        return any(id(each) in known for group in optimizer.param_groups for each in group["params"])

    def agree_anew(self, collectives: Collectives) -> list[ManagedParameter]:
        """Agree with all ranks on which parameters there are; returns the new ones that any rank has a gradient of."""
        membership = self._membership()
        if membership is not None:
            return membership.renew(collectives)
        gone = "the replicated module has been dropped, and only parts of it are left"
        agree(Description([], gone), [], collectives)
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
