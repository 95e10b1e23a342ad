"""The parameters of a reducer: which of a module's are replicated, on which the ranks have agreed, and later changes.

A :class:`Selection` chooses parameters and buffers, and refuses what cannot be replicated; a :class:`ParameterSet` has
the ones that the ranks have agreed on.

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

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter, call, is_
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.distributed.comm.agreement import Line, check_new_everywhere, check_same_on_all_ranks, describe_tensor
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.reduction.buffers import Buffer, BufferSet, has_overlap
from lockstep.distributed.reduction.gradients import GradientSnapshot, KeptGradient, bucket_memory, find_kept, give_up
from lockstep.distributed.reduction.graph import ReachableLeaves
from lockstep.distributed.reduction.managed_parameters import (
    ManagedParameter,
    Owner,
    attach_to_module,
    can_have_gradient,
    claim,
    owner_of,
    release,
    restore_later,
)
from lockstep.errors import AgreementError, AlreadyManagedError, NotReplicableError, OptionError
from lockstep.identity_map import IdentityMap
from lockstep.inner_tensors import check_trained, inner_tensors_of
from lockstep.optimizer_steps import has_any
from lockstep.run_all import RunAll
from lockstep.tensor_state import Layouts

_replicated: IdentityMap[None] = IdentityMap()
"""The modules and wrappers that have been replicated."""


class Contents(NamedTuple):
    """The parameters and buffers of a module to be replicated."""

    parameters: list[tuple[str, Parameter]]
    buffers: list[Buffer]
    sparse: frozenset[int]
    """The ids of the parameters with sparse gradients."""

    def describe(self, earlier: Mapping[int, str] = MappingProxyType({})) -> list[Line]:
        """Return the lines that must be the same on all ranks; ``earlier``: see :func:`describe_parameter`."""
        parameters = (describe_parameter(n, p, self, trained=True, earlier=earlier) for n, p in self.parameters)
        return [*parameters, *(Line(f"buffer {each.name}", each.describe()) for each in self.buffers)]


def describe_parameter(
    name: str,
    parameter: Parameter,
    contents: Contents,
    *,
    trained: bool,
    earlier: Mapping[int, str] = MappingProxyType({}),
) -> Line:
    """Return the properties of a parameter that must be the same on all ranks, ``trained`` or frozen only at the start.

    ``earlier``: the names, by id, of parameters agreed on before: ranks that have moved a parameter must have moved it
    to the same place (test_changing_modules.py, "layers in another order").
    """
    text = describe_tensor(parameter)
    if earlier.get(id(parameter), name) != name:
        text += f", which was parameter {earlier[id(parameter)]} before"
    if trained:
        text += ", trained" if parameter.requires_grad else ", frozen"
    return Line(f"parameter {name}", f"{text}, sparse gradients" if id(parameter) in contents.sparse else text)


class Selection:
    """Selects the parameters and buffers of one module in its present state; may be asked repeatedly."""

    def __init__(
        self,
        module: Module,
        ignored: Collection[Module],
        taking_over: bool,
        ignored_names: Collection[str] = (),
        device_ids: Sequence[object] | None = None,
        output_device: object = None,
    ) -> None:
        """Describe the selection.

        ``ignored`` modules, and parameters and buffers of ``ignored_names``, are left out. ``taking_over``: take
        parameters of other replicated modules. ``device_ids`` and ``output_device``: as for DDP, only checked.
        """
        self.module_or_none = ref(module)
        """Call it for the module, which a reference to the result keeps alive; None if the module no longer exists."""
        self._taking_over = taking_over
        self._ignored_names = frozenset(ignored_names)
        self._device_ids = device_ids
        self._output_device = output_device
        self._ignored: IdentityMap[None] = IdentityMap()
        for each in ignored:
            self._ignored[each] = None

    @property
    def module(self) -> Module:
        """The module; others must hold a reference to it."""
        module = self.module_or_none()
        if module is None:
            raise NotReplicableError("the module that was replicated does not exist any more")
        return module

    @property
    def alive(self) -> bool:
        """True if the module still exists."""
        return self.module_or_none() is not None

    def owners(self) -> list[tuple[str, Module]]:
        """Return the modules whose own parameters and buffers are replicated, with their names."""
        skipped, _ = self._left_out()
        return [(prefix, owner) for prefix, owner in self.module.named_modules() if owner not in skipped]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that are not left out, under all of their names."""
        for registry in ("_parameters", "_buffers"):
            for name, _, tensor in self._in_slots(registry):
                yield name, tensor

    def _in_slots(self, registry: str) -> Iterator[tuple[str, Module, Any]]:
        """Yield the parameters or buffers that are not left out, each with its name and the module that holds it."""
        _, names = self._left_out()
        for prefix, owner in self.owners():
            for key, tensor in getattr(owner, registry).items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and name not in names:
                    yield name, owner, tensor

    def _left_out(self) -> tuple[set[Module], set[str]]:
        """Return the modules, and the names of parameters and buffers, that are not replicated."""
        module = self.module
        roots = (*self._ignored, *sharded_children(module), *_replicated_children(module))
        names = {*self._ignored_names, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        return {each for root in roots for each in root.modules()}, names

    def left_alone(self) -> list[Tensor]:
        """Return the parameters and buffers inside the module that are not replicated."""
        skipped, names = self._left_out()
        module = self.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        below = [tensor for each in skipped for tensor in (*each.parameters(), *each.buffers())]
        return [*(tensor for name, tensor in named if name in names), *below]

    def without_values(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters and buffers that are uninitialised or on the meta device."""
        return ((name, tensor) for name, tensor in self.named_tensors() if is_lazy(tensor) or tensor.is_meta)

    def contents(self, reducer: Owner | None = None) -> Contents:
        """Return what is to be replicated; ``reducer``: the one that manages the module already.

        Raises a :class:`LockstepError` if the module cannot be replicated.
        """
        _check_scripted(self.owners())
        named = [(name, tensor) for name, tensor in self.named_tensors() if isinstance(tensor, Parameter)]
        _check_devices(named, self._device_ids, self._output_device)
        self._check_values()
        parameters, sparse = self._parameters(reducer)
        _check_kinds(parameters)
        check_optimizers(lambda: parameters)
        chosen = {id(parameter) for _, parameter in parameters}
        _check_embeddings(
            [(name, owner) for name, owner in self.owners() if id(owner._parameters.get("weight")) in chosen]
        )
        return Contents(parameters, self.buffers().buffers, sparse)

    def buffers(self) -> BufferSet:
        """Return the buffers, in an object that can detect changes of them."""
        return BufferSet(self.module, *self._left_out())

    def _parameters(self, reducer: Owner | None) -> tuple[list[tuple[str, Parameter]], frozenset[int]]:
        found: dict[int, tuple[str, Parameter]] = {}
        sparse: set[int] = set()
        for name, owner, parameter in self._in_slots("_parameters"):
            found.setdefault(id(parameter), (name, parameter))
            if isinstance(owner, Embedding | EmbeddingBag) and owner.sparse:
                sparse.add(id(parameter))
        return [pair for pair in found.values() if self._chooses(pair[1], found, reducer)], frozenset(sparse)

    def _chooses(self, parameter: Parameter, found: Collection[int], reducer: Owner | None) -> bool:
        """Return True if a parameter is free, or to be taken over from another replicated module.

        Without a wrapper that takes over, only all parameters of another module are taken together. Once the module has
        a ``reducer``, parameters new to it stay with another replicated module that has them; one that they have been
        moved out of does not count.
        """
        other = owner_of(parameter)
        if other is None or other is reducer:
            return True
        takes = reducer is None and (self._taking_over or other.is_added(parameter) or _is_covered(other, found))
        return takes or not other.has_in_module(parameter)

    def superseded(self, contents: Contents) -> list[Owner]:
        """Return the reducers of modules replicated before whose parameters are now all replicated by this one."""
        found = {id(parameter) for _, parameter in contents.parameters}
        others = {id(each): each for _, p in contents.parameters if (each := owner_of(p)) is not None}
        return [other for other in others.values() if _is_covered(other, found)]

    def _check_values(self) -> None:
        for name, tensor in self.without_values():
            if is_lazy(tensor):
                raise NotReplicableError(
                    f"{name} is not initialised. Modules with uninitialized parameters can't be used with "
                    "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the modules, under "
                    "torch.no_grad() on every rank"
                )
            raise NotReplicableError(
                f"{name} is on the meta device and has no values; call module.to_empty(device=...) and initialise it, "
                "or load a checkpoint, before the first forward"
            )


def _is_covered(owner: Owner, found: Collection[int]) -> bool:
    """Return True if all parameters that a reducer's module still has are in ``found``."""
    return all(id(each) in found for each in owner.present())


# -------------------------------------------------------------------------------------- left out


def note_replicated(module: Module, undo: ExitStack) -> None:
    """Record that a module has a replication of its own, which replications of modules around it leave alone; ``undo``
    removes the record."""
    if module not in _replicated:
        undo.callback(_replicated.discard, module)
        _replicated[module] = None


def _replicated_children(module: Module) -> Iterator[Module]:
    return (child for child in module.modules() if child is not module and child in _replicated)


def sharded_children(module: Module) -> Iterator[Module]:
    """Return the modules inside ``module`` that ``fully_shard`` manages; raise if it is ``module`` itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    if isinstance(module, kinds):
        raise AlreadyManagedError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`; replicate over another "
            "dimension of the mesh with fully_shard(mesh=) itself, or leave this module to one of the two"
        )
    return (child for child in module.modules() if isinstance(child, kinds))


# ---------------------------------------------------------------------------------------- checks


APPLIED_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""The module of PyTorch whose optimizers step in backward."""


def check_optimizers(named: Callable[[], Iterable[tuple[str, Parameter]]]) -> None:
    """Raise :class:`NotReplicableError` if a parameter's optimizer steps in backward, on gradients not yet reduced.

    ``named`` returns parameters with their names; it is called only if the process has used such optimizers at all.
    """
    module = sys.modules.get(APPLIED_IN_BACKWARD)
    if module is not None and getattr(module, "param_to_acc_grad_map", True):  # else it has not been called
        for name, parameter in named():
            if hasattr(parameter, "_in_backward_optimizers"):
                raise NotReplicableError(
                    f"parameter {name} has an optimizer from _apply_optimizer_in_backward(), which steps before "
                    "gradients are reduced; step in a hook of your own (parameter.register_post_accumulate_grad_hook), "
                    "which waits for the reduced gradient, or after backward"
                )


def _check_devices(
    named: Sequence[tuple[str, Tensor]], device_ids: Sequence[object] | None, output_device: object
) -> None:
    """Raise :class:`OptionError` for invalid combinations of devices."""
    devices = {tensor.device for _, tensor in named}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise OptionError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {kinds}"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise OptionError(
            f"device_ids can only be None or contain a single element. Got {list(device_ids)}; a rank has "
            "one device, lockstep.DataParallel uses several in one process"
        )
    if (device_ids or output_device) and (len(devices) > 1 or kinds == {"cpu"}):
        raise OptionError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device/multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, "
            f"output_device {output_device}, and module parameters {devices}."
        )


def _check_scripted(owners: Sequence[tuple[str, Module]]) -> None:
    """Raise :class:`NotReplicableError` for TorchScript modules, whose slots are not Python dictionaries."""
    for name, owner in owners:
        if isinstance(owner, ScriptModule):
            raise NotReplicableError(
                f"{name or 'the module'} is a TorchScript module, whose parameters cannot be watched; replicate the "
                "module as it was before torch.jit.script (torch.compile may be used beside), or leave it out, by "
                "ignored_modules"
            )


def _check_kinds(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise :class:`NotReplicableError` for parameters that cannot be synchronised."""
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_leaf:
            raise NotReplicableError(f"parameter {name} is not a leaf of autograd; register a Parameter")
        if parameter.requires_grad:
            check_trained(name, parameter)
        if any(map(has_overlap, inner_tensors_of(f"parameter {name}", parameter))):
            raise NotReplicableError(
                f"parameter {name} has elements that share memory, as an expanded tensor has, and cannot be written; "
                "register parameter.contiguous() or .clone()"
            )


def _check_embeddings(named: Sequence[tuple[str, Module]]) -> None:
    """Raise :class:`NotReplicableError` for embeddings that rewrite, on each rank, the rows that it uses."""
    for name, module in named:
        embeds = isinstance(module, Embedding | EmbeddingBag)
        if embeds and module.max_norm is not None and module.weight is not None and module.weight.requires_grad:
            weight = f"{name}.weight" if name else "weight"
            raise NotReplicableError(
                f"parameter {weight} belongs to an embedding with max_norm={module.max_norm}, whose forward "
                "rewrites the rows that it looks up. Ranks look up different rows, so replicas would drift apart. Use "
                "max_norm=None, and rescale the rows after optimizer.step(), in the same way on every rank; or leave "
                "the parameter out, by params_and_buffers_to_ignore"
            )


# -------------------------------------------------------------------------- agreed parameters, and changes


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
        self.added: Sequence[ManagedParameter] = ()
        """Parameters on this rank that the ranks have not agreed on yet."""
        managed = _managed(contents)
        self._use(_Agreed.on(managed, [each.index for each in managed if each.parameter.requires_grad]))
        self._next: _Agreed | None = None  # agreed on, but not in use yet
        self._structure = _Structure.of(selection)

    def _use(self, agreed: _Agreed) -> None:
        self._agreed = self._complete = agreed  # the same, but for stand-ins
        self._retyped: list[int] = []
        self._layouts = Layouts([tensor for tensor in agreed.tensors if tensor.layout is torch.strided])

    @property
    def parameters(self) -> list[ManagedParameter]:
        """The parameters that the ranks have agreed on; stand-ins for those that have become others."""
        return self._agreed.parameters

    @property
    def tracked(self) -> list[Parameter]:
        """The parameters whose gradients are watched: those agreed on, in order of their index, then the added ones."""
        agreed = self._agreed.tensors
        return [*agreed, *(each.parameter for each in self.added)] if self.added else agreed

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
        if not (self._layouts.changed() or self._retyped):
            return False
        complete = self._complete.parameters
        retyped = [each.index for each in complete if each.is_retyped]
        if not retyped:  # other strides, or another requires_grad
            self._layouts = Layouts(self._layouts.tensors)
        if retyped == self._retyped:
            return False
        self._retyped = retyped
        members = [each.vacated() if each.is_retyped else each for each in complete]
        self._agreed = _Agreed.on(members, self._complete.trained)
        return True

    def look_for_changes(self) -> bool:
        """Look for parameters added or removed on this rank; return True if there are any, or the module is gone."""
        held = self._selection.module_or_none()  # another thread may drop the module meanwhile
        if held is None:
            return True
        changed = self._structure.slots.changed() or bool(self._retyped)
        if changed or self.added:
            self.added = self._find_added() if changed else ()
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
            if _can_be_managed(tensor) and id(tensor) not in self._agreed.by_id
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
            self._next = _Agreed.on(proposal.parameters, proposal.trained)

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
        for old in self._agreed.tensors:
            if id(old) not in self._next.by_id:
                release(old, owner)
        self._use(self._next)
        self._next = None
        self.added = ()
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
