"""Programs with a fault, in processes: each is named by its cause, and right programs are equal to one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lockstep.check import checking
from lockstep.check.checking import check, make_options
from lockstep.check.job import PRECISIONS
from lockstep.check.processes import started
from lockstep.check.sources import parse_source
from lockstep.errors import CheckError, OptionError

sys.path.insert(0, str(Path(__file__).parent))

import planted


@pytest.fixture(scope="module")
def processes():
    with started(60) as found:
        yield found


def findings(processes, case, wrap="ddp", ranks=2, **options):
    precision = options.get("precision", "float64")
    tolerance = options.pop("tolerance", PRECISIONS[precision])
    return check(make_options(case, ranks, wrap, **options), processes, tolerance)


def causes(report):
    return [each.cause for each in report.findings]


RIGHT = [
    (planted.right, "ddp", {}),
    (planted.right, "lockstep", {"ranks": 3}),
    (planted.right_adamw, "fsdp2", {}),
    (planted.right_adamw, "lockstep", {"split": "strided"}),
    (planted.right_adamw, "lockstep", {"precision": "float32"}),
    (planted.right_adamw, "ddp", {"precision": "bf16"}),
    (planted.sampled, "ddp", {}),
    (planted.dropping, "lockstep", {}),
    (planted.dropping, "lockstep", {"dropout": "rows"}),
    (planted.dropping_everywhere, "lockstep", {}),
    (planted.dropping_everywhere, "ddp", {}),
    (planted.weighted_by_tokens, "lockstep", {}),
    (planted.accumulated, "ddp", {}),
    (planted.clipped, "ddp", {}),
    (planted.clipped_beside_a_loss, "ddp", {}),
    (planted.clipped_beside_a_loss, "lockstep", {}),
    (planted.used_outside, "ddp", {}),
    (planted.used_outside, "lockstep", {}),
    (planted.grown, "lockstep", {}),
    (planted.unfrozen, "lockstep", {}),
]


@pytest.mark.parametrize(("case", "wrap", "options"), RIGHT)
def test_a_right_program_is_equal_to_one_process(processes, case, wrap, options):
    report = findings(processes, case, wrap, **options)
    assert report.is_equal, str(report)


WRONG = [
    (planted.without_set_epoch, "ddp", {}, "same-order", "sampler.set_epoch(epoch)"),
    (planted.without_sampler, "ddp", {}, "rows", "4 are taken once too often and 4 by no rank"),
    (planted.same_masks, "ddp", {}, "same-masks", "seed each rank differently"),
    (planted.mean_of_tokens, "ddp", {}, "mean-of-means", "have the weights 0.167 : 0.833"),
    (planted.right, "ddp", {"split": (9, 3)}, "mean-of-means", "each as many as it has rows"),
    (planted.summed_loss, "ddp", {}, "own-factor", "is 0.5 times that of one process"),
    (planted.compares_rows, "lockstep", {}, "whole-batch-loss", "gather_rows"),
    (planted.normalised, "lockstep", {}, "batch-statistics", "1 normalises"),
    (planted.counted, "lockstep", {}, "only-buffers", "buffer seen"),
    (planted.accumulated_without_division, "ddp", {}, "own-factor", "is 3 times"),
    (planted.no_sync_around_all, "ddp", {}, "not-synchronised", "no gradient is synchronised"),
    (planted.clipped_before, "ddp", {}, "clipped-before", "clip the mean"),
    (planted.clipped_before, "lockstep", {}, "clipped-before", "clip the mean"),
    (planted.clipped_before_beside_a_loss, "lockstep", {}, "clipped-before", "clip the mean"),
    (planted.without_zero_grad, "ddp", {}, "earlier-gradients", "in step 1"),
    (planted.without_zero_grad, "lockstep", {}, "earlier-gradients", "optimizer.zero_grad()"),
    (planted.scaled_learning_rate, "ddp", {}, "learning-rate", "2 times as long"),
    (planted.own_learning_rate, "ddp", {}, "drift", "although the gradients are equal"),
    (planted.grown, "ddp", {}, "not-synchronised", "added.weight, added.bias of 4 tensors are not synchronised"),
    (planted.past_the_wrapper, "ddp", {}, "not-synchronised", "no gradient is synchronised"),
    (planted.unfrozen, "ddp", {}, "not-synchronised", "0.weight of 4 tensors are not synchronised"),
    (planted.steps_on_local_gradients, "ddp", {}, "drift", "in step 0"),
    (planted.right, planted.sums, {}, "summed", "is 2 times that of one process on every rank"),
    (planted.right, planted.divides_twice, {}, "averaged-twice", "is 0.5 times"),
    (planted.right, planted.draws_anew, {}, "initial-weights", "before the first step"),
    (planted.right, planted.takes_rank_0s, {}, "not-synchronised", "all ranks have that of the rows of rank 0"),
    (planted.right, planted.fails, {}, "failed", "rank 1 fails in step 0: ValueError: this rank cannot"),
    (planted.right, planted.sums, {"precision": "bf16"}, "summed", "averaged"),
    (planted.mean_of_tokens, "ddp", {"precision": "bf16"}, "mean-of-means", "0.1"),
    (planted.scaled_learning_rate, "ddp", {"precision": "bf16"}, "learning-rate", "times as long"),
    (planted.no_sync_around_all, "ddp", {"precision": "float32"}, "not-synchronised", "no gradient"),
    (planted.own_learning_rate, "ddp", {"precision": "bf16"}, "drift", "although the gradients are equal"),
    (planted.normalised, "ddp", {"precision": "bf16"}, "batch-statistics", "1 normalises"),
    (planted.right, "ddp", {"tolerance": 0.0}, "rounding", "order of sums"),
]


@pytest.mark.parametrize(("case", "wrap", "options", "cause", "words"), WRONG)
def test_a_fault_is_named_by_its_cause(processes, case, wrap, options, cause, words):
    report = findings(processes, case, wrap, **options)
    assert causes(report)[:1] == [cause], str(report)
    assert words in report.findings[0].text


NOTHING = {
    "raise ValueError('no data')": "ValueError: no data",
    "return 3": "returned a int; expected a lockstep.check.Case",
    "return Case(net, [torch.ones(4, 3)], lambda m, x: m(x).sum() * float('nan'))": "is not finite in one process",
    "return Case(net, [torch.ones(4, 3)], step=lambda *_: None)": "no weight of the case has moved",
    "return Case(net, [torch.ones(1, 3)], lambda m, x: m(x).sum())": "has 1 rows for 2 ranks",
    "return Case(net, [], lambda m, x: m(x).sum())": r"Case\(\) got no batches",
    "return Case(net, [1])": "neither a loss nor a step",
}
WRONG_CASES = {
    "return None": "returned a NoneType; expected a lockstep.check.Case",
    "return Case(net, [torch.ones(4, 3)])": "neither a loss nor a step",
    "return Case(net, (torch.ones(4, 3) for _ in range(2)), torch.sum)": "got a generator as its batches",
    "return Case(net, [torch.ones(4, 3)], torch.sum, torch.optim.SGD(net.parameters()))": "got a SGD as its optimizer",
}


@pytest.mark.parametrize(("body", "message"), [*WRONG_CASES.items(), ("", "has no function case")])
def test_what_is_no_case_is_told_before_a_process_starts(monkeypatch, body, message, tmp_path):
    monkeypatch.setattr(checking, "started", lambda timeout: pytest.fail("a process starts"))
    head = "import torch\nfrom lockstep.check import Case\nnet = torch.nn.Linear(3, 1)\n"
    file = tmp_path / f"wrong{len(message)}.py"
    file.write_text(head + (f"def case():\n    {body}\n" if body else ""))
    state = torch.get_rng_state()
    with pytest.raises(OptionError, match=message):
        checking.compare_with_one_process(parse_source(f"{file}:case", "case"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("body", "message"), NOTHING.items())
def test_a_case_with_nothing_to_compare_cannot_be_checked(processes, body, message, tmp_path):
    head = "import torch\nfrom lockstep.check import Case\nnet = torch.nn.Linear(3, 1)\ndef case():\n    "
    file = tmp_path / f"nothing{list(NOTHING).index(body)}.py"
    file.write_text(head + body + "\n")
    with pytest.raises(CheckError, match=message):
        findings(processes, parse_source(f"{file}:case", "case"))


def test_a_rank_that_hangs_ends_the_check_and_says_where_it_is():
    with started(40) as processes:  # in which the one process has to train, on a busy machine, too
        report = findings(processes, planted.right, planted.hangs)
    assert causes(report) == ["failed"]
    assert "in hangs" in report.error
