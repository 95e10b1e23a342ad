"""Programs in which ranks differ by design, or for a while: nothing is raised, and nothing is warned of.

Shapes of programs that people run. All but those marked `DIFFERS` end with equal weights on all ranks.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook

import lockstep
from lockstep.distributed.replication.replication import find_replication
from processes import on_processes
from programs.ranks import on_ranks, replicated
from threaded import run_ranks

STEPS = 40


class Program:
    """A network, its optimizer and its batches on one rank."""

    def __init__(self, rank, optimizer=torch.optim.AdamW, wrap=lockstep.replicate, dtype=torch.float32, **options):
        self.rank, self.dtype = rank, dtype
        self.net = rank.make(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        self.net.to(rank.device, dtype)
        self.model = wrap(self.net, process_group=rank.group, **options)
        self.parameters = list(self.net.parameters())
        self.optimizer = optimizer(self.parameters, lr=1e-2)
        self.numbers = rank.generator()

    def loss(self):
        x = torch.randn(6, 4, generator=self.numbers, device="cpu").to(self.rank.device, self.dtype)
        return self.model(x).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def train(self, between=lambda number: None, steps=STEPS):
        for number in range(steps):
            self.step()
            between(number)
        return self.parameters


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def schedulers_on_all_ranks(rank):
    p = Program(rank)
    first = torch.optim.lr_scheduler.OneCycleLR(p.optimizer, 0.1, total_steps=STEPS)
    return p.train(lambda number: first.step())


def rate_told_by_rank_0(rank):
    """Rank 0 has the scheduler, and sends what it says."""
    p = Program(rank)
    scheduler = torch.optim.lr_scheduler.StepLR(p.optimizer, 5) if rank.rank == 0 else None

    def send(number):
        if scheduler is not None:
            scheduler.step()
        rate = torch.tensor([p.optimizer.param_groups[0]["lr"]], dtype=torch.float64)
        dist.broadcast(rate, group=rank.group, group_src=0)
        p.optimizer.param_groups[0]["lr"] = rate.item()

    return p.train(send)


def plateau_of_the_mean_loss(rank):
    p = Program(rank)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(p.optimizer, patience=1)

    def step(number):
        loss = p.loss().detach().clone()
        dist.all_reduce(loss, group=rank.group)
        plateau.step(loss.item())

    with torch.no_grad():
        p.loss()
    return p.train(lambda number: torch.no_grad()(step)(number))


@torch.no_grad()
def average(parameters, group):
    for each in parameters:
        dist.all_reduce(each.data, group=group)
        each /= dist.get_world_size(group)


def average_written_back_on_all_ranks(rank):
    p = Program(rank)
    kept = copy.deepcopy(p.parameters)

    @torch.no_grad()
    def follow(number):
        torch._foreach_lerp_(kept, p.parameters, 0.1)
        if number % 5 == 4:
            torch._foreach_copy_(p.parameters, kept)

    return p.train(follow)


def average_swapped_in_to_evaluate_on_rank_0(rank):
    p = Program(rank)
    kept = [each.detach().clone() for each in p.parameters]

    @torch.no_grad()
    def evaluate(number):
        if rank.rank == 0:
            own = [each.detach().clone() for each in p.parameters]
            torch._foreach_copy_(p.parameters, kept)
            p.net(torch.ones(2, 4))
            torch._foreach_copy_(p.parameters, own)

    return p.train(evaluate)


def local_steps_then_averages(rank):
    """Steps under no_sync() that differ by rank, then a mean of the weights, and now and then a step of all."""
    p = Program(rank, sgd)
    for number in range(STEPS):
        p.model.set_requires_gradient_sync(number % 4 == 0)
        p.step()
        if number % 4 == 3:
            average(p.parameters, rank.group)
    average(p.parameters, rank.group)
    return p.parameters


def gradients_summed_by_the_program(rank):
    p = Program(rank)
    for number in range(STEPS):
        p.optimizer.zero_grad()
        p.model.set_requires_gradient_sync(number % 3 == 0)
        p.loss().backward()
        if number % 3:
            for each in p.parameters:
                dist.all_reduce(each.grad, group=rank.group)
        p.optimizer.step()
    return p.parameters


def post_local_sgd(rank):
    """DIFFERS: each rank has its own gradients after the first steps."""
    p = Program(rank)
    state = post_localSGD_hook.PostLocalSGDState(rank.group, rank.group, start_localSGD_iter=3)

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    p.model.register_comm_hook(state, hook)
    p.train()
    average(p.parameters, rank.group)
    return p.parameters


def values_of_each_rank(rank):
    """DIFFERS: init_sync=False."""
    p = Program(rank, sgd, init_sync=False)
    with torch.no_grad():
        p.net[0].bias += rank.rank
    p.train()
    return p.parameters[2:3] and []


def sharpness_aware(rank):
    p = Program(rank, sgd)
    for _ in range(STEPS):
        loss = p.loss()
        added = torch.autograd.grad(loss, p.parameters)
        before = [each.detach().clone() for each in p.parameters]
        with torch.no_grad():
            torch._foreach_add_(p.parameters, added)
        p.optimizer.zero_grad()
        p.loss().backward()
        with torch.no_grad():
            torch._foreach_copy_(p.parameters, before)
        p.optimizer.step()
    return p.parameters


class Perturbing(torch.optim.SGD):
    """Keeps what each rank adds in its state, as many implementations of SAM do."""

    @torch.no_grad()
    def perturb(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["added"] = 0.1 * each.grad
                each.add_(self.state[each]["added"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(self.state[each]["added"])
        super().step()


def sharpness_aware_optimizer(rank):
    p = Program(rank, Perturbing)
    for _ in range(STEPS):
        p.optimizer.zero_grad()
        p.loss().backward()
        p.optimizer.perturb()
        p.optimizer.zero_grad()
        p.loss().backward()
        p.optimizer.step()
    return p.parameters


def lbfgs(rank):
    p = Program(rank, torch.optim.LBFGS)

    def closure():
        p.optimizer.zero_grad()
        loss = p.loss()
        loss.backward()
        return loss

    for _ in range(4):
        p.optimizer.step(closure)
    return p.parameters


def zero_redundancy(rank):
    with warnings.catch_warnings(action="ignore"):  # of what PyTorch imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr, process_group=rank.group)

    return Program(rank, make).train()


def two_optimizers(rank):
    p = Program(rank)
    second = torch.optim.RMSprop(p.net[2].parameters())
    p.optimizer.param_groups[0]["params"] = p.parameters[:2]

    def also(number):
        second.step()

    return p.train(also)


def adversaries(rank):
    p, q = Program(rank), Program(rank, sgd)
    for number in range(STEPS):
        (p if number % 3 else q).step()
    return [*p.parameters, *q.parameters]


def uneven_batches(rank):
    p = Program(rank)
    for _ in range(4):
        for _ in lockstep.batches(range(8 + 3 * rank.rank), group=rank.group):
            p.step()
    return p.parameters


def skipped_batches(rank):
    p = Program(rank)
    for number in lockstep.batches(range(STEPS), group=rank.group):
        if number % 5 == rank.rank:
            lockstep.loop.skip_batch(group=rank.group)
            continue
        p.optimizer.zero_grad()
        p.loss().backward()
        if not lockstep.loop.skipped(group=rank.group):
            p.optimizer.step()
    return p.parameters


def joined(rank):
    p = Program(rank, sgd, lockstep.DistributedDataParallel)
    with p.model.join():
        for _ in range(10 + 9 * rank.rank):
            p.step()
    return p.parameters


def accumulated(rank):
    p = Program(rank)
    for number in range(STEPS):
        with lockstep.accumulate(p.model, last=number % 3 == 2, weight=1.0 + rank.rank):
            p.loss().backward()
        if number % 3 == 2:
            p.optimizer.step()
            p.optimizer.zero_grad()
    return p.parameters


def scaled(rank):
    p, scaler = Program(rank), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    for number in range(STEPS):
        p.optimizer.zero_grad()
        scaler.scale(p.loss() * (torch.inf if number % 9 == 4 + rank.rank else 1.0)).backward()
        scaler.step(p.optimizer)
        scaler.update()
    return p.parameters


def optimizer_in_hooks(rank):
    p = Program(rank)
    own = {each: torch.optim.SGD([each], 0.1) for each in p.parameters}
    for each in p.parameters:
        each.register_post_accumulate_grad_hook(lambda each: own[each].step())
    for _ in range(STEPS):
        p.loss().backward()
        p.net.zero_grad()
    return p.parameters


def loaded_on_all_ranks(rank):
    p = Program(rank)
    state = None

    def load(number):
        nonlocal state
        if number == 4:
            state = copy.deepcopy((p.net.state_dict(), p.optimizer.state_dict()))
        if number == 20:
            p.net.load_state_dict(state[0])
            p.optimizer.load_state_dict(state[1])

    return p.train(load)


def layer_replaced_on_all_ranks(rank):
    p = Program(rank)

    def replace(number):
        if number == 9:
            p.net[2] = rank.make(lambda: nn.Linear(8, 3), seed=3)
            p.parameters = list(p.net.parameters())
            p.optimizer = torch.optim.AdamW(p.parameters)

    p.train(replace)
    return p.parameters


def ignored_part(rank):
    """Each rank has an adapter of its own, with a learning rate of its own."""
    net = rank.make(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    lockstep.replicate(net, process_group=rank.group, ignored_modules=[net[1]])
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.1 + rank.rank}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    return list(net[0].parameters())


def with_shares(rank):
    net = replicated(rank, lambda: nn.Linear(4, 3), shares=2)
    optimizer = torch.optim.AdamW(net.parameters())
    data = torch.linspace(-1, 1, 48).view(12, 4)
    for epoch in range(8):
        for batch in lockstep.shares.GlobalBatches(data, 4, 2, seed=epoch, process_group=rank.group):
            optimizer.zero_grad()
            for rows in batch:
                net(rows).square().mean().backward()
            optimizer.step()
    return list(net.parameters())


PROGRAMS = [
    *(schedulers_on_all_ranks, rate_told_by_rank_0, plateau_of_the_mean_loss, average_written_back_on_all_ranks),
    *(average_swapped_in_to_evaluate_on_rank_0, local_steps_then_averages, gradients_summed_by_the_program),
    *(post_local_sgd, values_of_each_rank, sharpness_aware, sharpness_aware_optimizer, lbfgs, two_optimizers),
    *(adversaries, uneven_batches, skipped_batches, accumulated, scaled, optimizer_in_hooks, loaded_on_all_ranks),
    *(layer_replaced_on_all_ranks, ignored_part, with_shares),
]


def with_a_tensor_as_rate(parameters, lr):
    return torch.optim.Adam(parameters, torch.tensor(lr), foreach=False)


# How a step is computed may differ by rank, as long as bits do not.
OPTIONS = {
    "wrapped": lambda rank: {"wrap": lockstep.DistributedDataParallel},
    "fused": lambda rank: {"optimizer": lambda parameters, lr: torch.optim.AdamW(parameters, lr, fused=True)},
    "foreach on rank 0": lambda rank: {"optimizer": lambda p, lr: torch.optim.SGD(p, lr, foreach=rank.rank == 0)},
    "bfloat16": lambda rank: {"dtype": torch.bfloat16},
    "a tensor as rate": lambda rank: {"optimizer": with_a_tensor_as_rate},
}
BEFORE = {
    "sharded": lambda p: setattr(p, "optimizer", lockstep.shard_optimizer(p.optimizer)),
    "compressed": lambda p: p.model.register_comm_hook(p.rank.group, default_hooks.bf16_compress_hook),
}
BETWEEN = {
    "frozen and unfrozen": lambda p, number: p.net[0].requires_grad_(number % 7 > 3),
    "a tensor as rate": lambda p, number: p.optimizer.param_groups[0]["lr"].mul_(0.9),
    "not a number": lambda p, number: nn.init.constant_(p.net[0].weight[0], torch.nan),
}
"""What programs do that are plain otherwise."""


def train(rank, program):
    return [rank.all_equal(p) for p in program(rank)]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step", "ignore:.*uses the gradient of parameter")
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_false_alarm(program):
    with warnings.catch_warnings():
        if program is local_steps_then_averages:
            warnings.simplefilter("ignore")  # steps on gradients of one rank alone are warned of
        assert all(all(each) for each in run_ranks(2, train, program))


@pytest.mark.parametrize("name", sorted({"plain", *OPTIONS, *BEFORE, *BETWEEN}))
@on_ranks(2)
def test_no_false_alarm_in_plain_training(rank, name):
    p = Program(rank, **OPTIONS.get(name, lambda rank: {})(rank))
    BEFORE.get(name, lambda p: None)(p)
    between = BETWEEN.get(name, lambda p, number: None)
    assert all(map(rank.all_equal, p.train(lambda number: between(p, number))))


@on_ranks(2)
def test_what_has_been_told_is_dropped(rank):
    p = Program(rank)
    p.train()
    p.step()
    assert len(find_replication(p.net).drift._looks) <= 1


@pytest.mark.around
@on_processes(2)
def test_no_false_alarm_where_there_is_a_default_group(rank):
    for program in (zero_redundancy, joined):
        assert all(train(rank, program))
