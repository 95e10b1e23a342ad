"""A step: what one backward pass brings to one replicated module.

A step is made when a pass begins that may reach the module. A rank that takes part in a round without a pass of its own
(it pads, skips the batch, has joined, or has failed outside of backward) makes one when the round opens. When the pass
is over, the step is dropped, and with it all that was known of the pass: nothing has to be set back.

What outlasts a pass is elsewhere: gradients and weights that have accumulated since the last round (``rank_state.py``),
forwards and steps of optimizers that the ranks compare (``report/pass_log.py``).
"""

from collections.abc import Sequence
from itertools import repeat

from torch import Tensor

from lockstep.distributed.reduction.autograd.engine import BackwardPass
from lockstep.distributed.reduction.autograd.gradients import GradientSnapshot
from lockstep.distributed.reduction.buckets.bucket import set_grads
from lockstep.distributed.reduction.module.managed_parameters import PassHooks
from lockstep.distributed.reduction.round import Round


class Step:
    """One backward pass, as one module sees it."""

    __slots__ = (
        "aside",
        "before",
        "called",
        "came",
        "differs",
        "has_users_hooks",
        "hooks",
        "is_within_module",
        "round",
        "synchronises",
        "this",
        "through_forward",
    )

    def __init__(
        self, this: BackwardPass | None, before: GradientSnapshot, synchronises: bool, differs: bool = False
    ) -> None:
        self.this = this
        """The pass; None if this rank takes part in a round without one."""
        self.before = before
        """The gradients before the pass."""
        self.synchronises = synchronises
        """True if the pass reduces what has accumulated."""
        self.differs = differs
        """True if this rank has other parameters, buffers or another hook than the ranks have agreed on."""
        self.through_forward = False
        """True if the pass has gone through outputs of a forward, or through a mean that leads to the module."""
        self.is_within_module = False
        """True if such a forward ran on the module's own parameters, and not on those of ``functional_call``."""
        self.called: int | None = 0
        """How the module was called in these forwards, as a :class:`Called`; None if this rank takes part in the round
        without a pass that has reached the module."""
        self.hooks: PassHooks | None = None
        """What the pass has put onto the parameters in place of their hooks."""
        self.has_users_hooks = False
        """True if any of these hooks is the program's."""
        self.came: Sequence[int] = ()
        """The gradients that the pass has brought, by position in :attr:`before`; known when it is over."""
        self.round: Round | None = None
        """The round that reduces them, once it is open."""
        self.aside: Sequence[Tensor | None] = ()
        """The gradients from before it, if it counts nothing."""

    def __repr__(self) -> str:
        facts = ("synchronises", "through_forward", "differs")
        named = [name for name in facts if getattr(self, name)]
        return f"Step({', '.join([*named, f'{len(self.came)} gradients', repr(self.round)])})"

    @property
    def is_reached(self) -> bool:
        """True if the pass has reached the module so far."""
        return self.round is not None or self.through_forward or bool(self.before.changed())

    def set_aside(self) -> None:
        """Let no parameter have a gradient until :meth:`put_back`: the pass counts nothing."""
        self.aside = self.before.grads
        set_grads(self.before.parameters, repeat(None))

    def put_back(self) -> None:
        """Give the parameters back what the pass has taken off them: hooks, and gradients."""
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.put_back()
        aside, self.aside = self.aside, ()
        if aside:
            set_grads(self.before.parameters, aside)
