"""The numbers of optimizers: learning rates and all others in their parameter groups, to be compared between ranks."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lockstep._base.texts import ranks_in_words

_NOT_OF_STEPS = frozenset(
    (
        "params",
        *("capturable", "differentiable", "foreach", "fused"),  # which do not say what a step computes, but how
        *("base_lr", "base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"),  # a scheduler's own
    )
)
SAME_NUMBERS = (
    "Let every rank do the same: step a scheduler on all ranks and give it the same number (lockstep.mean() of the "
    "loss), load the optimizer's state on all ranks. An optimizer that computes a number of all its parameters cannot "
    "be sharded"
)
"""What to do about numbers that differ."""


class Numbers(NamedTuple):
    """The numbers in the groups of an optimizer that have parameters of a module."""

    optimizer: str
    """Its class."""
    groups: tuple[tuple[int, tuple[tuple[str, str], ...]], ...]
    """For each group its place, and its numbers by name."""

    def lines(self) -> list[tuple[str, str]]:
        """Return a line for each number."""
        return [
            (f"optimizer {self.optimizer}, group {place}, {name}", text)
            for place, group in self.groups
            for name, text in group
        ]


def numbers_of(optimizer: Optimizer, is_of: Callable[[dict[str, Any]], bool]) -> Numbers:
    """Return the numbers of an optimizer in the groups for which ``is_of`` is true."""
    rows = []
    for place, group in enumerate(optimizer.param_groups):
        if is_of(group):
            texts = ((name, _text(value)) for name, value in group.items() if name not in _NOT_OF_STEPS)
            rows.append((place, tuple(sorted((name, text) for name, text in texts if text))))
    return Numbers(type(optimizer).__name__, tuple(rows))


def _text(value: object) -> str:
    """Return a text that is the same for equal numbers, and empty for what is no number, or cannot be read without
    waiting."""
    if isinstance(value, Tensor):
        return _text(value.item()) if value.is_cpu and value.numel() == 1 else ""
    if isinstance(value, tuple | list):
        texts = [_text(each) for each in value]
        return f"({', '.join(texts)})" if texts and all(texts) else ""
    if not isinstance(value, Number) or isinstance(value, complex):
        return str(value) if isinstance(value, complex) else ""
    number = float(value)  # type: ignore[arg-type]
    return str(int(number)) if number.is_integer() else repr(number)


class Known(NamedTuple):
    """What is known of an optimizer that steps the module's parameters."""

    groups: list[dict[str, Any]]
    """Copies of its parameter groups; none if a number is a tensor on the CPU, which may be written in place."""
    numbers: Numbers
    digest: int
    tensors: list[Tensor]
    """Numbers on an accelerator, in its groups."""

    def is_as_before(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the groups have the same parameters and values."""
        try:  # one comparison in C, which asks only objects that are others than before
            same = groups == self.groups
        except Exception:  # arrays, or other parameters, which a sharded optimizer has for a while
            return False
        if not (same and self.tensors):
            return same
        # An equal number may be in another tensor now, which is to be read from then on.
        return {*map(id, self.tensors)} <= {id(each) for group in groups for each in group.values()}


def difference_in_numbers(told_by: Mapping[int, Mapping[str, str]]) -> str:
    """Return the first number in which ranks differ, with its values; an empty text if there is none."""
    names = dict.fromkeys(name for each in told_by.values() for name in each)
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, each in told_by.items():
            values.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            return f"{name}: {', '.join(f'{value} on {ranks_in_words(having)}' for value, having in values.items())}"
    return ""
