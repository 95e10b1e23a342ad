"""``replicate()``: the gradients of a module become the mean over all ranks; the module itself stays what it is.

The module gains two forward hooks and a few methods. Its class and its attributes stay, and its copies and pickles are
plain.
"""

import importlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Literal, cast

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from lockstep._base.wrapper import ModuleHook
from lockstep.distributed.reduction.module.selection import sharded_children
from lockstep.distributed.replication.instance_methods import add_methods
from lockstep.distributed.replication.options import Options, read_options
from lockstep.distributed.replication.reducer_replication import ReducerReplication
from lockstep.distributed.replication.replication import Replication, find_replication, register, replication_of
from lockstep.distributed.replication.training_alone import training_alone
from lockstep.errors import AlreadyManagedError, OptionError

Loss = Literal["sum", "mean"]
"""What the loss of a share is, over its rows."""
WithShares = Callable[[Module, Options, Collection[Module], int, Loss], Replication]
"""Makes the replication of a module with shares, from the arguments of :func:`replicate`."""
_with_shares: WithShares | None = None


def replicate_shares_with(make: WithShares) -> None:
    """Let ``make`` replicate the modules for which :func:`replicate` is given ``shares``.

    ``lockstep.shares`` calls it when it is imported: this package cannot import that one, which imports this one.
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
        module: The module; the same object is returned. Its class, attributes and ``state_dict`` stay;
            ``copy.deepcopy`` and ``pickle`` give the plain module, not replicated, and such a pickle loads without
            lockstep. It gains the methods of :class:`lockstep.distributed.Replicated`, which is the type of the
            returned module for type checkers.
        ignored_modules: Submodules that are not replicated, with everything below them.
        shares: The number of shares into which the batch of a step is cut, the same for the whole run. With shares the
            gradients have the same bits on any number of ranks up to the number of shares: see docs/reproducibility.md.
            None: gradients are the mean over the ranks.
        loss: With ``shares``: ``"sum"`` if the loss of a share is a sum over its rows, or ``"mean"``.
        **options: The options of :class:`lockstep.DistributedDataParallel`, by name. One more is ``device_id`` (int or
            ``torch.device``), the accelerator to which the tensors among the inputs of forward are moved.

    If the module is on the meta device, or there is no process group yet, the first forward begins the replication.

    Communicates, at the beginning, one small all-gather, in which the ranks compare names, order, shapes, dtypes and
    options, broadcasts of rank 0's values in buckets of 10 MiB, and a second small all-gather, in which the ranks tell
    each other that they have managed. Each backward communicates one all-reduce for each bucket of gradients, while the
    rest of backward runs. A bucket has 25 MiB, the first one 1 MiB (not on ``shm``). A gradient of at least 4 MiB
    (on an accelerator: of a bucket's size) is sent without a bucket. The last all-reduce also carries the parameters
    that were used, small buffers, and failures. The first backward also compares the values of parameters, by one
    all-reduce of 4 KiB.

    ``torch.autograd.grad`` returns the gradients of this rank alone, and gradients from ``backward(create_graph=True)``
    have no graph: use :func:`lockstep.loop.mean_over_ranks`.

    Raises:
        UnknownOptionError: A misspelt option (a ``TypeError``).
        OptionError: Options that make no sense.
        AgreementError: The ranks differ, or one of them has failed; raised on every rank.
        AlreadyManagedError: The module is replicated already, over a group that still exists, or under ``fully_shard``.
        CommunicationError: A rank does not answer.

    A call that fails leaves no trace on the module, on any rank, except that its values may be rank 0's already.

    Example:
        >>> import torch, torch.distributed as dist
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # not needed after init_process_group()
        >>> model = replicate(torch.nn.Linear(4, 2), process_group=group)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.bias.grad.tolist(), type(model).__name__
        ([3.0, 3.0], 'Linear')

    Stands for: ``torch.distributed._composable.replicate.replicate``.
    """
    chosen = read_options(options)
    chosen.warn_deprecated(stacklevel=2)
    if not isinstance(module, Module):
        raise OptionError(f"expected a torch.nn.Module to replicate, got {type(module).__name__}")
    if isinstance(module, Replicated) and not replication_of(module, "replicate").end_if_group_is_gone():
        raise AlreadyManagedError(
            "Each distinct composable distributed API can only be applied to a module once. replicate has already been "
            f"applied to the following module:\n{module}\nCall replicate() once, and use the module that you gave it"
        )
    if _is_empty(module):
        raise OptionError(
            f"replicate() got a {type(module).__name__}, which has neither parameters nor buffers: there is nothing to "
            "keep the same on all ranks; replicate the network that it belongs to"
        )
    list(sharded_children(module))
    ignored = list(ignored_modules or ())
    replication: Replication
    if shares is None:
        replication = ReducerReplication(module, chosen, ignored, taking_over=False)
    else:
        importlib.import_module("lockstep.shares")  # calls replicate_shares_with()
        assert _with_shares is not None
        replication = _with_shares(module, chosen, ignored, shares, loss)
    replication.start_if_possible(lambda undo: _attach(module, replication, undo))
    return cast("Replicated", module)


_METHODS = ("set_requires_gradient_sync", "no_sync", "register_comm_hook")


def _is_empty(module: Module) -> bool:
    """Return True for a layer without parameters and buffers, but not for a container, which may be filled later."""
    if isinstance(module, Sequential | ModuleList | ModuleDict):
        return False
    parts = *module._parameters.values(), *module._buffers.values(), *module._modules.values()
    return all(each is None for each in parts)


def _attach(module: Module, replication: Replication, undo: ExitStack) -> None:
    """Register the replication, and add the hooks and the methods of :class:`Replicated`; ``undo`` removes them."""
    # The methods of a wrapper are those of its replication, which this one replaces.
    kept = [] if find_replication(module) else [n for n in _METHODS if getattr_static(module, n, None) is not None]
    training_alone()
    register(module, replication, undo)
    before = ModuleHook(module, replication.before_forward)
    undo.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
    after = ModuleHook(module, replication.after_forward)
    undo.callback(module.register_forward_hook(after).remove)
    add_methods(module, {name: getattr(replication, name) for name in _METHODS if name not in kept}, undo)


if TYPE_CHECKING:

    class _TypedModule(Module, Any):
        """The base of :class:`Replicated` for type checkers: they then take it for a module of any class."""

        def __getattr__(self, name: str) -> Any: ...
else:
    _TypedModule = object


class _AsRegistered(type):
    """Lets ``isinstance(module, Replicated)`` say whether a module is replicated: its class does not tell."""

    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, Module):
            return False
        replication = find_replication(instance)
        forms = (instance, getattr(instance, "_orig_mod", None))  # compiled before or after it was replicated
        return replication is not None and any(map(replication.is_of, forms))


class Replicated(_TypedModule, metaclass=_AsRegistered):
    """The methods that :func:`replicate` adds to a module, and the type of the module for mypy and pyright.

    No object has this class: a replicated module keeps its own, and ``isinstance(module, Replicated)`` asks whether it
    went through :func:`replicate`. If a module has a method of one of these names itself, it keeps it, and these are
    functions for any replicated module: ``Replicated.no_sync(module)``.

    Type checkers see these methods and the methods of ``torch.nn.Module``; other attributes of the module's own class
    have the type ``Any``. A replicated module can be passed wherever its own class is expected. A variable that refers
    to the module already (``net = Net(); model = replicate(net)``) keeps its type.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Let backward passes that begin from now on synchronise; if False, gradients accumulate on this rank.

        The next pass that synchronises reduces all accumulated gradients. Communicates nothing.

        Stands for: ``DistributedDataParallel.require_backward_grad_sync``.
        """
        replication_of(self, "set_requires_gradient_sync").set_requires_gradient_sync(requires_gradient_sync)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not synchronise; forward may run inside or outside of it.

        Stands for: ``DistributedDataParallel.no_sync``.
        """
        return replication_of(self, "no_sync").no_sync()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket. A module has one hook at most.

        ``bucket`` has the methods of ``torch.distributed.GradBucket``. A hook that returns a future communicates, and
        divides by the world size, itself, as PyTorch's hooks do. If a hook returns a tensor, it has only transformed
        the buffer, and lockstep averages it.

        Raises :class:`HookError` for an object that cannot be a hook, and if the module has a hook already.

        Stands for: ``DistributedDataParallel.register_comm_hook``.
        """
        replication_of(self, "register_comm_hook").register_comm_hook(state, hook)


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
