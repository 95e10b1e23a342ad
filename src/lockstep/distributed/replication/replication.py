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
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lockstep.compiler import outside_compiler
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives, Group, resolve_group
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.selection import Contents, Selection, note_replicated
from lockstep.distributed.reduction.values import broadcast_values
from lockstep.distributed.replication.options import Options
from lockstep.errors import CommunicationError, LockstepError, NotReplicableError
from lockstep.phases import Phases, Statistics


class Replication(ABC):
    """The state of one replicated module."""

    training_is_common = False
    """True if :meth:`training_state` is the same on all ranks, and on any number of them."""
    reducer: Reducer | None = None
    """The reducer, once the module is ready; None for a module whose gradients are not synchronised in rounds."""

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
        self.requires_sync = True
        """True if backward passes that begin from now on synchronise."""
        self._restored: dict[str, Any] | None = None

    # --------------------------------------------------------------------------------- getting ready

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True if gradients are synchronised already."""

    @abstractmethod
    def _start(self, collectives: Collectives) -> Reducer | None:
        """Compare modules, make values equal, and begin to synchronise gradients."""

    @property
    @abstractmethod
    def started_reducer(self) -> Reducer:
        """The reducer; gets ready first if necessary."""

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
    def start(self) -> Reducer | None:
        """Get ready: compare modules, make values equal, and begin to synchronise gradients."""
        group = resolve_group(self.options.group)
        if group is None:
            raise CommunicationError(self._without_group())
        return self._start(Collectives(group, self.phases))

    def _without_group(self) -> str:
        return (
            "a replicated module was used before there is a process group; call "
            "torch.distributed.init_process_group() first, or pass process_group"
        )

    def _contents(self) -> tuple[Contents, LockstepError | None]:
        """Return what is to be replicated, and the error if it cannot be."""
        try:
            return self._selection.contents(), None
        except LockstepError as error:
            return Contents([], [], frozenset()), error

    def _compare(
        self, lines: Sequence[Line], collectives: Collectives, numbers: Sequence[int], failure: LockstepError | None
    ) -> list[list[int]]:
        """Compare with the other ranks, and return everybody's numbers; a failure of this rank is theirs, too."""
        try:
            return check_same_on_all_ranks(lines, collectives, numbers, str(failure or ""))
        except LockstepError as error:
            if failure is not None:
                raise failure from error
            raise

    def _make_equal(self, contents: Contents, collectives: Collectives) -> None:
        with self.phases.phase("make equal"):
            buffers = contents.buffers if self.options.syncs_buffers_at_start else []
            broadcast_values([parameter for _, parameter in contents.parameters], buffers, collectives)

    # ------------------------------------------------------------------------------------- forward

    @abstractmethod
    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Get ready if necessary; move inputs to the device of the options."""

    @abstractmethod
    def after_forward(self, outputs: Any) -> None:
        """Note that the module's forward has returned these outputs."""

    # ------------------------------------------------------------------------------------- methods

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients of backward passes inside accumulate on this rank."""

    @abstractmethod
    def synchronising(self, required: bool) -> AbstractContextManager[None]:
        """Let backward passes inside synchronise, or not."""

    @abstractmethod
    def set_requires_gradient_sync(self, required: bool) -> None:
        """Choose whether backward passes that begin from now on synchronise."""

    @abstractmethod
    def weighing(self, weight: float | None) -> AbstractContextManager[None]:
        """Give the loss of the backward passes inside a weight, if it is not None."""

    @abstractmethod
    def watch_values(self, every: int) -> None:
        """Compare values in every ``every``-th round from now on, or in none if it is 0; all ranks must."""

    @abstractmethod
    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Add a communication hook."""

    @property
    def group(self) -> Group:
        """The process group; None if there is none yet."""
        return resolve_group(self.options.group)

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


def replication_of(module: Module, caller: str) -> Replication:
    """Return the replication of a module or a wrapper; raises :class:`NotReplicableError` if it has none."""
    found = find_replication(module)
    if found is None:
        raise NotReplicableError(
            f"{caller}() got a {type(module).__name__} that is not replicated; pass the module that went through "
            "replicate(), or the DistributedDataParallel around it"
        )
    return found
