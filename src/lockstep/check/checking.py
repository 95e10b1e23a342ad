"""Checks a case: one process beside N, and what a difference means."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from torch import Tensor

from lockstep._base.arguments import check_backend
from lockstep._base.seeds import keep_generators
from lockstep.check.case import Case, build
from lockstep.check.diagnosis import Finding, Surroundings, diagnose
from lockstep.check.dropout import DROPOUTS
from lockstep.check.job import AFTER_A_STEP, PRECISIONS, CheckOptions, CheckStep, Job, JobRecord
from lockstep.check.measuring import Comparison, Values, changes, compare, distance, weights_of_ranks
from lockstep.check.processes import Processes, started
from lockstep.check.report import Report
from lockstep.check.rows import Split, parse_split, period_of, rows_taken_wrongly
from lockstep.check.sources import Source, source_of
from lockstep.check.wrapping import WRAPS, Wrap
from lockstep.errors import CheckError, OptionError

Precision = Literal["float64", "float32", "bf16"]


def compare_with_one_process(
    case: Callable[[], Case] | Source,
    ranks: int = 2,
    wrap: str | Wrap | Source = "lockstep",
    *,
    split: str | Sequence[int] = "even",
    precision: Precision = "float64",
    dropout: Literal["off", "rows", "on"] = "off",
    tolerance: float | None = None,
    backend: str | None = None,
    timeout: float = 120.0,
) -> Report:
    """Train a case in one process and in ``ranks`` processes, and return a report of what differs.

    One process computes each step on the whole batch; the ranks compute it with the wrapped model, each on its rows.
    Compared are the weights before the first step, then in each step the gradients before the optimizer's step, and
    weights and buffers after it, on every rank; and which rows the ranks have seen. If gradients differ, each rank's
    rows are computed alone as well, which tells the causes apart.

    Args:
        case: A function at the top level of a file, which each process imports and calls.
        ranks: The number of processes.
        wrap: ``lockstep``, ``ddp``, ``fsdp2``, ``accelerate``, or a function ``(model) -> model`` at the top level of a
            file.
        split: How whole batches are divided: ``even`` blocks of rows, ``strided`` (every N-th row), or numbers of rows
            in proportion, one for each rank.
        precision: ``float64`` converts the model and its batches; ``float32`` leaves them as they are; ``bf16`` leaves
            them and computes under autocast.
        dropout: ``off``; ``rows``: masks that depend on the row; ``on``: as the program draws them.
        tolerance: The largest difference that counts as equal, relative to a tensor's norm (for weights: to the norm of
            their change). By default 1e-6 in float64, 1e-3 in float32 and 2**-5 in bf16; in these two 16 times as
            much from the first optimizer step on, and relative to the largest tensor, since an optimizer such as Adam
            makes of rounding a step of full length. Ranks must be equal to each other to 1e-6 in any precision.
        backend: Of the process group; by default ``shm`` for lockstep, and ``gloo``.
        timeout: Seconds for all processes together.

    Starts processes on this host, which compute on the CPU with one thread each, and communicate with each other.

    Raises:
        OptionError: An argument makes no sense, or a function cannot be imported by other processes.
        CheckError: The case fails in one process, or trains nothing there.

    Example: see :func:`assert_equal_to_one_process`.

    PyTorch has no such function.
    """
    options = make_options(case, ranks, wrap, split, precision, dropout, backend)
    _check_sources(options)
    with started(timeout) as processes:
        return check(options, processes, PRECISIONS[precision] if tolerance is None else tolerance)


def _check_sources(options: CheckOptions) -> None:
    """Raise :class:`OptionError` before a process starts, if the case is none, or a function is not in its file."""
    with ExitStack() as stack:
        keep_generators(stack)
        try:
            if isinstance(options.wrap, Source):
                options.wrap.load()
            build(options.case)
        except OptionError:
            raise
        except (Exception, SystemExit):  # it may need a rank; if not, the processes tell it with its traceback
            return


def check(options: CheckOptions, processes: Processes, tolerance: float) -> Report:
    """Train a case in these processes, and compare."""
    one, *records = processes.run([Job(options, None), *[Job(options, rank) for rank in range(options.ranks)]])
    if one.error:
        raise CheckError(f"the case fails in one process, so there is nothing to compare with:\n{one.error}")
    _check_trained(one)
    name = options.wrap if isinstance(options.wrap, str) else options.wrap.name
    report = Report(options.ranks, name, options.precision, tolerance)
    if any(each.error for each in records):
        return _of_failure(report, records)
    comparisons = list(_comparisons(options.precision, one, records, tolerance))
    by_step = _one_by_step(processes, options, one, comparisons, tolerance)
    if by_step is not None:
        one = by_step
        comparisons = list(_comparisons(options.precision, one, records, tolerance))
    findings = [
        *_of_rows(one, records, options.dropout),
        *_of_tensors(processes, options, one, records, comparisons, tolerance, by_step is not None),
    ]
    return dataclasses.replace(report, comparisons=tuple(comparisons), findings=tuple(findings))


def _one_by_step(
    processes: Processes, options: CheckOptions, one: JobRecord, comparisons: Sequence[Comparison], tolerance: float
) -> JobRecord | None:
    """Return what one process computes by the case's step, if that is to be compared with, and not its loss.

    So it is if backward brings the gradient of the loss, and the step changes it afterwards, as clipping does.
    """
    first = next((each for each in comparisons if each.differing), None)
    if not one.has_both or first is None or first.kind != "gradients" or first.step is None:
        return None
    (found,) = processes.run([Job(options, None, by_step=True)])
    if found.error or len(found.steps) <= first.step:
        return None
    step, wanted = found.steps[first.step], one.steps[first.step].gradients or {}
    is_of_loss = not compare("gradients", first.step, wanted, [step.after], tolerance).differing
    is_changed = bool(compare("gradients", first.step, wanted, [step.gradients or {}], tolerance).differing)
    return found if is_of_loss and is_changed else None


def _check_trained(one: JobRecord) -> None:
    before, has_moved = one.weights, False
    for number, step in enumerate(one.steps):
        for name, each in ((step.gradients or {}) | step.weights).items():
            if each is not None and not each.isfinite().all():
                raise CheckError(f"{name} or its gradient is not finite in one process, in step {number}")
        has_moved = has_moved or any(
            not each.equal(before[name]) for name, each in step.weights.items() if name in before
        )
        before = step.weights
    if not has_moved:
        raise CheckError(
            f"no weight of the case has moved in one process, in {len(one.steps)} steps; give batches, an optimizer "
            "and a loss that train"
        )


def assert_equal_to_one_process(
    case: Callable[[], Case], ranks: int = 2, wrap: str | Wrap = "lockstep", **options: Any
) -> None:
    """Raise :class:`AssertionError` unless ``ranks`` processes train a case as one process does; for test suites.

    Args:
        case: A function at the top level of a file, which returns a :class:`Case`.
        ranks: The number of processes.
        wrap: ``lockstep``, ``ddp``, ``fsdp2``, ``accelerate``, or a function ``(model) -> model`` at the top level of a
            file.
        options: Those of :func:`compare_with_one_process`: ``split``, ``precision``, ``dropout``, ``tolerance``,
            ``backend``, ``timeout``.

    Starts processes on this host. The message of the error is the report: the first tensor that differs, by how much,
    and the cause.

    Example::

        from lockstep.check import assert_equal_to_one_process
        from my_training import case

        def test_two_ranks_train_like_one():
            assert_equal_to_one_process(case, ranks=2, wrap="ddp")

    PyTorch has no such function.
    """
    __tracebackhide__ = True
    report = compare_with_one_process(case, ranks, wrap, **options)
    if not report.is_equal:
        raise AssertionError(str(report))


def make_options(
    case: Any,
    ranks: int = 2,
    wrap: Any = "lockstep",
    split: Any = "even",
    precision: str = "float64",
    dropout: str = "off",
    backend: str | None = None,
) -> CheckOptions:
    """Return the options of a check, if they make sense."""
    for name, value, known in (("precision", precision, PRECISIONS), ("dropout", dropout, DROPOUTS)):
        if value not in known:
            raise OptionError(f"there is no {name} {value!r}; expected {', '.join(known)}")
    if isinstance(wrap, str) and wrap not in WRAPS:
        raise OptionError(f"there is no wrap {wrap!r}; expected {', '.join(WRAPS)}, or FILE.py:FUNCTION")
    if wrap == "accelerate" and importlib.util.find_spec("accelerate") is None:
        raise OptionError("accelerate is not installed, which wrap='accelerate' needs")
    if backend is not None:
        check_backend(backend, "the backend of a check")
    if ranks < 2:
        raise OptionError(f"a check of {ranks} ranks compares nothing; expected 2 or more")
    divided: Split = parse_split(split if isinstance(split, str) else ",".join(map(str, split)), ranks)
    return CheckOptions(
        case=case if isinstance(case, Source) else source_of(case, "the case"),
        wrap=wrap if isinstance(wrap, str | Source) else source_of(wrap, "the function that wraps the model"),
        ranks=ranks,
        split=divided,
        precision=precision,
        dropout=dropout,
        backend=backend or ("shm" if wrap == "lockstep" else "gloo"),
    )


def _of_failure(report: Report, records: Sequence[JobRecord]) -> Report:
    """Return the report for a rank that fails: that of the rank whose error does not follow from another's."""
    failed = [rank for rank, each in enumerate(records) if each.error]
    first = min(failed, key=lambda rank: (_follows(records[rank].error), rank))
    error = records[first].error
    text = f"rank {first} fails in step {len(records[first].steps)}: {error.splitlines()[-1]}"
    return dataclasses.replace(report, findings=(Finding("failed", text),), error=error)


def _follows(error: str) -> bool:
    last = error.splitlines()[-1]
    return any(each in last for each in ("PeerError", "PeerFailure", "CommunicationError", "Connection closed", "gloo"))


def _comparisons(
    precision: str, one: JobRecord, records: Sequence[JobRecord], tolerance: float
) -> Iterator[Comparison]:
    yield compare("weights", None, one.weights, [each.weights for each in records], tolerance)
    yield compare("buffers", None, one.buffers, [each.buffers for each in records], tolerance)
    before = one.weights
    for number, (wanted, *got) in enumerate(zip(one.steps, *[each.steps for each in records], strict=False)):
        later = _later(precision, number)
        if wanted.gradients is not None:
            by_rank = [each.gradients or {} for each in got]
            yield compare("gradients", number, wanted.gradients, by_rank, tolerance * later, to_largest=later > 1)
        later = _later(precision, number + 1)
        moved = [changes(before, each.weights) for each in (wanted, *got)]
        yield compare("weights", number, moved[0], moved[1:], tolerance * later, to_largest=later > 1)
        buffers = [each.buffers for each in got]
        yield compare("buffers", number, wanted.buffers, buffers, tolerance * later, to_largest=later > 1)
        before = wanted.weights


def _later(precision: str, steps: int) -> int:
    """Return how much larger differences may be after some steps of the optimizer."""
    return AFTER_A_STEP if steps and precision != "float64" else 1


# ------------------------------------------------------------------------------------------------ findings


def _of_rows(one: JobRecord, records: Sequence[JobRecord], dropout: str) -> Iterator[Finding]:
    steps = list(zip(one.steps, *[each.steps for each in records], strict=False))
    counts = {len(each.steps) for each in (one, *records)}
    if len(counts) > 1:
        has = ", ".join(f"{len(each.steps)} on rank {rank}" for rank, each in enumerate(records))
        yield Finding("rows", f"one process has {len(one.steps)} batches, and the ranks have others: {has}")
    for number, (whole, *by_rank) in enumerate(steps):
        again, none, foreign = rows_taken_wrongly(whole.rows, [each.rows for each in by_rank])
        if again or none or foreign:
            yield Finding(
                "rows",
                f"step {number}: of {len(whole.rows)} rows of one process, {again} are taken once too often and {none} "
                f"by no rank; {foreign} rows of the ranks are none of them",
            )
            break
    if one.draws_rows and (period := period_of([each.rows for each in records[0].steps])) is not None:
        yield Finding(
            "same-order",
            f"from step {period} on, rank 0 sees the same batches in the same order again: call "
            "sampler.set_epoch(epoch) before each epoch",
        )
    for number, (_, *by_rank) in enumerate(steps):
        drawn = [each.drawn_from for each in by_rank]
        if dropout != "rows" and None not in drawn and len(set(drawn)) < len(drawn):
            yield Finding(
                "same-masks",
                f"step {number}: ranks draw the same random numbers, so dropout has the same mask for different rows; "
                "seed each rank differently after the model has been made",
            )
            break


def _of_tensors(
    processes: Processes,
    options: CheckOptions,
    one: JobRecord,
    records: Sequence[JobRecord],
    comparisons: list[Comparison],
    tolerance: float,
    by_step: bool,
) -> Iterator[Finding]:
    place = next((n for n, each in enumerate(comparisons) if each.differing), None)
    if place is None:
        return
    first = comparisons[place]
    later = _later(options.precision, (first.step or 0) + (first.kind != "gradients"))
    around = Surroundings(ranks=options.ranks, rounding=PRECISIONS[options.precision] * later)
    if first.kind == "gradients" and first.step is not None:
        step = first.step
        alone = processes.run([Job(options, rank, alone=step, by_step=by_step) for rank in range(options.ranks)])
        own = [each.steps[-1] for each in alone if len(each.steps) > step]
        if len(own) == options.ranks:
            wanted = one.steps[step].gradients or {}
            by_own = [each.gradients or {} for each in own]
            by_rank = [each.steps[step].gradients or {} for each in records]
            first = comparisons[place] = compare(
                "gradients", step, wanted, by_rank, tolerance * later, by_own, to_largest=later > 1
            )
            around = dataclasses.replace(
                around,
                rows=tuple(len(each.steps[step].rows) for each in records),
                weights=weights_of_ranks(wanted, by_own, max(tolerance, 1e-6)),
                batch_norms=tuple(one.batch_norms),
                scaled=_scaled(own, max(tolerance, 1e-9)),
                adds_earlier=step > 0 and _adds_earlier(wanted, by_rank, records, step, tolerance * later),
            )
    yield diagnose(first, around)


def _adds_earlier(
    wanted: Values, by_rank: Sequence[Values], records: Sequence[JobRecord], step: int, tolerance: float
) -> bool:
    """Return True if each rank has the gradient of one process, and in addition what it had in the step before."""
    for got, record in zip(by_rank, records, strict=True):
        of_each = [(got.get(name), (record.steps[step - 1].gradients or {}).get(name), wanted[name]) for name in wanted]
        there = [(now, before, want) for now, before, want in of_each if isinstance(want, Tensor)]
        if not there or any(
            now is None or before is None or distance(now - before, want) > tolerance for now, before, want in there
        ):
            return False
    return True


def _scaled(own: Sequence[CheckStep], tolerance: float) -> tuple[float, ...]:
    """Return by how much each rank's program changes its gradient between backward and the step; empty if it does
    not."""
    found = []
    for step in own:
        given = {name: each for name, each in (step.gradients or {}).items() if each is not None}
        left = step.after | step.backward
        changed = [name for name in given if name in left and distance(given[name], left[name]) > tolerance]
        if changed:
            name = changed[0]
            found.append(float(given[name].norm() / left[name].norm()))
        else:
            found.append(1.0)
    return tuple(found) if any(each != 1.0 for each in found) else ()
