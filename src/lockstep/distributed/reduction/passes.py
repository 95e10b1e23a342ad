"""Tells backward passes apart, so that ranks do not mix the gradients of different ones.

As many backward passes are not the same ones: if one rank alone runs backward through a part of the module, or leaves
out a batch after its forward, the ranks' rounds still pair off, one by one. So each rank says in its report

- *how the module was called*: whether this backward went through outputs of the module's ``forward`` in training mode,
  in evaluation mode, or through none at all (a submodule, another method, ``.module``);
- *how many forwards* in training mode, since its last round, a backward has gone through, and how many none has. Those
  under ``torch.no_grad()``, ``no_sync()``, or inside a backward (checkpointing) do not count.

Which parameters were used, and through how many forwards, may differ by rank: branches and sequences do.
"""

import itertools
from enum import Flag, auto
from weakref import WeakValueDictionary


class Called(Flag):
    """How the module was called in what a backward pass went through."""

    TRAINING = auto()
    EVALUATION = auto()
    OTHERWISE = auto()
    """Its parameters were reached, but not through outputs of its forward."""
    UNKNOWN = auto()
    """The compiler runs its forward, and does not say; or it was reached through a mean over the ranks, from which some
    rank's pass goes back through the forward, and another's does not."""


_TRAINING, _EVALUATION, _OTHERWISE, _UNKNOWN = (each.value for each in Called)  # numbers are cheaper


class ForwardMark:
    """One forward of the module, as a backward pass finds it on its outputs."""

    __slots__ = ("bound_parameter", "called", "round")

    def __init__(self, called: int, round_: int | None, bound_parameter: object) -> None:
        self.called, self.round = called, round_
        self.bound_parameter = bound_parameter
        """Of the parameters that it ran on: see :meth:`Members.bound_parameter`."""


_numbers = itertools.count()
_logs: "WeakValueDictionary[str, PassLog]" = WeakValueDictionary()


class PassLog:
    """What this rank has done with one module since its last round. ``name`` is no other log's."""

    def __init__(self) -> None:
        self.name = str(next(_numbers))
        _logs[self.name] = self
        self._round = 0
        self._called = 0
        self._through = self._unused_forwards = 0
        self._compiled = self._own = False

    def enter_forward(self, counts: bool) -> None:
        """Forward begins; ``counts`` if a backward is to go through it."""
        if counts:
            self._unused_forwards += 1

    def leave_forward(
        self, counts: bool, training: bool, has_graph: bool, bound_parameter: object
    ) -> ForwardMark | None:
        """Forward has ended, as :meth:`enter_forward` was told it would; returns what to put on its outputs, if a
        backward can go through them (``has_graph``). It ran on parameters of which there is a ``bound_parameter``."""
        if not has_graph:
            self._unused_forwards = max(0, self._unused_forwards - counts)
            return None
        return ForwardMark(_TRAINING if training else _EVALUATION, self._round if counts else None, bound_parameter)

    def compile_forward(self) -> None:
        """Note that the compiler has traced a forward: how the module is called is not known from now on."""
        self._compiled = True

    def note_reached(self, mark: ForwardMark | None, own: bool) -> None:
        """Note that the backward pass under way goes through a forward, on the module's ``own`` parameters or on
        others; through a mean over the ranks, if it is None."""
        self._called |= _UNKNOWN if mark is None else mark.called
        if own:
            self._own = True
        if mark is not None and mark.round == self._round:
            mark.round = None
            self._through += 1
            if self._unused_forwards:
                self._unused_forwards -= 1

    @property
    def is_reached(self) -> bool:
        """True if the backward pass under way has gone through a forward on the module's own parameters, or through a
        mean over the ranks that leads to them."""
        return self._own

    def summarize(self) -> tuple[int, int, int]:
        """Return what to tell the other ranks at the end of the backward pass under way: how the module was called, as
        a :class:`Called`, and how many forwards backward has gone through and left out since the last round."""
        called = self._called or (_UNKNOWN if self._compiled else _OTHERWISE)
        return called, self._through, self._unused_forwards

    def end_pass(self) -> None:
        """Note that the backward pass under way is over."""
        self._called, self._own = 0, False

    def end_round(self) -> None:
        """Note that the backward pass under way is over, and was a round: forwards are counted anew."""
        self._called, self._own = 0, False
        self._round += 1
        self._through = self._unused_forwards = 0


def note_compiled(name: str) -> bool:
    """Call :meth:`PassLog.compile_forward`, when the compiler traces a forward, and not again when it runs.

    By the log's name, since PyTorch 2.11 takes nothing but constants here; and a number may become a variable.
    """
    _logs[name].compile_forward()
    return True


# What torch.compiler.assume_constant_result does, without importing the compiler: called while tracing, leaves nothing.
note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
