"""What is replicated of a module, over which group, and what happens around its forward.

A :class:`Replication` is made by ``replicate()`` (then it belongs to the module itself) or by
``DistributedDataParallel`` (then to the wrapper). It becomes ready when the parameters are there and the group is: at
once, or at the first forward. Getting ready means: compare what all ranks have, make values equal, hook the
parameters. It refers to modules weakly.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lockstep.compiler import is_in_compiled_backward, outside_compiler
from lockstep.distributed.agree import Description, Line, agree, describe_tensor
from lockstep.distributed.buffers import Buffer, BufferSet, BufferSync, describe_buffer
from lockstep.distributed.collectives import Collectives, Group, resolve_group
from lockstep.distributed.conductor import Conductor, conductor_of
from lockstep.distributed.gradients import ManagedParameter
from lockstep.distributed.hooks import check_hook
from lockstep.distributed.mixed_precision import Casts, ReduceIn, reduce_dtype
from lockstep.distributed.options import Options
from lockstep.distributed.parameter_hooks import attach, is_attached, take_over_optimizers
from lockstep.distributed.passes import ForwardMark, in_backward, note_compiled
from lockstep.distributed.placement import check_devices, check_kinds, input_device, left_out, move_to, outputs_in
from lockstep.distributed.reducer import Reducer
from lockstep.distributed.start import broadcast_values
from lockstep.distributed.training_state import hook_state, restore_hook_state
from lockstep.errors import CommunicationError, LockstepError, NotReplicableError
from lockstep.phases import Phases, Statistics


class Contents(NamedTuple):
    """The parameters and buffers of a module that are replicated."""

    parameters: list[tuple[str, Parameter]]
    buffers: list[Buffer]
    sparse: frozenset[int]
    """Identities of the parameters whose gradients are sparse."""


class Replication:
    """The state of one replicated module."""

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], taking_over: bool) -> None:
        self.options = options
        self.phases = Phases()
        self.reducer: Reducer | None = None
        self.requires_sync = True
        self._module = weakref.ref(module)
        self._ignored = weakref.WeakSet(ignored)
        self._taking_over = taking_over
        self.hooks: list[tuple[Any, Any]] = []
        """Communication hooks, each with its state."""
        self._casts: Casts | None = None
        self._restored: dict[str, Any] | None = None
        self._serial = 0
        self._others: set[int] = set()

    # --------------------------------------------------------------------------------- getting ready

    @property
    def ready(self) -> bool:
        """Whether gradients are synchronised already."""
        return self.reducer is not None

    def start_if_possible(self) -> None:
        """Get ready now, unless the group or the parameters are not there yet."""
        if resolve_group(self.options.group) is not None and not any(self._without_values()):
            self.start()

    @outside_compiler
    def _start_at_forward(self) -> None:
        """Get ready, but for the forward without gradients that gives the parameters of lazy modules their shapes."""
        if torch.is_grad_enabled() or not any(is_lazy(tensor) for _, tensor in self._without_values()):
            self.start()

    def _without_values(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that are not initialised, or on the meta device."""
        return ((name, tensor) for name, tensor in self._named_tensors() if is_lazy(tensor) or tensor.is_meta)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that are not ignored."""
        module = self._alive()
        ignored = {id(tensor) for each in self._ignored for tensor in (*each.parameters(), *each.buffers())}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if id(tensor) not in ignored:
                yield name, tensor

    def _check_values(self) -> None:
        for name, tensor in self._without_values():
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

    @outside_compiler
    def start(self) -> None:
        """Get ready: compare, make equal, hook."""
        group = resolve_group(self.options.group)
        if group is None:
            raise CommunicationError(
                "a replicated module was used before there is a process group; call "
                "torch.distributed.init_process_group() first, or pass process_group"
            )
        collectives = Collectives(group, self.phases)
        conductor = conductor_of(group)
        module = self._alive()
        contents, failure = Contents([], [], frozenset()), None
        try:
            check_devices([(n, t) for n, t in self._named_tensors() if isinstance(t, Parameter)], self.options)
            self._check_values()
            found = self._contents(module)
            check_kinds(found.parameters)
            contents = found
        except LockstepError as error:
            failure = error
        if self.options.init_sync:
            self._agree(contents, failure, collectives, conductor)
        if failure is not None:
            raise failure
        self._build(contents, collectives, conductor)

    def _agree(
        self, contents: Contents, failure: LockstepError | None, collectives: Collectives, conductor: Conductor
    ) -> None:
        """Compare with the other ranks, and learn what they have replicated; a failure of this one is theirs, too."""
        lines = [Line(*pair) for pair in self.options.agreed()]
        lines += [
            Line(f"parameter {name}", f"{describe_tensor(p)}, {'trained' if p.requires_grad else 'frozen'}")
            for name, p in contents.parameters
        ]
        lines += [describe_buffer(buffer) for buffer in contents.buffers]
        numbers = [conductor.next_serial, *conductor.living()]
        try:
            rows = agree(Description(lines, str(failure or "")), numbers, collectives)
        except LockstepError as error:
            if failure is not None:
                raise failure from error
            raise
        self._serial = max(row[0] for row in rows)
        self._others = {serial for row in rows for serial in row[1:]}

    def _build(self, contents: Contents, collectives: Collectives, conductor: Conductor) -> None:
        options = self.options
        if options.init_sync:
            with self.phases.phase("make equal"):
                buffers = contents.buffers if options.syncs_buffers_at_start else []
                broadcast_values([p for _, p in contents.parameters], buffers, collectives)
        delayed = {id(parameter) for _, parameter in options.delay_all_reduce_named_params or ()}
        trainable = [(name, p) for name, p in contents.parameters if p.is_floating_point() or p.is_complex()]
        managed = [
            ManagedParameter(index, name, parameter, id(parameter) in contents.sparse)
            for index, (name, parameter) in enumerate(trainable)
        ]
        reducer = Reducer(
            managed,
            collectives,
            conductor,
            BufferSync(self._scan(), options.policy, collectives),
            options.caps,
            [m.index for m in managed if id(m.parameter) in delayed],
        )
        if options.init_sync:
            conductor.settle(reducer, self._serial, self._others)
        else:  # nothing has been sent yet: the ranks agree when they first have to
            reducer.before_round.append(self._late_agreement(contents, collectives, conductor, reducer))
        reducer.requires_sync = self.requires_sync
        for parameter in managed:
            attach(parameter, reducer)
        if options.mixed_precision is not None:
            self._start_casts(reducer)
        self.reducer = reducer
        for state, hook in self.hooks:
            reducer.register_hook(state, hook)
        if self._restored is not None:
            self.restore(self._restored)

    def _start_casts(self, reducer: Reducer) -> None:
        module, config = self._alive(), self.options.mixed_precision
        skipped, names = left_out(module, self._ignored, self.options)
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        ignored = [tensor for name, tensor in named if name in names]
        below = [tensor for each in skipped for tensor in (*each.parameters(), *each.buffers())]
        self._casts = Casts(module, config, [*ignored, *below])
        dtype = reduce_dtype(config)
        if dtype is not None:
            reducer.register_hook(None, ReduceIn(dtype))

    def _late_agreement(
        self, contents: Contents, collectives: Collectives, conductor: Conductor, reducer: Reducer
    ) -> Callable[[], None]:
        def settle() -> None:
            self._agree(contents, None, collectives, conductor)
            conductor.settle(reducer, self._serial, self._others)

        conductor.settle(reducer, conductor.next_serial, conductor.living())
        return settle

    def _contents(self, module: Module) -> Contents:
        """What is replicated: not what is ignored, sharded, or replicated by a child of its own."""
        skipped, names = left_out(module, self._ignored, self.options)
        found: dict[int, tuple[str, Parameter]] = {}
        sparse: set[int] = set()
        for prefix, owner in module.named_modules():
            if owner in skipped:
                continue
            for key, parameter in owner._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is None or name in names or (not self._taking_over and is_attached(parameter)):
                    continue
                found.setdefault(id(parameter), (name, parameter))
                if isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag) and owner.sparse:
                    sparse.add(id(parameter))
        return Contents(list(found.values()), BufferSet(module, skipped, names).buffers, frozenset(sparse))

    def _scan(self) -> Callable[[], BufferSet]:
        """What finds the module's buffers, again and again, without keeping the module."""
        find, ignored, options = self._module, self._ignored, self.options

        def scan() -> BufferSet:
            found = find()
            module = Module() if found is None else found
            return BufferSet(module, *left_out(module, ignored, options))

        return scan

    def _alive(self) -> Module:
        module = self._module()
        if module is None:
            raise NotReplicableError("the module that was replicated does not exist any more")
        return module

    # ------------------------------------------------------------------------------------- forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Get ready if need be; move inputs to the device that was asked for."""
        if self.reducer is None:
            self._start_at_forward()
        elif not torch.compiler.is_compiling():
            take_over_optimizers(self.reducer.parameters)
        if self.reducer is not None:
            if torch.compiler.is_compiling():
                note_compiled(self.reducer.passes)
            else:
                self.reducer.passes.enter_forward(self._counts())
        device = input_device(self.options)
        if device is not None:
            args, kwargs = move_to(args, device), move_to(kwargs, device)
        if self._casts is not None:
            args, kwargs = self._casts.inputs(args), self._casts.inputs(kwargs)
        return args, kwargs

    def after_forward(self, outputs: Any) -> None:
        """Mark the outputs, so that a backward through them is known to go through this forward, and is closed when it
        ends as a whole, however it nests others."""
        if self.reducer is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tensors = [tensor for tensor in outputs_in(outputs) if tensor.requires_grad and not tensor.is_leaf]
        mark = self.reducer.passes.leave_forward(self._counts(), self._alive().training, bool(tensors))
        if mark is not None:
            reached = _Reached(self.reducer, mark)
            for tensor in tensors:
                tensor.register_hook(reached)

    def _counts(self) -> bool:
        """Whether a synchronising backward is to go through a forward that runs now."""
        return torch.is_grad_enabled() and self.requires_sync and self._alive().training and not in_backward()

    # ------------------------------------------------------------------------------------- methods

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of backward passes inside pile up on this rank."""
        before = self.requires_sync
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)

    def set_requires_gradient_sync(self, required: bool) -> None:
        """Whether backward passes that begin from now on synchronise."""
        self.requires_sync = bool(required)
        if self.reducer is not None:
            self.reducer.requires_sync = self.requires_sync

    def announce(self, weight: float | None) -> None:
        """What the loss of the next backward passes counts."""
        if self.reducer is None:
            self.start()
        assert self.reducer is not None
        self.reducer.announce(weight)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Add a communication hook."""
        check_hook(hook)
        self.hooks.append((state, hook))
        if self.reducer is not None:
            self.reducer.register_hook(state, hook)

    @property
    def group(self) -> Group:
        """The process group, None if there is none yet."""
        return self.reducer.collectives.group if self.reducer is not None else resolve_group(self.options.group)

    def statistics(self) -> Statistics:
        """Calls and seconds of every phase so far."""
        return self.phases.statistics()

    # ----------------------------------------------------------------------------- training state

    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.training_state_dict`."""
        if self.reducer is None:
            self.start()
        reducer = self.reducer
        assert reducer is not None
        return {
            "round": reducer.round,
            "plan": reducer.plan.to_json(),
            "hooks": [hook_state(state) for state, _ in self.hooks],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.load_training_state_dict`."""
        if self.reducer is None:
            self._restored = state
            return
        self.reducer.restore(state["round"], state["plan"])
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
            reducer.conductor.expect(reducer)
            reducer.passes.reach(self._mark)


@outside_compiler
def _expect_outside(reached: _Reached, grad: Tensor) -> None:
    reached(grad)
