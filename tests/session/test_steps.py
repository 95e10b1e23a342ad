"""The step of a run: batches of `run.batches`, or else steps of its optimizers; what failures say of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import lockstep
from lockstep.errors import PeerFailure
from lockstep.failures.progress import Phase, Progress
from lockstep.session.step_counter import StepCounter
from processes import on_processes, run_processes
from small_modules import one_weight

# ---------------------------------------------------------------------------------- what counts


def sgd(module, kind=SGD):
    return kind(module.parameters(), lr=1e-3)


@pytest.fixture
def counter():
    progress, phases = Progress("steps", 0, 1), []
    counter = StepCounter(progress, phases.append)
    counter.step = lambda: progress.step
    counter.phases = phases
    yield counter
    counter.close()
    progress.close()


@pytest.fixture
def group():
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


@pytest.fixture
def module(group):
    return lockstep.replicate(one_weight(), process_group=group)


def test_a_step_has_its_phase(counter, module):
    sgd(module).step()
    assert counter.phases == [Phase.OPTIMIZER, Phase.TRAINING]


def test_the_optimizer_with_most_steps_counts(counter, module):
    """As in a GAN whose discriminator makes three steps for each of the generator; then another one alone."""
    discriminator, generator, last = sgd(module), sgd(module), sgd(module)
    for number in range(1, 10):
        discriminator.step()
        assert counter.step() == number
        if number % 3 == 0:
            generator.step()
            assert counter.step() == number
    for number in range(9, 12):  # it begins with the step at which the run is
        last.step()
        assert counter.step() == number
    discriminator.step()
    assert counter.step() == 11


def test_who_trains_no_replicated_module_does_not_count(counter, module):
    """Such as the optimizer of a copy of the weights."""
    optimizer, other = sgd(module), sgd(one_weight())
    for number in range(1, 4):
        for _ in range(3):
            sgd(copy.deepcopy(module)).step()
            other.step()
        optimizer.step()
        assert counter.step() == number


class Nested(SGD):
    """Steps in its own step."""

    def step(self, closure=None):
        self.other.step()
        super().step(closure)


def test_steps_in_the_step_of_an_optimizer_do_not_count(counter, module):
    optimizer = sgd(module, Nested)
    optimizer.other = sgd(module)
    for number in range(1, 4):
        optimizer.step()
        assert counter.step() == number


def test_optimizers_in_backward_make_one_step_together(counter, group):
    network = lockstep.replicate(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), process_group=group)
    for each in network.parameters():
        optimizer = SGD([each], lr=1e-3)
        each.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    for number in range(1, 4):
        network(torch.ones(1, 1)).sum().backward()
        assert counter.step() == number


def test_a_step_with_a_closure_counts_once_and_one_that_raises_not_at_all(counter, module):
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (module(torch.ones(1, 1)) - 3).square().sum()
        loss.backward()
        return loss

    for number in range(1, 4):
        optimizer.step(closure)
        assert counter.step() == number
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert counter.step() == number


def test_a_resumed_run_counts_on(counter, module):
    optimizer, second = sgd(module), sgd(module)
    optimizer.step()
    counter.go_on_from(40)
    for each, number in [(optimizer, 41), (second, 41), (second, 42), (optimizer, 42)]:
        each.step()
        assert counter.step() == number


@on_processes(1, launched=True)
def test_where_no_module_is_replicated_all_optimizers_count(rank):
    with lockstep.session() as run:
        optimizer = sgd(one_weight())
        for number in range(1, 4):
            optimizer.step()
            assert run.step == number


def test_batches_count_alone():
    with lockstep.session() as run:
        model = lockstep.replicate(one_weight())
        optimizer = sgd(model)
        optimizer.step()
        assert run.step == 1
        with torch.no_grad():
            assert len(list(run.batches([0] * 3))) == 3  # an evaluation
        optimizer.step()
        assert run.step == 2
        for number, _ in enumerate(run.batches([0] * 3), 3):
            for _ in range(2):
                optimizer.step()
            assert run.step == number
        optimizer.step()
        assert run.step == 5


def test_a_checkpoint_has_the_number_of_steps_in_its_name(tmp_path):
    for begin, end in [(0, 3), (3, 5)]:
        with lockstep.session() as run:
            model = lockstep.replicate(one_weight())
            optimizer = sgd(model)
            found = run.resume(tmp_path, model=model, optimizer=optimizer)
            assert run.step == begin == (found.step if found else 0)
            for _ in range(begin, end):
                optimizer.step()
            assert run.save(tmp_path, model=model, optimizer=optimizer).name.endswith(f"-step-{end:08}")


# ---------------------------------------------------------------------------------- what failures say


def plain_loop(rank, backend, what):
    """Rank 1 does something else in the third step of six."""
    with lockstep.session(timeout=60.0, backend=backend):
        model = lockstep.replicate(one_weight())
        optimizer = sgd(model)
        for number in range(6):
            if (rank.rank, number) == (1, 2):
                if what == "raises":
                    raise ValueError("bad batch")
                if what == "leaves out":
                    continue
                return
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()


LEFT = (
    "because rank 1 has left the training in good order, while others still needed it, after step {0}: optimizer steps "
    "made are {0} on rank 1 and {0} on rank 0, in backward now"
)


FAILED = "because rank 1 failed after step {0}, in training: ValueError: bad batch"


@pytest.mark.parametrize(
    ("what", "backend", "step", "text", "own"),
    [
        ("raises", "shm", 2, FAILED, ValueError),
        ("raises", "gloo", 2, FAILED, ValueError),
        ("ends", "gloo", 2, LEFT, type(None)),
        ("leaves out", "shm", 5, LEFT, type(None)),
    ],
)
def test_failures_in_a_plain_loop_have_a_step(what, backend, step, text, own):
    first, second = run_processes(2, plain_loop, backend, what, errors=True, launched=True)
    assert isinstance(first.error, PeerFailure)
    assert text.format(step) in str(first.error)
    assert (first.error.rank, first.error.step) == (1, step)
    assert isinstance(second.error, own)
