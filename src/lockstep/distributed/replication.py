"""The state of one replicated module: what of it is replicated, over which group, and the steps around forward.

A :class:`Replication` is made by ``replicate()`` (then it belongs to the module itself) or by
``DistributedDataParallel`` (then to the wrapper). It becomes ready when the parameters are there and the group is: at
once, or at the first forward. Getting ready means: compare what all ranks have, make values equal, make the reducer.

Modules do not carry their replication, so that their copies and pickles are plain: :func:`replication_of` finds it.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from lockstep.compiler import is_in_compiled_backward, outside_compiler
from lockstep.distributed.agreement import Line, check_same_on_all_ranks
from lockstep.distributed.buffers import BufferSet, BufferSync, describe_buffer
from lockstep.distributed.collectives import Collectives, Group, resolve_group
from lockstep.distributed.hook_state import hook_state, restore_hook_state
from lockstep.distributed.inputs import input_device, move_to, outputs_in
from lockstep.distributed.mixed_precision import Casts, ReduceIn, reduce_dtype
from lockstep.distributed.options import Options
from lockstep.distributed.reduction.comm_hooks import check_hook
from lockstep.distributed.reduction.engine import watch_engine
from lockstep.distributed.reduction.graph import mark_output
from lockstep.distributed.reduction.parameter_set import ParameterSet
from lockstep.distributed.reduction.passes import ForwardMark, note_compiled
from lockstep.distributed.reduction.reducer import Reducer
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.reduction.selection import Contents, Selection, describe_parameter, note_replicated
from lockstep.distributed.reduction.setup import Setup
from lockstep.distributed.values import broadcast_values
from lockstep.dtensors import is_dtensor
from lockstep.errors import CommunicationError, LockstepError, NotReplicableError
from lockstep.phases import Phases, Statistics


class Replication:
    """The state of one replicated module."""

    training_is_common = False
    """Whether :meth:`training_state` is the same on all ranks, and on any number of them."""

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], taking_over: bool) -> None:
        self.options = options
        self.phases = Phases()
        self.reducer: Reducer | None = None
        self.requires_sync = True
        self._selection = Selection(
            module,
            ignored,
            taking_over,
            options.params_and_buffers_to_ignore,
            options.device_ids,
            options.output_device,
        )
        self.hooks: list[tuple[Any, Any]] = []
        """Communication hooks, each with its state."""
        self._casts: Casts | None = None
        self._moves_inputs = options.device_id is not None or bool(options.device_ids)
        self._restored: dict[str, Any] | None = None
        self._module_id = self._order = 0
        self._others: set[int] = set()

    # --------------------------------------------------------------------------------- getting ready

    @property
    def ready(self) -> bool:
        """Whether gradients are synchronised already."""
        return self.reducer is not None

    def start_if_possible(self) -> None:
        """Get ready now, unless the group or the parameters are not there yet."""
        if resolve_group(self.options.group) is not None and not any(self._selection.without_values()):
            self.start()

    @outside_compiler
    def _start_at_forward(self) -> None:
        """Get ready, but for the forward without gradients that gives the parameters of lazy modules their shapes."""
        if torch.is_grad_enabled() or not any(is_lazy(tensor) for _, tensor in self._selection.without_values()):
            self.start()

    @outside_compiler
    # In inference mode memory would be made that cannot be written in training:
    # test_a_module_that_gets_ready_in_inference_mode_can_be_trained.
    @torch.inference_mode(False)
    def start(self) -> Reducer:
        """Get ready: compare, make equal, make the reducer."""
        group = resolve_group(self.options.group)
        if group is None:
            raise CommunicationError(
                "a replicated module was used before there is a process group; call "
                "torch.distributed.init_process_group() first, or pass process_group"
            )
        collectives = Collectives(group, self.phases)
        if self.options.process_group is not None:
            _warn_of_one_rank(collectives, self._selection)
        scheduler = scheduler_of(group)
        contents, failure = Contents([], [], frozenset()), None
        try:
            contents = self._selection.contents()
        except LockstepError as error:
            failure = error
        if self.options.init_sync:
            self._agree(contents, failure, collectives, scheduler)
        if failure is not None:
            raise failure
        return self._build(contents, collectives, scheduler)

    @property
    def started_reducer(self) -> Reducer:
        """The reducer; gets ready first if need be."""
        return self.reducer or self.start()

    def _agree(
        self, contents: Contents, failure: LockstepError | None, collectives: Collectives, scheduler: GroupScheduler
    ) -> None:
        """Compare with the other ranks, and learn what they have replicated; a failure of this one is theirs, too."""
        lines = [Line(*pair) for pair in self.options.agreed()]
        lines += [describe_parameter(name, p, contents, trained=True) for name, p in contents.parameters]
        lines += [describe_buffer(buffer) for buffer in contents.buffers]
        leaving = self._selection.superseded(contents)
        modules = scheduler.modules
        numbers = [modules.next_id, modules.propose_order(), *modules.ids(leaving)]
        try:
            rows = check_same_on_all_ranks(lines, collectives, numbers, str(failure or ""))
        except LockstepError as error:
            if failure is not None:
                raise failure from error
            raise
        self._module_id = max(row[0] for row in rows)
        self._order = max(row[1] for row in rows)
        self._others = {number for row in rows for number in row[2:]}

    def _build(self, contents: Contents, collectives: Collectives, scheduler: GroupScheduler) -> Reducer:
        options = self.options
        if options.init_sync:
            with self.phases.phase("make equal"):
                buffers = contents.buffers if options.syncs_buffers_at_start else []
                broadcast_values([p for _, p in contents.parameters], buffers, collectives)
        delayed = [parameter for _, parameter in options.delay_all_reduce_named_params or ()]
        parameters = ParameterSet(self._selection, contents, delayed, values=options.init_sync)
        policy = BufferSync(self._scan(), options.policy, collectives)
        caps = options.caps_in_shared_memory() if collectives.shares_memory else options.caps
        reducer = Reducer(Setup(parameters, collectives, scheduler, policy, caps))
        for earlier in self._selection.superseded(contents):
            earlier.retire()
        if options.init_sync:
            scheduler.modules.register(reducer, self._module_id, self._others, self._order)
        else:  # nothing has been sent yet: the ranks agree when they first have to
            reducer.setup.do_before_next_round(self._late_agreement(contents, collectives, scheduler, reducer))
        reducer.participation.set_requires_sync(self.requires_sync)
        parameters.attach(reducer)
        if options.mixed_precision is not None:
            self._start_casts(reducer)
        self.reducer = reducer
        for state, hook in self.hooks:
            reducer.setup.register_hook(state, hook)
        if self._restored is not None:
            self.restore(self._restored)
        if scheduler.decisions.is_padding:
            reducer.participation.begin_idle_batch()
        return reducer

    def _start_casts(self, reducer: Reducer) -> None:
        config = self.options.mixed_precision
        self._casts = Casts(self._selection.module, config, self._selection.left_alone())
        dtype = reduce_dtype(config)
        if dtype is not None:
            reducer.setup.register_hook(None, ReduceIn(dtype))

    def _late_agreement(
        self, contents: Contents, collectives: Collectives, scheduler: GroupScheduler, reducer: Reducer
    ) -> Callable[[], None]:
        def agree_late() -> None:
            self._agree(contents, None, collectives, scheduler)
            modules.register(reducer, self._module_id, self._others, self._order)

        modules = scheduler.modules
        modules.register(reducer, modules.next_id, modules.ids(), modules.propose_order())
        return agree_late

    def _scan(self) -> Callable[[], BufferSet]:
        """What finds the module's buffers, again and again, without keeping the module."""
        selection = self._selection  # refers to it weakly

        def scan() -> BufferSet:
            return selection.buffers() if selection.alive else BufferSet(Module(), (), ())

        return scan

    # ------------------------------------------------------------------------------------- forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Get ready if need be; move inputs to the device that was asked for."""
        if self.reducer is None:
            self._start_at_forward()
        reducer = self.reducer
        if reducer is not None:
            if torch.compiler.is_compiling():
                note_compiled(reducer.passes.name)
            else:
                watch_engine()
                reducer.collectives.enter("forward")
                reducer.forward_begins()
                reducer.passes.enter_forward(self._counts())
        if self._moves_inputs and (device := input_device(self.options)) is not None:
            args, kwargs = move_to(args, device), move_to(kwargs, device)
        if self._casts is not None:
            args, kwargs = self._casts.inputs(args), self._casts.inputs(kwargs)
        return args, kwargs

    def after_forward(self, outputs: Any) -> None:
        """Mark the outputs, so that a backward through them is known to go through this forward, and is closed when it
        ends as a whole, however it nests others."""
        reducer = self.reducer
        if reducer is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        found = (outputs,) if isinstance(outputs, Tensor) else outputs_in(outputs)
        tensors = [tensor for tensor in found if tensor.requires_grad and not tensor.is_leaf]
        sample, training = reducer.setup.members.sample(), self._selection.module.training
        mark = reducer.passes.leave_forward(self._counts(), training, bool(tensors), sample)
        if mark is not None:
            reached = _Reached(reducer, mark)
            for tensor in tensors:
                tensor.register_hook(reached)
                mark_output(tensor, reducer, sample)

    def _counts(self) -> bool:
        """Whether a synchronising backward is to go through a forward that runs now."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or not (self.requires_sync and torch.is_grad_enabled()):
            return False
        return self._selection.module.training

    # ------------------------------------------------------------------------------------- methods

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of backward passes inside pile up on this rank."""
        with self.synchronising(False):
            yield

    @contextmanager
    def synchronising(self, required: bool) -> Iterator[None]:
        """Let backward passes inside synchronise, or not."""
        before = self.requires_sync
        self.set_requires_gradient_sync(required)
        try:
            yield
        except BaseException:
            if self.reducer is not None and not self.requires_sync:
                self.reducer.scheduler.decisions.note_local_failure()
            raise
        finally:
            self.set_requires_gradient_sync(before)

    def set_requires_gradient_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self._check_in_charge("set_requires_gradient_sync() and no_sync()")
        self.requires_sync = bool(required)
        if self.reducer is not None:
            self.reducer.participation.set_requires_sync(self.requires_sync)

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """What the loss of the backward passes inside counts, of all together; None if they are not weighed."""
        own = self.started_reducer.participation
        self._check_in_charge("accumulate()")
        with nullcontext() if weight is None else own.weighing(weight):
            yield

    def watch_values(self, every: int) -> None:
        """Compare values in every ``every``-th round from now on, or in none if it is 0; all ranks must."""
        self.started_reducer.setup.watch_values(every)

    @torch.inference_mode(False)
    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Add a communication hook."""
        self._check_in_charge("register_comm_hook()")
        check_hook(hook)
        self.hooks.append((state, hook))
        if self.reducer is not None:
            self.reducer.setup.register_hook(state, hook)

    def _check_in_charge(self, what: str) -> None:
        if self.reducer is not None and self.reducer.retired:
            raise NotReplicableError(
                f"{what}: this module has been replicated or wrapped once more since, and what was made later "
                "synchronises its gradients; use that"
            )

    @property
    def group(self) -> Group:
        """The process group, None if there is none yet."""
        return self.reducer.collectives.group if self.reducer is not None else resolve_group(self.options.group)

    def statistics(self) -> Statistics:
        """Calls and seconds of every phase so far."""
        return self.phases.statistics()

    def own_and_replicated(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters and buffers of the module that each rank has for itself, and those that are made equal."""
        replicated = [tensor for _, tensor in self._selection.named_tensors()]
        if self.options.policy != "local":
            return self._selection.left_alone(), replicated
        buffers = {id(tensor) for tensor in self._selection.module.buffers()}
        local = [tensor for tensor in replicated if id(tensor) in buffers]
        return [*self._selection.left_alone(), *local], [each for each in replicated if id(each) not in buffers]

    # ----------------------------------------------------------------------------- training state

    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.training_state_dict`."""
        reducer = self.started_reducer
        return {
            "round": reducer.rounds,
            "plan": reducer.setup.plan.current.to_json(),
            "hooks": [hook_state(state) for state, _ in self.hooks],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.load_training_state_dict`."""
        if self.reducer is None:
            self._restored = state
            return
        self.reducer.hear_abandoned()
        self.reducer.setup.restore(state["round"], state["plan"])
        if len(state["hooks"]) != len(self.hooks):
            raise NotReplicableError(
                f"the training state is of {len(state['hooks'])} communication hook(s), {len(self.hooks)} are "
                "registered; register the same hooks, in the same order, before loading it"
            )
        for saved, (hook_object, _) in zip(state["hooks"], self.hooks, strict=True):
            restore_hook_state(hook_object, saved)


class _Reached:
    """Output hook: log that the backward pass goes through a forward, and queue the end-of-backward callback in the
    outermost pass that does."""

    __slots__ = ("_mark", "_reducer")

    def __init__(self, reducer: Reducer, mark: ForwardMark) -> None:
        self._reducer, self._mark = weakref.ref(reducer), mark

    def __call__(self, grad: Tensor) -> None:
        if torch.compiler.is_compiling():
            if not is_in_compiled_backward():  # such a pass is closed where it leaves the engine
                _expect_outside(self, grad)
            return
        reducer = self._reducer()
        if reducer is not None:
            reducer.reached(self._mark)


@outside_compiler
def _expect_outside(reached: _Reached, grad: Tensor) -> None:
    reached(grad)


# ----------------------------------------------------------------------------- which module has which

_replications: "weakref.WeakKeyDictionary[Module, weakref.ref[Replication]]" = weakref.WeakKeyDictionary()


def register(module: Module, replication: Replication) -> None:
    """Remember the replication of a module or wrapper, which itself keeps it alive: it may lead back to the module."""
    _replications[module] = weakref.ref(replication)
    note_replicated(module)


def find_replication(module: Module) -> Replication | None:
    """The replication of a module, of a wrapper, or of what ``torch.compile`` made of one; None if it has none."""
    link = _replications.get(module) or _replications.get(getattr(module, "_orig_mod", module))
    return None if link is None else link()


def replication_of(module: Module, caller: str) -> Replication:
    """The replication of a module or a wrapper; raises :class:`NotReplicableError` if it has none."""
    found = find_replication(module)
    if found is None:
        raise NotReplicableError(
            f"{caller}() got a {type(module).__name__} that is not replicated; pass the module that went through "
            "replicate(), or the DistributedDataParallel around it"
        )
    return found


_warned_of_one_rank = False


def _warn_of_one_rank(collectives: Collectives, selection: Selection) -> None:
    """Warn, once in a process, of a group of one rank where there are more: the module would train by itself.

    Not of a module whose tensors are spread over other ranks.
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
