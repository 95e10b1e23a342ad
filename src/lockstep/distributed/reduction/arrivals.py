"""Which gradients come in a backward pass.

A hook in Python is called for every gradient of every pass, which costs more than anything else that is done for a
small one. Most of the time there is nothing to decide: a gradient has come, and what follows is done for many together.
So for as long as that holds, what stands in the place of a parameter's hook is the ``append`` of a list, which is
called without any Python. In all other cases - no pass has been opened, the gradient is the last one of those that are
copied together, it comes for the second time - the hook itself is there, and asks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter

from torch.nn import Parameter

from lockstep.distributed.reduction.parameter_hooks import OUR_KEY, HookDictionary

_ours_of = attrgetter("ours")


class Arrivals:
    """Switches the hooks of a module's parameters, which are known by their numbers."""

    def __init__(self) -> None:
        self._hooks: list[HookDictionary] = []
        self._noted: list[Sequence[int]] = []  # parameters without their hook
        self.accumulated: list[Parameter] = []
        """Parameters whose gradients have come in the pass under way, if it does not synchronise, in their order."""

    def set_hooks(self, hooks: Iterable[HookDictionary]) -> None:
        """These are the hooks of the parameters, by number."""
        self._hooks = list(hooks)

    def replace_hook(self, index: int, hooks: HookDictionary) -> None:
        """These are those of one of the parameters from now on; the earlier ones are another tensor's."""
        self.ask_for([index])
        self._hooks[index] = hooks

    def note_in(self, arrived: list[Parameter], parameters: Sequence[int]) -> None:
        """From now on gradients of these parameters are only noted in ``arrived``."""
        self._noted.append(parameters)
        _put(map(self._hooks.__getitem__, parameters), repeat(arrived.append))

    def ask_for(self, parameters: Sequence[int]) -> None:
        """From now on gradients of these parameters have their hooks called."""
        hooks = list(map(self._hooks.__getitem__, parameters))
        _put(hooks, map(_ours_of, hooks))

    def accumulate(self) -> None:
        """A pass has opened that does not synchronise."""
        self.note_in(self.accumulated, range(len(self._hooks)))

    def end_pass(self) -> Sequence[Parameter]:
        """The pass is over, and all hooks are called again; returns what has accumulated."""
        for parameters in self._noted:
            self.ask_for(parameters)
        self._noted.clear()
        accumulated, self.accumulated = self.accumulated, []
        return accumulated


def _put(hooks: Iterable[HookDictionary], ours: Iterable[Callable[[Parameter], object]]) -> None:
    """Put something in the place of our hook, in the dictionaries of many parameters."""
    deque(map(dict.__setitem__, hooks, repeat(OUR_KEY), ours), maxlen=0)
