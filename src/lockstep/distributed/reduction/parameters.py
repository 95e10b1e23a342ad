"""The parameters of a reducer: those that the ranks have agreed on, and later changes on this rank.

Modules change while they are trained. Loading with ``assign=True``, replacing a layer, ``weight_norm``, a
parametrization, a conversion that makes new parameters and a write to ``module._parameters`` all put another object
into some module's dictionary. When a backward pass begins, a :class:`SlotSnapshot` compares references, which takes
about 50 ns for each parameter and each module; it ignores values.

A rank that finds other parameters or modules watches the gradients of the added ones as well, and says so in its
status. All ranks then agree again on the parameters, in the same backward: they compare names, order, shapes and
dtypes, and the values of new parameters, since gradients at different values have no common mean. A difference is an
error by name, on every rank, in this backward and each later one until it is gone.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.buckets import TensorSpec
from lockstep.distributed.comm.agreement import check_new_everywhere, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.graph import ReachableLeaves
from lockstep.distributed.reduction.owners import Owner, attach_to_module, claim, owner_of
from lockstep.distributed.reduction.parameter_hooks import can_have_gradient, release
from lockstep.distributed.reduction.selection import Contents, Selection, describe_parameter
from lockstep.distributed.reduction.values import check_equal_values
from lockstep.dtensors import local_part, matching_gradient
from lockstep.errors import LayoutError, LockstepError


class ManagedParameter:
    """A parameter whose gradient is synchronised, with its name and its index among those of the module."""

    __slots__ = ("__weakref__", "_kind", "index", "name", "parameter", "sparse", "spec")

    def __init__(self, index: int, name: str, parameter: Parameter, sparse: bool) -> None:
        self.index, self.name, self.parameter, self.sparse = index, name, parameter, sparse
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        spec = TensorSpec.of(local_part(parameter), name)
        self.spec = TensorSpec(name, spec.shape, spec.stride, dtype, spec.device)
        self._kind = _kind_of(parameter)

    def take(self, grad: Tensor) -> Tensor:
        """Return this rank's part of a gradient as a plain tensor; raise if its dtype or shape is not as planned."""
        local = matching_gradient(grad.detach(), self.parameter)
        self.check(local)
        return local

    def check(self, local: Tensor) -> None:
        """Raise :class:`LayoutError` if a parameter or gradient is not of the planned dtype, shape and device."""
        spec = self.spec
        if local.shape != spec.shape or local.dtype != spec.dtype or local.device != spec.device:
            raise LayoutError(
                f"parameter {self.name} had gradients of {spec.dtype}, shape {spec.shape}, on {spec.device} when its "
                f"module was replicated, and has one of {local.dtype}, shape {tuple(local.shape)}, on {local.device} "
                "now; change shape, dtype and device of a module before replicating it"
            )

    def check_parameter(self) -> None:
        """Raise :class:`LayoutError` if the dtype, shape or device of the parameter has changed."""
        kind = _kind_of(self.parameter)
        if kind != self._kind:
            raise LayoutError(
                f"parameter {self.name} was {_describe(*self._kind)} when its module was replicated, and is "
                f"{_describe(*kind)} now; change shape, dtype and device of a module before replicating it"
            )

    def zeros(self) -> Tensor:
        """Return zeros of the planned dtype and shape; if gradients are sparse, a tensor without entries."""
        spec = self.spec
        if self.sparse:
            size = (1, 0), (0, *spec.shape[1:])
            indices = torch.empty(size[0], dtype=torch.int64, device=spec.device)
            values = torch.empty(size[1], dtype=spec.dtype, device=spec.device)
            return torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=True).coalesce()
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _kind_of(parameter: Parameter) -> tuple[torch.dtype, torch.Size, torch.device]:
    return parameter.dtype, parameter.shape, parameter.device


def _describe(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype}, shape {tuple(shape)}, on {device}"


_END = (object(),)
"""Follows the last entry, so that a list that has become longer or shorter differs there."""
_SLOTS = attrgetter("_parameters", "_modules")


class SlotSnapshot:
    """The contents of the parameter and module slots of ``modules``, to compare with later contents."""

    retired = False
    """Read by :func:`attach_to_module`: a module keeps its snapshot until another one replaces it."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = list(map(ref, modules))  # weak: a module keeps the reducer alive, and the reducer holds this
        dictionaries = [slots for module in modules for slots in _SLOTS(module)]
        self._known = [*chain.from_iterable(map(dict.values, dictionaries)), *_END]

    def changed(self) -> bool:
        """Return True if any slot holds another object than at first."""
        try:
            dictionaries = chain.from_iterable(map(_SLOTS, map(call, self._modules)))
            return not all(map(is_, chain(chain.from_iterable(map(dict.values, dictionaries)), _END), self._known))
        except AttributeError:  # a weak reference returned None: a module is gone
            return True


class _Agreed(NamedTuple):
    """The parameters on which the ranks have agreed."""

    parameters: list[ManagedParameter]
    trained: list[int]
    """The indices of those that were trained on any rank at that time."""
    tensors: list[Parameter]
    """The tensors of :attr:`parameters`."""
    by_id: dict[int, Parameter]

    @classmethod
    def on(cls, parameters: list[ManagedParameter], trained: list[int]) -> "_Agreed":
        tensors = [each.parameter for each in parameters]
        return cls(parameters, trained, tensors, {id(parameter): parameter for parameter in tensors})


class _Structure(NamedTuple):
    """The places of the parameters in the module."""

    owners: Sequence["ref[Module]"] = ()
    """The modules that hold parameters."""
    last_slot: tuple[dict[str, Any], str, Any] = {}, "", None
    """The slot of the last trained parameter: a module's registry, its name in it, and the parameter."""
    slots: Callable[[], SlotSnapshot | None] = lambda: None


class ParameterSet:
    """The parameters of one reducer, kept alive by every module that holds one of them.

    Refers to modules weakly, since they hold the reducer, which holds this object. When the replicated module is gone,
    its remaining parts are synchronised as before.
    """

    def __init__(self, selection: Selection, contents: Contents, delayed: Sequence[Parameter], values: bool) -> None:
        """``delayed``: parameters whose gradients leave last; ``values``: compare the values of new parameters."""
        self._selection = selection
        self._compares_values = values
        self._delayed = {id(parameter) for parameter in delayed}
        self._owner: ref[Owner] | None = None
        self.added: Sequence[ManagedParameter] = ()
        """Parameters on this rank that the ranks have not agreed on yet."""
        managed = _managed(contents)
        self._agreed = _Agreed.on(managed, [each.index for each in managed if each.parameter.requires_grad])
        self._next: _Agreed | None = None  # agreed on, but not in use yet
        self.tracked = self._agreed.tensors
        """The parameters whose gradients are watched: those agreed on, in order of their index, then the added ones."""
        self._structure = _Structure()
        self._note_structure()

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on."""
        return self._agreed.parameters

    @property
    def trained(self) -> list[int]:
        """The indices of the parameters that were trained on any rank when the ranks agreed on them."""
        return self._agreed.trained

    def _note_structure(self) -> None:
        if self.is_dropped:
            return
        owners = [owner for _, owner in self._selection.owners()]
        # The snapshot refers to parts of the module, and these keep the reducer, so the module keeps the snapshot.
        slots = SlotSnapshot(owners)
        attach_to_module(self._selection.module, slots, instead_of=self._structure.slots())
        self._structure = _Structure(list(map(ref, owners)), _last_slot(owners), ref(slots))

    def attach(self, owner: Owner) -> None:
        """Let a reducer synchronise all parameters; every module that holds one keeps the reducer from now on."""
        self._owner = ref(owner)
        claim(self._agreed.tensors, owner)
        for link in self._structure.owners:
            if (module := link()) is not None:
                attach_to_module(module, owner)
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
    def is_dropped(self) -> bool:
        """True if the module itself is gone, and only parts of it may be left."""
        return not self._selection.alive

    @property
    def current(self) -> list[ManagedParameter]:
        """The parameters from the next round on."""
        return (self._next or self._agreed).parameters

    @property
    def present(self) -> list[ManagedParameter]:
        """The parameters that the module still has; all of them if the module itself is gone."""
        if self.is_dropped:
            return self.parameters
        there = {id(parameter) for parameter in self._selection.module.parameters()}
        return [each for each in self.parameters if id(each.parameter) in there]

    @property
    def here(self) -> list[ManagedParameter]:
        """The parameters of the module on this rank, agreed on or not, as of the last :meth:`look_for_changes`."""
        return [*self.present, *self.added]

    def has(self, parameter: Parameter) -> bool:
        """Return True if the module has the parameter on this rank, agreed on or not."""
        if self.is_dropped:
            return id(parameter) in self._agreed.by_id
        return any(tensor is parameter for _, tensor in self._selection.named_tensors())

    def tracks(self, parameter: Parameter) -> bool:
        """Return True if the parameter is one of :attr:`tracked`."""
        return self._agreed.by_id.get(id(parameter)) is parameter or self.is_added(parameter)

    def is_added(self, parameter: Parameter) -> bool:
        """Return True if the parameter is new on this rank, and not agreed on yet."""
        return any(each.parameter is parameter for each in self.added)

    def named(self) -> list[tuple[str, Parameter]]:
        """Return the tracked parameters with their names."""
        return [(each.name, each.parameter) for each in (*self.added, *self.parameters)]

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a tracked parameter."""
        return next(name for name, each in self.named() if each is parameter)

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer has any of the parameters."""
        return any(self.tracks(each) for group in optimizer.param_groups for each in group["params"])

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

    def look_for_changes(self) -> bool:
        """Look for parameters added or removed on this rank; return True if there are any."""
        held = self._selection.module_or_none()  # another thread may drop the module meanwhile
        if held is None:
            self._track(self._orphans())
            return False
        slots = self._structure.slots()
        changed = slots is None or slots.changed()
        if changed or self.added:
            self._track(self._find_added() if changed else ())
        return changed

    def _track(self, added: Sequence[ManagedParameter]) -> None:
        self.added = added
        agreed = self._agreed.tensors
        self.tracked = [*agreed, *(each.parameter for each in added)] if added else agreed

    def _find_added(self) -> list[ManagedParameter]:
        owner = self._owner_now
        try:
            contents = self._selection.contents(owner)
            new = [each for each in _managed(contents) if id(each.parameter) not in self._agreed.by_id]
        except LockstepError:  # reported to all ranks when they compare
            new = self._unknown([self._selection.module])
        claim([each.parameter for each in new if owner_of(each.parameter) is not owner], owner)
        return new

    def _orphans(self) -> list[ManagedParameter]:
        """Return parameters that were put into parts of the module after the module itself was gone."""
        return self._unknown([part for link in self._structure.owners if (part := link()) is not None])

    def _unknown(self, parts: Sequence[Module]) -> list[ManagedParameter]:
        """Return parameters that no reducer synchronises, by the shortest of their names."""
        found = {
            id(tensor): (f"{name}.{key}" if name else key, tensor)
            for part in parts
            for name, owner in part.named_modules()
            for key, tensor in owner._parameters.items()
            if _can_be_managed(tensor) and id(tensor) not in self._agreed.by_id
        }
        unowned = [(name, tensor) for name, tensor in found.values() if owner_of(tensor) in (None, self._owner_now)]
        count = len(self._agreed.parameters)
        return [ManagedParameter(count + i, name, tensor, False) for i, (name, tensor) in enumerate(unowned)]

    def agree_anew(self, collectives: Collectives) -> list[ManagedParameter]:
        """Agree on the parameters with all other ranks; return the new ones that any rank has a gradient of.

        They come into use with :meth:`take_over`. Raises on every rank if ranks differ, and changes nothing then.
        Communicates what :func:`check_same_on_all_ranks` and :func:`check_equal_values` do.
        """
        if self.is_dropped:
            gone = "the replicated module has been dropped, and only parts of it are left"
            check_same_on_all_ranks([], collectives, error=gone)
            return []
        owner, contents, failure = self._owner_now, Contents([], [], frozenset()), ""
        try:
            contents = self._selection.contents(owner)
        except LockstepError as error:
            failure = str(error)
        known = {id(each.parameter): each.name for each in self.current}
        lines = [describe_parameter(n, p, contents, trained=False, earlier=known) for n, p in contents.parameters]
        managed = _managed(contents)
        new = [each for each in managed if id(each.parameter) not in known]
        numbers = [2 * each.index + (each.parameter.grad is not None) for each in new]
        trained = [each.index for each in managed if each.parameter.requires_grad]
        rows = check_same_on_all_ranks(lines, collectives, [len(new), *numbers, *trained], failure)
        trained = sorted({index for row in rows for index in row[1 + row[0] :]})
        rows = [row[1 : 1 + row[0]] for row in rows]
        told = {number for row in rows for number in row}
        names, indices = [each.name for each in managed], [{number // 2 for number in row} for row in rows]
        check_new_everywhere(names, indices, collectives.global_ranks)
        if self._compares_values:
            check_equal_values([(each.name, each.parameter) for each in new], collectives)
        before = [(each.name, id(each.parameter)) for each in self.current]
        if told or [(each.name, id(each.parameter)) for each in managed] != before:
            self._next = _Agreed.on(managed, trained)
        return [self.current[i] for i in sorted({number // 2 for number in told if number % 2})]

    def take_over(self) -> bool:
        """Use the parameters agreed on last; return True if they have changed."""
        if self._next is None:
            self._note_structure()
            return False
        owner = self._owner_now
        for old in self._agreed.tensors:
            if id(old) not in self._next.by_id:
                release(old, owner)
        self._agreed, self._next = self._next, None
        self._track(())
        self._note_structure()
        self.attach(owner)
        return True


def _last_slot(owners: Sequence[Module]) -> tuple[dict[str, Any], str, Any]:
    """Return the slot of the last trained parameter: its dictionary, its key and the parameter."""
    for owner in reversed(owners):
        for key, parameter in reversed(owner._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                return owner._parameters, key, parameter
    return {}, "", None


def _can_be_managed(tensor: Any) -> bool:
    return isinstance(tensor, Parameter) and not is_lazy(tensor) and tensor.is_leaf and can_have_gradient(tensor)


def _managed(contents: Contents) -> list[ManagedParameter]:
    trainable = [(name, parameter) for name, parameter in contents.parameters if can_have_gradient(parameter)]
    return [
        ManagedParameter(index, name, parameter, id(parameter) in contents.sparse)
        for index, (name, parameter) in enumerate(trainable)
    ]
