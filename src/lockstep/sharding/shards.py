"""The step of a sharded optimizer on one rank, and its messages to the other ranks.

A step goes in this order, on every rank:

1. *place* - parameters that have a gradient and no place yet (new groups, unfrozen layers) are cut and assigned.
2. *agree* - one small all-gather checks that all ranks take the same step, with the same options, over the same
   parameters. If not, every rank raises an error by name, and nothing has been changed.
3. *step* - the rank's twin optimizer steps on the rank's pieces, which are views of the parameters. If that fails on
   any rank, a mark in the first chunk of its weights says so. Then every rank gets the old values of its pieces from
   another rank, since no rank has copied new values yet.
4. *gather* - each rank sends its pieces, and all ranks copy them into their parameters.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.compiler import calls_compiled, outside_compiler
from lockstep.digests import text_digest
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.dtensors import is_dtensor, local_part
from lockstep.errors import AgreementError, LayoutError, PeerError, ShardingError
from lockstep.sharding.granularity import Trials
from lockstep.sharding.partition import Piece, cut_evenly, matrix_cost, share_out
from lockstep.sharding.pieces import (
    as_bytes,
    check_dense,
    flat,
    flat_gradient,
    gradient_of,
    is_like,
    is_same_order,
    memory_order,
)
from lockstep.sharding.streams import Moves, Streams
from lockstep.sharding.twin import make_twin, shared_attributes, step_of
from lockstep.texts import LONGEST_HEADLINE, shortened


class Placed(NamedTuple):
    """A parameter whose elements have been assigned to ranks."""

    name: str
    parameter: Tensor
    is_whole: bool
    """True if it has gone to one rank, in its shape."""
    kind: tuple[torch.dtype, torch.Size, torch.device]


class OwnPiece(NamedTuple):
    """A piece that this rank steps on."""

    piece: Piece
    tensor: Tensor
    """A view of the parameter's memory, what the twin has in its groups: in the parameter's shape if the piece is all
    of it, else flat."""


class _Bound(NamedTuple):
    """The objects that depend on the addresses of the parameters."""

    addresses: list[int]
    orders: list[list[int]]
    """The dimensions of each parameter in the order of its memory, the slowest first."""
    streams: Streams | None
    """None if there is one rank."""
    moves: list[Moves]
    """The places of each rank's pieces in the parameters."""


class Shards:
    """The pieces of all ranks, and this rank's twin of the optimizer."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer], collectives: Collectives) -> None:
        self.collectives = collectives
        self.placed: list[Placed] = []
        self.by_rank: list[list[Piece]] = [[] for _ in range(collectives.world)]
        """The pieces of each rank."""
        self.own: list[OwnPiece] = []
        self.twin = make_twin(optimizer, kind)
        self.steps = 0
        self._kind = kind
        self._step = step_of(kind)
        self._numbers: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}  # by the parameter's id
        self._bound = _Bound([], [], None, [])
        self._trials = Trials(self.twin, kind)
        self._has_dtensors = False
        self._digest = ""  # of all that has been placed
        self._broken = ""  # why the weights or the state are not whole

    @property
    def rank(self) -> int:
        """The rank in its group."""
        return self.collectives.rank

    # ------------------------------------------------------------------------------------- placing

    def number_of(self, parameter: Tensor) -> int | None:
        """Return the number of a parameter that has been assigned, or None."""
        return self._numbers.get(id(parameter))

    def place(self, groups: Sequence[dict[str, Any]], find_names: Callable[[], dict[int, str]]) -> None:
        """Cut and assign the parameters that have no place yet, whose names are asked for; the others keep their
        places."""
        new = [
            (group, parameter)
            for group in groups
            for parameter in group["params"]
            if id(parameter) not in self._numbers and parameter.numel()
        ]
        if not new:
            return
        names = find_names()
        are_whole = [self._needs_whole(group, parameter, names) for group, parameter in new]
        first = len(self.placed)
        for (_, parameter), is_whole in zip(new, are_whole, strict=True):
            self._numbers[id(parameter)] = len(self.placed)
            self._has_dtensors = self._has_dtensors or is_dtensor(parameter)
            kind = parameter.dtype, parameter.shape, parameter.device
            self.placed.append(Placed(names[id(parameter)], parameter, is_whole, kind))
        self._give_out(range(first, len(self.placed)))
        self._digest = self._digest_places()
        self._bind()

    def _needs_whole(self, group: dict[str, Any], parameter: Tensor, names: dict[int, str]) -> bool:
        check_dense(parameter, names[id(parameter)])
        return self._trials.needs_whole(group, local_part(parameter)) or not parameter.dim()

    def _give_out(self, numbers: Sequence[int]) -> None:
        world = self.collectives.world
        whole = [number for number in numbers if self.placed[number].is_whole]
        locals_ = {number: local_part(self.placed[number].parameter) for number in numbers}
        for rank, share in enumerate(share_out([matrix_cost(locals_[number].shape) for number in whole], world)):
            self.by_rank[rank] += [Piece(whole[each], 0, locals_[whole[each]].numel()) for each in share]
        for dtype in dict.fromkeys(locals_[number].dtype for number in numbers):
            cut = [n for n in numbers if not self.placed[n].is_whole and locals_[n].dtype == dtype]
            for rank, pieces in enumerate(cut_evenly([locals_[number].numel() for number in cut], world)):
                self.by_rank[rank] += [piece._replace(number=cut[piece.number]) for piece in pieces]

    def follow(self) -> None:
        """Make the pieces anew if the parameters' memory has moved; raises :class:`LayoutError` if they do not fit."""
        if self._addresses() != self._bound.addresses:
            self._bind()

    def order_of(self, number: int) -> list[int]:
        """Return the dimensions of a parameter in the order of the memory of its state, the slowest first."""
        return self._bound.orders[number]

    def _bind(self) -> None:
        """Make the pieces anew at the parameters' present addresses; their state is kept."""
        self._check_kinds()
        self._check_apart()
        orders = [memory_order(local_part(placed.parameter)) for placed in self.placed]
        self._check_orders(orders)
        state, former = self.twin.state, {own.piece: own.tensor for own in self.own}
        self.own = [OwnPiece(piece, self._view(piece)) for piece in self.by_rank[self.rank]]
        moved = {own.tensor: state.pop(former[own.piece]) for own in self.own if former.get(own.piece) in state}
        state.update(moved)
        self._tensors = {id(self.placed[own.piece.number].parameter): own.tensor for own in self.own}
        self._bound = _Bound(self._addresses(), orders, *self._streams())

    def _check_apart(self) -> None:
        """Raise :class:`LayoutError` if parameters share memory: different ranks would step on the same elements."""
        places = sorted((local_part(each.parameter).data_ptr(), number) for number, each in enumerate(self.placed))
        for (address, number), (following, other) in pairwise(places):
            mine, theirs = self.placed[number], self.placed[other]
            if following < address + local_part(mine.parameter).nbytes and mine.kind[2] == theirs.kind[2]:
                raise LayoutError(
                    f"parameters {mine.name} and {theirs.name} share memory (weight_norm of a tied weight makes such): "
                    "an optimizer steps on it twice, which cannot be sharded; give one of them memory of its own"
                )

    def _view(self, piece: Piece) -> Tensor:
        placed = self.placed[piece.number]
        local = local_part(placed.parameter.detach())
        return local if piece.stop - piece.start == local.numel() else flat(local)[piece.start : piece.stop]

    def _streams(self) -> tuple[Streams | None, list[Moves]]:
        if self.collectives.world == 1:
            return None, []
        places = [[as_bytes(self._flat(piece)) for piece in pieces] for pieces in self.by_rank]
        lengths = [sum(place.numel() for place in each) for each in places]
        streams = Streams(lengths, self.collectives, self.placed[0].parameter.device)
        return streams, [streams.moves(each) for each in places]

    def _flat(self, piece: Piece) -> Tensor:
        return flat(local_part(self.placed[piece.number].parameter.detach()))[piece.start : piece.stop]

    def _addresses(self) -> list[int]:
        if self._has_dtensors:
            return [local_part(placed.parameter).data_ptr() for placed in self.placed]
        return [placed.parameter.data_ptr() for placed in self.placed]

    # ------------------------------------------------------------------------------------- a step

    @outside_compiler
    def prepare(
        self, optimizer: Optimizer, find_names: Callable[[], dict[int, str]], find_problem: Callable[[], str]
    ) -> None:
        """Get ready for one step, with all ranks; ``find_problem`` returns the reason why this rank cannot take it, or
        an empty text.

        If this fails on any rank, raises on every rank. :meth:`step_own` and :meth:`finish` follow.
        """
        self._check_whole()
        problem, cause = find_problem(), None
        if not problem:
            try:
                self._get_ready(optimizer, find_names)
            except Exception as error:
                cause = error
        self._agree(optimizer, problem, cause)
        self.steps += 1
        if self._bound.streams is not None:  # until finish() has ended
            self._broken = f"step {self.steps} of the optimizer was cut short, so the weights may be of two steps"

    @calls_compiled
    def step_own(self) -> Exception | None:
        """Step on this rank's pieces; return what it raises. If the program compiles its step, this part is
        compiled."""
        try:
            self._step(self.twin)
        except Exception as error:
            return error
        return None

    @outside_compiler
    def finish(self, optimizer: Optimizer, failure: Exception | None) -> None:
        """Send this rank's new values and copy those of the others; if the step failed on any rank, restore the old
        ones."""
        self._drop_gradients()
        for group, own in zip(optimizer.param_groups, self.twin.param_groups, strict=True):
            group.update((name, value) for name, value in own.items() if name != "params")
        streams, moves = self._bound.streams, self._bound.moves
        if streams is None:
            if failure is not None:
                raise failure
            return
        what = f"weights, step {self.steps}"
        others = [None if rank == self.rank else each for rank, each in enumerate(moves)]
        marks = streams.gather(moves[self.rank], others, what, int(failure is not None))
        if any(marks):
            self._give_back(streams, moves)
            self._broken = f"step {self.steps} of the optimizer has failed, after some ranks had changed their state"
            self._raise(failure)
        self._broken = ""

    def _check_whole(self) -> None:
        if self._broken:
            raise ShardingError(
                f"{self._broken}. Load a checkpoint: model.load_state_dict() and optimizer.load_state_dict()"
            )

    def _get_ready(self, optimizer: Optimizer, find_names: Callable[[], dict[int, str]]) -> None:
        groups = optimizer.param_groups
        present = [{**group, "params": [p for p in group["params"] if p.grad is not None]} for group in groups]
        self.place(present, find_names)
        self.follow()
        vars(self.twin).update(shared_attributes(optimizer))
        for name in vars(self.twin).keys() & {"grad_scale", "found_inf"} - vars(optimizer).keys():
            delattr(self.twin, name)
        self._set_groups(groups)
        self._take_gradients()

    def _set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give the twin the groups as they are now, over this rank's pieces."""
        self.twin.param_groups[:] = [
            {**group, "params": [self._tensors[id(p)] for p in group["params"] if id(p) in self._tensors]}
            for group in groups
        ]

    def _check_kinds(self) -> None:
        for placed in self.placed:
            kind = placed.parameter.dtype, placed.parameter.shape, placed.parameter.device
            if kind != placed.kind:
                raise LayoutError(
                    f"parameter {placed.name} had dtype, shape and device {placed.kind} when its optimizer was "
                    f"sharded, and has {kind} now; convert and move a module before shard_optimizer()"
                )
            check_dense(placed.parameter, placed.name)

    def _check_orders(self, orders: Sequence[list[int]]) -> None:
        """Raise :class:`LayoutError` if a slice of state would belong to other elements than those it was made for."""
        for placed, before, now in zip(self.placed, self._bound.orders, orders, strict=False):
            if self.twin.state and not placed.is_whole and not is_same_order(before, now, placed.parameter.shape):
                raise LayoutError(
                    f"parameter {placed.name} has another memory format (strides "
                    f"{local_part(placed.parameter).stride()}) than when its optimizer made its state, which is cut in "
                    "the order of memory; convert a module before the first step, or load full_state_dict(optimizer) "
                    "into a new sharded optimizer"
                )

    def _take_gradients(self) -> None:
        for piece, tensor in self.own:
            placed = self.placed[piece.number]
            gradient = placed.parameter.grad
            if gradient is None:
                continue
            if placed.is_whole:
                gradient = gradient_of(placed.parameter, placed.name)
            elif not is_like(gradient, tensor):
                gradient = flat_gradient(placed.parameter, placed.name)[piece.start : piece.stop]
                gradient = gradient.as_strided(tensor.shape, tensor.stride())
            tensor.grad = gradient

    def _drop_gradients(self) -> None:
        for own in self.own:
            own.tensor.grad = None  # else the gradient's memory could not be used again

    def _give_back(self, streams: Streams, moves: Sequence[Moves]) -> None:
        """Restore the old values of every rank's pieces: each rank sends those of the next rank, which it still has."""
        world = self.collectives.world
        targets: list[Moves | None] = [None] * world
        targets[(self.rank - 1) % world] = moves[self.rank]
        streams.gather(moves[(self.rank + 1) % world], targets, f"weights from before step {self.steps}")

    def _raise(self, failure: Exception | None) -> NoReturn:
        text = "" if failure is None else shortened(f"{type(failure).__name__}: {failure}", LONGEST_HEADLINE)
        told = all_gather_object(text, "error of the optimizer's step", self.collectives)
        if failure is not None:
            raise failure
        rank = next(rank for rank, each in zip(self.collectives.global_ranks, told, strict=True) if each)
        raise PeerError(
            f"rank {self.collectives.global_rank}: step {self.steps} of the optimizer has failed on rank {rank} "
            f"({next(filter(None, told))}); every rank has the weights from before it"
        )

    # ----------------------------------------------------------------------------------- agreeing

    def agree_on_places(self, optimizer: Optimizer, error: Exception | None) -> None:
        """Compare the places with all ranks; raise on every rank if ranks differ or one has an ``error``."""
        self._agree(optimizer, "", error)

    def _agree(self, optimizer: Optimizer, problem: str, cause: Exception | None) -> None:
        """Raise on every rank unless all take the same step; a rank with a ``problem``, or its ``cause``, reports it to
        all."""
        if cause is not None:
            problem = f"{type(cause).__name__}: {cause}"
        if problem:
            self._drop_gradients()
        if self.collectives.world == 1:
            if problem:
                raise cause or ShardingError(problem)
            return
        lines = self._describe(optimizer.param_groups)
        told = all_gather_object(
            [problem, text_digest(json.dumps(lines))], f"step {self.steps + 1} of the optimizer", self.collectives
        )
        if first_differing(told) is None and not problem:
            return
        self._drop_gradients()
        ranks = self.collectives.global_ranks
        for rank, (theirs, _) in zip(ranks, told, strict=True):
            if theirs and not problem:
                raise PeerError(f"rank {rank} cannot take step {self.steps + 1} of its sharded optimizer: {theirs}")
        if problem:
            raise cause or ShardingError(problem)
        self._raise_difference(lines)

    def _describe(self, groups: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
        """Return the values that have to be the same on all ranks."""
        lines = [("the number of steps", str(self.steps))]
        for number, group in enumerate(groups):
            options = {name: _plain(value) for name, value in group.items() if name != "params" and _is_compared(value)}
            lines += [(f"the options of parameter group {number}", str(options))]
            without = [place for place, p in enumerate(group["params"]) if p.grad is None]
            lines += [(f"the places of the parameters of group {number} that have no gradient", str(without))]
        return [*lines, ("the parameters and their pieces", self._digest)]

    def _digest_places(self) -> str:
        placed = [(each.name, each.is_whole, str(each.kind[:2])) for each in self.placed]
        return f"{len(placed)} parameters, digest {text_digest(str((placed, self.by_rank))):x}"

    def _raise_difference(self, lines: list[tuple[str, str]]) -> NoReturn:
        rows = all_gather_object(lines, "what ranks step with", self.collectives)
        for rank, row in zip(self.collectives.global_ranks, rows, strict=True):
            for mine, theirs in zip(rows[0], row, strict=False):
                if mine != theirs:
                    raise AgreementError(
                        f"ranks differ in {mine[0]} of a sharded optimizer: {mine[1]} on rank "
                        f"{self.collectives.global_ranks[0]}, {theirs[1]} on rank {rank}; no weight has been changed. "
                        "Make it the same on all ranks"
                    )
        raise AgreementError("ranks differ in the number of parameter groups of a sharded optimizer")

    def load(self, groups: Sequence[dict[str, Any]], values: dict[int, Any], others: dict[Any, Any]) -> None:
        """Load the state of this rank's pieces, by place in :attr:`own`, and the state that belongs to no parameter.

        This ends the error state after a step that was cut short.
        """
        self._set_groups(groups)
        numbers = {own.tensor: number for number, own in enumerate(self.own)}
        numbered = [
            {**group, "params": [numbers[tensor] for tensor in group["params"]]} for group in self.twin.param_groups
        ]
        self.twin.load_state_dict({"state": {**values, **others}, "param_groups": numbered})
        self._broken = ""


def _is_compared(value: Any) -> bool:
    """Return True if an option is compared; a tensor only if it is on the CPU, as a step does not wait for a device."""
    return value.device.type == "cpu" if isinstance(value, Tensor) else isinstance(value, int | float | str | tuple)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value if _is_compared(each))
    return value.tolist() if isinstance(value, Tensor) else value
