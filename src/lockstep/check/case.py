"""``Case``: the program that is checked, as a function builds it in each process."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep.check.rows import Split, count_rows, take_rows
from lockstep.check.sources import Source
from lockstep.errors import OptionError

Batches = Sequence[Any] | Callable[[int, int], Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batches, and what one training step does. A function without arguments returns it in each process.

    The function runs once in each process, with the same seeds. So the models are equal, and so are random batches. If
    it seeds PyTorch itself, its seed counts in the steps as well; otherwise each rank gets a seed of its own then.

    Args:
        model: The model, on the CPU, not yet wrapped. It is in training mode if the function leaves it there.
        batches: The whole batches, which the check divides between the ranks: nested tensors whose first dimension
            counts rows (with ``collate``: lists of samples). Or a function ``(rank, ranks) -> iterable``, which returns
            this rank's own batches, as a ``DataLoader`` with a ``DistributedSampler`` does; one process calls it with
            ``(0, 1)``, and its batches must be the whole ones.
        loss: ``loss(model, batch)`` returns the loss of the rows in ``batch``, usually their mean. One process computes
            it for the whole batch.
        optimizer: Makes the optimizer from the parameters of the wrapped model: a class, or a function. By
            default SGD with a learning rate of 0.1.
        steps: The number of steps; a list with fewer batches begins again. By default one for each batch, and at most
            10 if ``batches`` is a function.
        step: ``step(model, optimizer, batch)``: the whole step of a rank, with accumulation, clipping, or a sum over
            tokens. Without ``loss``, or if it changes the gradient of the loss after backward, the one process runs it
            as well, on the whole batch; it wraps the model then, over one rank, so that ``model.no_sync()`` and
            ``lockstep.accumulate(model)`` are there.
        collate: Makes of a list of samples what ``loss`` gets; each batch is such a list.

    Raises:
        OptionError: There is neither a loss nor a step, or there are no batches.

    Example:
        >>> import torch, lockstep.check
        >>> def case() -> lockstep.check.Case:
        ...     x, y = torch.randn(8, 4), torch.randn(8, 1)
        ...     loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        ...     return lockstep.check.Case(torch.nn.Linear(4, 1), [(x, y)], loss, steps=3)
        >>> case().steps
        3

    PyTorch has no such class.
    """

    model: Module
    batches: Batches
    loss: Callable[[Module, Any], Tensor] | None = None
    optimizer: Callable[[Iterator[Parameter]], Optimizer] | None = None
    steps: int | None = None
    step: Callable[[Module, Optimizer, Any], None] | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Module):
            raise OptionError(f"Case() got a {type(self.model).__name__} as its model; expected a torch.nn.Module")
        if self.loss is None and self.step is None:
            raise OptionError("Case() got neither a loss nor a step; give loss(model, batch) -> tensor")
        if isinstance(self.optimizer, Optimizer) or not (self.optimizer is None or callable(self.optimizer)):
            raise OptionError(
                f"Case() got a {type(self.optimizer).__name__} as its optimizer; expected a class or a function that "
                "makes one from the parameters of the wrapped model: functools.partial(torch.optim.SGD, lr=0.1)"
            )
        if not callable(self.batches):
            if not hasattr(self.batches, "__len__"):
                raise OptionError(
                    f"Case() got a {type(self.batches).__name__} as its batches; expected a list of whole batches, or "
                    "a function (rank, ranks) -> iterable"
                )
            if not len(self.batches):
                raise OptionError("Case() got no batches; give one whole batch at least")


def build(source: Source) -> Case:
    """Call the function that builds a case."""
    case = source.load()()
    if not isinstance(case, Case):
        raise OptionError(f"{source.name}() returned a {type(case).__name__}; expected a lockstep.check.Case")
    return case


def whole_batches(case: Case, ranks: int, split: Split) -> Iterator[Any]:
    """Yield the batches of one process; raise :class:`OptionError` for one that leaves a rank without rows."""
    if callable(case.batches):
        yield from _first(case, case.batches(0, 1))
        return
    for batch in _first(case, cycle(case.batches)):
        rows = count_rows(batch, case.collate is not None)
        if rows < ranks and isinstance(split, str):
            raise OptionError(
                f"a whole batch of the case has {rows} rows for {ranks} ranks, so that a rank has none; give larger "
                "batches, or fewer ranks"
            )
        yield batch


def batches_of_rank(case: Case, rank: int, ranks: int, split: Split) -> Iterator[Any]:
    """Yield the batches of one rank."""
    if callable(case.batches):
        return _first(case, case.batches(rank, ranks))
    has_samples = case.collate is not None
    return (take_rows(batch, split, rank, ranks, has_samples) for batch in _first(case, cycle(case.batches)))


def _first(case: Case, batches: Iterable[Any]) -> Iterator[Any]:
    default = 10 if callable(case.batches) else len(case.batches)
    return islice(iter(batches), default if case.steps is None else case.steps)


def make_optimizer(case: Case, parameters: Iterator[Parameter]) -> Optimizer:
    """Return the optimizer of a case."""
    return torch.optim.SGD(parameters, lr=0.1) if case.optimizer is None else case.optimizer(parameters)


def run_step(case: Case, model: Module, optimizer: Optimizer, batch: Any, *, of_one_process: bool) -> None:
    """Train one step: of one process on the whole batch, or of a rank."""
    if case.collate is not None:
        batch = case.collate(batch)
    if case.step is not None and not (of_one_process and case.loss is not None):
        case.step(model, optimizer, batch)
        return
    assert case.loss is not None
    optimizer.zero_grad()
    case.loss(model, batch).backward()
    optimizer.step()
