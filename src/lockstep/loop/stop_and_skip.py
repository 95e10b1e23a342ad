"""``skip_batch()``, ``skip_on()``, ``should_stop()``, ``agree()``: decisions that all ranks take together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Generic, ParamSpec

import torch
from torch.nn import Module

from lockstep._base.compiler import outside_compiler
from lockstep._base.run_all import RunAll
from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.group_state import shared_objects
from lockstep.distributed.comm.groups import Group, needed_group
from lockstep.distributed.reduction.report.decisions import Decisions, decisions_of
from lockstep.distributed.reduction.scheduler import GroupScheduler, scheduler_of
from lockstep.distributed.replication.join import is_in_join
from lockstep.distributed.replication.reducer_replication import rounds_of
from lockstep.errors import OptionError
from lockstep.phases import Phases

Request = Callable[[], object]
_BY_ROUNDS = "batches(), skip_batch(), skip_on() and other functions that go by a module's rounds of gradients"
_SKIP_ON = "lockstep.loop.skip_on(torch.OutOfMemoryError, modules=[model])"

P = ParamSpec("P")


class asked(Generic[P]):
    """A question that is called, or stands in a condition as it is, as ``if run.should_stop:`` does."""

    def __init__(self, question: Callable[P, bool]) -> None:
        self._question = question
        update_wrapper(self, question)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Ask."""
        return self._question(*args, **kwargs)

    def __bool__(self) -> bool:
        return self()  # type: ignore[call-arg]


def groups_of(modules: Sequence[Module], group: Group | None, caller: str) -> list[Group]:
    """Return each group that modules are replicated over, once; without modules, ``group`` or the default group."""
    found: list[Group] = []
    for module in modules:
        of_module = rounds_of(module, caller, _BY_ROUNDS).started_reducer.collectives.group
        if not any(of_module is each for each in found):
            found.append(of_module)
    if found and group is not None:
        raise OptionError(f"{caller}() got modules, and a group; the modules are replicated over groups of their own")
    return found or [needed_group(group)]


def stop_when(request: Request, group: Group | None = None) -> Decisions:
    """Make :func:`should_stop` true on every rank as soon as ``request()`` is true, or a reason, on any rank.

    ``request`` has to be quick: it is called in each backward that synchronises, and in the other functions that
    :func:`should_stop` lists. Returns an object that holds the request: the request ends with it.
    """
    decisions = decisions_of(needed_group(group))
    decisions.stop_when(request)
    return decisions


@asked
def should_stop(group: Group | None = None) -> bool:
    """Return True if any rank has asked to stop. The result is the same on all ranks in the same step.

    Requests travel with other messages over the group, and over other groups of the same ranks: the report of each
    backward that synchronises, the lengths at the beginning of a loop over :func:`batches`, and the messages of
    :func:`mean`, :func:`lockstep.loop.total` and :func:`lockstep.loop.agree`. So a warm-up or an evaluation hears them,
    too. Warns if there are no such messages. Communicates nothing itself. On an accelerator, waits for the last report.
    """
    return decisions_of(needed_group(group)).should_stop


def skip_batch(*modules: Module, group: Group | None = None) -> None:
    """Skip the current batch on all ranks: no rank steps on it.

    Call it on the rank that cannot use its batch (bad data, out of memory), instead of the rest of the batch. The other
    ranks finish their backward, and get no gradients. On every rank :func:`skipped` is True until the next batch, and
    the optimizer's step changes nothing. Gradients of earlier micro-batches under ``no_sync()`` are dropped, too.

    At a padding batch of :func:`batches` no rank leaves out anything: it counts nothing, and the batches of the other
    ranks count. So :func:`skipped` is False, and the program goes on with the optimizer's step.

    Inside of ``no_sync()`` or ``accumulate(last=False)`` more micro-batches of the step follow, and the one that
    synchronises tells the others. Outside of them the step is over on this rank: go on with the next step.

    If backward has begun and failed on this rank, the other ranks raise :class:`PeerError`. Catch that error on all
    ranks and call this function; or use :func:`skip_on`, with which no rank raises.

    Args:
        modules: The replicated modules that the other ranks' backward goes through, if they are on other groups.
        group: The ranks; the default group if None.

    Communicates what a backward without gradients does. Buffers (the statistics of batch normalisation) keep the values
    from each rank's forward, and become equal in the next backward.

    Raises:
        PeerError: Other ranks are at another batch.
        OptionError: No module is replicated over the group; modules with shares do not count. Or it comes before the
            forward in ``join()``.
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

    Stands for: an ``all_reduce`` of a flag in each step, before backward.
    """
    schedulers = _schedulers(modules, group, "skip_batch")
    _check_modules(schedulers, "skip_batch", "skip_batch(model), before its first backward")
    if any(is_in_join(each) and not each.passes.has_begun for scheduler in schedulers for each in scheduler.modules):
        raise OptionError(
            "skip_batch() is inside of join(), and comes before the forward of a module, in which the other ranks wait "
            "for this one. Call it after the forwards of the batch, or iterate over lockstep.batches() in place of "
            "join()"
        )
    _skip(schedulers)


@asked
def skipped(*modules: Module, group: Group | None = None) -> bool:
    """Return True if any rank has skipped this batch, by :func:`skip_batch`. Communicates nothing.

    Call it after the backward that synchronises. The batch ends with the next one of :func:`lockstep.batches`; outside
    of such a loop, with the next backward that synchronises, or ``accumulate(last=False)``.

    Without arguments it is about the default group, or, if no module is replicated over that, the one group that has
    modules. Raises :class:`OptionError` if there are several.
    """
    found = groups_of(modules, group, "skipped")
    if not modules and group is None:
        used = [each.group for each in shared_objects(GroupScheduler) if list(each.modules)]
        if used and found[0] not in used:
            found = used
        if len(found) > 1:
            raise OptionError(
                f"skipped() does not say which batch it is about: modules are replicated over {len(found)} groups, and "
                "none over the default group. Pass the replicated module, lockstep.loop.skipped(model)"
            )
    return any(decisions_of(each).skipped for each in found)


@contextmanager
def skip_on(*errors: type[BaseException], modules: Sequence[Module] = (), group: Group | None = None) -> Iterator[None]:
    """Skip a batch whose forward or backward raises one of ``errors`` on this rank; see :func:`skip_batch`.

    Run forward and backward of a batch inside the block, on every rank, and call :func:`skipped` after it. The block
    suppresses the exception, and the other ranks see none. Buffers of the modules are restored on all ranks. If a step
    has several micro-batches, put the block around all of them, or inside the :func:`accumulate` block of each.

    Args:
        errors: Types of exceptions; ``torch.OutOfMemoryError`` if none are given.
        modules: The replicated modules that backward goes through, if they are on other groups.
        group: The ranks; the default group if None.

    Raises :class:`OptionError` if the block ends between the micro-batches of a step, outside of their
    :func:`accumulate` or ``no_sync()``, if no module is replicated over the group when it ends, and inside of
    ``join()``, on all ranks that have a batch.

    If a batch is skipped, communicates what :func:`skip_batch` does; otherwise nothing. Copies the buffers of all
    modules on the group each time.

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
    if any(is_in_join(module) for scheduler in schedulers for module in scheduler.modules):
        raise OptionError(
            "skip_on() is inside of join(), where each forward tells the other ranks that a batch begins: they would "
            "wait for a rank that fails before its forward. Iterate over lockstep.batches() in place of join()"
        )
    kept, failed = [scheduler.keep_buffers() for scheduler in schedulers], False
    with ExitStack() as stack:
        for scheduler in schedulers:
            scheduler.decisions.note_new_step()
            stack.enter_context(scheduler.decisions.skipping_on(kinds))
        try:
            yield
        except kinds:
            failed = True
            _check_modules(schedulers, "skip_on", _SKIP_ON)
            _skip(schedulers)
        else:
            _check_modules(schedulers, "skip_on", _SKIP_ON)
            for scheduler in schedulers:
                scheduler.check_no_open_window()
    for scheduler, buffers in zip(schedulers, kept, strict=True):
        if scheduler.decisions.skipped or (failed and not scheduler.decisions.is_padding):
            for each in buffers:
                each.give_back()


@outside_compiler
def agree(flag: object, group: Group | None = None) -> bool:
    """Return True if ``flag`` is true on any rank. Every rank must call it; all get the same result.

    Communicates one all-reduce of three numbers, and waits for it. Raises :class:`OptionError`, on every rank, if a
    flag is neither true nor false, such as a tensor of two elements.

    Example:
        >>> import torch.distributed as dist, lockstep
        >>> lockstep.loop.agree(False, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        False

    Stands for: ``all_reduce`` of a flag.
    """
    decisions = decisions_of(needed_group(group))
    collectives = Collectives(decisions.group, Phases())
    own, problem = False, ""
    try:
        own = bool(flag)
    except Exception as error:  # told to the other ranks, who would wait
        problem = f"agree() got a {type(flag).__name__} on rank {collectives.global_rank}: {error}"
    numbers = torch.tensor([own, decisions.asks_to_stop(), bool(problem)], dtype=torch.int64).to(collectives.device)
    collectives.all_reduce(numbers, "agree()").wait()
    agreed, stops, problems = numbers.tolist()
    decisions.hear_requests(bool(stops))
    if problems:
        raise OptionError(next(filter(None, all_gather_object(problem, "agree()", collectives))))
    return bool(agreed)


def _check_modules(schedulers: Sequence[GroupScheduler], caller: str, call: str) -> None:
    """Raise :class:`OptionError` if no module would hear that a batch is left out."""
    if not all(list(scheduler.modules) for scheduler in schedulers):
        raise OptionError(
            f"{caller}() has nothing to leave out: no module takes part in rounds of this process group. Pass the "
            f"replicated module, {call}; with shares a batch cannot be left "
            "out: let an error leave the loop over its shares on all ranks"
        )


@outside_compiler
def _skip(schedulers: Sequence[GroupScheduler]) -> None:
    steps = RunAll()
    for scheduler in schedulers:
        with steps:
            scheduler.skip_batch()
    steps.end()


def _schedulers(modules: Sequence[Module], group: Group | None, caller: str) -> list[GroupScheduler]:
    found = [scheduler_of(each) for each in groups_of(modules, group, caller)]
    return sorted(found, key=lambda each: each.order)
