"""Which rank steps on which elements, and this rank's pieces as tensors, with their state.

A piece that is all of a parameter and has gone to one rank for that reason *is* the parameter, so the optimizer sees
its class, its attributes and its shape. Other pieces are views of the parameter's memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep._base.digests import text_digest
from lockstep._base.dtensors import is_dtensor
from lockstep._base.tensor_state import addresses, layouts
from lockstep.errors import LayoutError, ShardingError
from lockstep.sharding.granularity import Granularity
from lockstep.sharding.partition import Piece, cut_evenly, matrix_cost, share_out
from lockstep.sharding.pieces import check_dense, flat, is_same_order, memory_order, plain

State = defaultdict[Any, Any]
Groups = Sequence[dict[str, Any]]


class Placed(NamedTuple):
    """A parameter whose elements have been assigned to ranks."""

    name: str
    parameter: Tensor
    is_whole: bool
    """True if one rank owns all of it."""
    kind: tuple[torch.dtype, torch.Size, torch.device]


class OwnPiece(NamedTuple):
    """A piece that this rank steps on."""

    piece: Piece
    tensor: Tensor
    """What the optimizer has in its groups: the parameter, or a view of its memory; in the parameter's shape if the
    piece is all of it, else flat."""


class Placement:
    """The pieces of all ranks, and the state of this rank's."""

    def __init__(self, granularity: Granularity, reads_attributes: bool, rank: int, world: int) -> None:
        """``reads_attributes``: the optimizer may read attributes of parameters, which views do not have."""
        self.placed: list[Placed] = []
        self.by_rank: list[list[Piece]] = [[] for _ in range(world)]
        """The pieces of each rank, of parameters that are in the optimizer's groups now."""
        self.own: list[OwnPiece] = []
        self.state: State = defaultdict(dict)
        """The state by tensor of this rank's pieces, and what belongs to none."""
        self.tensors: dict[int, Tensor] = {}
        """This rank's tensor by the ``id`` of the parameter."""
        self.orders: dict[int, list[int]] = {}
        """The dimensions of each parameter in the order of its memory, the slowest first."""
        self.digest = ""
        """A digest of all of it, which is the same on all ranks."""
        self._granularity = granularity
        self._reads_attributes = reads_attributes
        self._rank = rank
        self._assigned: list[list[Piece]] = [[] for _ in range(world)]  # also of parameters that have left
        self._numbers: dict[int, int] = {}
        self._present: set[int] = set()
        self._views: dict[Piece, Tensor] = {}
        self._layout: Any = None  # of the present parameters, when the pieces were made

    def __repr__(self) -> str:
        pieces = f"{len(self.own)} of {sum(map(len, self.by_rank))} pieces by {self._granularity}"
        return f"Placement(rank {self._rank} of {len(self.by_rank)}, {pieces} of {len(self.placed)} parameters)"

    @property
    def has_whole(self) -> bool:
        """True if this rank owns a whole parameter."""
        return any(self.placed[own.piece.number].is_whole for own in self.own)

    def own_devices(self) -> set[torch.device]:
        """Return the devices of this rank's pieces."""
        return {own.tensor.device for own in self.own}

    def state_of_slices(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of this rank's pieces that are views."""
        views = [own.tensor for own in self.own if not self.placed[own.piece.number].is_whole]
        return {each: self.state[each] for each in views if each in self.state}

    def number_of(self, parameter: Tensor) -> int | None:
        """Return the number of a parameter that has been assigned, or None."""
        return self._numbers.get(id(parameter))

    def place(self, groups: Groups, find_names: Callable[[], dict[int, str]]) -> None:
        """Assign the parameters that have no place yet, whose names are asked for; the others keep their places."""
        parameters = [each for group in groups for each in group["params"]]
        new = [each for each in parameters if id(each) not in self._numbers and each.numel()]
        if not new:
            return
        names, first = find_names(), len(self.placed)
        for parameter in new:
            _check_can_be_gathered(parameter, names[id(parameter)])
        for number, parameter in enumerate(new, first):
            kind = parameter.dtype, parameter.shape, parameter.device
            self._numbers[id(parameter)] = number
            self.placed.append(Placed(names[id(parameter)], parameter, self._stays_whole(parameter), kind))
        self._assign(range(first, len(self.placed)))

    def _stays_whole(self, parameter: Tensor) -> bool:
        is_other = type(parameter) is not Parameter and not is_dtensor(parameter)  # a view would be a plain tensor
        has_more = is_other or (self._reads_attributes and bool(vars(parameter)))
        # Kernels for the CPU round half precision otherwise where they go element by element, at the ends of what each
        # thread gets, which are at other places in a slice: test_half_precision_is_not_cut_on_the_cpu.
        is_half = parameter.dtype.itemsize < 4 and parameter.device.type == "cpu"
        return self._granularity == "tensor" or not parameter.dim() or has_more or is_half

    def _assign(self, numbers: Sequence[int]) -> None:
        world = len(self._assigned)
        whole = [number for number in numbers if self.placed[number].is_whole]
        costs = [self._cost(self.placed[number].parameter) for number in whole]
        for rank, share in enumerate(share_out(costs, world)):
            self._assigned[rank] += [Piece(whole[each], 0, self._numel(whole[each])) for each in share]
        for dtype in dict.fromkeys(self.placed[number].kind[0] for number in numbers):
            cut = [n for n in numbers if not self.placed[n].is_whole and self.placed[n].kind[0] == dtype]
            for rank, pieces in enumerate(cut_evenly([self._numel(number) for number in cut], world)):
                self._assigned[rank] += [piece._replace(number=cut[piece.number]) for piece in pieces]

    def _cost(self, parameter: Tensor) -> float:
        return matrix_cost(parameter.shape) if self._granularity == "tensor" else parameter.numel()

    def _numel(self, number: int) -> int:
        return plain(self.placed[number].parameter).numel()

    def follow(self, groups: Groups) -> bool:
        """Make the pieces anew if parameters have come, have left the groups, or have moved in memory; return True if
        so. Their state is kept. Raises :class:`LayoutError` if they do not fit."""
        numbers = (self._numbers.get(id(each)) for group in groups for each in group["params"])
        present = {number for number in numbers if number is not None}
        layout = self._layout_of(present)
        if present == self._present and layout == self._layout:
            return False
        self._bind(present)
        self._present, self._layout = present, layout
        return True

    def _layout_of(self, numbers: Iterable[int]) -> Any:
        tensors = [self.placed[number].parameter for number in sorted(numbers)]
        locals_ = [plain(each) if is_dtensor(each) else each for each in tensors]
        return addresses(locals_), layouts(locals_)

    def _bind(self, present: set[int]) -> None:
        self._check_kinds(present)
        self._check_apart(present)
        orders = {number: memory_order(plain(self.placed[number].parameter)) for number in sorted(present)}
        self._check_orders(orders)
        self.by_rank = [[piece for piece in each if piece.number in present] for each in self._assigned]
        self.own = [OwnPiece(piece, self._tensor(piece)) for piece in self.by_rank[self._rank]]
        for own in self.own:
            former = self._views.get(own.piece)
            if former is not None and former is not own.tensor and former in self.state:
                self.state[own.tensor] = self.state.pop(former)
            self._views[own.piece] = own.tensor
        self.tensors = {id(self.placed[own.piece.number].parameter): own.tensor for own in self.own}
        self.orders.update(orders)
        self.digest = self._digest()

    def _tensor(self, piece: Piece) -> Tensor:
        placed = self.placed[piece.number]
        if placed.is_whole:
            return placed.parameter
        local = plain(placed.parameter)
        return local if piece.stop - piece.start == local.numel() else flat(local)[piece.start : piece.stop]

    def memory_of(self, piece: Piece) -> Tensor:
        """Return the elements of a piece as a flat tensor, a view of the parameter's memory."""
        return flat(plain(self.placed[piece.number].parameter))[piece.start : piece.stop]

    def _digest(self) -> str:
        lines = []
        for number, order in self.orders.items():
            name, _, is_whole, (dtype, shape, _) = self.placed[number]
            lines.append((name, is_whole, str(dtype), tuple(shape), [dim for dim in order if shape[dim] > 1]))
        return f"{len(lines)} parameters, digest {text_digest(str((lines, self.by_rank))):x}"

    # ------------------------------------------------------------------------------------ checks

    def _check_kinds(self, present: Iterable[int]) -> None:
        for placed in (self.placed[number] for number in present):
            kind = placed.parameter.dtype, placed.parameter.shape, placed.parameter.device
            if kind != placed.kind:
                raise LayoutError(
                    f"parameter {placed.name} had dtype, shape and device {placed.kind} when its optimizer was "
                    f"sharded, and has {kind} now; convert and move a module before shard_optimizer()"
                )
            check_dense(placed.parameter, placed.name)

    def _check_apart(self, present: Iterable[int]) -> None:
        """Raise :class:`LayoutError` if parameters share memory: different ranks would step on the same elements."""
        places = sorted((plain(self.placed[number].parameter).data_ptr(), number) for number in present)
        for (address, number), (following, other) in pairwise(places):
            mine, theirs = self.placed[number], self.placed[other]
            if following < address + plain(mine.parameter).nbytes and mine.kind[2] == theirs.kind[2]:
                raise LayoutError(
                    f"parameters {mine.name} and {theirs.name} share memory (weight_norm of a tied weight makes such): "
                    "an optimizer steps on it twice, which cannot be sharded; give one of them memory of its own"
                )

    def _check_orders(self, orders: dict[int, list[int]]) -> None:
        """Raise :class:`LayoutError` if a slice of state would belong to other elements than those it was made for."""
        for number, order in orders.items():
            placed, before = self.placed[number], self.orders.get(number, order)
            if self.state and not placed.is_whole and not is_same_order(before, order, placed.parameter.shape):
                raise LayoutError(
                    f"parameter {placed.name} has another memory format (strides "
                    f"{plain(placed.parameter).stride()}) than when its optimizer made its state, which is cut in "
                    "the order of memory; convert a module before the first step, or load full_state_dict(optimizer) "
                    "into a new sharded optimizer"
                )


def _check_can_be_gathered(parameter: Tensor, name: str) -> None:
    has_memory = is_dtensor(parameter) or not is_traceable_wrapper_subclass(parameter)
    if not has_memory:
        raise ShardingError(
            f"parameter {name} is a {type(parameter).__name__}, which has no memory of its own that could be sent; "
            "give it an optimizer of its own that is not sharded"
        )
    check_dense(parameter, name)
