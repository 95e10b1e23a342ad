"""``replicate()``: the gradients of a module become the mean over all ranks; the module itself stays what it is.

The module's class is replaced by a subclass made at run time, which adds a few methods. Copies and pickles have the
plain class, and are not replicated. Nothing else is visible on the module.
"""

import copyreg
import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Module

from lockstep.distributed.reduction.parameters import sharded_children
from lockstep.distributed.replication.options import Options, read_options
from lockstep.distributed.replication.reducer_replication import ReducerReplication, rounds_of
from lockstep.distributed.replication.replication import Replication, find_replication, register, replication_of
from lockstep.errors import AlreadyManagedError, OptionError
from lockstep.wrapper import ModuleHook

Loss = Literal["sum", "mean"]
"""What the loss of a share is, over its rows."""
WithShares = Callable[[Module, Options, Collection[Module], int, Loss], Replication]
"""Makes the replication of a module with shares, from the arguments of :func:`replicate`."""
_with_shares: WithShares | None = None


def replicate_shares_with(make: WithShares) -> None:
    """Let ``make`` replicate the modules for which :func:`replicate` is given ``shares``.

    ``import lockstep`` calls it. This package cannot import ``lockstep.shares``, which imports this package.
    """
    global _with_shares
    _with_shares = make


def replicate(
    module: Module,
    ignored_modules: Iterable[Module] | None = None,
    *,
    shares: int | None = None,
    loss: Loss = "sum",
    **options: Any,
) -> "Replicated":
    """Replicate a module over a process group, in place: ``param.grad`` becomes the mean over all ranks.

    After every backward pass that synchronises, ``param.grad`` on each rank is the mean over the ranks of the gradients
    that each rank has accumulated since the last such pass. The program may call the module, a submodule or another
    method, if all ranks call the same. It may run several forwards, and branches that differ by rank. If a rank does
    not use a parameter, its gradient counts as zero on that rank. If no rank uses a parameter, its ``.grad`` stays as
    it is.

    Args:
        module: The module; the same object is returned. Its class is replaced by a subclass, so ``isinstance``,
            attributes and ``state_dict`` stay; ``copy.deepcopy`` and ``pickle`` give the plain module, not replicated.
            It gains the methods of :class:`lockstep.distributed.Replicated`, which is the type of the returned module
            for type checkers.
        ignored_modules: Submodules that are not replicated, with everything below them.
        shares: The number of shares into which the batch of a step is cut, the same for the whole run. With shares the
            gradients have the same bits on any number of ranks up to the number of shares: see docs/reproducibility.md.
            None: gradients are the mean over the ranks.
        loss: With ``shares``: ``"sum"`` if the loss of a share is a sum over its rows, or ``"mean"``.
        **options: The options of :class:`lockstep.DistributedDataParallel`, by name. One more is ``device_id`` (int or
            ``torch.device``), the accelerator to which the tensors among the inputs of forward are moved.

    If the module is on the meta device, or there is no process group yet, the first forward begins the replication.

    Communicates, at the beginning, one small all-gather, in which the ranks compare names, order, shapes, dtypes and
    options, and broadcasts of rank 0's values in buckets of 10 MiB. Each backward communicates one all-reduce for each
    bucket of gradients, while the rest of backward runs. A bucket has 25 MiB, the first one 1 MiB (not on ``shm``).
    A gradient of at least 4 MiB is sent without a bucket. The last all-reduce also carries the parameters that were
    used, small buffers, and failures.

    ``torch.autograd.grad`` returns the gradients of this rank alone, and gradients from ``backward(create_graph=True)``
    have no graph: use :func:`lockstep.loop.mean_over_ranks`.

    Raises:
        UnknownOptionError: A misspelt option (a ``TypeError``).
        OptionError: Options that make no sense.
        AgreementError: The ranks differ, on every rank.
        AlreadyManagedError: The module is replicated already, or under ``fully_shard``.
        CommunicationError: A rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # not needed after init_process_group()
        >>> model = replicate(torch.nn.Linear(4, 2), process_group=group)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.bias.grad.tolist(), type(model).__name__
        ([3.0, 3.0], 'ReplicatedLinear')

    Stands for: ``torch.distributed._composable.replicate.replicate``.
    """
    chosen = read_options(options, "replicate")
    chosen.warn_deprecated(stacklevel=2)
    if not isinstance(module, Module):
        raise OptionError(f"expected a torch.nn.Module to replicate, got {type(module).__name__}")
    original = getattr(module, "_orig_mod", module)
    if isinstance(original, Replicated) and find_replication(module) is not None:
        raise AlreadyManagedError(
            "Each distinct composable distributed API can only be applied to a module once. replicate has already been "
            f"applied to the following module:\n{module}"
        )
    list(sharded_children(module))
    ignored = list(ignored_modules or ())
    replication: Replication
    if shares is None:
        replication = ReducerReplication(module, chosen, ignored, taking_over=False)
    else:
        assert _with_shares is not None
        replication = _with_shares(module, chosen, ignored, shares, loss)
    replication.start_if_possible()
    return _attach(module, replication)


if TYPE_CHECKING:

    class _TypedModule(Module, Any):
        """The base of :class:`Replicated` for type checkers: they then take it for a module of any class."""

        def __getattr__(self, name: str) -> Any: ...
else:
    _TypedModule = object  # in the class made at run time, the module's own class is the other base


class Replicated(_TypedModule):
    """The methods that :func:`replicate` adds to a module, and the type of the module for mypy and pyright.

    Type checkers see these methods and the methods of ``torch.nn.Module``; other attributes of the module's own class
    have the type ``Any``. A replicated module can be passed wherever its own class is expected. A variable that refers
    to the module already (``net = Net(); model = replicate(net)``) keeps its type.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backward passes that begin from now on synchronise; if False, gradients accumulate on this rank.

        The next pass that synchronises reduces all accumulated gradients. Communicates nothing.

        Stands for: ``DistributedDataParallel.require_backward_grad_sync``.
        """
        _of(self).set_requires_gradient_sync(requires_gradient_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not synchronise; forward may run inside or outside of it.

        Stands for: ``DistributedDataParallel.no_sync``.
        """
        return _rounds_of(self, "no_sync()").no_sync()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket; several hooks make a chain, in the order of registration.

        ``bucket`` has the methods of ``torch.distributed.GradBucket``. A hook that returns a future communicates, and
        divides by the world size, itself, as PyTorch's hooks do. If a hook returns a tensor, it has only transformed
        the buffer, and lockstep averages it.

        Raises :class:`HookError` for an object that cannot be a hook.

        Stands for: ``DistributedDataParallel.register_comm_hook``.
        """
        _rounds_of(self, "register_comm_hook()").register_comm_hook(state, hook)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(super().__reduce_ex__(protocol), type(self))


def _of(module: Any) -> Replication:
    return replication_of(module, "replicate")


def _rounds_of(module: Any, what: str) -> ReducerReplication:
    return rounds_of(module, "replicate", what)


def _as_plain(reduced: Any, kind: type) -> Any:
    """Return the function and arguments that make a copy, with the plain class and without lockstep's hooks."""
    if not isinstance(reduced, tuple):
        return reduced
    plain = kind.__mro__[2]
    function, args, *rest = reduced
    if function is copyreg.__newobj__ and args[0] is kind:  # type: ignore[attr-defined]
        function, args = (_new, (plain, *args[1:])) if args[1:] else (copyreg._reconstructor, (plain, object, None))  # type: ignore[attr-defined]
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: _without_hooks(value) if name.endswith("hooks") else value for name, value in rest[0].items()}
        for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            flags, hooks = rest[0].get(name), rest[0].get(name.partition("_hooks")[0] + "_hooks")
            if flags and hooks is not None:
                rest[0][name] = type(flags)((key, flag) for key, flag in flags.items() if key in hooks)
    return (plain if function is kind else function, args, *rest)


def _new(plain: Any, *args: Any) -> Any:
    return plain.__new__(plain, *args)


def _without_hooks(hooks: Any) -> Any:
    if not isinstance(hooks, dict):
        return hooks
    return type(hooks)(
        (key, hook) for key, hook in hooks.items() if not isinstance(hook, _BeforeForward | _AfterForward)
    )


class _BeforeForward(ModuleHook):
    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._target is None else self._target.before_forward(args, kwargs)


class _AfterForward(ModuleHook):
    def __call__(self, module: Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self._target is not None:
            self._target.after_forward(outputs)


def _attach(module: Any, replication: Replication) -> Replicated:
    register(module, replication)
    if not isinstance(module, Replicated):  # as a copy is of a module that was parametrized after replicating
        module.__class__ = replicated_class(type(module))
    module.register_forward_pre_hook(_BeforeForward(replication), with_kwargs=True, prepend=True)
    module.register_forward_hook(_AfterForward(replication))
    attached: Replicated = module
    return attached


_classes: "weakref.WeakValueDictionary[type[Module], type[Module]]" = weakref.WeakValueDictionary()


def replicated_class(plain: Any) -> type[Module]:
    """Return the subclass for modules of class ``plain``; it is made once."""
    if (known := _classes.get(plain)) is not None:
        return known
    body: dict[str, Any] = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    if "__deepcopy__" in dir(plain):
        copy = plain.__deepcopy__

        def __deepcopy__(self: Module, memo: dict[int, Any]) -> Any:
            """The class's own way of copying, which may well make one of the class of ``self``."""
            copied = copy(self, memo)
            if type(copied) is type(self):
                copied.__class__ = plain
            return copied

        body["__deepcopy__"] = __deepcopy__
    initialise = plain.__init__

    @functools.wraps(initialise)
    def __init__(self: Module, *args: Any, **kwargs: Any) -> None:
        """A module that another makes of its own class, as a slice of a Sequential is, is a plain one."""
        if type(self) is made and find_replication(self) is None:
            self.__class__ = plain
        initialise(self, *args, **kwargs)

    body["__init__"] = __init__
    made: type[Module] = type(f"Replicated{plain.__name__}", (Replicated, plain), body)
    _classes[plain] = made
    return made


class State:
    """The result of ``replicate.state(module)``, with the attributes of PyTorch's state."""

    def __init__(self, replication: Replication) -> None:
        self._replication = replication

    @property
    def ready(self) -> bool:
        """True if gradients are synchronised; False until the first forward of a module that was replicated lazily."""
        return self._replication.ready

    @property
    def options(self) -> Options:
        """The options."""
        return self._replication.options

    @property
    def process_group(self) -> Any:
        """The group, None if there is none yet."""
        return self._replication.group

    @property
    def device_ids(self) -> list[int] | None:
        """As in PyTorch: None on the CPU, else the index of ``device_id``."""
        device = self._replication.options.device_id
        if device is None or (not isinstance(device, int) and device.type == "cpu"):
            return None
        return [device if isinstance(device, int) else device.index]

    @property
    def _param_names(self) -> list[str]:
        found = self._replication
        reducer = found.reducer if isinstance(found, ReducerReplication) else None
        return [] if reducer is None else [member.name for member in reducer.parameters]

    def _ddp_weakref(self) -> "State":
        return self


def state(module: Module) -> State | None:
    """Return the state of a module that went through :func:`replicate`; None for any other."""
    replication = find_replication(module)
    return None if replication is None else State(replication)


replicate.state = state  # type: ignore[attr-defined]
