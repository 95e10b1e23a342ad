"""DataParallel: one process, one model, many devices.

A batch has four phases. Each is a method that a subclass may override:

    scatter         rows of the inputs -> one share for each device
    replicate       the network -> up-to-date replicas (the first is the network itself)
    parallel_apply  each replica on its share: side by side on different devices, else one after the other
    gather          the replicas' outputs -> one output

:meth:`DataParallel.step` has no last phase: the replicas also compute the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.nn import Module

from lockstep._base.arguments import check_module
from lockstep._base.compiler import is_observed, is_recorded, outside_compiler
from lockstep._base.devices import (
    DeviceLike,
    replica_devices,
    resolve_destination,
    resolve_devices,
    warn_if_unbalanced,
)
from lockstep._base.inherited import refusal, refusing
from lockstep._base.wrapper import is_of_module, naming_options
from lockstep.errors import LengthError, NotReplicableError
from lockstep.local import scatter_gather, workers
from lockstep.local.checks import require_on
from lockstep.local.comm import copy_to
from lockstep.local.loss_weights import weights_of_parts
from lockstep.local.module_copy import SLOTS
from lockstep.local.replicas import ReplicaSet, cached, replicate
from lockstep.local.training_step import forward, running, training_step
from lockstep.phases import Event, Phases, Statistics

T = TypeVar("T", bound=Module)
_PyTorchs: Any = torch.nn.DataParallel  # a base class for isinstance alone; its annotations differ from this class's

# attributes that are set on the wrapper itself, even if the module has an attribute of that name
_OWN = frozenset(
    {"module", "dim", "device_ids", "output_device", "src_device_obj", "split", "gather_outputs", "training"}
)


@refusing(torch.nn.DataParallel, {})
class DataParallel(_PyTorchs, Module, Generic[T]):
    """Run a module on several devices at once, each on its rows of the batch.

    Args:
        module: its parameters and buffers must be on the first device.
        device_ids: the devices. Each is an index of the current accelerator type, a string or a ``torch.device``. The
            same device may be listed more than once: with ``["cpu", "cpu"]`` two replicas take turns. None takes all
            accelerators. On a machine without accelerators the module runs as it is with None, an empty list, and a
            list of accelerators, as with PyTorch. The attribute may be set, or changed in place, later.
        output_device: the device on which outputs are gathered: any device, ``-1`` or ``"cpu"``. None takes the first
            device.
        dim: the dimension along which inputs are split and outputs are concatenated. Mark an input that does not
            consist of rows of the batch with :func:`lockstep.local.shared`. If an input has one row for each device,
            next to inputs with more rows, each replica gets one of its rows.
        split: one weight for each device, for devices that differ in speed. ``[2, 1]`` gives two thirds of the rows to
            the first device. None splits evenly: sizes differ by at most one.
        gather_outputs: if False, each output stays on its device, and forward returns a list with one output for each
            replica.

    After ``backward`` the module's parameters have the gradients of the whole batch, as on one device. Replicas are
    built once. A change of the module reaches all replicas at the next use. The first replica is the module itself, so
    state that its forward sets stays. If the wrapper does not have an attribute, it is read from the module and set on
    the module: ``parallel.fc = Linear(parallel.fc.in_features, 10)`` puts a layer into the module. ``state_dict`` has
    the same keys as with ``torch.nn.DataParallel``; ``load_state_dict`` also takes the keys of the plain module. The
    wrapper is an instance of ``torch.nn.DataParallel``, for programs that check the type; no code of that class runs.

    Each forward copies each input and output once, and each bucket of parameters (10 MiB) to each device except the
    first; backward copies the gradients of each bucket back. Raises :class:`~lockstep.errors.DeviceError`, with the
    name, for a parameter or buffer that is not on the first device. Stands for ``torch.nn.DataParallel``.

    >>> import torch
    >>> parallel = DataParallel(torch.nn.Linear(3, 2), device_ids=["cpu", "cpu"])
    >>> parallel(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    @naming_options
    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        split: Sequence[float] | None = None,
        gather_outputs: bool = True,
    ) -> None:
        check_module(module, "DataParallel()")
        Module.__init__(self)  # not the constructor of PyTorch's wrapper
        self.module = module
        self.dim = dim
        self.gather_outputs = gather_outputs
        devices = replica_devices(device_ids)
        self.device_ids = [_public(device) for device in devices]
        self.split = None if split is None else list(split)
        self._start()
        if not devices:
            return
        scatter_gather.split_sizes(0, len(devices), self.split)
        self.src_device_obj = devices[0]
        self.output_device = _public(
            self.src_device_obj if output_device is None else resolve_destination(output_device, stacklevel=4)
        )
        warn_if_unbalanced(devices)
        if len(devices) == 1:
            module.to(self.src_device_obj)

    def _start(self) -> None:
        self._phases = Phases("local")
        self._replicas: ReplicaSet | None = None

    # Forward #

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole batch, or, with ``gather_outputs=False``, a list of outputs.

        Where operations are recorded and not run (``torch.jit.trace``, ``make_fx``, ``torch.export``, ``torch.func``,
        forward-mode autograd), and where a mode of this thread would not see those of replicas on several devices, the
        module runs as it is.
        """
        # The compiler traces these lines, so it sees the module itself where that runs as it is, or on one device.
        # (In PyTorch 2.11, torch.compiler.is_exporting() is true wherever it traces.)
        if torch.compiler.is_compiling():
            if torch.compiler._is_exporting_flag or not self.device_ids:
                return self.module(*map(_plain, inputs), **{name: _plain(each) for name, each in kwargs.items()})
            if len(self.device_ids) == 1:
                return self._forward_on_one(inputs, kwargs)
        return self._forward(inputs, kwargs)

    @outside_compiler
    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        devices = self._devices()
        if not devices or _runs_whole(devices):
            output = self.module(*scatter_gather.unmarked(inputs), **scatter_gather.unmarked(kwargs))
            return output if self.gather_outputs or not devices else [output]
        with self._phases.phase("DataParallel.forward"):
            if len(devices) == 1:
                return self._forward_on_one(inputs, kwargs)
            shares, keywords = self._scattered(inputs, kwargs)
            own = self._own_replicas()
            replicas = self.replicate(self.module, self.device_ids[: len(shares)])
            with running([own]):
                outputs = self.parallel_apply(replicas, shares, keywords)
            if not self.gather_outputs:
                return outputs
            with self._phases.phase("gather"):
                return self.gather(outputs, self.output_device)

    def _forward_on_one(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs, kwargs = self._moved_in(inputs, kwargs)
        return self._moved_out(self.module(*inputs, **kwargs))

    @outside_compiler
    def _moved_in(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the arguments of the module on the only device."""
        self._devices()
        require_on(self.module, self.src_device_obj)
        shares, keywords = self._scattered(inputs, kwargs)
        return shares[0], keywords[0]

    @outside_compiler
    def _moved_out(self, output: Any) -> Any:
        return scatter_gather.move(output, self.output_device) if self.gather_outputs else [output]

    def _scattered(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]]]:
        with self._phases.phase("scatter"):
            shares, keywords = self.scatter(inputs, kwargs, self.device_ids)
        if not inputs and not kwargs:
            return shares[:1] or ((),), keywords[:1] or ({},)
        return shares, keywords

    def replicate(self, module: T, device_ids: Sequence[DeviceLike]) -> list[Any]:
        """Return replicas of ``module`` for ``device_ids``; the replicas of the wrapped module are kept for the next
        use."""
        devices = resolve_devices(device_ids)
        if module is self.module and devices == self._devices()[: len(devices)]:
            return self._own_replicas().refresh()[: len(devices)]
        return replicate(module, devices, not torch.is_grad_enabled())

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device_ids: Sequence[DeviceLike]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the positional and keyword arguments of each replica that is used."""
        return scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, self.dim, split=self.split)

    def parallel_apply(
        self,
        replicas: Sequence[Callable[..., Any]],
        inputs: Sequence[Any],
        kwargs: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """Run each replica on its share of the inputs, and return the outputs."""
        timed = [partial(forward, self._phases, index, replica) for index, replica in enumerate(replicas)]
        return workers.parallel_apply(timed, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: DeviceLike) -> Any:
        """Combine the outputs of the replicas into one output."""
        return scatter_gather.gather(outputs, output_device, self.dim)

    def _devices(self) -> list[torch.device]:
        """Return the devices that ``device_ids`` names now; none if that is empty or None: the module runs as it is."""
        ids = self.device_ids
        devices = [] if ids is None or (isinstance(ids, list | tuple) and not ids) else replica_devices(ids)
        if devices and devices[0] != vars(self).get("src_device_obj"):
            self.src_device_obj = devices[0]
            if "output_device" not in vars(self):  # the wrapper began without devices
                self.output_device = _public(devices[0])
        return devices

    def _own_replicas(self) -> ReplicaSet:
        own = self._replicas
        devices = self._devices() or [_device_of(self.module)]
        if own is None or own.network is not self.module or own.devices != devices:
            self._replicas = ReplicaSet(self.module, devices, network_first=True, phases=self._phases)
            return self._replicas
        return own

    # Training step #

    @outside_compiler
    def step(
        self, loss_fn: Callable[..., torch.Tensor], *batch: Any, weight: Callable[[Any], Any] | None = None
    ) -> torch.Tensor:
        """Run forward, loss and backward in each replica; leave the gradients of the loss of the batch on the module.

        A replica's loss is a mean over its part of the batch, and counts by what that mean divides by. Say it by
        ``weight`` if it is not the number of rows, as with padded labels: ``weight=lambda target: (target !=
        -100).sum()``. Without ``weight`` it is found for cross entropy and negative log-likelihood of PyTorch, whatever
        calls them, if the loss is their result; every other loss counts by rows.

        Args:
            loss_fn: a function ``loss_fn(output, target)``, or a module, also one with parameters and buffers. It
                returns a mean, or is a criterion of PyTorch with ``reduction="sum"``.
            batch: the module's inputs and, last, the target. With one entry, ``loss_fn(output)`` is called.
            weight: a function ``weight(target)`` that gets the target's rows of one replica (with one entry in the
                batch: its rows of that), on the device of the target that was given, and returns what the mean of
                ``loss_fn`` divides by for them: a number, 0 or more. The host waits if it is on an accelerator. A
                replica of weight 0 has no part in loss and gradients, even NaN.

        Returns the loss of the whole batch: a detached tensor without dimensions on the output device. Gradients are
        added to ``.grad``, as by ``backward``. They equal the gradients of ``loss_fn(module(*inputs),
        target).backward()`` on one device. No output is gathered, so the first device needs no more memory than the
        others. Communicates as forward does, without the outputs.

        Warns if the mean may be over something else than rows, and it cannot be seen what: the criterion is not
        PyTorch's and has an ``ignore_index`` or a tensor ``weight``, or such a mean is one of several terms. What a
        compiled loss, or one that a function computes by itself, divides by, cannot be seen, and not be warned of.

        >>> import torch
        >>> parallel = DataParallel(torch.nn.Linear(3, 2), device_ids=["cpu", "cpu"])
        >>> loss = parallel.step(torch.nn.functional.mse_loss, torch.ones(5, 3), torch.zeros(5, 2))
        >>> parallel.module.weight.grad.shape
        torch.Size([2, 3])
        """
        if not batch:
            raise LengthError("step expects the batch: step(loss_fn, *inputs, target)")
        if _runs_whole(self._devices()):
            raise NotReplicableError(
                "step() cannot be recorded (by a trace, an export or torch.func), nor seen by a mode if its replicas "
                "are on several devices: record the forward of the module, parallel.module"
            )
        with self._phases.phase("DataParallel.step"):
            return self._step(loss_fn, batch, weight)

    def _step(
        self, loss_fn: Callable[..., torch.Tensor], batch: tuple[Any, ...], weight: Callable[[Any], Any] | None
    ) -> torch.Tensor:
        own = self._own_replicas()
        with self._phases.phase("scatter"):
            shares, sizes = scatter_gather.scatter_arguments(batch, None, own.devices, self.dim, self.split)
            weights = None
            if weight is not None and len(shares) > 1:
                weights = weights_of_parts(weight, batch[-1], len(own.devices), self.dim, self.split)[: len(shares)]
        networks = [own]
        if isinstance(loss_fn, Module):
            make = partial(ReplicaSet, loss_fn, own.devices, network_first=True, phases=self._phases)
            networks.append(cached(loss_fn, ("step", *own.devices), make))
        losses = training_step(networks, loss_fn, shares, sizes or [1] * len(shares), weights, self._phases)
        target = resolve_destination(self.output_device) if self.device_ids else losses[0].device
        return torch.stack([copy_to(loss.detach(), target) for loss in losses]).sum()

    # Observation #

    def statistics(self) -> Statistics:
        """Return how often each phase has run so far, and for how many seconds of the host's time."""
        return self._phases.statistics()

    def timeline(self) -> AbstractContextManager[list[Event]]:
        """List the phases of every replica that end inside the ``with`` block, as they end."""
        return self._phases.timeline()

    # The wrapper as the module #

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            refused = refusal(type(self), name)
            if refused is None:
                return getattr(super().__getattr__("module"), name)
        raise AttributeError(refused, name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._belongs_to_module(name):  # set it where it was read; on the wrapper it would have no effect
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._belongs_to_module(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _belongs_to_module(self, name: str) -> bool:
        """Return True if the module has an attribute of that name and the wrapper has none.

        What a subclass sets is its own, before and after the constructor of this class.
        """
        if (
            type(self) is not DataParallel
            or name in _OWN
            or name.startswith("_")
            or name in vars(self)
            or hasattr(type(self), name)
        ):
            return False
        slots = [vars(self).get(kind, {}) for kind in SLOTS]
        module = vars(self).get("_modules", {}).get("module")
        return module is not None and not any(name in slot for slot in slots) and hasattr(module, name)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the ``state_dict`` of this wrapper, of ``torch.nn.DataParallel``, or of the plain module."""
        if is_of_module(state_dict, self.module):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._replicas = None  # they may have devices and dtypes that the module no longer has
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_phases", "_replicas")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()


def _device_of(module: Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _public(device: torch.device) -> int | torch.device:
    """Return a device as PyTorch's attributes show it: an accelerator by its index."""
    return device if device.index is None else device.index


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Compute the output of ``module`` for ``inputs`` on several devices, as :class:`DataParallel` does.

    Args:
        module: its parameters and buffers must be on the first device.
        inputs: a tuple of positional arguments, a single argument, or None for no argument.
        device_ids: as in :class:`DataParallel`.
        output_device: as in :class:`DataParallel`.
        dim: as in :class:`DataParallel`.
        module_kwargs: keyword arguments.

    The module must be on the first device, even if there is only one, as with PyTorch's Python function. (PyTorch's C++
    function moves the module.) The replicas are kept for the next call. Communicates and raises as
    :class:`DataParallel` does. Stands for ``torch.nn.parallel.data_parallel`` and the C++
    ``torch::nn::parallel::data_parallel``.

    >>> import torch
    >>> data_parallel(torch.nn.Linear(3, 2), torch.ones(5, 3), ["cpu", "cpu"]).shape
    torch.Size([5, 2])
    """
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    kwargs = dict(module_kwargs or {})
    devices = replica_devices(device_ids)
    if not devices or _runs_whole(devices):
        return module(*scatter_gather.unmarked(args), **scatter_gather.unmarked(kwargs))
    if len(devices) == 1:  # the class moves its module to a lone device, the function does not
        require_on(module, devices[0])
    key = ("data_parallel", *devices, output_device, dim)
    parallel = cached(module, key, lambda: DataParallel(module, devices, output_device, dim))
    return parallel(*args, **kwargs)


def _plain(value: Any) -> Any:
    """Return the tensor of an argument that is marked: what the compiler of every PyTorch can trace."""
    return value.tensor if isinstance(value, scatter_gather.Shared) else value


def _runs_whole(devices: Sequence[torch.device]) -> bool:
    """Return True if replicas would not do what the calling thread is in: a recording, or a mode where others run."""
    return is_recorded() or (len(set(devices)) > 1 and is_observed())
