"""``skip_batch()``, ``skip_on()``, ``should_stop()``, ``agree()``: what the loops of all ranks decide together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.nn import Module

from lockstep.distributed.comm.collectives import Collectives, Group, resolve_group
from lockstep.distributed.comm.run_all import RunAll
from lockstep.distributed.reduction.decisions import Decisions, decisions_of
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.replication.reducer_replication import rounds_of
from lockstep.errors import CommunicationError, OptionError
from lockstep.phases import Phases

Request = Callable[[], object]
_BY_ROUNDS = "batches(), skip_batch(), skip_on() and other functions that go by a module's rounds of gradients"


def groups_of(modules: Sequence[Module], group: Group | None, caller: str) -> list[Group]:
    """Return the groups that modules are replicated over, each once; ``group``, or the default group, if there are
    none."""
    found: list[Group] = []
    for module in modules:
        its = rounds_of(module, caller, _BY_ROUNDS).started_reducer.collectives.group
        if not any(its is each for each in found):
            found.append(its)
    if found and group is not None:
        raise OptionError(f"{caller}() got modules, and a group; the modules are replicated over groups of their own")
    return found or [known_group(group)]


def known_group(group: Group | None) -> Group:
    """Return the group, or the default group; raises :class:`CommunicationError` if there is none yet,
    :class:`OptionError` for anything else."""
    found = resolve_group(group)
    if found is not None and not isinstance(found, dist.ProcessGroup | Backend):
        raise OptionError(f"expected a process group, got {type(found).__name__}; leave it out for the default group")
    if found is None:
        raise CommunicationError("there is no process group yet; call torch.distributed.init_process_group() first")
    return found


def stop_when(request: Request, group: Group | None = None) -> Decisions:
    """Let :func:`should_stop` be true on every rank as soon as ``request()`` is something on one: a reason, True.

    ``request`` is called in each synchronising backward, and in what else carries requests (:func:`should_stop`); it
    has to be quick. Returns what :func:`should_stop` asks; keep it for as long as the request is to count.
    """
    decisions = decisions_of(known_group(group))
    decisions.stop_when(request)
    return decisions


def should_stop(group: Group | None = None) -> bool:
    """Return True if any rank has asked to stop: the same on all ranks at the same step.

    What ranks ask for travels with what they exchange over the group anyway: the report of each synchronising backward,
    the lengths with which a loop over :func:`batches` begins, :func:`mean`, :func:`total` and :func:`agree`. So it is
    heard in a warm-up and in an evaluation, too. Communicates nothing itself; waits for the last report where that
    travels over an accelerator.
    """
    return decisions_of(known_group(group)).should_stop


def skip_batch(*modules: Module, group: Group | None = None) -> None:
    """Leave out the batch that this rank is at: no rank steps on it.

    Call it on the rank that cannot use its batch - its data are bad, its memory ran out - in place of what is left of
    the batch. All other ranks come to the end of their backward, and have no gradients; there and here
    :func:`skipped` is true until the next batch, and an optimizer's step changes nothing. What the rank had
    contributed before, in earlier micro-batches under ``no_sync()``, is left out as well.

    Where backward has begun and failed, the other ranks know it, and raise :class:`PeerError`. So let all ranks catch
    that, too, and call this, or use :func:`skip_on`, where nothing of the kind is needed.

    Args:
        modules: The replicated modules that the other ranks' backward goes through, if they are on other groups.
        group: The ranks; the default group if None.

    Communicates what a backward does that has no gradients. Buffers (the statistics of batch normalisation) are what
    each rank's forward has left, and become equal in the next backward.

    Raises:
        PeerError: Other ranks are at another batch.
        OptionError: No module takes part in rounds of the group: with shares there are none.
        CommunicationError: There is no group, or a rank does not answer.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=group)
        >>> for x in [torch.ones(1, 1), torch.full((1, 1), torch.nan)]:
        ...     model.zero_grad()
        ...     loss = model(x).sum()
        ...     if loss.isfinite():
        ...         loss.backward()
        ...     else:
        ...         lockstep.loop.skip_batch(model)
        ...     lockstep.loop.skipped(model)
        False
        True

    Stands for: an ``all_reduce`` of a flag in each step, ahead of backward.
    """
    steps = RunAll()
    for scheduler in _schedulers(modules, group, "skip_batch"):
        if not list(scheduler.modules):
            raise OptionError(
                "skip_batch() has nothing to leave out: no module takes part in rounds of this process group. Pass the "
                "replicated module, skip_batch(model), before its first backward; with shares a batch cannot be left "
                "out: let an error leave the loop over its shares on all ranks"
            )
        with steps:
            scheduler.skip_batch()
    steps.end()


def skipped(*modules: Module, group: Group | None = None) -> bool:
    """Return True if any rank has left out this batch, so that all have: see :func:`skip_batch`. Communicates
    nothing."""
    return any(decisions_of(each).skipped for each in groups_of(modules, group, "skipped"))


@contextmanager
def skip_on(*errors: type[BaseException], modules: Sequence[Module] = (), group: Group | None = None) -> Iterator[None]:
    """Leave out a batch whose forward or backward raises one of ``errors`` on this rank; see :func:`skip_batch`.

    Put forward and backward of a batch inside, on every rank, and ask :func:`skipped` after it. The exception goes no
    further, and the other ranks see none. Buffers of the modules are on all ranks what they were before the batch.

    Args:
        errors: Types of exceptions; ``torch.OutOfMemoryError`` if none are given.
        modules: The replicated modules that backward goes through, if they are on other groups.
        group: The ranks; the default group if None.

    Communicates what :func:`skip_batch` does, and only when a batch is left out. Copies the buffers of all modules on
    the group each time.

    Example:
        >>> import torch, torch.distributed as dist, lockstep
        >>> group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        >>> model = lockstep.replicate(torch.nn.Linear(1, 1), process_group=group)
        >>> with lockstep.loop.skip_on(ValueError, modules=[model]):
        ...     raise ValueError("a bad batch")
        >>> lockstep.loop.skipped(model)
        True
    """
    kinds = errors or (torch.OutOfMemoryError,)
    schedulers = _schedulers(modules, group, "skip_on")
    kept = [scheduler.keep_buffers() for scheduler in schedulers]
    with ExitStack() as stack:
        for scheduler in schedulers:
            stack.enter_context(scheduler.decisions.skipping_on(kinds))
        try:
            yield
        except kinds:
            steps = RunAll()
            for scheduler in schedulers:
                with steps:
                    scheduler.skip_batch()
            steps.end()
    for scheduler, buffers in zip(schedulers, kept, strict=True):
        if scheduler.decisions.skipped:
            for each in buffers:
                each.give_back()


def agree(flag: object, group: Group | None = None) -> bool:
    """Return True if ``flag`` is true on any rank; every rank calls it, and gets the same.

    Communicates one all-reduce of two numbers, and waits for it.

    Example:
        >>> import torch.distributed as dist, lockstep
        >>> lockstep.agree(False, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        False

    Stands for: ``all_reduce`` of a flag.
    """
    decisions = decisions_of(known_group(group))
    collectives = Collectives(decisions.group, Phases())
    numbers = torch.tensor([bool(flag), decisions.asks_to_stop], dtype=torch.int64).to(collectives.device)
    collectives.all_reduce(numbers, "a flag that ranks agree on").wait()
    agreed, stops = numbers.tolist()
    decisions.hear_requests(bool(stops))
    return bool(agreed)


def _schedulers(modules: Sequence[Module], group: Group | None, caller: str) -> list[GroupScheduler]:
    found = [scheduler_of(each) for each in groups_of(modules, group, caller)]
    return sorted(found, key=lambda each: each.order)
