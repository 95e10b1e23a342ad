"""What tells one backward pass from another, so that ranks do not mix the gradients of different ones.

As many backward passes are not the same ones: if one rank alone runs backward through a part of the module, or leaves
out a batch after its forward, the ranks' rounds still pair off, one by one. So each rank says in its report

- *how the module was called*: whether this backward went through outputs of the module's ``forward`` in training mode,
  in evaluation mode, or through none at all (a submodule, another method, ``.module``);
- *how many forwards* in training mode, since its last round, a backward has gone through, and how many none has. Those
  under ``torch.no_grad()``, ``no_sync()``, or inside a backward (checkpointing) do not count.

Which parameters were used, and through how many forwards, may differ by rank: branches and sequences do.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from weakref import WeakValueDictionary

import torch

from lockstep.errors import PeerError

Code = tuple[int, int]
"""A rank's :class:`PassSummary` as it travels: two whole numbers from 1 to 240, which even bfloat16 holds exactly."""
MOST = 14
"""Forwards are counted up to here."""


class Called(Flag):
    """How the module was called in what a backward pass went through."""

    TRAINING = auto()
    EVALUATION = auto()
    OTHERWISE = auto()
    """Its parameters were reached, but not through outputs of its forward."""
    UNKNOWN = auto()
    """The compiler runs its forward, and does not say; or it was reached through a mean over the ranks, from which some
    rank's pass goes back through the forward, and another's does not."""


@dataclass(frozen=True)
class PassSummary:
    """What one rank says of its backward pass."""

    called: Called = Called.UNKNOWN
    through: int = 0
    """Forwards since the last round that a backward has gone through; at most ``MOST``."""
    left_out: int = 0
    """Forwards since then that none has gone through, or that raised; at most ``MOST``."""

    def encode(self) -> Code:
        """As it travels."""
        return _encode(self.called.value, self.through, self.left_out)

    @classmethod
    def decode(cls, code: Code) -> "PassSummary":
        """What :meth:`encode` gave."""
        left_out, through = divmod(code[1] - 1, 16)
        return cls(Called(code[0] - 1), through, left_out)


def _encode(called: int, through: int, left_out: int) -> Code:
    return called + 1, 16 * min(left_out, MOST) + min(through, MOST) + 1


_TRAINING, _EVALUATION, _OTHERWISE, _UNKNOWN = (each.value for each in Called)  # numbers are cheaper


class ForwardMark:
    """One forward of the module, as a backward pass finds it on its outputs."""

    __slots__ = ("called", "round", "sample")

    def __init__(self, called: int, round_: int | None, sample: object) -> None:
        self.called, self.round = called, round_
        self.sample = sample
        """Of the parameters that it ran on: see :meth:`Members.sample`."""


_numbers = itertools.count()
_logs: "WeakValueDictionary[str, PassLog]" = WeakValueDictionary()


class PassLog:
    """What this rank has done with one module since its last round. ``name`` is no other log's."""

    def __init__(self) -> None:
        self.name = str(next(_numbers))
        _logs[self.name] = self
        self._round = 0
        self._called = 0
        self._through = self._left_out = 0
        self._compiled = self._own = False

    def enter_forward(self, counts: bool) -> None:
        """Forward begins; ``counts`` if a backward is to go through it."""
        if counts:
            self._left_out += 1

    def leave_forward(self, counts: bool, training: bool, has_graph: bool, sample: object) -> ForwardMark | None:
        """Forward has ended, as :meth:`enter_forward` was told it would; returns what to put on its outputs, if a
        backward can go through them (``has_graph``). It ran on parameters of which there is a ``sample``."""
        if not has_graph:
            self._left_out = max(0, self._left_out - counts)
            return None
        return ForwardMark(_TRAINING if training else _EVALUATION, self._round if counts else None, sample)

    def compile_forward(self) -> None:
        """The compiler has traced a forward: how the module is called is not known from now on."""
        self._compiled = True

    def reach(self, mark: ForwardMark | None, own: bool) -> None:
        """The backward pass under way goes through a forward, on the module's ``own`` parameters or on others; through
        a mean over the ranks, if it is None."""
        self._called |= _UNKNOWN if mark is None else mark.called
        if own:
            self._own = True
        if mark is not None and mark.round == self._round:
            mark.round = None
            self._through += 1
            if self._left_out:
                self._left_out -= 1

    @property
    def is_reached(self) -> bool:
        """Whether the backward pass under way has gone through a forward on the module's own parameters, or through a
        mean over the ranks that leads to them."""
        return self._own

    def summarize(self) -> Code:
        """What to tell the other ranks at the end of the backward pass under way: an encoded :class:`PassSummary`."""
        called = self._called or (_UNKNOWN if self._compiled else _OTHERWISE)
        return _encode(called, self._through, self._left_out)

    def end_pass(self) -> None:
        """The backward pass under way is over."""
        self._called, self._own = 0, False

    def end_round(self) -> None:
        """It was a round: forwards are counted anew."""
        self._round += 1
        self._through = self._left_out = 0


def note_compiled(name: str) -> bool:
    """Call :meth:`PassLog.compile_forward`, when the compiler traces a forward, and not again when it runs.

    By the log's name, since PyTorch 2.11 takes nothing but constants here; and a number may become a variable.
    """
    _logs[name].compile_forward()
    return True


# What torch.compiler.assume_constant_result does, without importing the compiler: called while tracing, leaves nothing.
note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


NOT_HANDED_OUT = "No gradient has been handed out; every rank can go on with the next batch after zero_grad()"
NOT_STEPPED = "The optimizer has not stepped; every rank can go on with the next batch after zero_grad()"
KNOWN_LATE = (
    "This rank knows of it one backward later, and has handed out gradients in that one: compare the weights with "
    "check_in_sync(), or load a checkpoint, before going on"
)
"""What errors advise: where the report was waited for, where an optimizer's step has read it, and where nothing has."""


def check_passes(
    passes: Mapping[int, Code | None], compare_forwards: bool, number: int, rank: int, advice: str = ""
) -> None:
    """Raise :class:`PeerError` if two ranks cannot be in the same backward pass; None is a rank that is in none.

    ``passes`` has each rank's, under the rank's number in messages.

    ``compare_forwards`` is False where a rank may leave out a batch: contributions are weighted. ``advice``: what to
    do, if the parameters have got gradients already.
    """
    first: dict[Code, int] = {}
    for other, code in passes.items():
        if code is not None:
            first.setdefault(code, other)
    ranks = [(PassSummary.decode(code), other) for code, other in first.items()]
    for place, (theirs, other) in enumerate(ranks):
        for those, another in ranks[:place]:
            difference = _difference(those, theirs, compare_forwards)
            if difference:
                raise PeerError(
                    f"rank {rank}: ranks {another} and {other} are not in the same backward pass (number {number} that "
                    f"synchronises): {difference.format(another, other)}. {advice or NOT_HANDED_OUT}. Let every rank "
                    "run the same backward passes; put one that is for one rank alone under no_sync(), or take its "
                    "gradients with torch.autograd.grad, and a forward that is not trained on under torch.no_grad()"
                )


def _difference(a: PassSummary, b: PassSummary, compare_forwards: bool) -> str:
    """What shows that the passes of two ranks are different ones, with a place for the number of each; "" if
    nothing does."""
    if not a.called & b.called and Called.UNKNOWN not in a.called | b.called:
        return f"on rank {{}} it went through {_describe(a.called)}, on rank {{}} through {_describe(b.called)}"
    comparable = compare_forwards and a.through == b.through and 0 < a.through < MOST
    if comparable and a.left_out != b.left_out:
        return (
            f"since the one before, rank {{}} has left out {_count(a.left_out)}, rank {{}} {_count(b.left_out)} (in "
            "training mode, raised or without a backward through it: a batch was skipped)"
        )
    return ""


def _describe(called: Called) -> str:
    if called is Called.OTHERWISE:
        return "no output of the module's forward (a submodule, another method, or the wrapped module was called)"
    modes = [word for mode, word in _MODES.items() if called & mode]
    return f"the module's forward in {' and '.join(modes)} mode"


_MODES = {Called.TRAINING: "training", Called.EVALUATION: "evaluation"}


def _count(forwards: int) -> str:
    if forwards >= MOST:
        return f"{MOST} forwards or more"
    return f"{forwards or 'no'} forward{'s' if forwards != 1 else ''}"
