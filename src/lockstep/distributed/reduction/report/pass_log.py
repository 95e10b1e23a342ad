"""Counts the forwards, backward passes and optimizer steps of one rank, which the ranks compare.

Equal numbers of backward passes are not enough to tell that ranks are in the same one: if one rank runs an extra
backward through a part of the module, or skips a batch after its forward, the ranks' rounds still pair up. So each
rank's status says what its :class:`PassLog` and :class:`StepLog` have counted:

- *how the module was called*: this backward went through outputs of the module's ``forward`` in training mode, in
  evaluation mode, or through none (a submodule, another method, ``.module``);
- *how many forwards* in training mode since the last round a backward has gone through, and how many it has left out.
  Forwards under ``torch.no_grad()``, ``no_sync()``, or inside a backward (checkpointing) do not count;
- *how many steps* optimizers have made on the module's parameters since the last round.

The parameters used and the number of forwards gone through may differ between ranks, as with branches and sequences.
"""

import itertools
from weakref import WeakValueDictionary

from torch.optim import Optimizer

from lockstep.distributed.reduction.report.status import MOST_STEPS, UNKNOWN_STEPS, Called

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
        self._through = self._unused_forwards = 0
        self._compiled = False

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

    def note_reached(self, mark: ForwardMark | None) -> int:
        """Note that a backward pass goes through a forward; return how that was called, as a :class:`Called`.

        ``mark`` is None for a pass that reaches the module through a mean over the ranks.
        """
        if mark is None:
            return _UNKNOWN
        if mark.round == self._round:
            mark.round = None
            self._through += 1
            if self._unused_forwards:
                self._unused_forwards -= 1
        return mark.called

    @property
    def has_begun(self) -> bool:
        """True if a forward has begun since the last round."""
        return self._through + self._unused_forwards > 0

    def summarize(self, called: int) -> tuple[int, int, int]:
        """Return, for the report, how the module was called (a :class:`Called`), and the numbers of forwards that
        backward has gone through and left out since the last round; ``called``: as far as the pass has seen it."""
        return called or (_UNKNOWN if self._compiled else _OTHERWISE), self._through, self._unused_forwards

    def end_round(self) -> None:
        """Note that a round is over: start to count forwards from zero."""
        self._round += 1
        self._through = self._unused_forwards = 0


class StepLog:
    """Counts the steps that optimizers have made on one module's parameters, on this rank, since its last round.

    Of several optimizers the one that has made most steps counts. So it makes no difference if an optimizer steps
    another one in its own step, which may be so on some ranks only (``ZeroRedundancyOptimizer``).

    The number is unknown where it may differ between ranks that have done the same: before the first round, after a
    round that has failed or whose batch was left out (without gradients a step changes nothing, and may be left out),
    and after one in which this rank had run out of batches in ``Join``.
    """

    def __init__(self) -> None:
        self.count = UNKNOWN_STEPS
        """The number for the report."""
        self._round = 0
        self._begun: dict[int, tuple[int, int]] = {}  # steps under way, by the optimizer's id: the round, their number
        self._made: dict[int, int] = {}  # since the last round

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note that an optimizer that has parameters of the module begins a step."""
        number = id(optimizer)
        self._begun[number] = self._round, 1 + self._made.get(number, 0)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has made a step, if it has parameters of the module. There may have been rounds in the
        step, in its closure, or a step of its base class."""
        number = id(optimizer)
        round_, made = self._begun.pop(number, (0, 0))
        if made and self.count != UNKNOWN_STEPS:
            made = self._made[number] = made if round_ == self._round else 1
            self.count = max(self.count, min(made, MOST_STEPS))

    def end_round(self, known: bool) -> None:
        """Note that a round is over: count from zero, or not at all if the number is not ``known`` from now on."""
        self._round += 1
        self._made.clear()
        self.count = 0 if known else UNKNOWN_STEPS


def note_compiled(name: str) -> bool:
    """Call :meth:`PassLog.compile_forward` while the compiler traces a forward, and not when the compiled code runs.

    Takes the log's name, since PyTorch 2.11 accepts only constants here, and might make a number a variable.
    """
    _logs[name].compile_forward()
    return True


# As torch.compiler.assume_constant_result does, without importing the compiler: called while tracing, not compiled.
note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
