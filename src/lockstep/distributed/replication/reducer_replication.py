"""A module whose gradients are synchronised in rounds of a reducer: how it starts, and the steps around forward."""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lockstep._base.compiler import call_outside, is_in_compiled_backward
from lockstep._base.dtensors import is_dtensor
from lockstep.distributed.comm.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import watchers
from lockstep.distributed.comm.groups import resolve_group
from lockstep.distributed.reduction.autograd.engine import watch_engine
from lockstep.distributed.reduction.autograd.graph import mark_checkpoints, mark_output
from lockstep.distributed.reduction.buckets.comm_hooks import Hook, check_hook, hook_state, name_of, restore_hook_state
from lockstep.distributed.reduction.common_state import CommonState
from lockstep.distributed.reduction.module.buffer_sync import BufferSync
from lockstep.distributed.reduction.module.buffers import BufferSet
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.managed_parameters import Owner
from lockstep.distributed.reduction.module.parameters import ParameterSet
from lockstep.distributed.reduction.module.selection import Contents, Selection
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.report.pass_log import ForwardMark, note_compiled
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.distributed.replication.options import Options, outputs_in
from lockstep.distributed.replication.replication import Replication, replication_of
from lockstep.errors import CommunicationError, HookError, NotReplicableError, OptionError


class _Numbering(NamedTuple):
    """The number of a module among those of its group, on which all ranks agree."""

    module: int
    others: set[int]
    """The numbers of all other modules, on any rank."""
    order: int
    """The number of the group among the groups of its processes."""

    @classmethod
    def agreed(cls, rows: list[list[int]]) -> "_Numbering":
        """Return the numbering that follows from each rank's proposals, and the numbers of its other modules."""
        others = {number for row in rows for number in row[2:]}
        return cls(max(row[0] for row in rows), others, max(row[1] for row in rows))


class ReducerReplication(Replication):
    """The state of one module that is synchronised in rounds."""

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], taking_over: bool) -> None:
        super().__init__(module, options, ignored, taking_over)
        self.reducer: Reducer | None = None
        """The reducer; None until the replication has started."""
        self.requires_sync = True
        """True if backward passes that begin from now on synchronise."""
        self.hook: Hook | None = None
        """The communication hook."""
        self._buffer_versions: list[int] | None = None  # before a forward, once all parameters were found to be frozen
        self._buffers_drift = False

    # --------------------------------------------------------------------------------- getting ready

    @property
    def ready(self) -> bool:
        """True if gradients are synchronised already."""
        return self.reducer is not None

    @property
    def drift(self) -> DriftWatch | None:
        """See :class:`Replication`."""
        return None if self.reducer is None else self.reducer.common.drift

    @property
    def started_reducer(self) -> Reducer:
        """The reducer; starts the replication first if necessary."""
        if self.reducer is None:
            self.start()
        assert self.reducer is not None
        return self.reducer

    def _check_group(self) -> None:
        if resolve_group(self.options.group) is None:
            raise CommunicationError(
                "a replicated module was used before there is a process group; put the training into `with "
                "lockstep.session():`, or call torch.distributed.init_process_group() first, or pass process_group"
            )

    def _describe(self, contents: Contents, collectives: Collectives) -> tuple[list[Line], list[int]]:
        """Return what must be the same on all ranks, and numbers from which :class:`_Numbering` comes."""
        modules = scheduler_of(collectives.group).modules
        for reducer in modules:  # one that is superseded may have other parameters since its last backward
            reducer.common.members.look_for_changes()
        lines = [*(Line(*pair) for pair in self.options.agreed()), *contents.describe()]
        return lines, [modules.next_id, modules.propose_order(), *modules.ids(self._selection.superseded(contents))]

    def _synchronise(
        self, contents: Contents, collectives: Collectives, rows: list[list[int]] | None, undo: ExitStack
    ) -> list[Owner]:
        if self.options.process_group is not None:
            _warn_of_one_rank(collectives, self._selection)
        options, scheduler = self.options, scheduler_of(collectives.group)
        superseded = self._selection.superseded(contents)
        delayed = [parameter for _, parameter in options.delay_all_reduce_named_params or ()]
        parameters = ParameterSet(self._selection, contents, delayed, undo)
        policy = BufferSync(self._scan(), options.policy, collectives)
        on_cpu = all(each.spec.device.type == "cpu" for each in parameters.parameters)
        caps = options.caps_in_shared_memory() if on_cpu and collectives.shares_memory else options.caps
        common = CommonState(
            parameters,
            collectives,
            scheduler.modules,
            policy,
            caps,
            options.reduce_dtype,
            compares_values=options.init_sync,
        )
        reducer = Reducer(common, keeps=scheduler)
        undo.callback(reducer.retire)
        self._register(reducer, contents, rows, undo)
        reducer.rank_state.set_requires_sync(self.requires_sync)
        parameters.attach(reducer)
        undo.callback(self._forget_reducer)
        self.reducer = reducer
        if self.hook is not None:
            common.register_hook(self.hook)
        if scheduler.decisions.is_padding:
            reducer.rank_state.begin_padding_batch()
        return superseded

    def _register(self, reducer: Reducer, contents: Contents, rows: list[list[int]] | None, undo: ExitStack) -> None:
        modules = reducer.common.modules
        modules.restore_later(undo)
        if rows is not None:
            modules.register(reducer, *_Numbering.agreed(rows))
            return
        # Nothing has been sent yet: the ranks agree when they first have to.
        modules.register(reducer, modules.next_id, set(modules.ids()), modules.propose_order())
        reducer.common.do_before_next_round(lambda: self._agree_late(reducer, contents))

    def _agree_late(self, reducer: Reducer, contents: Contents) -> None:
        lines, numbers = self._describe(contents, reducer.collectives)
        rows = check_same_on_all_ranks(lines, reducer.collectives, numbers, what="replicate()")
        reducer.common.modules.register(reducer, *_Numbering.agreed(rows))

    def retire(self) -> None:
        """See :class:`Replication`."""
        self.started_reducer.retire()

    def _forget_reducer(self) -> None:
        self.reducer = None

    def _scan(self) -> Callable[[], BufferSet]:
        """Return a function that finds the module's present buffers, without keeping the module alive."""
        selection = self._selection  # refers to it weakly

        def scan() -> BufferSet:
            held = selection.module_or_none()  # it may be collected at any time
            return BufferSet(Module(), (), ()) if held is None else selection.buffers()

        return scan

    # ------------------------------------------------------------------------------------- forward

    def before_forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Start the replication if necessary; move inputs to the device of the options."""
        if self.reducer is None:
            self._start_at_forward()
        reducer = self.reducer
        if reducer is not None:
            if torch.compiler.is_compiling():
                note_compiled(reducer.passes.name)
            else:
                watch_engine()
                if watchers:
                    reducer.collectives.enter("forward")
                reducer.forward_begins()
                reducer.passes.enter_forward(self._counts(module.training))
                if self._buffer_versions is not None:
                    self._buffer_versions = reducer.buffers.versions()
        if self._moves_inputs:
            args, kwargs = self._moved(args, kwargs)
        return args, kwargs

    def after_forward(self, module: Module, args: object, outputs: Any) -> None:
        """Mark the outputs: a backward through them goes through this forward, and its round ends with the outermost
        pass."""
        reducer = self.reducer
        if reducer is None or torch.compiler.is_compiling():
            return
        if watchers:
            reducer.collectives.enter("training")
        if not torch.is_grad_enabled():
            mark_checkpoints(reducer, reducer.common.members.bound_parameter())
            self._look_at_buffers(module, reducer)
            return
        if isinstance(outputs, Tensor):
            tensors = [outputs] if outputs.requires_grad and not outputs.is_leaf else []
        else:
            tensors = [tensor for tensor in outputs_in(outputs) if tensor.requires_grad and not tensor.is_leaf]
        bound_parameter, training = reducer.common.members.bound_parameter(), module.training
        if not tensors:
            self._look_at_buffers(module, reducer)
        mark = reducer.passes.leave_forward(self._counts(training), training, bool(tensors), bound_parameter)
        if mark is not None:
            reached = _OutputHook(reducer, mark)
            for tensor in tensors:
                tensor.register_hook(reached)
                mark_output(tensor, reducer, bound_parameter)

    def _look_at_buffers(self, module: Module, reducer: Reducer) -> None:
        """Warn once if forwards change buffers of a module without a trained parameter: no backward makes them
        equal."""
        if self._buffers_drift or not module.training or reducer.collectives.world == 1:
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            return
        before, self._buffer_versions = self._buffer_versions, reducer.buffers.versions()
        if before is not None and before != self._buffer_versions:
            self._buffer_versions, self._buffers_drift = None, True
            warnings.warn(
                f"rank {reducer.collectives.global_rank}: forward changes buffers of a replicated "
                f"{type(module).__name__} whose parameters are all frozen. Buffers are made equal at the end of a "
                "backward, and it has none, so they may differ between ranks from now on. Call its eval(), if they are "
                "not to change; use lockstep.local.SyncBatchNorm; send them yourself (torch.distributed.broadcast); or "
                'let each rank have its own by buffer_policy="local"',
                stacklevel=4,
            )

    def _counts(self, training: bool) -> bool:
        """Return True if a backward that synchronises is expected to go through a forward that runs now."""
        in_backward = torch._C._current_graph_task_id() != -1
        return training and self.requires_sync and not in_backward and torch.is_grad_enabled()

    # ------------------------------------------------------------------------------------- methods

    def check_rounds(self, what: str) -> None:
        """Do nothing: there are rounds."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`Replication`."""
        return self._synchronising(False)

    @contextmanager
    def _synchronising(self, required: bool) -> Iterator[None]:
        """Let backward passes inside the block synchronise, or accumulate."""
        before = self.requires_sync
        self.set_requires_gradient_sync(required)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """See :class:`Replication`."""
        self._check_in_charge("set_requires_gradient_sync() and no_sync()")
        self.requires_sync = bool(requires_gradient_sync)
        if self.reducer is not None:
            self.reducer.rank_state.set_requires_sync(self.requires_sync)

    @contextmanager
    def accumulating(self, last: bool, weight: float | None) -> Iterator[None]:
        """See :func:`lockstep.loop.accumulate`."""
        with self._synchronising(last and self.requires_sync):
            rank_state = self.started_reducer.rank_state
            self._check_in_charge("accumulate()")
            if not last:
                self.started_reducer.decisions.note_new_step()
            with nullcontext() if weight is None else rank_state.weighing(weight):
                yield

    @contextmanager
    def needing_weight(self) -> Iterator[None]:
        """See :class:`Replication`."""
        contribution = self.started_reducer.rank_state.contribution
        before, contribution.needs_weight = contribution.needs_weight, True
        try:
            yield
        finally:
            contribution.needs_weight = before

    @torch.inference_mode(False)
    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """See :class:`Replication`."""
        self._check_in_charge("register_comm_hook()")
        check_hook(hook)
        if self.options.reduce_dtype is not None:
            raise OptionError(
                f"register_comm_hook(): this module's gradients travel in reduce_dtype={self.options.reduce_dtype}; a "
                "communication hook decides itself what travels. Leave out one of the two"
            )
        if self.hook is not None:
            raise HookError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. This module's communication "
                f"hook is {name_of(self.hook.call)} already. To do what two hooks do, write a function that calls the "
                "first, gives what it returns to bucket.set_buffer(), and returns what the second returns"
            )
        self.hook = Hook(state, hook)
        if self.reducer is not None:
            self.reducer.common.register_hook(self.hook)

    def _check_in_charge(self, what: str) -> None:
        if self.reducer is not None and self.reducer.retired:
            raise NotReplicableError(
                f"{what}: this module has been replicated or wrapped once more since, and what was made later "
                "synchronises its gradients; use that"
            )

    @property
    def has_local_buffers(self) -> bool:
        """See :class:`Replication`."""
        return self.reducer is not None and self.reducer.has_failed

    @property
    def has_local_gradients(self) -> bool:
        """See :class:`Replication`."""
        return self.reducer is not None and self.reducer.rank_state.contribution.is_local

    # ----------------------------------------------------------------------------- training state

    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.distributed.training_state_dict`."""
        reducer = self.started_reducer
        return {
            "round": reducer.rounds,
            "plan": reducer.common.plan.current.to_json(),
            "hook": None if self.hook is None else {"state": hook_state(self.hook.state)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.distributed.load_training_state_dict`."""
        if self.reducer is None:
            self._restored = state
            return
        self.reducer.finish_failed()
        self.reducer.common.restore(state["round"], state["plan"])
        saved = state["hook"]
        if (saved is None) != (self.hook is None):
            which = "no communication hook, and one is" if saved is None else "a communication hook, and none is"
            raise NotReplicableError(
                f"the training state is of a module with {which} registered; register the same hook before loading it"
            )
        if self.hook is not None:
            restore_hook_state(self.hook.state, saved["state"])


class _OutputHook:
    """A hook on an output: tells the reducer that the backward pass has reached the forward that made the output."""

    __slots__ = ("_mark", "_reducer")

    def __init__(self, reducer: Reducer, mark: ForwardMark) -> None:
        self._reducer = weakref.ref(reducer)
        self._mark = mark

    def __call__(self, grad: Tensor) -> None:
        if torch.compiler.is_compiling():
            if not is_in_compiled_backward():  # such a pass ends where it leaves the engine
                call_outside(self, grad)
            return
        reducer = self._reducer()
        if reducer is not None:
            reducer.on_output_grad(self._mark)


def rounds_of(module: Module, caller: str, what: str) -> ReducerReplication:
    """Return what :func:`replication_of` does; raises :class:`OptionError`, which names ``what``, if the module's
    gradients are not synchronised in rounds."""
    found = replication_of(module, caller)
    found.check_rounds(what)
    assert isinstance(found, ReducerReplication)
    return found


_warned_of_one_rank = False


def _warn_of_one_rank(collectives: Collectives, selection: Selection) -> None:
    """Warn, once in a process, if the group has one rank and the default group has more: the module would train by
    itself.

    Do not warn of a module whose tensors are sharded over other ranks.
    """
    global _warned_of_one_rank
    everybody = resolve_group(None)
    if _warned_of_one_rank or collectives.world > 1 or everybody is None or everybody.size() == 1:
        return
    if any(is_dtensor(each) for each in selection.module.parameters()):
        return
    _warned_of_one_rank = True
    warnings.warn(
        f"a module is replicated over a process group of rank {everybody.rank()} alone, while the default group has "
        f"ranks 0 to {everybody.size() - 1}: its gradients are those of this rank. Leave process_group out to train "
        "with all of them",
        RuntimeWarning,
        stacklevel=2,
    )
