"""Steps of optimizers between two rounds: a difference is an error on all ranks; whatever all ranks do alike is not."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import lockstep
from lockstep._base.optimizer_steps import has_replicated_parameters, observe_steps, stop_observing
from lockstep.distributed.reduction.report.pass_log import StepLog
from lockstep.distributed.reduction.report.status import MOST_STEPS, UNKNOWN_STEPS
from lockstep.errors import OutOfSyncError, PeerError
from processes import on_processes
from programs.ranks import on_ranks, replicated
from small_modules import fails_in_backward, filled, one_weight, x_of

# ---------------------------------------------------------------------------------- what a rank counts


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)


def step_of(log, optimizer, inside=lambda: None):
    log.step_begins(optimizer)
    inside()
    log.step_ended(optimizer)


def test_steps_are_counted_from_a_round_to_the_next():
    log, optimizer = StepLog(), sgd(one_weight())
    step_of(log, optimizer)
    assert log.count == UNKNOWN_STEPS  # there was no round yet
    log.end_round(known=True)
    assert log.count == 0
    for count in range(1, 3):
        step_of(log, optimizer)
        assert log.count == count
    log.end_round(known=False)  # it has failed
    step_of(log, optimizer)
    assert log.count == UNKNOWN_STEPS
    log.end_round(known=True)
    for _ in range(MOST_STEPS + 3):
        step_of(log, optimizer)
    assert log.count == MOST_STEPS


def test_a_step_inside_of_another_one_is_a_part_of_it():
    log, outer, inner = StepLog(), sgd(one_weight()), sgd(one_weight())
    log.end_round(known=True)
    for count in range(1, 3):
        step_of(log, outer, lambda: [step_of(log, inner), step_of(log, outer)])
        assert log.count == count


def test_of_several_optimizers_the_one_with_most_steps_counts():
    log, first, second = StepLog(), sgd(one_weight()), sgd(one_weight())
    log.end_round(known=True)
    for count, optimizer in [(1, first), (1, second), (2, second), (2, first), (3, first)]:
        step_of(log, optimizer)
        assert log.count == count


def test_a_step_ends_after_the_rounds_in_its_closure():
    log, optimizer = StepLog(), sgd(one_weight())
    log.end_round(known=True)
    for _ in range(2):
        step_of(log, optimizer, lambda: [log.end_round(known=True), log.end_round(known=True)])
        assert log.count == 1
    step_of(log, optimizer, lambda: log.end_round(known=False))
    assert log.count == UNKNOWN_STEPS


def test_a_step_that_raises_does_not_count():
    log, optimizer = StepLog(), sgd(one_weight())
    log.end_round(known=True)
    log.step_begins(optimizer)
    step_of(log, optimizer)
    assert log.count == 1


# ---------------------------------------------------------------------------------- who is told


class Observer:
    def __init__(self, modules=()):
        self.seen = []
        self.parameters = {id(p) for module in modules for p in module.parameters()}
        observe_steps(self)

    def step_begins(self, optimizer, closure):
        self.seen.append(("begins", optimizer))

    def step_ended(self, optimizer, closure):
        self.seen.append(("ended", optimizer))

    def has_parameter_of(self, optimizer):
        return any(id(p) in self.parameters for group in optimizer.param_groups for p in group["params"])


def test_observers_are_told_of_each_step_as_long_as_they_exist():
    first, second, optimizer = Observer(), Observer(), sgd(one_weight())
    optimizer.step()
    assert first.seen == second.seen == [("begins", optimizer), ("ended", optimizer)]
    stop_observing(first)
    alive = weakref.ref(second)
    del second
    gc.collect()
    optimizer.step()
    assert len(first.seen) == 2
    assert alive() is None


@pytest.mark.around
@on_processes(1)
def test_a_step_in_compiled_code_is_seen_each_time(rank):
    warnings.filterwarnings("ignore", message=".*script_method")  # of what PyTorch's compiler imports
    observer, module = Observer(), one_weight()
    optimizer = sgd(module)
    module(torch.ones(1, 1)).backward()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        step()
    assert [what for what, _ in observer.seen] == ["begins", "ended"] * 3


@on_ranks(2)
def test_an_optimizer_of_replicated_parameters(rank):
    module, other = replicated(rank), one_weight()
    assert has_replicated_parameters(sgd(other, module))
    assert not has_replicated_parameters(sgd(other))


# ---------------------------------------------------------------------------------- mistakes


class Training:
    """One weight, whose gradient in step i is 12 i + r on rank r, and what each step gave."""

    def __init__(self, rank, wrapped=False):
        make = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
        self.rank = rank
        self.module = one_weight()
        self.model = make(self.module, process_group=rank.group)
        self.optimizer = sgd(self.module)

    def backward(self, number):
        self.model(torch.full((1, 1), 12.0 * number + self.rank.rank)).sum().backward()

    def step(self, number, steps=1):
        self.optimizer.zero_grad()
        self.backward(number)
        torch.testing.assert_close(self.module.weight.grad.item(), 12.0 * number + (self.rank.world - 1) / 2)
        for _ in range(steps):
            self.optimizer.step()


def one_backward_more(training):
    training.step(2, steps=0)
    training.optimizer.zero_grad()
    training.backward(1)


def one_backward_more_on_top(training):
    training.step(2, steps=0)
    training.backward(1)


def one_backward_more_in_the_next_step(training):
    """Nobody can tell it from the one that is due; the next one shows it."""
    training.step(2)
    training.step(3, steps=0)
    training.step(3)


def one_step_less(training):
    training.step(2, steps=0)
    training.step(3)


def one_step_more(training):
    training.step(2, steps=2)
    training.step(3)


MISTAKES = {  # what rank 1 does where the others make steps 2, 3 and 4, and when it is an error
    one_backward_more: 0,
    one_backward_more_on_top: 0,
    one_backward_more_in_the_next_step: 1,
    one_step_less: 0,
    one_step_more: 0,
}


@pytest.mark.parametrize("hosts", ["", "aaa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["replicate", "DistributedDataParallel"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(3, "hosts")
def test_a_backward_or_a_step_of_one_rank_alone_is_an_error_on_all_ranks(rank, mistake, before, wrapped):
    training = Training(rank, wrapped)
    for number in range(before):
        training.step(number)
    with pytest.raises(PeerError) as error:
        if rank.rank == 1:
            mistake(training)
        for number in range(2, 5):
            training.step(number)
    assert training.module.weight.grad is None  # nothing has been handed out
    nn.init.ones_(training.module.weight)  # the ranks have not made the same steps
    for number in range(5, 8):
        training.step(number)  # and training goes on
    fewer, more = (0, 1) if mistake is one_step_more else (1, 0)
    counts = ("1 step", "2 steps") if mistake is one_step_more else ("no steps", "1 step")
    at, text = before + 1 + MISTAKES[mistake], str(error.value)
    assert text.startswith(f"rank {rank.rank}: ranks {fewer} and {more} are not in the same step of the training: ")
    assert f"(number {at}), optimizers have made {counts[0]} on this module's parameters on rank {fewer}" in text
    assert f", and {counts[1]} on rank {more}. Rank {fewer} has run one backward more, or one step less" in text


# ---------------------------------------------------------------------------------- programs that are right


def two_layers():
    return filled(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))


def plain(rank, training):
    for number in range(5):
        training.step(number)


def accumulating(rank, training):
    """Micro-batches under `no_sync()`, and two that synchronise before one step."""
    for _ in range(3):
        training.optimizer.zero_grad()
        with training.model.no_sync():
            training.backward(1)
        training.backward(1)
        training.backward(1)
        training.optimizer.step()


def without_steps(rank, training):
    """Gradients that are looked at, and dropped, before, between and after steps."""
    for looks in (2, 1, 0, 3):
        for _ in range(looks):
            training.optimizer.zero_grad()
            training.backward(3)
        training.step(1)
    for _ in range(2):
        training.optimizer.zero_grad()
        training.backward(3)


def by_hand(rank, training):
    for number in range(4):
        training.model.zero_grad()
        training.backward(1 + number)
        with torch.no_grad():
            training.module.weight -= 1e-3 * training.module.weight.grad


def scaled(rank, training):
    """GradScaler leaves out a step where any rank's gradient is infinite: on all ranks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        training.optimizer.zero_grad()
        bad = number in (0, 3) and rank.rank == 0
        x = torch.full((1, 1), torch.inf if bad else 1.0)
        scaler.scale(training.model(x).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0


def adversaries(rank):
    """Two modules on one group, one of which steps three times as often, through both."""
    first, second = replicated(rank), replicated(rank)
    one, two = sgd(first), sgd(second)
    for number in range(8):
        one.zero_grad()
        two.zero_grad()
        second(first(x_of(rank))).sum().backward()
        (two if number % 4 == 3 else one).step()
    return first, second


def two_groups_of_parameters(rank):
    """Two optimizers for the parts of one module, and one for what is no part of it, on one rank alone."""
    module = replicated(rank, two_layers)
    own = one_weight()
    optimizers = [sgd(part) for part in module] + [sgd(own)] * rank.rank
    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        (module(x_of(rank)).sum() + own(x_of(rank)).sum()).backward()
        for each in optimizers:
            each.step()
    return [module]


def in_closures(rank, training):
    optimizer = torch.optim.LBFGS(training.module.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (training.model(torch.ones(1, 1)) - 5).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def in_backward(rank):
    module = replicated(rank, two_layers)
    for each in module.parameters():
        optimizer = torch.optim.SGD([each], lr=1e-3)
        each.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    for _ in range(4):
        module(x_of(rank)).sum().backward()
    return [module]


class Nested(torch.optim.SGD):
    """Steps in its own step: that of its base class, and another optimizer's on some ranks."""

    def __init__(self, parameters, other):
        super().__init__(parameters, lr=1e-3)
        self.other = other

    def step(self, closure=None):
        if self.other is not None:
            self.other.step()
        super().step(closure)


def nested(rank, training):
    sgd(one_weight()).step()  # from now on SGD's own step has hooks, too
    other = torch.optim.SGD([*training.module.parameters()], lr=0.0) if rank.rank else None
    training.optimizer = Nested(training.module.parameters(), other)
    for number in range(4):
        training.step(number)


def perturbed(rank, training):
    """Sharpness-aware minimisation: each rank perturbs its weights by its own gradient, and puts them back."""
    for _ in range(3):
        before = training.module.weight.data
        with training.model.no_sync():
            training.backward(1)
        training.module.weight.data = before + 0.1 * training.module.weight.grad.sign()
        training.optimizer.zero_grad()
        training.backward(1)
        training.module.weight.data = before
        training.optimizer.step()
        training.optimizer.zero_grad()


def averaged(rank, training):
    """An average of the weights on rank 0 alone, and an optimizer over a copy of them there."""
    mean = torch.optim.swa_utils.AveragedModel(copy.deepcopy(training.module)) if rank.rank == 0 else None
    for number in range(3):
        training.step(number)
        if mean is not None:
            mean.update_parameters(training.module)
            probe = copy.deepcopy(training.module)
            probe(torch.ones(1, 1)).sum().backward()
            sgd(probe).step()


def uneven(rank, training):
    """Ranks that run out of batches; `join()` is in loops/test_join_gradients.py."""
    for _ in range(3):
        for x in lockstep.batches([x_of(rank)] * (2 + rank.rank), training.model):
            training.optimizer.zero_grad()
            training.model(x).sum().backward()
            training.optimizer.step()


def left_out(rank, training):
    """Batches that one rank cannot use: it, or all others, leave out the optimizer's step, too."""
    for number in range(8):
        bad = number % 3 == 1 and rank.rank == number % 2
        training.optimizer.zero_grad()
        with lockstep.loop.skip_on(ArithmeticError, modules=[training.model]):
            fails_in_backward(training.model(x_of(rank)), bad).sum().backward()
            if number % 2:
                training.optimizer.step()
        if number % 2 == 0:
            training.optimizer.step()


def caught(rank, training):
    """Errors of backward that all ranks catch; the rank that has failed goes on without a step, the others step."""
    for number in range(6):
        training.optimizer.zero_grad()
        try:
            fails_in_backward(training.model(x_of(rank)), number % 2 == 1 and rank.rank == 1).sum().backward()
        except ArithmeticError:
            continue
        except PeerError:
            pass
        training.optimizer.step()


def sharded(rank):
    module = replicated(rank, two_layers)
    optimizer = lockstep.shard_optimizer(torch.optim.AdamW(module.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        module(x_of(rank)).sum().backward()
        optimizer.step()
    return [module]


def frozen_for_a_while(rank):
    """Phases in which the module is frozen, on all ranks or on one, and phases without steps."""
    module = replicated(rank, two_layers)
    optimizer = sgd(module)
    for frozen, steps in [((), 1), ((0, 1), 1), ((0,), 0), ((0,), 1), ((), 2)]:
        for _ in range(2):
            for part in range(2):
                module[part].requires_grad_(part not in frozen)
            optimizer.zero_grad()
            module(x_of(rank).requires_grad_()).sum().backward()
            for _ in range(steps):
                optimizer.step()
    return [module]


def resumed(rank):
    """A run that goes on from a state of training in the middle of a step, on a new module."""
    training = Training(rank)
    training.step(0)
    training.backward(1)
    state = lockstep.distributed.training_state_dict(training.model)
    again = Training(rank)
    again.module.load_state_dict(training.module.state_dict())
    if rank.rank:
        again.optimizer.step()  # such as some do to make the state of an optimizer, before it is loaded
    lockstep.distributed.load_training_state_dict(again.model, state)
    for number in range(3):
        again.step(number)
    return [again.module]


OF_ONE_WEIGHT = [plain, accumulating, without_steps, by_hand, scaled, in_closures, nested, perturbed, averaged]
OF_ONE_WEIGHT += [uneven, left_out, caught]  # whose batches do not all count


@pytest.mark.parametrize("program", OF_ONE_WEIGHT)
@on_ranks(2)
def test_programs_that_do_the_same_on_all_ranks(rank, program):
    training = Training(rank)
    program(rank, training)
    lockstep.check_in_sync(training.module, rank.group)


@pytest.mark.parametrize(
    "program", [adversaries, two_groups_of_parameters, in_backward, sharded, frozen_for_a_while, resumed]
)
@on_ranks(2)
def test_programs_of_other_modules_that_do_the_same_on_all_ranks(rank, program):
    for module in program(rank):
        lockstep.check_in_sync(module, rank.group)


@on_ranks(2)
def test_steps_of_one_rank_on_a_module_with_shares_are_known_by_what_they_leave(rank):
    """Their number is not compared, since each exchange says of which batch it is."""
    module = replicated(rank, shares=2)
    optimizer = sgd(module)
    with pytest.raises(OutOfSyncError, match=r"^parameter weight is out of sync: .* replicate\(\) and step 1\. "):
        for batch in lockstep.shares.GlobalBatches(torch.ones(8, 1), 4, 2, process_group=rank.group):
            optimizer.zero_grad()
            for x in batch:
                module(x).sum().backward()
            for _ in range(1 + rank.rank):
                optimizer.step()
