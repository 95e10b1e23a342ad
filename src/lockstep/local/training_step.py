"""One training step in replicas: forward and loss in each, and one backward pass over all of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.errors import LayoutError
from lockstep.local import workers
from lockstep.local.loss_weights import weighted
from lockstep.local.replicas import ReplicaSet
from lockstep.phases import Phases

LossFunction = Callable[..., Tensor]
Share = tuple[tuple[Any, ...], Any]  # positional and keyword arguments of one replica


def forward(phases: Phases, index: int, replica: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one replica's forward under a label for the profiler, and return its output."""
    with phases.phase("forward", replica=index):
        return replica(*args, **kwargs)


@contextmanager
def running(networks: Sequence[ReplicaSet]) -> Iterator[None]:
    """Look at the networks after their replicas have run: what forward has set, and the slots of parameters."""
    try:
        yield
    finally:
        for network in networks:
            network.after_forward()
    for network in networks:
        network.check_slots()


def training_step(
    networks: Sequence[ReplicaSet],
    loss_fn: LossFunction,
    shares: Sequence[Share],
    rows: Sequence[int],
    weights: Sequence[float] | None,
    phases: Phases,
) -> list[Tensor]:
    """Return the replicas' weighted losses, after one backward pass over all of them.

    The first of ``networks`` is the model; the second, if there is one, is ``loss_fn``. ``rows`` and ``weights`` are as
    in :func:`~lockstep.local.loss_weights.weighted`.
    """
    modules, *others = [network.refresh() for network in networks]
    loss_fns = others[0] if others else [loss_fn] * len(shares)
    calls = [
        partial(_loss, phases, index, modules[index], loss_fns[index], args) for index, (args, _) in enumerate(shares)
    ]
    with running(networks):
        losses = workers.run(calls, networks[0].devices[: len(shares)])
    found = weighted(losses, loss_fn, rows, weights)
    with phases.phase("backward"), _without_autocast(networks[0].devices):
        _backward(found)
    return found


@contextmanager
def _without_autocast(devices: Sequence[torch.device]) -> Iterator[None]:
    """Turn off the caller's autocast: under it, backward would compute in half precision what forward has not."""
    with ExitStack() as stack:
        for device_type in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _backward(losses: Sequence[Tensor]) -> None:
    needing = [loss for loss in losses if loss.requires_grad]
    try:
        torch.autograd.backward(needing or list(losses))  # autograd's error if no loss needs a gradient
    except RuntimeError as error:
        if not needing or "second time" in str(error):
            error.add_note(
                "DataParallel.step() runs backward itself, through the loss of every replica: loss_fn and the module "
                "must not run it. Let loss_fn return the loss with its graph."
            )
        raise


def _loss(phases: Phases, index: int, replica: Module, loss_fn: LossFunction, args: tuple[Any, ...]) -> Tensor:
    inputs, target = (args[:-1], args[-1:]) if len(args) > 1 else (args, ())
    output = forward(phases, index, replica, *inputs)
    with phases.phase("loss", replica=index):
        loss = loss_fn(output, *target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LayoutError(f"loss_fn must return one number, the mean over its rows; in replica {index} it gave {got}")
    return loss
