"""What has drifted apart since the last look is named at the end of a session that ends well, and nothing else is."""

import gc
import signal
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import OutOfSyncError, PeerFailure
from processes import be_launched, run_processes


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


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def weight(run):
    training = Training(run).train()
    training.net[1].weight.data[0, run.rank] += 1
    return training


def rate(run):
    training = Training(run).train()
    training.optimizer.param_groups[0]["lr"] /= 1 + run.rank
    return training


def state(run):
    training = Training(run).train()
    training.optimizer.state[training.net[0].bias]["exp_avg"] *= run.rank
    return training


def last_step_clipped(run):
    training = Training(run).train()
    training.optimizer.zero_grad()
    training.model(torch.ones(2, 4)).sum().backward()
    if run.is_main:
        torch.nn.utils.clip_grad_value_(training.net.parameters(), 1e-3)
    training.optimizer.step()
    return training


def never_trained(run):
    training = Training(run)
    training.net[0].weight.data += run.rank
    return training


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


DRIFT = {
    weight: ("parameter 1.weight is out of sync: digest ", "between step 1 and the end of the session, after step 3"),
    rate: ("optimizer AdamW, group 0, lr: 0.1 on rank 0, 0.05 on rank 1, so ", "the end of the session, after step 3"),
    state: ("exp_avg of parameter 0.bias in AdamW is out of sync: digest ", "The optimizer's state alone differs"),
    last_step_clipped: ("parameter 0.weight is out of sync: digest ", "Weights and the optimizer's state differ"),
    never_trained: ("parameter 0.weight is out of sync: digest ", "between replicate() and the end of the session"),
    frozen: ("parameter bias is out of sync: digest ", "between replicate() and the end of the session"),
    second_module: ("parameter weight is out of sync: digest ", "replicate() and the end of the session"),
}


def plain(run):
    return Training(run).train()


def stopped(run):
    training = Training(run)
    while not run.should_stop:
        training.step()
        if run.is_main:
            signal.raise_signal(signal.SIGTERM)
    return training


def saved(run):
    training = Training(run).train()
    lockstep.check_in_sync(training.net, training.optimizer)
    return training


def best_for_a_last_test(run):
    training = Training(run).train()
    if run.is_main:
        training.net.load_state_dict({name: each + 1 for name, each in training.net.state_dict().items()})
    return training


def average_for_a_last_test(run):
    """As ema-pytorch and torch-ema write it: past the counters of versions."""
    training = Training(run).train()
    if run.is_main:
        for parameter in training.net.parameters():
            parameter.data.copy_(parameter.data + 0.5)
    return training


def average_in_place_of_the_weights(run):
    """As many programs with an average of their own do it: another tensor in ``.data``."""
    training = Training(run).train()
    if run.is_main:
        for parameter in training.net.parameters():
            parameter.data = parameter.data + 0.5
    return training


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


def values_of_each_rank(run):
    training = Training(run, init_sync=False).train()
    training.net[0].weight.data += run.rank
    return training


def ignored(run):
    training = Training(run, wrap=lambda net: lockstep.replicate(net, ignored_modules=[net[0]]))
    training.net[0].requires_grad_(False).weight += run.rank
    return training.train()


def sharded(run):
    training = Training(run)
    training.optimizer = lockstep.shard_optimizer(training.optimizer)
    return training.train()


def joined(run):
    training = Training(run, sgd, lockstep.DistributedDataParallel)
    with training.model.join():
        training.train(2 + 3 * run.rank)
    return training


def local_steps(run):
    training = Training(run).train()
    with warnings.catch_warnings(), training.model.no_sync():
        warnings.simplefilter("ignore")
        training.train()
    return training


def gone_on_one_rank(run):
    training = Training(run).train()
    training.net[0].weight.data += run.rank
    if run.is_main:
        del training
        gc.collect()
        return None
    return training


def converted_on_one_rank(run):
    training = Training(run).train()
    if run.is_main:
        training.net.half()
    return training


def buffer(run):
    net = nn.BatchNorm1d(2)
    net.running_mean += run.rank
    return lockstep.replicate(net, buffer_policy="local")


def nothing(run):
    return None


RIGHT = [
    frozen_inference_tensors,
    *(
        plain,
        stopped,
        saved,
        best_for_a_last_test,
        average_for_a_last_test,
        average_in_place_of_the_weights,
        values_of_each_rank,
        ignored,
        sharded,
        joined,
        local_steps,
        gone_on_one_rank,
    ),
    *(converted_on_one_rank, buffer, nothing),
]


def in_session(program, backend="gloo"):
    with lockstep.session(backend=backend, device="cpu", timeout=60.0) as run:
        return program(run)  # which keeps its modules until the session has ended


def ends(rank, port, backend, programs):
    """Run each program in a session of its own; return what was raised at its end."""
    dist.destroy_process_group()
    be_launched(rank, port)
    found = {}
    for program in programs:
        try:
            in_session(program, backend)
        except OutOfSyncError as error:
            found[program.__name__] = str(error)
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_has_drifted_is_named_on_all_ranks_when_the_session_ends(backend):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_processes(2, ends, store.port, backend, [*RIGHT, *DRIFT])
    assert first == second
    assert first.keys() == {each.__name__ for each in DRIFT}
    for program, (begin, said) in DRIFT.items():
        text = first[program.__name__]
        assert text.startswith(begin), program
        assert said in text, program


def trained_before(rank, port):
    """Train before the session, and write averaged weights on one rank in it, past the counters of versions."""
    model = lockstep.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    be_launched(rank, port)
    with lockstep.session(device="cpu", timeout=60.0) as run:
        for parameter in model.parameters() if run.is_main else ():
            parameter.data.mul_(0.5)


def test_weights_that_were_trained_before_the_session_may_be_written_in_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_processes(2, trained_before, store.port)


def raises(run):
    kept = weight(run)
    raise ValueError("of all ranks", kept)


def leaves_by_status(run):
    kept = weight(run)
    if run.rank == 1:
        sys.exit(0)
    return kept


def leaves_early(run):
    kept = weight(run)
    if run.is_main:
        kept.step()
    return kept


def ends_otherwise(rank, port):
    """Return, for each program, the class of what is raised where ranks have drifted and do not all end well."""
    dist.destroy_process_group()
    be_launched(rank, port)
    found = []
    for program in (raises, leaves_by_status, leaves_early):
        try:
            in_session(program)
        except BaseException as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


def test_nothing_is_compared_unless_all_ranks_end_well():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_processes(2, ends_otherwise, store.port)
    assert first == [ValueError, None, PeerFailure]
    assert second[:2] == [ValueError, SystemExit]
    assert second[2] is not OutOfSyncError
