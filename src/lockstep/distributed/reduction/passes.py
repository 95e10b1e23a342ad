"""Detects ranks that are in different backward passes, so that their gradients are not mixed.

Equal numbers of backward passes are not enough: if one rank runs an extra backward through a part of the module, or
skips a batch after its forward, the ranks' rounds still pair up. So each rank's report says

- *how the module was called*: this backward went through outputs of the module's ``forward`` in training mode, in
  evaluation mode, or through none (a submodule, another method, ``.module``);
- *how many forwards* in training mode since the last round a backward has gone through, and how many it has left out.
  Forwards under ``torch.no_grad()``, ``no_sync()``, or inside a backward (checkpointing) do not count.

The parameters used and the number of forwards gone through may differ between ranks, as with branches and sequences.
"""

import itertools
from enum import Flag, auto
from weakref import WeakValueDictionary


class Called(Flag):
    """How the module was called, for the outputs that a backward pass went through."""

    TRAINING = auto()
    EVALUATION = auto()
    OTHERWISE = auto()
    """The pass reached its parameters, but not through outputs of its forward."""
    UNKNOWN = auto()
    """The compiler runs its forward, and does not tell; or the pass reached it through a mean over the ranks, behind
    which the pass of one rank goes through the forward and that of another does not."""


_TRAINING, _EVALUATION, _OTHERWISE, _UNKNOWN = (each.value for each in Called)  # ints, since Flag operations are slow


class ForwardMark:
    """One forward of the module, attached to its outputs for the backward pass."""

    __slots__ = ("bound_parameter", "called", "round")

    def __init__(self, called: int, round_: int | None, bound_parameter: object) -> None:
        self.called = called
        self.round = round_
        self.bound_parameter = bound_parameter
        """Of the parameters that the forward ran on: see :meth:`ParameterSet.bound_parameter`."""


_numbers = itertools.count()
_logs: "WeakValueDictionary[str, PassLog]" = WeakValueDictionary()


class PassLog:
    """Counts this rank's forwards and backwards of one module since its last round; ``name`` is unique."""

    def __init__(self) -> None:
        self.name = str(next(_numbers))
        _logs[self.name] = self
        self._round = 0
        self._called = 0
        self._through = self._unused_forwards = 0
        self._compiled = self._own = False

    def enter_forward(self, counts: bool) -> None:
        """Note that a forward begins; ``counts``: a backward is expected to go through it."""
        if counts:
            self._unused_forwards += 1

    def leave_forward(
        self, counts: bool, training: bool, has_graph: bool, bound_parameter: object
    ) -> ForwardMark | None:
        """Note that a forward has ended; return the mark for its outputs, or None if they have no graph.

        ``counts``: as in :meth:`enter_forward`; ``bound_parameter``: of the parameters that the forward ran on.
        """
        if not has_graph:
            self._unused_forwards = max(0, self._unused_forwards - counts)
            return None
        return ForwardMark(_TRAINING if training else _EVALUATION, self._round if counts else None, bound_parameter)

    def compile_forward(self) -> None:
        """Note that the compiler has traced a forward: calls of the module are no longer seen."""
        self._compiled = True

    def note_reached(self, mark: ForwardMark | None, own: bool) -> None:
        """Note that the backward pass goes through a forward; ``own``: it ran on the module's own parameters.

        ``mark`` is None for a pass that reaches the module through a mean over the ranks.
        """
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
        """True if the current pass has gone through a forward on the module's own parameters, or a mean that leads
        there."""
        return self._own

    def summarize(self) -> tuple[int, int, int]:
        """Return, for the report, how the module was called (a :class:`Called`), and the numbers of forwards that
        backward has gone through and left out since the last round."""
        called = self._called or (_UNKNOWN if self._compiled else _OTHERWISE)
        return called, self._through, self._unused_forwards

    def end_pass(self) -> None:
        """Note that the backward pass is over."""
        self._called = 0
        self._own = False

    def end_round(self) -> None:
        """Note that the backward pass is over and was a round: start to count forwards from zero."""
        self._called = 0
        self._own = False
        self._round += 1
        self._through = self._unused_forwards = 0


def note_compiled(name: str) -> bool:
    """Call :meth:`PassLog.compile_forward` while the compiler traces a forward, and not when the compiled code runs.

    Takes the log's name, since PyTorch 2.11 accepts only constants here, and might make a number a variable.
    """
    _logs[name].compile_forward()
    return True


# As torch.compiler.assume_constant_result does, without importing the compiler: called while tracing, not compiled.
note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
