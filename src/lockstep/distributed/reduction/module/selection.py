"""Which parameters and buffers of a module are replicated, and the modules that cannot be."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy

from lockstep._base.devices import is_accelerator
from lockstep._base.identity_map import IdentityMap
from lockstep._base.inner_tensors import check_trained, inner_tensors_of
from lockstep._base.texts import first_line
from lockstep.distributed.comm.agreement import Line, describe_tensor
from lockstep.distributed.reduction.module.buffers import Buffer, BufferSet, has_overlap
from lockstep.distributed.reduction.module.managed_parameters import (
    Owner,
    owner_of,
)
from lockstep.errors import AlreadyManagedError, LockstepError, NotReplicableError, OptionError

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
    try:
        text = describe_tensor(parameter)
    except LockstepError:
        raise
    except Exception as error:
        raise NotReplicableError(
            f"parameter {name} is a {type(parameter).__name__}, and this class does not let its values be read "
            f"({type(error).__name__}: {first_line(error)}). Leave it out by params_and_buffers_to_ignore or "
            "ignored_modules, and make its gradients equal by lockstep.loop.mean_over_ranks"
        ) from error
    if is_accelerator(parameter.device):  # else ranks would wait for each other over different groups
        text += f", on {parameter.device.type}"
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
        replicated = (child for child in module.modules() if child is not module and child in _replicated)
        roots = (*self._ignored, *sharded_children(module), *replicated)
        names = {*self._ignored_names, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        return {each for root in roots for each in root.modules()}, names

    def left_alone(self) -> list[Tensor]:
        """Return the parameters and buffers inside the module that are not replicated."""
        skipped, names = self._left_out()
        below = [tensor for each in skipped for tensor in (*each.parameters(), *each.buffers())]
        return [*(tensor for name, tensor in all_named(self.module) if name in names), *below]

    def without_values(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters and buffers that are uninitialised or on the meta device."""
        return ((name, tensor) for name, tensor in self.named_tensors() if is_lazy(tensor) or tensor.is_meta)

    def contents(self, reducer: Owner | None = None) -> Contents:
        """Return what is to be replicated; ``reducer``: the one that manages the module already.

        Raises a :class:`LockstepError` if the module cannot be replicated.
        """
        check_scripted(self.owners())
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


def all_named(module: Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, under all of their names. Its class may have overridden its
    methods, with other arguments (torchrl)."""
    parameters = Module.named_parameters(module, remove_duplicate=False)
    return [*parameters, *Module.named_buffers(module, remove_duplicate=False)]


def _is_covered(owner: Owner, found: Collection[int]) -> bool:
    """Return True if all parameters that a reducer's module still has are in ``found``."""
    return all(id(each) in found for each in owner.present())


def note_replicated(module: Module, undo: ExitStack) -> None:
    """Record that a module has a replication of its own, which replications of modules around it leave alone; ``undo``
    removes the record."""
    if module not in _replicated:
        undo.callback(_replicated.discard, module)
        _replicated[module] = None


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


def check_scripted(owners: Sequence[tuple[str, Module]]) -> None:
    """Raise :class:`NotReplicableError` for TorchScript modules, whose slots are not Python dictionaries."""
    for name, owner in owners:
        if isinstance(owner, ScriptModule):
            raise NotReplicableError(
                f"{name or 'the module'} is a TorchScript module, whose parameters cannot be watched; replicate the "
                "module as it was before torch.jit.script (torch.compile may be used beside), or leave it out, by "
                "ignored_modules"
            )


def _check_kinds(named: Sequence[tuple[str, Tensor]]) -> None:
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_leaf:
            raise NotReplicableError(
                f"parameter {name} is not a leaf of autograd; register a Parameter. If an inner step has put it in the "
                "place of one, for gradients through that step, put the module's own parameters back before backward()"
            )
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
