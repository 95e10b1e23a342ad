"""The state of a replicated module, how to find it, and its training state.

A :class:`Replication` is made by ``replicate()`` (then it belongs to the module itself) or by
``DistributedDataParallel`` (then to the wrapper). It starts when the parameters and the group exist: at once, or at the
first forward. At the start it compares the modules of all ranks, makes values equal, and begins to synchronise
gradients. There are two subclasses: gradients are synchronised in rounds of a reducer (``reducer_replication.py``), or
by shares (``shares/share_replication.py``).

No attribute of a module is its replication, so that copies and pickles are plain: :func:`replication_of` finds it.
"""

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lockstep._base.compiler import outside_compiler
from lockstep._base.deal import Dealt
from lockstep._base.identity_map import IdentityMap
from lockstep._base.inner_tensors import inner_tensors
from lockstep._base.run_all import RunAll
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, resolve_group
from lockstep.distributed.reduction.module.buffers import Buffer, write
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.managed_parameters import Owner
from lockstep.distributed.reduction.module.selection import (
    Contents,
    Selection,
    all_named,
    check_scripted,
    note_replicated,
)
from lockstep.distributed.replication.instance_methods import remove_all
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
        self._collectives: Collectives | None = None
        self._restored: dict[str, Any] | None = None

    # --------------------------------------------------------------------------------- getting ready

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True if gradients are synchronised already."""

    def start_if_possible(self, attach: Callable[[ExitStack], object]) -> None:
        """Call ``attach``, as :meth:`start` does, and start, unless the group or the parameters do not exist yet."""
        if resolve_group(self.options.group) is not None and not any(self._selection.without_values()):
            self.start(attach)
        else:
            check_scripted(self._selection.owners())  # such a module takes no hooks
            with ExitStack() as undo:
                attach(undo)
                undo.pop_all()

    @outside_compiler
    def _start_at_forward(self) -> None:
        """Start, except in the forward without gradients that gives the parameters of lazy modules their shapes."""
        if torch.is_grad_enabled() or not any(is_lazy(tensor) for _, tensor in self._selection.without_values()):
            self.start()

    @outside_compiler
    # Memory that is made in inference mode could not be written in training:
    # test_a_module_that_gets_ready_in_inference_mode_can_be_trained.
    @torch.inference_mode(False)
    def start(self, attach: Callable[[ExitStack], object] = bool) -> None:
        """Start: compare modules, make values equal, and begin to synchronise gradients.

        ``attach`` attaches the replication to its module, and gives the argument what detaches it. If anything fails,
        on any rank, all that has been done is undone on every rank, except that values may be rank 0's already. A rank
        that fails takes part in all collectives until the ranks have told each other, so that none waits for it.
        """
        with ExitStack() as undo:
            superseded = self._start(attach, undo)
            undo.pop_all()
        for earlier in superseded:
            earlier.retire()

    def _start(self, attach: Callable[[ExitStack], object], undo: ExitStack) -> list[Owner]:
        self._check_group()
        collectives, is_compared = Collectives(self.group, self.phases), self.options.init_sync
        steps = RunAll()  # what fails on this rank is raised when the others know of it
        contents, lines = Contents([], [], frozenset()), list[Line]()
        numbers, values, superseded = list[int](), Values.of((), ()), list[Owner]()
        with steps:
            contents = self._selection.contents()
            attach(undo)
            lines, numbers = self._describe(contents, collectives)
            buffers = contents.buffers if self.options.syncs_buffers_at_start else ()
            values = Values.of((parameter for _, parameter in contents.parameters), buffers)
        rows = None
        if is_compared:
            with steps:
                rows = check_same_on_all_ranks(lines, collectives, numbers, steps.problem, "replicate()")
        steps.end()
        if is_compared:
            with self.phases.phase("make equal"):
                broadcast_values(values, collectives, steps)
        with steps:
            superseded = self._synchronise(contents, collectives, rows, undo)
            undo.callback(setattr, self, "_collectives", None)
            self._collectives = collectives
            if self._restored is not None:
                self.restore(self._restored)
        if is_compared:
            with steps:
                check_same_on_all_ranks([], collectives, error=steps.problem, what="replicate()")
        steps.end()
        return superseded

    @abstractmethod
    def _check_group(self) -> None:
        """Raise if there is no process group yet, or the module cannot be replicated over it."""

    @abstractmethod
    def _describe(self, contents: Contents, collectives: Collectives) -> tuple[list[Line], list[int]]:
        """Return what must be the same on all ranks, and numbers that this rank tells the others."""

    @abstractmethod
    def _synchronise(
        self, contents: Contents, collectives: Collectives, rows: list[list[int]] | None, undo: ExitStack
    ) -> list[Owner]:
        """Begin to synchronise gradients; parameters and buffers have the same values on all ranks.

        ``rows``: the numbers of all ranks; None if they have not compared yet. ``undo`` gets what ends it again.
        Returns the reducers that this replication takes the place of. Communicates nothing.
        """

    # ------------------------------------------------------------------------------------- forward

    @abstractmethod
    def before_forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Start if necessary; move inputs to the device of the options. A forward pre-hook of the ``module``."""

    @abstractmethod
    def after_forward(self, module: Module, args: object, outputs: Any) -> None:
        """Note that the module's forward has returned these outputs. A forward hook of the ``module``."""

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = input_device(self.options)
        return (args, kwargs) if device is None else (move_to(args, device), move_to(kwargs, device))

    # ------------------------------------------------------------------------------------- methods

    def is_of(self, module: object) -> bool:
        """Return True if it is the module itself that is replicated, not one inside of it."""
        return self._selection.module_or_none() is module

    def covers(self, module: Module) -> bool:
        """Return True if every trained parameter of another module belongs to the replicated one, too."""
        if not self._selection.alive:
            return False
        known = {id(each) for each in (*self._selection.left_alone(), *(t for _, t in self._selection.named_tensors()))}
        return all(id(each) in known for each in module.parameters() if each.requires_grad)

    @abstractmethod
    def check_rounds(self, what: str) -> None:
        """Raise :class:`OptionError`, which names ``what``, if gradients are not synchronised in rounds."""

    @abstractmethod
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Choose whether backward passes that begin from now on synchronise."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside the block accumulate gradients on this rank."""

    @abstractmethod
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket."""

    @abstractmethod
    def accumulating(self, last: bool, weight: float | None) -> AbstractContextManager[None]:
        """See :func:`lockstep.loop.accumulate`."""

    def needing_weight(self) -> AbstractContextManager[None]:
        """Run a block with a weight of a module around this one, in which this one has to have a weight as well."""
        return nullcontext()

    @property
    def started(self) -> Collectives | None:
        """The collectives over which it has started; None before."""
        return self._collectives

    @property
    def group(self) -> Group:
        """The process group; None if there is none yet."""
        return resolve_group(self.options.group) if self._collectives is None else self._collectives.group

    def end_if_group_is_gone(self) -> bool:
        """Return True if the group has been destroyed: then it is the replication of its module no longer."""
        if self._collectives is None or self._collectives.is_alive:
            return False
        self.retire()
        _replications.discard(self._selection.module)
        remove_all(self._selection.module)
        return True

    @abstractmethod
    def retire(self) -> None:
        """Stop synchronising."""

    def statistics(self) -> Statistics:
        """Return calls and seconds of every phase so far."""
        return self.phases.statistics()

    @property
    def dealt(self) -> Dealt | None:
        """How the shares of the last step were dealt; None without shares."""
        return None

    def own_and_replicated(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and buffers that differ between ranks, and those that are made equal."""
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
    def has_local_buffers(self) -> bool:
        """True if the last batch has failed, or was left out: until the next one each rank has its own buffers."""
        return False

    @property
    def drift(self) -> DriftWatch | None:
        """What watches that its replicas stay alike; None before it has started."""
        return None

    @property
    def has_local_gradients(self) -> bool:
        """True if this rank has accumulated gradients that are not synchronised."""
        return False

    # ----------------------------------------------------------------------------- training state

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.distributed.training_state_dict`."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.distributed.load_training_state_dict`."""


class Values(NamedTuple):
    """The inner tensors of the parameters and buffers of a module, and functions that write other values to them."""

    tensors: list[Tensor]
    """The inner tensors of the first parameter, of the second, and so on."""
    places: list[int]
    """For each tensor the number of its parameter or buffer."""
    counts: list[int]
    """For each parameter or buffer the number of its tensors."""
    writers: list[Callable[..., object]]
    """For each parameter or buffer a function that takes other values of its tensors."""

    @classmethod
    def of(cls, parameters: Iterable[Parameter], buffers: Iterable[Buffer]) -> "Values":
        """Return the values of parameters and of those buffers that exist."""
        own = [inner_tensors(parameter) for parameter in parameters]
        present = [(inner, buffer.assign) for buffer in buffers if (inner := buffer.inner()) is not None]
        values = [*own, *(inner for inner, _ in present)]
        places = [place for place, each in enumerate(values) for _ in each]
        writers: list[Callable[..., object]] = [partial(write, targets) for targets in own]
        writers += [assign for _, assign in present]
        return cls(list(chain.from_iterable(values)), places, list(map(len, values)), writers)


@torch.no_grad()
def broadcast_values(values: Values, collectives: Collectives, steps: RunAll, source: int = 0) -> None:
    """Broadcast the values of rank ``source`` in a few large tensors; ``steps`` gets errors of writing them."""
    arrived: dict[int, dict[int, Tensor]] = defaultdict(dict)
    try:
        for number, value in collectives.broadcast_coalesced(values.tensors, "initial values", source):
            if collectives.rank == source:
                continue
            place = values.places[number]
            arrived[place][number] = value
            if len(arrived[place]) == values.counts[place]:
                with steps:  # inner tensors arrive by device, and are numbered in the order of the parameter
                    values.writers[place](*(value for _, value in sorted(arrived.pop(place).items())))
    except LockstepError:
        raise
    except BaseException as error:
        collectives.lose(f"it could not take its part in a broadcast: {error!r}")
        raise


# ----------------------------------------------------------------------------- which module has which

_replications: IdentityMap[weakref.ref[Replication]] = IdentityMap()


def register(module: Module, replication: Replication, undo: ExitStack) -> None:
    """Register the replication of a module or wrapper, until ``undo``. The module keeps it alive, since it may refer to
    the module."""
    undo.callback(_set_replication, module, _replications.get(module))
    _set_replication(module, weakref.ref(replication))
    note_replicated(module, undo)


def _set_replication(module: Module, link: "weakref.ref[Replication] | None") -> None:
    if link is None:
        _replications.discard(module)
    else:
        _replications[module] = link


def find_replication(module: Module) -> Replication | None:
    """Return the replication of a module, of a wrapper, or of a compiled one; None if it has none."""
    link = _replications.get(module) or _replications.get(getattr(module, "_orig_mod", module))
    return None if link is None else link()


def replications() -> Iterator[Replication]:
    """Yield all replications of this process whose modules exist, in the order in which they were made.

    The module of the last one is kept alive meanwhile: that of an earlier training may be part of a cycle, and be
    collected at any time, on some ranks earlier than on others.
    """
    for each in dict.fromkeys(found for link in _replications.values() if (found := link()) is not None):
        module = each._selection.module_or_none()
        if module is not None:
            yield each


def replications_in(module: Module) -> Iterator[tuple[str, Replication]]:
    """Yield the replications of a module and of those inside, each once, with the name of its module or wrapper there.

    A module has the replication of the wrapper around it: a program may save ``ddp.module``.
    """
    wrapped = {id(inner): each for each in replications() if (inner := each._selection.module_or_none()) is not None}
    seen: set[int] = set()
    for name, each in Module.named_modules(module):
        found = find_replication(each) or wrapped.get(id(each))
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield name, found


def replication_of(module: Module, caller: str) -> Replication:
    """Return the replication of a module or a wrapper; raises :class:`NotReplicableError` if it has none."""
    found = find_replication(module)
    if found is None:
        raise NotReplicableError(
            f"{caller}() got a {type(module).__name__} that is not replicated; pass the module that went through "
            "replicate(), or the DistributedDataParallel around it"
        )
    return found


def own_names(module: Module, inner: Module) -> set[str]:
    """Return the names of parameters and buffers in ``inner`` (the module, or the wrapped one) that are not replicated.

    These are the ones that a replicated module at or below it leaves out (``ignored_modules``,
    ``params_and_buffers_to_ignore``), and its buffers under the policy ``"local"``.
    """
    own: set[int] = set()
    shared: set[int] = set()
    for _, replication in replications_in(module):
        kept, equal = replication.own_and_replicated()
        own.update(map(id, kept))
        shared.update(map(id, equal))
    return {name for name, tensor in all_named(inner) if id(tensor) in own - shared}


def training_state_dict(module: Module) -> dict[str, Any]:
    """Return the state that training resumes from, besides the ``state_dict`` of the module and the optimizer.

    Args:
        module: A module from :func:`lockstep.replicate`, or a :class:`lockstep.DistributedDataParallel`.

    Returns:
            The round's number, the bucket plan as JSON, and the state of the communication hook: its ``state_dict()``
            if it has one, else its attributes without process groups. It may differ between ranks (error feedback of
            PowerSGD), so save one for each rank. ``torch.save`` and distributed checkpoints can store it.

    Communicates nothing.

    Raises :class:`NotReplicableError` for a module that is not replicated.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(2, 1), process_group=group)
        >>> training_state_dict(model)["round"]
        0

    Stands for: pickling the state of a communication hook by hand, as PyTorch's documentation shows for PowerSGD.
    """
    return replication_of(module, "training_state_dict").training_state()


def load_training_state_dict(module: Module, state_dict: dict[str, Any]) -> None:
    """Load a state returned by :func:`training_state_dict`, on every rank.

    Register the same hook before. A module that is not set up yet loads it then. Communicates
    nothing now; a plan that is new to the module is compared among the ranks, in one small all-gather, before it is
    used.

    Raises :class:`NotReplicableError` if just one of the two has a hook, and :class:`LayoutError` if the state is of
    another module.

    Stands for: the counterpart of :func:`training_state_dict`.
    """
    replication_of(module, "load_training_state_dict").restore(state_dict)
