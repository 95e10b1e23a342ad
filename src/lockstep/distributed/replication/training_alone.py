"""Warns of an optimizer whose weights each of several ranks trains by itself: they belong to no replicated module.

PyTorch tells when an optimizer has made a step. After its first one, hooks are put on the weights that have a gradient
and belong to no replicated module; if the next backward brings their gradients, and the program begins no collective
before the next step, each rank trains its own. So master copies, whose gradients are assigned, and gradients that the
program averages itself are no reason for a warning. Nothing is communicated, and nothing is done at later steps.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from weakref import ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep._base.dtensors import is_dtensor
from lockstep._base.identity_map import IdentityMap
from lockstep._base.optimizer_steps import observe_steps
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.replication.replication import replications

STEPS = 10
"""The number of an optimizer's steps after which a backward must have synchronised."""
_MOST_NAMES = 3


class _StepsAlone:
    """The first steps of an optimizer."""

    def __init__(self, collectives: Collectives, own: Sequence[Tensor]) -> None:
        self.count = 1
        self.is_over = False
        """True if nothing is left to find out."""
        self.collectives = collectives
        self.begun = collectives.begun()
        self._own = [ref(each) for each in own]
        self._reached = False
        self._at_reach: int | None = None
        self._hooks: list[RemovableHandle] = [
            each.register_post_accumulate_grad_hook(self._note_reached) for each in own
        ]

    @property
    def own(self) -> list[Tensor]:
        """Weights of no replicated module."""
        return [each for link in self._own if (each := link()) is not None]

    def _note_reached(self, _: Tensor) -> None:
        if not self._reached:
            self._reached, self._at_reach = True, self.collectives.program_begun()

    def trains_alone(self) -> bool:
        """Return True if a backward has brought gradients since the last step, and the program has not communicated
        since; note otherwise that it has."""
        if not self._reached:
            return False
        self.is_over = True
        return self._at_reach is not None and self._at_reach == self.collectives.program_begun()

    def communicates(self) -> bool:
        """Return True if this process has begun a collective since the first step."""
        return self.begun is None or self.begun != self.collectives.begun()

    def end(self) -> None:
        """Note that nothing is left to find out."""
        self.is_over = True
        for each in self._hooks:
            each.remove()


class TrainingAlone:
    """Observes the steps of all optimizers of a process that is one of several ranks."""

    def __init__(self) -> None:
        self._sessions: list[Collectives] = []
        self._steps: IdentityMap[_StepsAlone] = IdentityMap()

    def session_begins(self, collectives: Collectives) -> None:
        """Note that this process is a rank of a session."""
        self._sessions.append(collectives)

    def session_ends(self, collectives: Collectives, *, warns: bool) -> None:
        """Note that the session is over; with ``warns``, warn if optimizers have made steps in it, and no backward has
        synchronised."""
        if collectives in self._sessions:  # nothing in a process forked from it
            self._sessions.remove(collectives)
        for optimizer in self._steps:
            known = self._steps[optimizer]
            if warns and not (known.is_over or _has_synchronised() or known.communicates()):
                _warn(collectives, f"the session ends after {_of(known.count, optimizer)}{_NONE}", 5)
            known.end()

    def has_parameter_of(self, optimizer: Optimizer) -> None:
        """Return None: others tell that."""

    def step_begins(self, optimizer: Optimizer, closure: bool) -> None:
        """Do nothing: only steps that are made count."""

    def step_ended(self, optimizer: Optimizer, closure: bool) -> None:
        """Look at an optimizer's first steps."""
        known = self._steps.get(optimizer)
        if known is None:
            self._first_step(optimizer)
        elif not known.is_over:
            known.count += 1
            self._next_step(optimizer, known)

    def _first_step(self, optimizer: Optimizer) -> None:
        started = [each.started for each in replications()]
        places = [each for each in (*self._sessions, *started) if each and each.world > 1 and each.is_alive]
        if places:
            own = list(_own_weights(optimizer))
            hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in own)
            self._steps[optimizer] = known = _StepsAlone(places[0], () if hooked else own)  # they may average gradients
            if hooked or (not own and _has_synchronised()):
                known.end()

    def _next_step(self, optimizer: Optimizer, known: _StepsAlone) -> None:
        if known.trains_alone():
            names, more = names_of(known.own[:_MOST_NAMES]), len(known.own) - _MOST_NAMES
            text = ", ".join(names) + (f" and {more} more" if more > 0 else "")
            _warn(
                known.collectives,
                f"{type(optimizer).__name__} has stepped {text}: each rank trains its own, since no replicated module "
                "has it. replicate() its module, too; of a copy of a replicated module, train the module itself. If "
                "each rank is to have its own, all is well",
                7,
            )
        elif not known.is_over and known.count >= STEPS:
            if not _has_synchronised() and not known.communicates():
                _warn(known.collectives, f"{_of(known.count, optimizer)}{_NONE}", 7)
            known.end()
        if known.is_over:
            known.end()


_NONE = (
    ", and no backward has synchronised gradients, so each rank trains its own model. Call forward and backward of the "
    "module that replicate() returns"
)


def _of(count: int, optimizer: Optimizer) -> str:
    return f"{count} step{'s' if count > 1 else ''} of {type(optimizer).__name__}"


def _warn(collectives: Collectives, text: str, stacklevel: int) -> None:
    warnings.warn(f"rank {collectives.global_rank}: {text}", stacklevel=stacklevel)


def _own_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer that have a gradient, and that no replicated module has."""
    known = {id(each) for one in replications() for some in one.own_and_replicated() for each in some}
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.requires_grad and each.grad is not None and id(each) not in known and not is_dtensor(each):
                yield each


def _has_synchronised() -> bool:
    return any(each.drift is not None and each.drift.round for each in replications())


def names_of(parameters: Sequence[Tensor]) -> list[str]:
    """Return the names of parameters in their modules, and their shapes; looks through all objects of the process."""
    names: dict[int, str] = {}
    for module in gc.get_objects():
        if issubclass(type(module), Module):
            kind, slots = type(module).__name__, module.__dict__.get("_parameters", {})
            names |= {id(each): f"{kind}.{name}" for name, each in slots.items() if each is not None}
    return [f"{names.get(id(each), 'a parameter')} {tuple(each.shape)}" for each in parameters]


@cache
def training_alone() -> TrainingAlone:
    """Return what warns in this process, from the first call on."""
    watch = TrainingAlone()
    observe_steps(watch)
    return watch
