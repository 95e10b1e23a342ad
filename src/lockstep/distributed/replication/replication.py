"""What a replicated module has, however its gradients are synchronised, and which module has which.

A :class:`Replication` is made by ``replicate()`` (then it belongs to the module itself) or by
``DistributedDataParallel`` (then to the wrapper). It becomes ready when the parameters are there and the group is: at
once, or at the first forward. Getting ready means: compare what all ranks have, make values equal, and begin to
synchronise gradients. A subclass says how: in rounds of a reducer (``reducer_replication.py``), or by shares
(``shares/share_replication.py``).

Modules do not carry their replication, so that their copies and pickles are plain: :func:`replication_of` finds it.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lockstep.compiler import outside_compiler
from lockstep.distributed.comm.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.selection import Contents, Selection, note_replicated
from lockstep.distributed.reduction.values import broadcast_values
from lockstep.distributed.replication.options import Options, input_device, move_to
from lockstep.errors import LockstepError, NotReplicableError
from lockstep.phases import Phases, Statistics


class Replication(ABC):
    """The state of one replicated module."""

    training_is_common = False
    """True if :meth:`training_state` is the same on all ranks, and on any number of them."""

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], taking_over: bool) -> None:
        self.options = options
        self.phases = Phases()
        self._selection = Selection(
            module,
            ignored,
            taking_over,
            options.params_and_buffers_to_ignore,
            options.device_ids,
            options.output_device,
        )
        self._moves_inputs = options.device_id is not None or bool(options.device_ids)
        self._group: Group | None = None
        self._restored: dict[str, Any] | None = None

    # --------------------------------------------------------------------------------- getting ready

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True if gradients are synchronised already."""

    def start_if_possible(self) -> None:
        """Get ready now, unless the group or the parameters are not there yet."""
        if resolve_group(self.options.group) is not None and not any(self._selection.without_values()):
            self.start()

    @outside_compiler
    def _start_at_forward(self) -> None:
        """Get ready, except in the forward without gradients that gives the parameters of lazy modules their shapes."""
        if torch.is_grad_enabled() or not any(is_lazy(tensor) for _, tensor in self._selection.without_values()):
            self.start()

    @outside_compiler
    # In inference mode memory would be made that cannot be written in training:
    # test_a_module_that_gets_ready_in_inference_mode_can_be_trained.
    @torch.inference_mode(False)
    def start(self) -> None:
        """Get ready: compare modules, make values equal, and begin to synchronise gradients."""
        group = self._group_to_start_with()
        collectives = Collectives(group, self.phases)
        contents = Contents([], [], frozenset())
        failure: LockstepError | None = None
        try:
            contents = self._selection.contents()
        except LockstepError as error:
            failure = error
        if self.options.init_sync:
            try:
                self._agree(contents, collectives, str(failure or ""))
            except LockstepError as error:
                if failure is not None:
                    raise failure from error
                raise
        if failure is not None:
            raise failure
        if self.options.init_sync:
            with self.phases.phase("make equal"):
                buffers = contents.buffers if self.options.syncs_buffers_at_start else []
                broadcast_values([parameter for _, parameter in contents.parameters], buffers, collectives)
        self._synchronise(contents, collectives)
        self._group = group
        if self._restored is not None:
            self.restore(self._restored)

    @abstractmethod
    def _group_to_start_with(self) -> Group:
        """Return the process group; raise if there is none yet, or the module cannot be replicated over it."""

    @abstractmethod
    def _agree(self, contents: Contents, collectives: Collectives, error: str) -> None:
        """Compare with the other ranks; they raise the ``error`` of this one, if it has one, too."""

    @abstractmethod
    def _synchronise(self, contents: Contents, collectives: Collectives) -> None:
        """Begin to synchronise gradients; parameters and buffers have the same values on all ranks."""

    # ------------------------------------------------------------------------------------- forward

    @abstractmethod
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Get ready if necessary; move inputs to the device of the options."""

    @abstractmethod
    def after_forward(self, outputs: Any) -> None:
        """Note that the module's forward has returned these outputs."""

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return inputs on the device of the options."""
        device = input_device(self.options)
        return (args, kwargs) if device is None else (move_to(args, device), move_to(kwargs, device))

    # ------------------------------------------------------------------------------------- methods

    @abstractmethod
    def check_rounds(self, what: str) -> None:
        """Raise :class:`OptionError`, which names ``what``, if gradients are not synchronised in rounds."""

    @abstractmethod
    def set_requires_gradient_sync(self, required: bool) -> None:
        """Choose whether backward passes that begin from now on synchronise."""

    @abstractmethod
    def accumulating(self, last: bool, weight: float | None) -> AbstractContextManager[None]:
        """See :func:`lockstep.loop.accumulate`."""

    @abstractmethod
    def watch_values(self, every: int) -> None:
        """Compare values in every ``every``-th round or step from now on, or in none if it is 0; all ranks must."""

    @property
    def group(self) -> Group:
        """The process group; None if there is none yet."""
        return resolve_group(self.options.group) if self._group is None else self._group

    def statistics(self) -> Statistics:
        """Return calls and seconds of every phase so far."""
        return self.phases.statistics()

    def own_and_replicated(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and buffers of the module that each rank has for itself, and those that are made
        equal."""
        replicated = [tensor for _, tensor in self._selection.named_tensors()]
        if self.options.policy != "local":
            return self._selection.left_alone(), replicated
        buffers = {id(tensor) for tensor in self._selection.module.buffers()}
        local = [tensor for tensor in replicated if id(tensor) in buffers]
        return [*self._selection.left_alone(), *local], [each for each in replicated if id(each) not in buffers]

    def replicated_names(self) -> dict[int, str]:
        """Return the names of the replicated parameters, by ``id``."""
        return {id(each): name for name, each in self._selection.named_tensors() if isinstance(each, Parameter)}

    @property
    def has_local_gradients(self) -> bool:
        """True if gradients have been accumulated that are this rank's only."""
        return False

    # ----------------------------------------------------------------------------- training state

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.distributed.training_state_dict`."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.distributed.load_training_state_dict`."""


# ----------------------------------------------------------------------------- which module has which

_replications: "weakref.WeakKeyDictionary[Module, weakref.ref[Replication]]" = weakref.WeakKeyDictionary()


def register(module: Module, replication: Replication) -> None:
    """Remember the replication of a module or wrapper, which itself keeps it alive: it may lead back to the module."""
    _replications[module] = weakref.ref(replication)
    note_replicated(module)


def find_replication(module: Module) -> Replication | None:
    """Return the replication of a module, of a wrapper, or of what ``torch.compile`` made of one; None if it has
    none."""
    link = _replications.get(module) or _replications.get(getattr(module, "_orig_mod", module))
    return None if link is None else link()


def replications() -> list[Replication]:
    """Return all replications of this process, in the order in which they were made."""
    found = (link() for link in list(_replications.values()))
    return list(dict.fromkeys(each for each in found if each is not None))


def replication_of(module: Module, caller: str) -> Replication:
    """Return the replication of a module or a wrapper; raises :class:`NotReplicableError` if it has none."""
    found = find_replication(module)
    if found is None:
        raise NotReplicableError(
            f"{caller}() got a {type(module).__name__} that is not replicated; pass the module that went through "
            "replicate(), or the DistributedDataParallel around it"
        )
    return found
