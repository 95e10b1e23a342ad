"""Weights that an optimizer steps and no replicated module has, of which each rank trains its own: a warning."""

import copy
import gc
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from processes import be_launched, on_processes, run_processes
from small_modules import one_weight


class Margin(nn.Module):
    """A loss with weights of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.ones(1, 5))

    def forward(self, x):
        return (x @ self.centres).square().mean()


class Collects(nn.Linear):
    """A layer at whose look through its modules a garbage collection happens to begin."""

    def named_modules(self, *args, **kwargs):
        gc.collect()
        return super().named_modules(*args, **kwargs)


class Program:
    """A replicated module, a loss beside it, and what was warned of."""

    def __init__(self, group):
        self.group = group
        self.model = lockstep.replicate(one_weight(), process_group=group)
        self.loss = Margin()

    def train(self, parameters, forward=None, before_step=lambda: None, steps=3, passes=1):
        optimizer = torch.optim.SGD(parameters, 1e-3)
        forward = forward or (lambda x: self.loss(self.model(x)))
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                forward(torch.ones(2, 1)).mean().backward()
            before_step()
            optimizer.step()

    @property
    def both(self):
        return [*self.model.parameters(), *self.loss.parameters()]


def loss_beside(p):
    p.train(p.both)


def loss_with_its_own_optimizer(p):
    p.train(p.loss.parameters(), passes=2)


def copied(p):
    model = copy.deepcopy(p.model)
    p.train(model.parameters(), model)


ALONE = {  # which weights the warning names
    loss_beside: "Margin.centres (1, 5)",
    loss_with_its_own_optimizer: "Margin.centres (1, 5)",
    copied: "Linear.weight (1, 1)",
}


def loss_replicated(p):
    p.loss = lockstep.replicate(p.loss, process_group=p.group)
    p.train(p.both)


def averaged_by_the_program(p):
    p.train(p.both, before_step=lambda: dist.all_reduce(p.loss.centres.grad, group=p.group))


def averaged_in_a_hook(p):
    p.loss.centres.register_hook(lambda grad: dist.all_reduce(grad, group=p.group) or grad)
    p.train(p.both)


def master_copies(p):
    masters = [each.detach().clone().requires_grad_() for each in p.model.parameters()]

    def assign():
        for master, each in zip(masters, p.model.parameters(), strict=True):
            master.grad = each.grad.clone()

    p.train(masters, p.model, assign, steps=12)


def left_alone_by_name(p):
    both = nn.Sequential(one_weight(), p.loss)
    lockstep.replicate(both, process_group=p.group, ignored_modules=[p.loss])
    p.train(both.parameters(), both)


def an_average_and_a_teacher(p):
    teacher = copy.deepcopy(p.model).requires_grad_(False)
    p.train([*p.model.parameters(), *teacher.parameters()], lambda x: p.model(x) - teacher(x))


RIGHT = [
    loss_replicated,
    averaged_by_the_program,
    averaged_in_a_hook,
    master_copies,
    left_alone_by_name,
    an_average_and_a_teacher,
]


def warnings_of(rank):
    """What each program warns of."""
    texts = {}
    for program in (*ALONE, *RIGHT):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(Program(rank.group))
        texts[program.__name__] = [str(each.message) for each in caught]
        assert all(each.filename == __file__ for each in caught)
    return texts


def test_weights_that_each_rank_trains_by_itself_are_named():
    for rank, texts in enumerate(run_processes(2, warnings_of)):
        for program, weights in ALONE.items():
            (text,) = texts[program.__name__]
            assert text.startswith(f"rank {rank}: SGD has stepped {weights}: each rank trains its own, ")
        assert not any(texts[each.__name__] for each in RIGHT)


def in_a_session(rank, port):
    """A module that nobody replicates, for one step, and one whose gradients are assigned, for ten."""
    dist.destroy_process_group()
    be_launched(rank, port)
    found = []
    for replicates in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with lockstep.session(timeout=60.0, device="cpu"):
                model = lockstep.replicate(one_weight()) if replicates else one_weight()
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(10 if replicates else 1):
                    loss = model(torch.ones(1, 1)).sum()
                    model.weight.grad = torch.autograd.grad(loss, model.weight)[0]
                    optimizer.step()
        found += [str(each.message) for each in caught]
    return found


def test_a_session_in_which_no_backward_synchronises():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (ended, stepped) in enumerate(run_processes(2, in_a_session, store.port)):
        assert ended.startswith(f"rank {rank}: the session ends after 1 step of SGD, and no backward has synchronised")
        assert stepped.startswith(f"rank {rank}: 10 steps of SGD, and no backward has synchronised gradients, so each")


@on_processes(1)
def test_a_process_alone_is_told_nothing(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_beside(Program(rank.group))


@on_processes(2)
def test_hooks_are_gone_when_nothing_is_left_to_find_out(rank):
    steps = [1, 2]
    found = []
    for number in steps:
        program = Program(rank.group)
        program.train(program.both, before_step=lambda: dist.all_reduce(torch.ones(1), group=rank.group), steps=number)
        found.append(bool(program.loss.centres._post_accumulate_grad_hooks))
    assert found == [True, False]


@on_processes(2)
def test_a_module_that_is_collected_while_modules_are_looked_at_is_no_error(rank):
    """An earlier module is garbage by now, in a cycle, and is collected while the modules are looked at."""
    model, earlier = Collects(1, 1), one_weight()
    lockstep.replicate(model)
    lockstep.replicate(earlier)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    earlier.itself, gone = [earlier], weakref.ref(earlier)
    gc.disable()
    try:
        del earlier
        model(torch.ones(1, 1)).sum().backward()
        was_there = gone() is not None
        optimizer.step()
    finally:
        gc.enable()
    assert (was_there, gone() is None) == (True, True)
