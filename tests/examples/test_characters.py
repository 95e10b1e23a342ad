"""The small transformer that writes, in one process and in two that share each batch."""

import importlib
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import lockstep
from example_programs import EXAMPLES, run_in_ranks
from processes import run_processes

PASSAGES, MICRO_BATCH = 13, 3
QUICK = ("--steps", "20", "--batch-size", "16", "--micro-batch-size", "3", "--length", "60")


def assert_it_learns_and_writes(output):
    begin, then = [
        float(loss) for loss in re.findall(r"^step \d\d/20  loss ([\d.]+) per character", output, re.MULTILINE)
    ]
    assert then < begin
    written = output.split("characters/s\n")[-1]
    assert written.startswith("\n    def ")
    assert len(written.removesuffix("\n")) == 60


def test_it_learns_and_writes_in_one_process():
    (((status, output, error),),) = run_in_ranks(1, "characters", list(QUICK))
    assert (status, error) == (0, "")
    assert_it_learns_and_writes(output)


def test_it_learns_and_writes_in_two_processes_of_which_one_speaks():
    (((status, output, error), other),) = run_in_ranks(2, "characters", list(QUICK))
    assert (status, error) == (0, "")
    assert other == (0, "", "")
    assert_it_learns_and_writes(output)


def gradients_of_a_rank(rank, folder):
    sys.path.insert(0, folder)
    characters = importlib.import_module("characters")
    passages = characters.load_passages()[:PASSAGES]
    torch.manual_seed(rank.rank)  # the first rank's weights count
    model = lockstep.replicate(characters.Transformer().double())
    loss_sum, count = characters.leave_gradients(model, passages[rank.rank :: dist.get_world_size()], MICRO_BATCH)
    return loss_sum, count, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_gradient_is_the_mean_over_all_characters_of_all_processes():
    ranks = run_processes(2, gradients_of_a_rank, str(EXAMPLES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        before = set(sys.modules)
        characters = importlib.import_module("characters")
    for name in ("characters", "passages"):
        if name not in before:
            del sys.modules[name]
    torch.manual_seed(0)
    model = characters.Transformer().double()
    passages = characters.load_passages()[:PASSAGES]
    loss = sum(cross_entropy(model(p[None, :-1])[0], p[1:], reduction="sum") for p in passages)
    count = sum(len(passage) - 1 for passage in passages)
    (loss / count).backward()

    assert ranks[0][1] != ranks[1][1]
    assert ranks[0][1] + ranks[1][1] == count
    assert ranks[0][0] + ranks[1][0] == pytest.approx(loss.item(), rel=1e-12)
    for _, _, gradients in ranks:
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-13, msg=name)
