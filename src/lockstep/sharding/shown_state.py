"""``optimizer.state`` of a sharded optimizer between its steps: this rank's part, which is read-only."""

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

from torch import Tensor

from lockstep._base.dtensors import local_part
from lockstep._base.inner_tensors import is_plain
from lockstep.errors import ShardingError
from lockstep.sharding.pieces import flat, plain
from lockstep.sharding.placement import OwnPiece, Placement
from lockstep.sharding.state_slice import StateSlice


def refuse_change(*_: object, **__: object) -> NoReturn:
    """Raise :class:`ShardingError`: each rank has a part of the state alone."""
    raise ShardingError(
        "the state of a sharded optimizer cannot be changed through optimizer.state, which shows this rank's part of "
        "it. Change full_state_dict(optimizer, all_ranks=True), and load that with optimizer.load_state_dict(); to "
        "begin with new state, load it with an empty dict under 'state'"
    )


class ReadOnlyDict(dict[str, Any]):
    """The state of one parameter, which raises when it is changed."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse_change


class ShownState(MutableMapping[Any, Any]):
    """The state of the parameters that this rank has a piece of; its tensors are :class:`StateSlice`."""

    __setitem__ = __delitem__ = clear = refuse_change

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def __getitem__(self, key: Any) -> Any:
        state = sharded_state(self._placement)
        if key in state:
            return ReadOnlyDict(state[key]) if isinstance(key, Tensor) else state[key]
        number = self._placement.number_of(key) if isinstance(key, Tensor) else None
        if number is None or id(key) in self._placement.tensors:  # it has no state, as before a first step
            return ReadOnlyDict()
        raise ShardingError(
            f"the state of parameter {self._placement.placed[number].name} is on another rank, as the optimizer is "
            "sharded; full_state_dict(optimizer, all_ranks=True) returns the whole state"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(sharded_state(self._placement))

    def __len__(self) -> int:
        return len(self._placement.state)

    def __contains__(self, key: object) -> bool:
        return key in sharded_state(self._placement)

    def __repr__(self) -> str:
        return repr(sharded_state(self._placement))

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError("a sharded optimizer cannot be copied: copy full_state_dict(optimizer)")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError("a sharded optimizer cannot be pickled: save full_state_dict(optimizer)")


def sharded_state(placement: Placement) -> dict[Any, Any]:
    """Return this rank's state by parameter; tensors that belong to its elements are slices."""
    shown: dict[Any, Any] = {key: value for key, value in placement.state.items() if not isinstance(key, Tensor)}
    for own in placement.own:
        if own.tensor in placement.state:
            parameter = placement.placed[own.piece.number].parameter
            values = placement.state[own.tensor].items()
            shown[parameter] = {name: _shown(value, own, placement) for name, value in values}
    return shown


def _shown(value: Any, own: OwnPiece, placement: Placement) -> Any:
    if not is_of_elements(value, own):
        return value
    number = own.piece.number
    shape = plain(placement.placed[number].parameter).shape
    return StateSlice(flat(plain(value)), own.piece.start, shape, placement.orders[number])


def is_of_elements(value: Any, own: OwnPiece) -> bool:
    """Return True if a value of the state of a piece is a plain tensor with one element for each of the piece's."""
    if not isinstance(value, Tensor) or not value.dim() or not is_plain(local_part(value)):
        return False
    local, like = plain(value), plain(own.tensor)
    return local.shape == like.shape and local.stride() == like.stride()
