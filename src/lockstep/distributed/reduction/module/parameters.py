"""The parameters of a reducer on which the ranks have agreed, and later changes of the module.

Modules change while they are trained. Loading with ``assign=True``, replacing a layer, ``weight_norm``, a
parametrization, a conversion that makes new parameters and a write to ``module._parameters`` all put another object
into some module's dictionary. When a backward pass begins, a :class:`SlotSnapshot` compares references, which takes
about 50 ns for each parameter and each module; it ignores values.

A parameter whose shape, dtype or device has changed (``parameter.data = ...``, ``module.half()``) is a new parameter,
too: until the ranks have agreed on it, a stand-in without gradients takes its place among those agreed on.

A rank that finds other parameters or modules watches the gradients of the added ones as well, and says so in its
status. All ranks then agree again on the parameters, in the same backward: they compare names, order, shapes and
dtypes, and the values of new parameters, since gradients at different values have no common mean. A difference is an
error by name, on every rank, in this backward and each later one until it is gone.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep._base.optimizer_steps import has_any
from lockstep._base.run_all import RunAll
from lockstep._base.tensor_state import Layouts
from lockstep.distributed.comm.agreement import Line, check_new_everywhere, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.autograd.gradients import (
    GradientSnapshot,
    KeptGradient,
    bucket_memory,
    find_kept,
    give_up,
)
from lockstep.distributed.reduction.autograd.graph import ReachableLeaves
from lockstep.distributed.reduction.module.managed_parameters import (
    ManagedParameter,
    Owner,
    attach_to_module,
    can_have_gradient,
    claim,
    owner_of,
    restore_later,
)
from lockstep.distributed.reduction.module.selection import Contents, Selection, describe_parameter
from lockstep.errors import AgreementError

_END = (object(),)
"""Follows the last entry, so that a list that has become longer or shorter differs there."""
_SLOTS = attrgetter("_parameters", "_modules")


class SlotSnapshot:
    """The contents of the parameter and module slots of ``modules``, to compare with later contents."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = list(map(ref, modules))  # weak: one of them keeps the reducer alive, and the reducer this
        dictionaries = [slots for module in modules for slots in _SLOTS(module)]
        self._known = [*chain.from_iterable(map(dict.values, dictionaries)), *_END]

    def changed(self) -> bool:
        """Return True if any slot holds another object than at first."""
        try:
            dictionaries = chain.from_iterable(map(_SLOTS, map(call, self._modules)))
            return not all(map(is_, chain(chain.from_iterable(map(dict.values, dictionaries)), _END), self._known))
        except AttributeError:  # a weak reference returned None: a module is gone
            return True


class Proposal(NamedTuple):
    """The parameters that all ranks have now; :meth:`ParameterSet.accept` agrees on them."""

    parameters: list[ManagedParameter]
    trained: list[int]
    """The indices of those that are trained on any rank."""
    new: list[ManagedParameter]
    """Those on which the ranks have not agreed before."""
    with_gradient: list[ManagedParameter]
    """The new ones that any rank has a gradient of."""


class _AgreedParameters(NamedTuple):
    """The parameters on which the ranks have agreed."""

    parameters: list[ManagedParameter]
    trained: list[int]
    """The indices of those that were trained on any rank at that time."""
    tensors: list[Parameter]
    """The tensors of :attr:`parameters`."""
    by_id: dict[int, Parameter]

    @classmethod
    def on(cls, parameters: list[ManagedParameter], trained: list[int]) -> "_AgreedParameters":
        tensors = [each.parameter for each in parameters]
        return cls(parameters, trained, tensors, {id(parameter): parameter for parameter in tensors})


class _Structure(NamedTuple):
    """The places of the parameters in the module."""

    slots: SlotSnapshot
    last_slot: tuple[dict[str, Any], str, Any]
    """The slot of the last trained parameter: a module's registry, its name in it, and the parameter."""

    @classmethod
    def of(cls, selection: Selection) -> "_Structure":
        owners = [owner for _, owner in selection.owners()]
        return cls(SlotSnapshot(owners), _last_slot(owners))


class ParameterSet:
    """The parameters of one reducer. Refers to the module weakly, since that holds the reducer, which holds this."""

    def __init__(self, selection: Selection, contents: Contents, delayed: Sequence[Parameter], undo: ExitStack) -> None:
        """``delayed``: parameters whose gradients leave last; ``undo`` removes what this and :meth:`attach` do to the
        module and its parameters."""
        restore_later(selection.module, [parameter for _, parameter in contents.parameters], undo)
        self._selection = selection
        self._delayed = {id(parameter) for parameter in delayed}
        self._owner: ref[Owner] | None = None
        managed = _managed(contents)
        self._use(_AgreedParameters.on(managed, [each.index for each in managed if each.parameter.requires_grad]))
        self._next: _AgreedParameters | None = None  # agreed on, but not in use yet
        self._structure = _Structure.of(selection)

    def _use(self, agreed: _AgreedParameters) -> None:
        self._agreed = self._complete = agreed  # the same, but for stand-ins
        self._retyped: list[int] = []
        self.layouts = Layouts([tensor for tensor in agreed.tensors if tensor.layout is torch.strided])
        """Notices if a parameter has another shape, dtype or device, other strides, or another ``requires_grad``."""
        self._track(())

    def _track(self, added: Sequence[ManagedParameter]) -> None:
        self.added = added
        """Parameters on this rank that the ranks have not agreed on yet."""
        self.tracked = [*self._agreed.tensors, *(each.parameter for each in added)]
        """The parameters whose gradients are watched: those agreed on, in order of their index, then the added ones."""

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on; stand-ins for those that have become others."""
        return self._agreed.parameters

    @property
    def trained(self) -> list[int]:
        """The indices of the parameters that were trained on any rank when the ranks agreed on them."""
        return self._agreed.trained

    def attach(self, owner: Owner) -> None:
        """Let a reducer synchronise all parameters; the module keeps it alive from now on."""
        self._owner = ref(owner)
        claim(self._agreed.tensors, owner)
        attach_to_module(self._selection.module, owner)

    @property
    def _owner_now(self) -> Owner:
        owner = self._owner() if self._owner is not None else None
        assert owner is not None
        return owner

    # ------------------------------------------------------------------------------------ which there are

    @property
    def last(self) -> list[int]:
        """The indices of the parameters whose gradients leave last."""
        return [each.index for each in self.parameters if id(each.parameter) in self._delayed]

    @property
    def current(self) -> list[ManagedParameter]:
        """The parameters from the next round on."""
        return (self._next or self._agreed).parameters

    @property
    def present(self) -> list[ManagedParameter]:
        """The parameters that the module still has."""
        module = self._selection.module_or_none()
        there = set() if module is None else {id(parameter) for parameter in module.parameters()}
        return [each for each in self.parameters if id(each.parameter) in there]

    @property
    def here(self) -> list[ManagedParameter]:
        """The parameters of the module on this rank, agreed on or not, as of the last :meth:`look_for_changes`."""
        return [*self.present, *self.added]

    def has(self, parameter: Parameter) -> bool:
        """Return True if the module has the parameter on this rank, agreed on or not."""
        module = self._selection.module_or_none()
        return module is not None and any(tensor is parameter for _, tensor in self._selection.named_tensors())

    def tracks(self, parameter: Parameter) -> bool:
        """Return True if the parameter is one of :attr:`tracked`."""
        return self._agreed.by_id.get(id(parameter)) is parameter or self.is_added(parameter)

    def has_any_of(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has one of the parameters that the ranks have agreed on."""
        return has_any(optimizer, self._agreed.by_id.keys())

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""
        return any(each.parameter is parameter for each in self.added)

    def named(self) -> list[tuple[str, Parameter]]:
        """Return the tracked parameters with their names."""
        return [(each.name, each.parameter) for each in (*self.added, *self.parameters)]

    def are_within(self, reach: ReachableLeaves, expected: bool, own: bool) -> bool:
        """Return True if a pass with this reach accumulates into a trained parameter.

        A pass through the module's forward on its ``own`` parameters counts even if every gradient is zero.
        ``expected``: the pass goes through the forward, perhaps on other parameters.
        """
        trained = [parameter for parameter in self.tracked if parameter.requires_grad]
        return any(id(p) in reach.leaves for p in trained) or bool(trained and (own or (expected and reach.hidden)))

    # ------------------------------------------------------------------------------------ parameters lent

    def bound_parameter(self) -> object:
        """Return the object in the slot of one parameter, for :meth:`is_own_parameter`."""
        slots, key, _ = self._structure.last_slot
        return slots.get(key)

    def is_own_parameter(self, bound_parameter: object) -> bool:
        """Return True if the forward that found ``bound_parameter`` ran on the module's own parameters.

        It did not if ``torch.func.functional_call`` had put others there; these are gone again when this is called,
        while new parameters of the module, not agreed on yet, are still there.
        """
        return bound_parameter is self._structure.last_slot[2] or bound_parameter is self.bound_parameter()

    # ------------------------------------------------------------------------------------ changes

    def look_for_retyped(self) -> bool:
        """Put stand-ins into the places of parameters with another shape, dtype or device than was agreed on; return
        True if other places have one than before."""
        if not (self.layouts.changed() or self._retyped):
            return False
        complete = self._complete.parameters
        retyped = [each.index for each in complete if each.is_retyped]
        if not retyped:  # other strides, or another requires_grad
            self.layouts = Layouts(self.layouts.tensors)
        if retyped == self._retyped:
            return False
        self._retyped = retyped
        members = [each.vacated() if each.is_retyped else each for each in complete]
        self._agreed = _AgreedParameters.on(members, self._complete.trained)
        self._track(self.added)
        return True

    def check_layouts(self) -> None:
        """Raise :class:`LayoutError` if the dtype, shape or device of a parameter has changed during backward."""
        for each in self.parameters:
            each.check_parameter()

    def look_for_changes(self) -> bool:
        """Look for parameters added or removed on this rank; return True if there are any, or the module is gone."""
        held = self._selection.module_or_none()  # another thread may drop the module meanwhile
        if held is None:
            return True
        changed = self._structure.slots.changed() or bool(self._retyped)
        if changed or self.added:
            self._track(self._find_added() if changed else ())
        return changed

    def _find_added(self) -> list[ManagedParameter]:
        owner = self._owner_now
        try:
            contents = self._selection.contents(owner)
            new = [each for each in _managed(contents) if id(each.parameter) not in self._agreed.by_id]
        except Exception:  # reported to all ranks when they compare
            new = self._unknown(self._selection.module)
        claim([each.parameter for each in new if owner_of(each.parameter) is not owner], owner)
        return new

    def _unknown(self, module: Module) -> list[ManagedParameter]:
        """Return parameters that no reducer synchronises."""
        found = {
            id(tensor): (f"{name}.{key}" if name else key, tensor)
            for name, owner in module.named_modules()
            for key, tensor in owner._parameters.items()
            if isinstance(tensor, Parameter) and not is_lazy(tensor) and tensor.is_leaf and can_have_gradient(tensor)
            if id(tensor) not in self._agreed.by_id
        }
        unowned = [(name, tensor) for name, tensor in found.values() if owner_of(tensor) in (None, self._owner_now)]
        count = len(self._agreed.parameters)
        return [ManagedParameter(count + i, name, tensor, False) for i, (name, tensor) in enumerate(unowned)]

    def compare(self, collectives: Collectives) -> "Proposal":
        """Compare the module's parameters with those of all other ranks; return what is to be agreed on.

        Raises on every rank if ranks differ. Communicates what :func:`check_same_on_all_ranks` does.
        """
        steps, lines, managed = RunAll(), list[Line](), list[ManagedParameter]()
        known = {id(each.parameter): each.name for each in self.current}
        with steps:
            contents = self._selection.contents(self._owner_now)
            lines = [describe_parameter(n, p, contents, trained=False, earlier=known) for n, p in contents.parameters]
            managed = _managed(contents)
        new = [each for each in managed if id(each.parameter) not in known]
        numbers = [2 * each.index + (each.parameter.grad is not None) for each in new]
        trained = [each.index for each in managed if each.parameter.requires_grad]
        try:
            rows = check_same_on_all_ranks(lines, collectives, [len(new), *numbers, *trained], steps.problem)
        except AgreementError as error:
            raise error from steps.first
        trained = sorted({index for row in rows for index in row[1 + row[0] :]})
        rows = [row[1 : 1 + row[0]] for row in rows]
        names, indices = [each.name for each in managed], [{number // 2 for number in row} for row in rows]
        check_new_everywhere(names, indices, collectives.global_ranks)
        with_gradient = {number // 2 for row in rows for number in row if number % 2}
        return Proposal(managed, trained, new, [managed[i] for i in sorted(with_gradient)])

    def accept(self, proposal: "Proposal") -> None:
        """Agree on what all ranks have compared; it comes into use with :meth:`take_over`."""
        before = [(each.name, id(each.parameter)) for each in self.current]
        if proposal.new or [(each.name, id(each.parameter)) for each in proposal.parameters] != before:
            self._next = _AgreedParameters.on(proposal.parameters, proposal.trained)

    def drop_gradients(self, kept: Sequence[KeptGradient] | None = None) -> None:
        """Let no parameter have a gradient, whether or not the ranks have agreed on it.

        ``kept``: the gradients that the program keeps; None: they are found.
        """
        parameters = [each.parameter for each in (*self.parameters, *self.added)]
        if kept is None:
            kept = find_kept(GradientSnapshot(parameters), range(len(parameters)), bucket_memory)
        give_up(kept)
        for parameter in parameters:
            parameter.grad = None

    def take_over(self) -> bool:
        """Use the parameters agreed on last; return True if they have changed."""
        self._structure = _Structure.of(self._selection)
        if self._next is None:
            return False
        owner = self._owner_now
        self._use(self._next)
        self._next = None
        self.attach(owner)
        return True


def _last_slot(owners: Sequence[Module]) -> tuple[dict[str, Any], str, Any]:
    """Return the slot of the last trained parameter: its dictionary, its key and the parameter."""
    for owner in reversed(owners):
        for key, parameter in reversed(owner._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                return owner._parameters, key, parameter
    return {}, "", None


def _managed(contents: Contents) -> list[ManagedParameter]:
    trainable = [(name, parameter) for name, parameter in contents.parameters if can_have_gradient(parameter)]
    return [
        ManagedParameter(index, name, parameter, id(parameter) in contents.sparse)
        for index, (name, parameter) in enumerate(trainable)
    ]
