"""Means that autograd goes through, where ranks differ: in strides, in what they use, in what has a graph."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import AgreementError, GradientError, OptionError, PeerError
from processes import on_processes
from programs.ranks import on_ranks, replicated

# ---------------------------------------------------------------------------------- strides, shapes


def turned(tensor):
    """The same values, with the strides the other way round."""
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 1, 5)])
@on_ranks(2)
def test_means_of_tensors_whose_strides_differ(rank, shape):
    x = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
    given = turned(x) if rank.rank else x
    mean, again = lockstep.loop.mean_over_ranks([given, given * (rank.rank + 1)], rank.group)
    torch.testing.assert_close(mean, x)
    torch.testing.assert_close(again, 1.5 * x)
    weights = torch.arange(x.numel(), 0.0, -1).view(shape)
    (mean * (turned(weights) if rank.rank == 0 else weights)).sum().backward()
    torch.testing.assert_close(x.grad, weights)
    assert mean.stride() == given.stride()


DIFFERENT = {
    "shapes": (
        [torch.ones(2, 3)],
        [torch.ones(3, 2)],
        "tensor 0 .* rank 0 has float32 of shape \\(2, 3\\); .*\\(3, 2\\)",
    ),
    "sizes": ([torch.ones(2)], [torch.ones(3)], "tensor 0 given to mean_over_ranks"),
    "dtypes": ([torch.ones(2)], [torch.ones(2).double()], "rank 0 has float32 of shape \\(2,\\); rank 1 has float64"),
    "numbers": (
        [torch.ones(2)],
        [torch.ones(2)] * 2,
        "the number of tensors given to mean_over_ranks\\(\\): rank 0 has 1; rank 1 has 2",
    ),
    "kinds": ([torch.ones(2)], [1.0], "rank 1 has a float"),
    "unused parameters": (
        [torch.ones(2)] * 2,
        [torch.ones(2, requires_grad=True), None],
        "tensor 1 .* rank 1 has None .*materialize_grads=True",
    ),
}


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENT.values(), ids=DIFFERENT)
@on_ranks(2)
def test_means_of_different_things_are_an_error_on_every_rank(rank, first, second, message):
    model = replicated(rank)  # what leads to it is looked for
    with pytest.raises(AgreementError, match=message):
        lockstep.loop.mean_over_ranks(second if rank.rank else first, rank.group)
    assert lockstep.loop.mean_over_ranks(torch.ones(1) * rank.rank, rank.group).item() == 0.5
    assert model.weight.grad is None


MEANS = {
    "mean_over_ranks()": lockstep.loop.mean_over_ranks,
    "mean()": lambda x, group: x * lockstep.mean(x.shape[0], group=group),
    "total()": lambda x, group: x * lockstep.loop.total(1, group),
}


@pytest.mark.parametrize("of", MEANS)
@on_processes(2)
def test_ranks_go_on_after_a_mean_inside_a_transform_of_torch_func(rank, of):
    with pytest.raises(OptionError, match=rf"rank {rank.rank}: {re.escape(of)} is called inside a transform of torch"):
        torch.func.grad(lambda x: MEANS[of](x, None).sum())(torch.ones(2))
    assert lockstep.loop.mean_over_ranks(torch.ones(1) * rank.rank).item() == 0.5


# ------------------------------------------------------------------------------ gradients of gradients


def gradients(loss, parameters, group=None):
    """The gradients of a loss, as a function of the parameters: of this rank's, or their mean over the ranks."""
    own = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    found = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, own, strict=True)]
    return found if group is None else lockstep.loop.mean_over_ranks(found, group)


@on_ranks(2)
def test_gradients_of_gradients_come_in_any_strides(rank):
    module = lockstep.replicate(nn.Linear(3, 2, bias=False).double(), process_group=rank.group)
    reference = copy.deepcopy(module)
    coefficients = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    x = torch.tensor([[1.0, 2, 3]], dtype=torch.float64)
    for each, group, transposed in ((module, rank.group, rank.rank == 1), (reference, None, False)):
        (grad,) = gradients(each(x).square().sum(), [each.weight], group)
        product = grad.t() * coefficients.t().contiguous() if transposed else grad * coefficients
        product.sum().backward()
    torch.testing.assert_close(module.weight.grad, reference.weight.grad)


class Ways(nn.Module):
    """Three layers; which are used is up to the call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2).double() for _ in range(3)])

    def forward(self, x, way, power):
        for i in way:
            x = self.layers[i](x)
        return x.pow(power).sum()


def second_order(module, losses, group=None):
    """The squared norm of the gradient of the mean loss, as a penalty; the gradients of that."""
    grads = gradients(sum(losses) / len(losses), list(module.parameters()), group)
    sum((n + 1) * grad.square().sum() for n, grad in enumerate(grads)).backward()
    second = [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return second


WAYS = {
    "other layers on each rank": ([(0, 1), (2, 1)], 3),
    "more layers on one rank": ([(0,), (0, 1)], 2),
    "nothing in common": ([(0,), (1,)], 2),
    "one rank's gradients are constant": ([(0,), (0,)], (1, 3)),
}


@pytest.mark.parametrize(("ways", "power"), WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_ranks_may_use_other_parameters(rank, ways, power):
    module = replicated(rank, Ways)
    reference = copy.deepcopy(module)
    powers = power if isinstance(power, tuple) else (power, power)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    for step in range(3):
        parts = [(x + r + step, way, p) for r, (way, p) in enumerate(zip(ways, powers, strict=True))]
        got = second_order(module, [module(*parts[rank.rank])], rank.group)
        torch.testing.assert_close(got, second_order(reference, [reference(*part) for part in parts]))


@on_ranks(2)
def test_a_mean_that_has_a_graph_on_one_rank_only_has_one_on_all(rank):
    """The loss of rank 0 is linear. Going back through the mean takes both ranks."""
    model, seen = lockstep.replicate(nn.ParameterList([torch.full((1,), 2.0)]), process_group=rank.group), []
    (weight,) = model
    for _ in range(2):
        (mean,) = gradients((weight**3 if rank.rank else 3 * weight).sum(), [weight], rank.group)
        with model.no_sync():
            (mean * mean).sum().backward()
        seen.append(weight.grad)
        weight.grad = None
        (weight * 1.0).sum().backward()  # synchronises
        weight.grad = None
    # the mean is (3 + 3 * 2 ** 2) / 2, and its derivative 2 * 3 * 2 on rank 1, which the other rank's half goes to, too
    assert seen == [[None] * 2, [2 * 7.5 * 12] * 2][rank.rank]


class Pair(nn.Module):
    """Two weights, of which losses are made as they are told, and many more."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (2.0, 3.0))
        self.more = nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(40))

    def forward(self, loss):
        return loss(self.a, self.b).sum()


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_buckets_leave_after_the_means_of_the_pass(rank):
    """On rank 0 the gradient of b is whole before the pass comes to the mean, on rank 1 it goes through that."""
    losses = (lambda a, b: a.square() + b), (lambda a, b: a.square() * b)
    module = lockstep.replicate(Pair(), process_group=rank.group, bucket_cap_mb=1e-6)
    for _ in range(3):
        (grad,) = gradients(module(losses[rank.rank]), [module.a], rank.group)
        (grad.square().sum() + module(lambda a, b: b)).backward()
        seen = module.a.grad.item(), module.b.grad.item()
        module.zero_grad()
    # the mean is a + a * b, that is 8; its derivatives 1 + b and a; b itself counts once more
    assert seen == (2 * 8 * 4, 2 * 8 * 2 + 1)


@on_ranks(2)
def test_what_no_rank_goes_back_from_has_no_gradient(rank):
    """The penalty is of the gradient of a alone, which goes back to a alone."""
    module = lockstep.replicate(Pair(), process_group=rank.group)
    grad, _ = gradients(module(lambda a, b: a.square() + b.square()), [module.a, module.b], rank.group)
    grad.square().sum().backward()
    assert (module.a.grad.item(), module.b.grad) == (2 * 4 * 2, None)


@on_ranks(2)
def test_means_of_what_has_a_graph_on_one_rank_only_have_one_on_all(rank):
    x = torch.full((1,), 3.0, requires_grad=rank.rank == 1)
    mean = lockstep.loop.mean_over_ranks(x * 2, rank.group)
    mean.square().sum().backward()
    without = lockstep.loop.mean_over_ranks(x.detach(), rank.group)
    found = (None if x.grad is None else x.grad.item(), without.requires_grad)
    assert found == [(None, False), (2 * 6.0 * 2, False)][rank.rank]


@on_ranks(2)
def test_a_mean_that_a_rank_takes_under_no_grad_has_no_graph_there(rank):
    module = lockstep.replicate(Pair(), process_group=rank.group)
    with torch.set_grad_enabled(rank.rank == 1):
        mean = lockstep.loop.mean_over_ranks(module.a * 2, rank.group)
    assert (mean.item(), mean.requires_grad) == [(4.0, False), (4.0, True)][rank.rank]


def divide_by_zero(_):
    return 1 / 0


def backward(module, penalty):
    penalty.backward()
    return module.a.grad


def grad(module, penalty):
    return torch.autograd.grad(penalty, module.a)[0]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("derive", [backward, grad])
@pytest.mark.parametrize("place", ["before the first", "between", "after the second"])
@on_ranks(2, "hosts")
def test_a_pass_that_fails_on_one_rank_before_or_after_a_mean_fails_on_all(rank, place, derive):
    """Two means, of which the pass comes to the later one first; ranks go on afterwards."""
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for step in range(3):
        a = module.a * 1
        loss = module(lambda _, b, a=a: a.square() + 0 * b) + sum(module.more)
        (first,) = gradients(loss, [module.a], rank.group)
        passed = first * 1
        penalty = lockstep.loop.mean_over_ranks(passed * module.a, rank.group) * 1
        if step == 1 and rank.rank == 1:
            where = {"before the first": penalty, "between": passed, "after the second": a}[place]
            where.register_hook(divide_by_zero)
        try:
            seen.append(derive(module, penalty.sum()).item())
        except (PeerError, ZeroDivisionError) as error:
            seen.append(type(error))
        module.zero_grad()
    right, error = seen[0], ZeroDivisionError if rank.rank else PeerError
    if place == "after the second" and derive is grad and rank.rank == 0:
        error = right  # this rank's own affair
    assert seen == [right, error, right]
    assert rank.all_equal(torch.tensor(right))


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@on_ranks(2, "hosts")
def test_gradients_of_a_third_order_are_refused_on_every_rank(rank, ranks):
    others = (GradientError, True) if len(ranks) == 2 else (PeerError, False)
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for step in range(3):
        (mean,) = gradients(module(lambda a, b: a**3), [module.a], rank.group)
        penalty = mean.square().sum()
        try:
            torch.autograd.grad(penalty, module.a, create_graph=step == 1 and rank.rank in ranks)
        except (GradientError, PeerError) as error:
            seen.append(error)
        (module.a * (rank.rank + 1)).sum().backward()
        assert module.a.grad.item() == 1.5
        module.zero_grad()
    (error,) = seen
    found = (type(error), "create_graph=True goes through mean_over_ranks()" in str(error))
    assert found == [others, (GradientError, True)][rank.rank]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2, "hosts")
def test_a_pass_goes_through_the_means_behind_its_outputs_that_do_not_lead_to_its_inputs(rank, fails):
    """On another rank they may; so a pass that fails on one rank fails on all."""
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for _ in range(2):
        (mean,) = gradients(module(lambda a, b: a.square()), [module.a], rank.group)
        b = module.b * 1
        if rank.rank == 1 and fails:
            b.register_hook(divide_by_zero)
        try:
            seen.append(torch.autograd.grad(mean.sum() + b.sum(), module.b)[0].item())
        except (ZeroDivisionError, PeerError) as error:
            seen.append(type(error))
        module.zero_grad()
        (module.a * rank.rank).sum().backward()
        seen.append(module.a.grad.item())
        module.zero_grad()
    error = ZeroDivisionError if rank.rank else PeerError
    assert seen == [error if fails else 1.0, 0.5] * 2


INPUTS = {
    "no graph": lambda a, x: x.detach() * 5,
    "another graph": lambda a, x: x * 5,
    "the same graph": lambda a, x: a * x * 5,
}


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("first", INPUTS)
@on_ranks(2, "hosts")
def test_grad_through_a_mean_that_leads_to_the_inputs_on_one_rank_only(rank, first, unused):
    # the mean is (15 + 24) / 2, or (30 + 24) / 2; what goes back is twice that
    twice = 2 * (27.0 if first == "the same graph" else 19.5)
    of_first = twice * 15 if first == "the same graph" else None
    a, x = (torch.full((1,), value, requires_grad=True) for value in (2.0, 3.0))
    seen = []
    for _ in range(2):
        loss = a**3 * x if rank.rank else INPUTS[first](a, x)
        mean = lockstep.loop.mean_over_ranks(loss, rank.group)
        if unused or rank.rank or first == "the same graph":
            (grad,) = torch.autograd.grad(mean.square().sum(), [a], allow_unused=unused)
        else:  # an error of this rank alone
            with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                torch.autograd.grad(mean.square().sum(), [a])
            grad = None
        seen.append(grad if grad is None else grad.item())
        (own,) = torch.autograd.grad(lockstep.loop.mean_over_ranks(a * 2, rank.group), a)
        seen.append(own.item())
    assert seen == [[of_first, 2.0] * 2, [twice * 12 * 3, 2.0] * 2][rank.rank]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("constant", [0, 1])
@on_ranks(2, "hosts")
def test_means_of_gradients_that_are_constant_on_one_rank(rank, constant):
    """A pass through their mean comes to parameters on the other rank only, and is a round on both."""
    losses = [lambda a, b: 3 * a + b, lambda a, b: a.square() * b]
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for _ in range(2):
        loss = module(losses[rank.rank != constant])
        (own,) = torch.autograd.grad(loss, module.a, create_graph=True)
        mean = lockstep.loop.mean_over_ranks(own, rank.group)
        mean.square().sum().backward()
        seen.append((module.a.grad.item(), module.b.grad.item()))
        module.zero_grad()
    # the mean is (3 + 2 * 2 * 3) / 2, that is 7.5; a's derivative 2 * 3 / 2, b's 2 * 2 / 2
    assert seen == [(2 * 7.5 * 3, 2 * 7.5 * 2)] * 2


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2, "hosts")
def test_a_pass_that_fails_before_a_mean_of_gradients_that_are_constant_on_one_rank(rank, failing):
    """On rank 0 nothing leads from the mean to parameters; the round is one of both ranks."""
    losses = (lambda a, b: 3 * a), (lambda a, b: a.square() * b)
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for step in range(3):
        (mean,) = gradients(module(losses[rank.rank]), [module.a], rank.group)
        penalty = mean * 1
        if step == 1 and rank.rank == failing:
            penalty.register_hook(divide_by_zero)
        try:
            penalty.square().sum().backward()
            seen.append(module.a.grad.item())
        except (PeerError, ZeroDivisionError) as error:
            seen.append(type(error))
        module.zero_grad()
    assert seen == [45.0, ZeroDivisionError if rank.rank == failing else PeerError, 45.0]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts")
def test_a_pass_that_a_hook_begins_and_that_fails_before_a_mean_fails_on_all(rank):
    """The mean is in the graph of the inner pass alone."""
    module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
    for step in range(3):
        (mean,) = gradients(module(lambda a, b: a.square()), [module.a], rank.group)
        mean = mean * 1
        penalty, loss = mean.square().sum(), module(lambda a, b: a * b)
        if step == 1 and rank.rank == 1:
            mean.register_hook(divide_by_zero)
        loss.register_hook(lambda grad, inner=penalty: grad + torch.autograd.grad(inner, module.a)[0].sum())
        try:
            loss.backward()
            seen.append(module.b.grad.item())
        except (PeerError, ZeroDivisionError) as error:
            seen.append(type(error))
        module.zero_grad()
    # the mean is 2 * a, that is 4; the inner pass gives 2 * 4 * 2, and b gets that and 1, times a
    assert seen == [34.0, ZeroDivisionError if rank.rank else PeerError, 34.0]
