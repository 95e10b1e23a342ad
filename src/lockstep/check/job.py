"""What a process of a check is told, and what it hands back."""

from dataclasses import dataclass, field

from torch import Tensor

from lockstep.check.rows import Split
from lockstep.check.sources import Source

PRECISIONS = {"float64": 1e-6, "float32": 1e-3, "bf16": 2**-5}
"""By name, the difference that rounding may make, relative to the norm of a tensor (of a weight: of its change).

``bf16`` is autocast to bfloat16 with weights in float32. One rounding is 2**-9 there; a gradient goes through several.
"""
AFTER_A_STEP = 16
"""In float32 and bf16, differences may be this many times as large from the first optimizer step on, and are relative
to the largest tensor: Adam divides a gradient by its size, so what was rounding becomes a step of full length."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How a case is checked."""

    case: Source
    wrap: str | Source
    ranks: int
    split: Split
    precision: str
    dropout: str
    backend: str


@dataclass(frozen=True)
class Job:
    """The part of one process: rank ``rank`` of all, or one process with whole batches (``rank`` is None).

    With ``alone``, one process computes the whole batches of the steps before that number, and then only the rows of
    ``rank`` in that step. With ``by_step``, it computes whole batches by the case's step, even if there is a loss.
    """

    options: CheckOptions
    rank: int | None
    alone: int | None = None
    by_step: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The rank, and the number of ranks, in the process group."""
        return (0, 1) if self.rank is None or self.alone is not None else (self.rank, self.options.ranks)


Tensors = dict[str, Tensor]


@dataclass
class CheckStep:
    """What a process has seen in one step."""

    rows: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor | None] | None = None
    """Before the last call of the optimizer's step; None if there was none."""
    backward: Tensors = field(default_factory=dict)
    """What backward has left in each gradient, before anything else has changed it; in one process only."""
    after: Tensors = field(default_factory=dict)
    """The gradients after the last backward, also under ``no_sync()``, where hooks may be held back; in one process."""
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    drawn_from: str | None = None
    """A digest of the state of the random numbers at the first dropout of the step."""


@dataclass
class JobRecord:
    """What a process has seen."""

    weights: Tensors = field(default_factory=dict)
    """Before the first step, wrapped."""
    buffers: Tensors = field(default_factory=dict)
    steps: list[CheckStep] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    """The names of layers with statistics of this process's batch."""
    has_both: bool = False
    """True if the case has a step, and a loss beside it."""
    draws_rows: bool = False
    """True if the case gives each rank its own batches."""
    error: str = ""
    """The error with which the program ended, or an empty text."""
