"""Converts the state of a sharded optimizer to slices or whole tensors, and back."""

import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep._base.dtensors import is_dtensor, like_parameter
from lockstep._base.inner_tensors import as_bytes
from lockstep._base.tree import tree_map
from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import LayoutError, ShardingError
from lockstep.sharding.partition import Piece
from lockstep.sharding.pieces import flat, in_order, is_same_order, memory_order, plain
from lockstep.sharding.placement import OwnPiece, Placement
from lockstep.sharding.shown_state import is_of_elements
from lockstep.sharding.state_slice import StateSlice
from lockstep.sharding.streams import GatheredStreams, Moves, Targets

State = dict[Any, Any]

# ------------------------------------------------------------------------------------------ loading


def sliced(placement: Placement, state: Mapping[Any, Any], parameters: Sequence[Tensor]) -> State:
    """Return this rank's part of a whole state by number; ``parameters`` are those of the numbers, and those with state
    have places.

    State of parameters that other ranks step on alone is left out.
    """
    by_parameter: State = {}
    for key, values in state.items():
        if not isinstance(key, int) or key >= len(parameters):
            by_parameter[key] = values
            continue
        number = placement.number_of(parameters[key])
        own = next((each for each in placement.own if each.piece.number == number), None)
        if own is not None:
            by_parameter[key] = {name: _part_of(value, own, parameters[key], name) for name, value in values.items()}
    return by_parameter


def _part_of(value: Any, own: OwnPiece, parameter: Tensor, name: str) -> Any:
    """Return a value of the state for a rank's piece: of a slice as a :class:`StateSlice`."""
    if isinstance(value, StateSlice):
        _check_slice(value, own, parameter, name)
        return _as_tensor(value, own) if own.tensor is parameter else value
    if not isinstance(value, Tensor) or not value.dim() or value.shape != parameter.shape:
        return value
    if own.tensor is parameter and (type(value) is not Tensor or value.stride() == parameter.stride()):
        return value
    if not (type(value) in (Tensor, torch.nn.Parameter) or is_dtensor(value)):
        raise ShardingError(
            f"state {name!r} of a parameter is a {type(value).__name__}, of which there are no slices; shard the "
            'optimizer with granularity="tensor"'
        )
    local, like = plain(value), plain(parameter)
    if local.stride() != like.stride():
        local = torch.empty_like(like, dtype=local.dtype, device=local.device).copy_(local)
    if own.tensor is parameter:
        return local
    return StateSlice.of(flat(local)[own.piece.start : own.piece.stop].clone(), own.piece.start, like)


def _check_slice(value: StateSlice, own: OwnPiece, parameter: Tensor, name: str) -> None:
    if (value.start, value.local.numel()) != (own.piece.start, own.piece.stop - own.piece.start):
        raise LayoutError(
            f"state {name!r} of a parameter is the slice {value!r}, and this rank needs the elements "
            f"{own.piece.start} to {own.piece.stop}: it was made by another number of ranks; load a whole state "
            "dict (full_state_dict), or go through torch.distributed.checkpoint or lockstep.resume()"
        )
    if not is_same_order(value.order, memory_order(plain(parameter)), value.shape):
        raise LayoutError(
            f"state {name!r} of a parameter is a slice of another memory format than the parameter has now "
            f"(strides {plain(parameter).stride()}); load a whole state dict (full_state_dict)"
        )


def by_piece(placement: Placement, state: Mapping[Any, Any]) -> State:
    """Return state by parameter, as :func:`sliced` makes it, by tensor of this rank's pieces."""
    pieces: State = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    for own in placement.own:
        values = state.get(placement.placed[own.piece.number].parameter)
        if values is not None:
            pieces[own.tensor] = {name: _as_tensor(value, own) for name, value in values.items()}
    return pieces


def _as_tensor(value: Any, own: OwnPiece) -> Any:
    if not isinstance(value, StateSlice):
        return value
    like = plain(own.tensor)
    return like_parameter(value.local.as_strided(like.shape, like.stride(), value.local.storage_offset()), own.tensor)


# ---------------------------------------------------------------------------------------- gathering


class _Described(NamedTuple):
    """The description of one rank's part of the state."""

    names: list[list[list[str]] | None]
    """For each piece with state the names of its values, with the dtype of a tensor that has an element for each of the
    piece's, and an empty text for all else."""
    rest: int
    """The length in bytes of all else."""
    problem: str
    """Why that cannot be sent, or an empty text."""


@torch.inference_mode(False)  # a collective runs outside of that mode, and could not write to memory made inside
def full_state(placement: Placement, collectives: Collectives, keeps: bool) -> State:
    """Return the whole state by parameter if ``keeps`` is True on this rank; every rank has to call it.

    Raises :class:`ShardingError` on every rank if there is state that ``torch.load(weights_only=True)`` does not read.
    """
    device = plain(placement.placed[0].parameter).device if placement.placed else collectives.device
    rest = _packed(placement)
    description = _Described(_names(placement), len(rest), _problem_of(placement, rest))
    descriptions = [_Described(*each) for each in all_gather_object(description, "full_state_dict()", collectives)]
    problem = next((each.problem for each in descriptions if each.problem), "")
    if problem:
        raise ShardingError(problem)
    result = _AssembledState(placement, descriptions, device)
    places = [*_own_places(placement), torch.frombuffer(bytearray(rest), dtype=torch.uint8).to(device)]
    targets = [result.places(rank) for rank in range(len(descriptions))] if keeps else None
    if len(descriptions) == 1:
        for place, target in zip(places, (targets or [[]])[0], strict=False):
            target.copy_(place)
    else:
        streams = GatheredStreams([result.length(rank) for rank in range(len(descriptions))], collectives, device)
        moves: list[Moves | None] = [None] * len(descriptions)
        if targets is not None:
            moves = [streams.moves(each) for each in targets]
        streams.gather(streams.moves(places), Targets(moves), "full_state_dict()")
    others = {key: value for key, value in placement.state.items() if not isinstance(key, Tensor)}
    return {**result.state(), **copy.deepcopy(others)} if keeps else {}


def _problem_of(placement: Placement, rest: bytes) -> str:
    """Return why the packed state of this rank cannot be read, or an empty text."""
    try:
        torch.load(io.BytesIO(rest), weights_only=True)
    except Exception:
        for own in placement.own:
            for name, value in placement.state.get(own.tensor, {}).items():
                if not isinstance(value, Tensor | int | float | str | None):
                    return (
                        f"state {name!r} of parameter {placement.placed[own.piece.number].name} is a "
                        f"{type(value).__name__}, which torch.load(weights_only=True) does not read, so it is not sent "
                        "to other ranks: this optimizer's state cannot be saved whole"
                    )
        return "the state of the optimizer has something that torch.load(weights_only=True) does not read"
    return ""


def _names(placement: Placement) -> list[list[list[str]] | None]:
    return [
        [
            [name, str(value.dtype).removeprefix("torch.") if is_of_elements(value, own) else ""]
            for name, value in placement.state[own.tensor].items()
        ]
        if own.tensor in placement.state
        else None
        for own in placement.own
    ]


def _packed(placement: Placement) -> bytes:
    """Return, as bytes, the state that is not a tensor with an element for each weight, by the number of the piece."""
    rests = {}
    for number, own in enumerate(placement.own):
        state = placement.state.get(own.tensor, {})
        rest = {name: value for name, value in state.items() if not is_of_elements(value, own)}
        rests[number] = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, rest)
    file = io.BytesIO()
    torch.save(rests, file)
    return file.getvalue()


def _own_places(placement: Placement) -> list[Tensor]:
    return [
        as_bytes(flat(plain(value)))
        for own in placement.own
        for value in placement.state.get(own.tensor, {}).values()
        if is_of_elements(value, own)
    ]


class _AssembledState:
    """The whole state, while it is assembled."""

    def __init__(self, placement: Placement, told: Sequence[_Described], device: torch.device) -> None:
        self._placement = placement
        self._told = told
        self._device = device
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._rests: dict[int, Tensor] = {}

    def length(self, rank: int) -> int:
        """Return the number of bytes of a rank's stream."""
        return self._told[rank].rest + sum(
            (piece.stop - piece.start) * dtype.itemsize for piece, _, dtype in self._of_elements(rank)
        )

    def _of_elements(self, rank: int) -> Iterator[tuple[Piece, str, torch.dtype]]:
        for piece, names in zip(self._placement.by_rank[rank], self._told[rank].names, strict=True):
            for name, dtype in names or ():
                if dtype:
                    yield piece, name, getattr(torch, dtype)

    def places(self, rank: int) -> list[Tensor]:
        """Return the targets of a rank's stream: parts of the whole tensors, and memory for other state."""
        rest = torch.empty(self._told[rank].rest, dtype=torch.uint8, device=self._device)
        self._rests[rank] = rest
        return [as_bytes(self._part(*each)) for each in self._of_elements(rank)] + [rest]

    def _part(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor:
        key = piece.number, name
        if key not in self._tensors:
            like = plain(self._placement.placed[piece.number].parameter)
            order = self._placement.orders[piece.number]
            whole = torch.empty(in_order(like.shape, order), dtype=dtype, device=like.device)
            self._tensors[key] = whole.permute([order.index(dim) for dim in range(like.dim())])
        return flat(self._tensors[key])[piece.start : piece.stop]

    def state(self) -> State:
        """Return the state by parameter, after all streams have arrived."""
        values: dict[int, State] = {}
        for rank, description in enumerate(self._told):
            rest = torch.load(io.BytesIO(bytes(self._rests[rank].tolist())), weights_only=True)
            for number, (piece, names) in enumerate(zip(self._placement.by_rank[rank], description.names, strict=True)):
                if names is not None and piece.number not in values:
                    values[piece.number] = {
                        name: self._whole(piece.number, name) if dtype else rest[number][name] for name, dtype in names
                    }
        return {self._placement.placed[index].parameter: values[index] for index in sorted(values)}

    def _whole(self, index: int, name: str) -> Tensor:
        return like_parameter(self._tensors[index, name], self._placement.placed[index].parameter)
