"""Reports that are read before an optimizer uses the gradients of their round.

On an accelerator backward does not wait for what the other ranks say. An optimizer's step does: it comes when nearly
all of the round has arrived, and before weights change. Steps that no ``torch.optim.Optimizer`` takes are not seen
here; then the report is read when the next round opens.
"""

from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.distributed.reduction.optimizer_steps import NextStep


class Reader(Protocol):
    """Who has not read the report of a round yet."""

    def has_parameter_of(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of that round are what the optimizer uses."""

    def read_before_step(self) -> None:
        """Read it; raises, before weights change, if the round has failed on some rank."""


def before_next_step(reader: Reader) -> None:
    """Have a report read at the next step of an optimizer, if it has not been read by then."""
    _next_step.wait(reader)


_next_step: NextStep[Reader] = NextStep(register_optimizer_step_pre_hook, lambda reader: reader.read_before_step())
