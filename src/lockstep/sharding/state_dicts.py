"""Converts the state of a sharded optimizer to slices or whole tensors, and back."""

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.dtensors import like_parameter, local_part
from lockstep.errors import LayoutError, ShardingError
from lockstep.sharding.partition import Piece
from lockstep.sharding.pieces import as_bytes, flat, in_order, is_same_order, memory_order
from lockstep.sharding.shards import OwnPiece, Shards
from lockstep.sharding.state_slice import StateSlice
from lockstep.sharding.streams import Moves, Streams
from lockstep.tree import tree_map

State = dict[Any, Any]


def refuse_change(*_: object, **__: object) -> NoReturn:
    """Raise :class:`ShardingError`: a change would be lost, since ``optimizer.state`` is made anew at each use."""
    raise ShardingError(
        "the state of a sharded optimizer cannot be changed through optimizer.state, which shows this rank's part of "
        "it. Change full_state_dict(optimizer, all_ranks=True), and load that with optimizer.load_state_dict(); to "
        "begin with new state, load it with an empty dict under 'state'"
    )


class ReadOnlyState(defaultdict[Any, Any]):
    """State that raises when it is changed."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse_change

    def __missing__(self, key: object) -> "ReadOnlyState":
        return ReadOnlyState(None)


def read_only(shards: Shards) -> ReadOnlyState:
    """Return :func:`sharded_state`, to be read only."""
    return ReadOnlyState(None, {key: ReadOnlyState(None, values) for key, values in sharded_state(shards).items()})


def sharded_state(shards: Shards) -> State:
    """Return this rank's state by parameter; tensors that belong to its elements are slices."""
    found: defaultdict[Any, State] = defaultdict(dict)
    for own in shards.own:
        parameter = shards.placed[own.piece.number].parameter
        for name, value in shards.twin.state.get(own.tensor, {}).items():
            if is_of_elements(value, own):
                order = shards.order_of(own.piece.number)
                value = StateSlice(flat(value), own.piece.start, local_part(parameter).shape, order)
            found[parameter][name] = value
    found.update((key, value) for key, value in shards.twin.state.items() if not isinstance(key, Tensor))
    return found


def is_of_elements(value: Any, own: OwnPiece) -> bool:
    """Return True if a value of the state of a piece is a tensor with one element for each of the piece's."""
    if not isinstance(value, Tensor) or not value.dim():
        return False
    return value.shape == own.tensor.shape and value.stride() == own.tensor.stride()


# ------------------------------------------------------------------------------------------ loading


def sliced(shards: Shards, state_dict: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return this rank's part of a whole state dict; ``parameters`` are by number, and those with state have places.

    State of parameters that other ranks step on alone is left out.
    """
    state: State = {}
    for key, values in state_dict["state"].items():
        if not isinstance(key, int) or key >= len(parameters):
            state[key] = values
            continue
        number = shards.number_of(parameters[key])
        own = next((each for each in shards.own if each.piece.number == number), None)
        if own is not None:
            state[key] = {name: _slice_of(value, own, parameters[key], name) for name, value in values.items()}
    return {**state_dict, "state": state}


def _slice_of(value: Any, own: OwnPiece, parameter: Tensor, name: str) -> Any:
    if isinstance(value, StateSlice):
        if (value.start, value.local.numel()) != (own.piece.start, own.piece.stop - own.piece.start):
            raise LayoutError(
                f"state {name!r} of a parameter is the slice {value!r}, and this rank needs the elements "
                f"{own.piece.start} to {own.piece.stop}: it was made by another number of ranks; load a whole state "
                "dict (full_state_dict), or go through torch.distributed.checkpoint or lockstep.resume()"
            )
        if not is_same_order(value.order, memory_order(local_part(parameter)), value.shape):
            raise LayoutError(
                f"state {name!r} of a parameter is a slice of another memory format than the parameter has now "
                f"(strides {local_part(parameter).stride()}); load a whole state dict (full_state_dict)"
            )
        return value
    if not isinstance(value, Tensor) or not value.dim() or value.shape != parameter.shape:
        return value
    local, like = local_part(value), local_part(parameter)
    if local.stride() != like.stride():
        local = torch.empty_like(like, dtype=local.dtype, device=local.device).copy_(local)
    return StateSlice.of(flat(local)[own.piece.start : own.piece.stop].clone(), own.piece.start, like)


def take(shards: Shards, state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Load state into the twin, which moves and casts it as PyTorch's optimizers do."""
    values = {
        number: {name: _local(value, own) for name, value in found.items()}
        for number, own in enumerate(shards.own)
        if (found := state.get(shards.placed[own.piece.number].parameter)) is not None
    }
    shards.load(groups, values, {key: value for key, value in state.items() if not isinstance(key, Tensor)})


def _local(value: Any, own: OwnPiece) -> Any:
    if not isinstance(value, StateSlice):
        return value
    return value.local.as_strided(own.tensor.shape, own.tensor.stride(), value.local.storage_offset())


# ---------------------------------------------------------------------------------------- gathering


class _Described(NamedTuple):
    """The description of one rank's part of the state."""

    names: list[list[list[str]]]
    """For each piece the names of its values, with the dtype of a tensor that has an element for each of the piece's,
    and an empty text for all else."""
    rest: int
    """The length in bytes of all else."""


def full_state(shards: Shards, keeps: bool) -> State:
    """Return the whole state by parameter if ``keeps`` is True on this rank; every rank has to call it."""
    rest = _packed(shards)
    own = _Described(_names(shards), len(rest))
    told = [_Described(*each) for each in all_gather_object(own, "what ranks have of the state", shards.collectives)]
    result = _Whole(shards, told)
    places = _own_places(shards, rest)
    targets = [result.places(rank) for rank in range(len(told))] if keeps else None
    if len(told) == 1:
        for place, target in zip(places, (targets or [[]])[0], strict=False):
            target.copy_(place)
    else:
        streams = Streams([result.length(rank) for rank in range(len(told))], shards.collectives, _device_of(shards))
        moves: list[Moves | None] = [None] * len(told)
        if targets is not None:
            moves = [streams.moves(each) for each in targets]
        streams.gather(streams.moves(places), moves, "state of the optimizer")
    return result.state() if keeps else {}


def _names(shards: Shards) -> list[list[list[str]]]:
    return [
        [
            [name, str(value.dtype).removeprefix("torch.") if is_of_elements(value, own) else ""]
            for name, value in shards.twin.state.get(own.tensor, {}).items()
        ]
        for own in shards.own
    ]


def _packed(shards: Shards) -> bytes:
    """Return, as bytes, the state that is not a tensor with an element for each weight, by the number of the piece."""
    found = {}
    for number, own in enumerate(shards.own):
        state = shards.twin.state.get(own.tensor, {})
        rest = {name: value for name, value in state.items() if not is_of_elements(value, own)}
        found[number] = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, rest)
    file = io.BytesIO()
    torch.save(found, file)
    return file.getvalue()


def _own_places(shards: Shards, rest: bytes) -> list[Tensor]:
    places = [
        as_bytes(flat(value))
        for own in shards.own
        for value in shards.twin.state.get(own.tensor, {}).values()
        if is_of_elements(value, own)
    ]
    packed = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    return [*places, packed.to(_device_of(shards))]


def _device_of(shards: Shards) -> torch.device:
    return local_part(shards.placed[0].parameter).device if shards.placed else shards.collectives.device


class _Whole:
    """The whole state, while it is assembled."""

    def __init__(self, shards: Shards, told: Sequence[_Described]) -> None:
        self._shards = shards
        self._told = told
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._rests: dict[int, Tensor] = {}

    def length(self, rank: int) -> int:
        """Return the number of bytes of a rank's stream."""
        return self._told[rank].rest + sum(
            (piece.stop - piece.start) * dtype.itemsize for piece, _, dtype in self._of_elements(rank)
        )

    def _of_elements(self, rank: int) -> Iterator[tuple[Piece, str, torch.dtype]]:
        for piece, names in zip(self._shards.by_rank[rank], self._told[rank].names, strict=True):
            for name, dtype in names:
                if dtype:
                    yield piece, name, getattr(torch, dtype)

    def places(self, rank: int) -> list[Tensor]:
        """Return the targets of a rank's stream: parts of the whole tensors, and memory for other state."""
        rest = torch.empty(self._told[rank].rest, dtype=torch.uint8, device=_device_of(self._shards))
        self._rests[rank] = rest
        return [as_bytes(self._part(*each)) for each in self._of_elements(rank)] + [rest]

    def _part(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor:
        key = piece.number, name
        if key not in self._tensors:
            like = local_part(self._shards.placed[piece.number].parameter)
            order = self._shards.order_of(piece.number)
            whole = torch.empty(in_order(like.shape, order), dtype=dtype, device=like.device)
            self._tensors[key] = whole.permute([order.index(dim) for dim in range(like.dim())])
        return flat(self._tensors[key])[piece.start : piece.stop]

    def state(self) -> State:
        """Return the state by parameter, after all streams have arrived."""
        found: dict[int, State] = {}
        for rank, told in enumerate(self._told):
            rest = torch.load(io.BytesIO(bytes(self._rests[rank].tolist())), weights_only=True)
            for number, (piece, names) in enumerate(zip(self._shards.by_rank[rank], told.names, strict=True)):
                if names and piece.number not in found:
                    found[piece.number] = {
                        name: self._whole(piece.number, name) if dtype else rest[number][name] for name, dtype in names
                    }
        return {self._shards.placed[index].parameter: found[index] for index in sorted(found)}

    def _whole(self, index: int, name: str) -> Tensor:
        return like_parameter(self._tensors[index, name], self._shards.placed[index].parameter)
