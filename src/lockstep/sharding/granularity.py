"""Finds out by trials on small tensors if an optimizer updates single elements, or needs whole parameters.

An optimizer updates element by element if a slice that is stepped alone gets the same bits as within the whole tensor.
Otherwise, if a tensor that is stepped alone gets the same bits as among other tensors, the optimizer needs whole
parameters (Muon, LAMB, Adafactor). If neither holds, it needs all parameters at once, or draws random numbers; then it
is refused.

The tensors have the shapes of the parameters, but at most ``LONGEST`` elements along each dimension. The trials change
nothing of the program: neither parameters nor state nor random numbers.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ShardingError
from lockstep.sharding.partition import ALIGNED
from lockstep.sharding.twin import copied_options, make_twin, step_of

STEPS = 3
LONGEST = 320
MOST = 1 << 18
"""Number of elements of a tensor to try with, at most."""


class Trials:
    """The trials of one optimizer; each is made once for tensors of one shape in groups with the same options."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._known: dict[Hashable, bool] = {}

    def needs_whole(self, group: dict[str, Any], parameter: Tensor) -> bool:
        """Return True if the optimizer needs all of a parameter at once; raise :class:`ShardingError` if it needs other
        parameters, too."""
        shape = small_shape(parameter.shape)
        options = tuple(f"{name}={value}" for name, value in group.items() if name not in ("params", "param_names"))
        key = shape, parameter.dtype, parameter.device, options
        if key not in self._known:
            trial = _Trial(self._optimizer, self._kind, group, parameter, shape)
            devices = [parameter.device] if parameter.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                self._known[key] = trial.needs_whole()
        return self._known[key]


def small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of as many dimensions, but at most ``LONGEST`` elements along each and ``MOST`` in all."""
    small = [min(size, LONGEST) for size in shape]
    while math.prod(small) > MOST:
        longest = small.index(max(small))
        small[longest] = -(-small[longest] // 2)
    return tuple(small)


class _Trial:
    """One trial: the same values and gradients, stepped in several ways."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        group: dict[str, Any],
        parameter: Tensor,
        shape: tuple[int, ...],
    ) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._group = group
        self._shape = shape
        self._like = parameter
        generator = torch.Generator().manual_seed(25)
        numel = math.prod(shape)
        rows = torch.randn((2 + STEPS, numel), generator=generator, dtype=torch.float32, device="cpu")
        self._rows = rows.to(parameter.device, parameter.dtype)

    def needs_whole(self) -> bool:
        reference = self._reference()
        if self._in_slices(reference):
            return False
        if not self._alone(reference):
            raise ShardingError(
                f"{self._kind.__name__} updates a parameter of shape {tuple(self._like.shape)} differently beside "
                "others than alone: it works on all parameters at once, or draws random numbers, so its state cannot "
                "be sharded; use it as it is"
            )
        return True

    def _reference(self) -> Tensor:
        """Step on the tensor beside another one in its group, and one in another group."""
        whole = [self._tensor(row, None) for row in (0, 1, 1)]
        try:
            self._step([whole[:2], whole[2:]])
        except Exception as error:
            raise ShardingError(
                f"{self._kind.__name__} cannot be sharded: its step was tried on a tensor of shape {self._shape}, "
                f"without a closure, and raised {type(error).__name__}: {error}"
            ) from error
        return whole[0].detach().reshape(-1)

    def _in_slices(self, reference: Tensor) -> bool:
        numel = reference.numel()
        half = -(-numel // (2 * ALIGNED)) * ALIGNED if numel > ALIGNED else numel
        slices = [slice(0, half), slice(half, numel)] if half < numel else [slice(0, numel)]
        tensors = [self._tensor(0, each) for each in slices]
        try:
            twins = [self._step([[tensor]], each) for tensor, each in zip(tensors, slices, strict=True)]
        except Exception:  # it takes no flat tensors
            return False
        states = [twin.state.get(tensor, {}) for twin, tensor in zip(twins, tensors, strict=True)]
        if not all(_is_sliced(state, tensor) for state, tensor in zip(states, tensors, strict=True)):
            return False
        return _equal(torch.cat([tensor.detach() for tensor in tensors]), reference)

    def _alone(self, reference: Tensor) -> bool:
        tensor = self._tensor(0, None)
        self._step([[tensor]])
        return _equal(tensor.detach().reshape(-1), reference)

    def _tensor(self, row: int, part: slice | None) -> Tensor:
        values = self._rows[row].view(self._shape) if part is None else self._rows[row][part]
        return values.clone().requires_grad_()

    def _step(self, groups: Sequence[Sequence[Tensor]], part: slice | None = None) -> Optimizer:
        twin = make_twin(self._optimizer, self._kind)
        vars(twin)["param_groups"] = [{**copied_options(self._group), "params": list(each)} for each in groups]
        step = step_of(self._kind)
        for row in self._rows[2:]:
            for group in groups:
                for number, tensor in enumerate(group):
                    given = row.view(self._shape) if part is None else row[part]
                    tensor.grad = given * (1 + number)
            with torch.no_grad():
                step(twin)
        return twin


def _is_sliced(state: dict[str, Any], tensor: Tensor) -> bool:
    """Return True if every tensor of the state of a flat tensor has one element for each of it, or one in all."""
    tensors = [each for each in state.values() if isinstance(each, Tensor)]
    others = [each for each in state.values() if not isinstance(each, Tensor | int | float | bool | type(None))]
    return not others and all(each.shape in (tensor.shape, ()) for each in tensors)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
