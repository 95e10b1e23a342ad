"""Says what a difference means: a pure function over what has been measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep._base.texts import DOCUMENTATION
from lockstep.check.measuring import Comparison, Facts

PAGE = "not_equal.md"
"""The page of the documentation with a section for each cause."""

SECTIONS = {
    "failed": "the-ranks-fail",
    "rows": "rows-that-several-ranks-or-none-have-seen",
    "same-order": "the-same-order-in-each-epoch",
    "same-masks": "the-same-dropout-masks-on-all-ranks",
    "initial-weights": "different-weights-before-the-first-step",
    "rounding": "a-difference-in-rounding",
    "not-synchronised": "gradients-that-are-not-synchronised",
    "summed": "n-times-too-large",
    "averaged-twice": "n-times-too-small",
    "own-factor": "a-factor-in-each-rank-s-own-gradient",
    "mean-of-means": "a-mean-of-means",
    "clipped-before": "clipping-before-the-reduction",
    "earlier-gradients": "gradients-of-earlier-steps",
    "batch-statistics": "statistics-of-each-rank-s-rows",
    "whole-batch-loss": "a-loss-that-compares-rows",
    "other-gradients": "gradients-that-differ-otherwise",
    "learning-rate": "steps-of-another-length",
    "other-steps": "steps-that-differ-otherwise",
    "only-buffers": "only-buffers-differ",
    "drift": "ranks-that-drift-apart",
}
"""The causes, each with its section of the page."""


@dataclass(frozen=True)
class Finding:
    """A difference: its cause (one of ``SECTIONS``) and a sentence."""

    cause: str
    text: str

    @property
    def section(self) -> str:
        """Where the documentation explains it."""
        return f"{PAGE}#{SECTIONS[self.cause]}"

    @property
    def link(self) -> str:
        """Its address."""
        return f"{DOCUMENTATION}/{self.section.replace('.md', '.html')}"


@dataclass(frozen=True)
class Surroundings:
    """What is known beside the tensors, at the first one that differs."""

    ranks: int
    rounding: float = 1e-6
    """The difference that rounding may make in this precision."""
    rows: tuple[int, ...] = ()
    """The number of rows of each rank in that step."""
    weights: tuple[float, ...] | None = None
    """Those with which the ranks' own gradients add up to that of one process, if there are any."""
    adds_earlier: bool = False
    """True if each rank has the gradient of one process, and in addition that of the step before."""
    batch_norms: tuple[str, ...] = ()
    scaled: tuple[float, ...] = ()
    """For each rank, the factor by which its program changes its gradient between backward and the step, when it
    trains alone; empty if it does not."""


def diagnose(comparison: Comparison, around: Surroundings) -> Finding:
    """Return what the tensors that differ mean; there is one at least."""
    first = comparison.differing[0]
    gist = f"{comparison.kind[:-1]} {first.name} {_where(comparison)} {_amount(first)}"
    if comparison.step is None:
        return Finding("initial-weights", f"{gist}; replicas must start with the same values")
    if all(each.alike and each.difference <= around.rounding for each in comparison.differing):
        return Finding("rounding", f"{gist}, which the order of sums explains")
    judge = {"gradients": _of_gradients, "weights": _of_weights, "buffers": _of_buffers}[comparison.kind]
    return judge(gist, comparison, around)


def _of_gradients(gist: str, comparison: Comparison, around: Surroundings) -> Finding:
    apart = [each for each in comparison.differing if not each.alike or each.of_one is not None]
    if apart:
        return _not_synchronised(gist, apart, comparison)
    if around.adds_earlier:
        return Finding(
            "earlier-gradients",
            f"{gist}: it is that of one process, and in addition that of the step before; call optimizer.zero_grad() "
            "before the first backward of each step",
        )
    slack = max(1e-3, around.rounding)
    by_reduction = _common([each.own_factor for each in comparison.differing], slack)
    if _is(by_reduction, around.ranks, slack):
        return Finding("summed", f"{gist}: the ranks' gradients are summed instead of averaged")
    if _is(by_reduction, 1 / around.ranks, slack):
        return Finding("averaged-twice", f"{gist}: the ranks' gradients are divided by their number twice")
    ratio = _common([each.ratio for each in comparison.differing], slack)
    is_mean = _is(by_reduction, 1, slack)
    if ratio is not None:
        return _factor(gist, ratio, around.ranks, is_mean, slack)
    if around.scaled and is_mean:
        by = ", ".join(f"{each:.3g} on rank {rank}" for rank, each in enumerate(around.scaled))
        return Finding(
            "clipped-before",
            f"{gist}: each rank changes its own gradient before the ranks' are averaged (a factor of {by}); clip the "
            "mean, after backward has synchronised it",
        )
    if around.weights is not None and is_mean and _is(sum(around.weights), 1, slack):
        return _mean_of_means(gist, around.weights, around)
    if around.batch_norms:
        return Finding(
            "batch-statistics",
            f"{gist}: {around.batch_norms[0]} normalises with the statistics of each rank's rows; convert the "
            "model by lockstep.local.SyncBatchNorm.convert_sync_batchnorm(model)",
        )
    if around.weights is not None and is_mean:
        shown = " : ".join(f"{each:.3g}" for each in around.weights)
        return Finding(
            "own-factor",
            f"{gist}: in one process the ranks' own gradients have the weights {shown}, which do not add up to 1, so "
            "each rank's has a factor of its own before the reduction",
        )
    if is_mean:
        return Finding(
            "whole-batch-loss",
            f"{gist}: it is the mean of the ranks' own gradients, of which no weighted sum is that of one process, so "
            "the loss compares rows with each other; gather them with lockstep.loop.gather_rows()",
        )
    return Finding("other-gradients", f"{gist}: it is neither the mean nor a sum of the ranks' own gradients")


def _not_synchronised(gist: str, apart: Sequence[Facts], comparison: Comparison) -> Finding:
    first = apart[0]
    of_all = len(apart) == comparison.count
    if first.of_one is not None:
        whose = f"all ranks have that of the rows of rank {first.of_one}"
    elif first.is_own:
        whose = "each rank has that of its own rows"
    else:
        whose = "it differs between ranks"
    if of_all:
        why = "no gradient is synchronised: no_sync() around the last backward, or the model is called past its wrapper"
    else:
        names = ", ".join(each.name for each in apart[:3]) + (", ..." if len(apart) > 3 else "")
        why = (
            f"{names} of {comparison.count} tensors are not synchronised: used outside of the wrapper's forward, or "
            "unfrozen or added after wrapping"
        )
    return Finding("not-synchronised", f"{gist}: {whose}; {why}")


def _factor(gist: str, ratio: float, ranks: int, is_mean: bool, slack: float) -> Finding:
    if is_mean:
        return Finding(
            "own-factor",
            f"{gist}: each rank's own gradient has this factor, before the reduction; a loss that sums or divides by "
            "the rows of all ranks, or micro-batches that are not divided by their number",
        )
    if _is(ratio, ranks, slack):
        return Finding("summed", f"{gist}: the ranks' gradients are summed instead of averaged")
    if _is(ratio, 1 / ranks, slack):
        return Finding("averaged-twice", f"{gist}: the ranks' gradients are divided by their number twice")
    return Finding("own-factor", f"{gist}: the whole gradient is multiplied")


def _mean_of_means(gist: str, weights: Sequence[float], around: Surroundings) -> Finding:
    shown = " : ".join(f"{each:.3g}" for each in weights)
    total = sum(around.rows) or 1
    by_rows = len(around.rows) == len(weights) and all(
        abs(w - n / total) < 1e-3 for w, n in zip(weights, around.rows, strict=True)
    )
    what = "as many as it has rows" if by_rows else "as many as it has tokens, or whatever its loss divides by"
    return Finding(
        "mean-of-means",
        f"{gist}: the mean of the ranks' means. In one process the ranks' rows have the weights {shown}, each {what}; "
        "use lockstep.accumulate(model, weight=...) with a loss that sums",
    )


def _of_weights(gist: str, comparison: Comparison, around: Surroundings) -> Finding:
    if not all(each.alike for each in comparison.differing):
        return Finding(
            "drift",
            f"{gist}, although the gradients are equal: the replicas drift apart. A number of the optimizer is "
            "another one on some rank, something writes to weights on one rank alone, or an optimizer steps on "
            "gradients of one rank alone",
        )
    first = _common([each.ratio for each in comparison.differing], max(1e-3, around.rounding))
    if first is not None:
        return Finding(
            "learning-rate",
            f"{gist}: equal gradients, but each step is {first:.4g} times as long; the learning rate depends on the "
            "number of ranks",
        )
    return Finding("other-steps", f"{gist}, although the gradients are equal: the optimizer steps differently")


def _of_buffers(gist: str, comparison: Comparison, around: Surroundings) -> Finding:
    return Finding(
        "only-buffers",
        f"{gist}; gradients and weights are equal. Buffers have the statistics of one rank's rows: use "
        "lockstep.local.SyncBatchNorm, "
        'or replicate(model, buffer_policy="mean")',
    )


def _common(factors: Sequence[float | None], slack: float) -> float | None:
    """Return the factor that all tensors have, if they have one."""
    first = factors[0]
    if first is None or not all(each is not None and _is(each, first, slack) for each in factors):
        return None
    return first


def _is(factor: float | None, expected: float, slack: float) -> bool:
    return factor is not None and abs(factor - expected) <= slack * abs(expected)


def _where(comparison: Comparison) -> str:
    return "before the first step" if comparison.step is None else f"in step {comparison.step}"


def _amount(facts: Facts) -> str:
    if facts.ratio == 0:
        return "is 0 on every rank"
    if facts.ratio is not None and abs(facts.ratio - 1) > 1e-9:
        return f"is {facts.ratio:.6g} times that of one process on every rank"
    if not facts.alike and all(each is not None for each in facts.ratios):
        each = ", ".join(f"{ratio:.4g} on rank {rank}" for rank, ratio in enumerate(facts.ratios))
        return f"is a multiple of that of one process ({each})"
    return f"differs from that of one process by {facts.difference:.2g} of its norm"
