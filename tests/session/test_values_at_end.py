"""What has drifted apart since the last look is named at the end of a session that ends well, and nothing else is."""

import functools
import gc
import signal
import sys
import warnings

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OutOfSyncError, PeerFailure
from processes import on_processes, run_processes


class Training:
    """A replicated module in a session of two ranks, and its optimizer."""

    def __init__(self, run, optimizer=torch.optim.AdamW, wrap=lockstep.replicate, **options):
        self.run = run
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.model = wrap(self.net, **options)
        self.optimizer = optimizer([p for p in self.net.parameters() if p.requires_grad], 0.1)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4) + self.run.rank).square().sum().backward()
        self.optimizer.step()

    def train(self, steps=3):
        for _ in range(steps):
            self.step()
        return self


def trained(then=lambda training: None, steps=3, on=(0, 1), **options):
    """A program that trains for some steps, and then does something, on both ranks or one."""

    def program(run):
        training = Training(run, **options).train(steps)
        if run.rank in on:
            then(training)
        return training

    return program


def add_rank(training):
    training.net[0].weight.data += training.run.rank


def step_clipped_on_rank_0(training):
    training.optimizer.zero_grad()
    training.model(torch.ones(2, 4)).sum().backward()
    if training.run.is_main:
        torch.nn.utils.clip_grad_value_(training.net.parameters(), 1e-3)
    training.optimizer.step()


def frozen(run):
    net = lockstep.replicate(nn.Linear(2, 2).requires_grad_(False))
    net.bias.data += run.rank
    return net


def second_module(run):
    """The first one is alike, and the third one, which is like the second, is gone on one rank."""
    first, second, third = (Training(run).train() for _ in range(3))
    other = lockstep.replicate(nn.Linear(5, 1))
    other.weight.data += run.rank
    if run.is_main:
        del third
        gc.collect()
    return [first, second, other]


A_WEIGHT = trained(lambda t: t.net[1].weight.data[0, t.run.rank].add_(1))
DIGEST = "is out of sync: digest "
BEGINNING = "between replicate() and the end of the session"
DRIFT = {
    "a weight": (A_WEIGHT, f"parameter 1.weight {DIGEST}", "between step 1 and the end of the session, after step 3"),
    "a rate": (
        trained(lambda t: t.optimizer.param_groups[0].update(lr=0.1 / (1 + t.run.rank))),
        "optimizer AdamW, group 0, lr: 0.1 on rank 0, 0.05 on rank 1, so ",
        "the end of the session, after step 3",
    ),
    "the optimizer's state": (
        trained(lambda t: t.optimizer.state[t.net[0].bias]["exp_avg"].mul_(t.run.rank)),
        f"exp_avg of parameter 0.bias in AdamW {DIGEST}",
        "The optimizer's state alone differs",
    ),
    "the last step": (
        trained(step_clipped_on_rank_0),
        f"parameter 0.weight {DIGEST}",
        "Weights and the optimizer's state differ",
    ),
    "before any step": (trained(add_rank, steps=0), f"parameter 0.weight {DIGEST}", BEGINNING),
    "what is frozen": (frozen, f"parameter bias {DIGEST}", BEGINNING),
    "a second module": (second_module, f"parameter weight {DIGEST}", BEGINNING),
}
"""Programs whose replicas drift apart; how the message begins, and what else it says."""


def stopped(run):
    training = Training(run)
    while not run.should_stop:
        training.step()
        if run.is_main:
            signal.raise_signal(signal.SIGTERM)
    return training


def load_better_ones(training):
    training.net.load_state_dict({name: each + 1 for name, each in training.net.state_dict().items()})


def write_averages(training):
    """As ema-pytorch and torch-ema do it: past the counters of versions."""
    for parameter in training.net.parameters():
        parameter.data.copy_(parameter.data + 0.5)


def exchange_for_averages(training):
    """As many programs with an average of their own do it: another tensor in ``.data``."""
    for parameter in training.net.parameters():
        parameter.data = parameter.data + 0.5


def frozen_inference_tensors(run):
    with torch.inference_mode():
        encoder = nn.Linear(4, 4).requires_grad_(False)
    net = nn.Sequential(encoder, nn.Linear(4, 1))
    model = lockstep.replicate(net)
    optimizer = torch.optim.AdamW(net[1].parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(2, 4) + run.rank).square().sum().backward()
        optimizer.step()
    return net, optimizer


def ignored(run):
    training = Training(run, wrap=lambda net: lockstep.replicate(net, ignored_modules=[net[0]]))
    training.net[0].requires_grad_(False).weight += run.rank
    return training.train()


def sharded(run):
    training = Training(run)
    training.optimizer = lockstep.shard_optimizer(training.optimizer)
    return training.train()


def joined(run):
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    training = Training(run, momentum, lockstep.DistributedDataParallel)
    with training.model.join():
        training.train(2 + 3 * run.rank)
    return training


def step_locally(training):
    with warnings.catch_warnings(), training.model.no_sync():
        warnings.simplefilter("ignore")
        training.train()


def gone_on_one_rank(run):
    training = trained(add_rank)(run)
    if run.is_main:
        del training
        gc.collect()
        return None
    return training


def buffer(run):
    net = nn.BatchNorm1d(2)
    net.running_mean += run.rank
    return lockstep.replicate(net, buffer_policy="local")


RIGHT = {
    "frozen inference tensors": frozen_inference_tensors,
    "plain": trained(),
    "stopped": stopped,
    "compared": trained(lambda t: lockstep.check_in_sync(t.net, t.optimizer)),
    "the best for a last test": trained(load_better_ones, on=[0]),
    "averages for a last test": trained(write_averages, on=[0]),
    "averages in place of the weights": trained(exchange_for_averages, on=[0]),
    "values of each rank": trained(add_rank, init_sync=False),
    "ignored": ignored,
    "sharded": sharded,
    "joined": joined,
    "local steps": trained(step_locally),
    "gone on one rank": gone_on_one_rank,
    "converted on one rank": trained(lambda t: t.net.half(), on=[0]),
    "a buffer": buffer,
    "nothing": lambda run: None,
}


def in_session(program, backend="gloo"):
    with lockstep.session(backend=backend, device="cpu", timeout=60.0) as run:
        return program(run)  # which keeps its modules until the session has ended


def ends(rank, backend):
    """Run each program in a session of its own; return what was raised at its end."""
    found = {}
    for name, program in (RIGHT | {name: program for name, (program, *_) in DRIFT.items()}).items():
        try:
            in_session(program, backend)
        except OutOfSyncError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.around)])
def test_what_has_drifted_is_named_on_all_ranks_when_the_session_ends(backend):
    first, second = run_processes(2, ends, backend, launched=True)
    assert first == second
    assert first.keys() == DRIFT.keys()
    for name, (_, begin, said) in DRIFT.items():
        assert first[name].startswith(begin), name
        assert said in first[name], name


@on_processes(2)
def test_weights_that_were_trained_before_the_session_may_be_written_in_it(rank):
    """As averaged weights on one rank, past the counters of versions."""
    model = lockstep.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with lockstep.session(device="cpu", timeout=60.0) as run:
        for parameter in model.parameters() if run.is_main else ():
            parameter.data.mul_(0.5)


def raises(run):
    kept = A_WEIGHT(run)
    raise ValueError("of all ranks", kept)


def leaves_by_status(run):
    kept = A_WEIGHT(run)
    if run.rank == 1:
        sys.exit(0)
    return kept


def leaves_early(run):
    kept = A_WEIGHT(run)
    if run.is_main:
        kept.step()
    return kept


@pytest.mark.parametrize(
    ("program", "raised"),
    [(raises, [ValueError, ValueError]), (leaves_by_status, [None, SystemExit]), (leaves_early, [PeerFailure, None])],
)
@on_processes(2, launched=True)
def test_nothing_is_compared_unless_all_ranks_end_well(rank, program, raised):
    found = None
    try:
        in_session(program)
    except BaseException as error:
        found = type(error)
    assert found is not OutOfSyncError
    if (program, rank.rank) != (leaves_early, 1):  # which may be told of the other one's failure, or has ended before
        assert found is raised[rank.rank]
