"""Means that autograd goes through, where ranks differ: in strides, in what they use, in what has a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import AgreementError, PeerError
from threaded import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


# ---------------------------------------------------------------------------------- strides, shapes


def turned(tensor):
    """The same values, with the strides the other way round."""
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 1, 5)])
def test_means_of_tensors_whose_strides_differ(shape):
    def call(rank):
        x = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
        given = turned(x) if rank.rank else x
        mean, again = lockstep.mean_over_ranks([given, given * (rank.rank + 1)], rank.group)
        torch.testing.assert_close(mean, x)
        torch.testing.assert_close(again, 1.5 * x)
        weights = torch.arange(x.numel(), 0.0, -1).view(shape)
        (mean * (turned(weights) if rank.rank == 0 else weights)).sum().backward()
        torch.testing.assert_close(x.grad, weights)
        return mean.stride() == given.stride()

    assert run_ranks(2, call) == [True, True]


DIFFERENT = {
    "shapes": (
        [torch.ones(2, 3)],
        [torch.ones(3, 2)],
        "tensor 0 .* float32 of shape \\(2, 3\\) on rank 0, .*\\(3, 2\\)",
    ),
    "sizes": ([torch.ones(2)], [torch.ones(3)], "tensor 0 given to mean_over_ranks"),
    "dtypes": ([torch.ones(2)], [torch.ones(2).double()], "float32 of shape \\(2,\\) on rank 0, float64"),
    "numbers": (
        [torch.ones(2)],
        [torch.ones(2)] * 2,
        "the number of tensors given to mean_over_ranks\\(\\): 1 on rank 0, 2",
    ),
    "kinds": ([torch.ones(2)], [1.0], "a float on rank 1"),
}


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_means_of_different_things_are_an_error_on_every_rank(first, second, message):
    def call(rank):
        with pytest.raises(AgreementError, match=message):
            lockstep.mean_over_ranks(second if rank.rank else first, rank.group)
        return lockstep.mean_over_ranks(torch.ones(1) * rank.rank, rank.group).item()

    assert run_ranks(2, call) == [0.5, 0.5]


# ---------------------------------------------------------------------------------- create_graph=True


def strides_of_second_order(rank):
    module = lockstep.replicate(nn.Linear(3, 2, bias=False).double(), process_group=rank.group)
    reference = copy.deepcopy(module)
    coefficients = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    x = torch.tensor([[1.0, 2, 3]], dtype=torch.float64)
    grads = []
    for each, transposed in ((module, rank.rank == 1), (reference, False)):
        each(x).square().sum().backward(create_graph=True)
        (grad,) = (p.grad for p in each.parameters())
        each.zero_grad()
        product = grad.t() * coefficients.t().contiguous() if transposed else grad * coefficients
        product.sum().backward()
        grads.append(each.weight.grad)
    torch.testing.assert_close(*grads)


def test_gradients_of_gradients_come_in_any_strides():
    run_ranks(2, strides_of_second_order)


class Ways(nn.Module):
    """Three layers; which are used is up to the call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2).double() for _ in range(3)])

    def forward(self, x, way, power):
        for i in way:
            x = self.layers[i](x)
        return x.pow(power).sum()


def second_order(module, losses, clear):
    """The squared norm of the gradient of the mean loss, as a penalty; the gradients of that."""
    loss = sum(losses) / len(losses)
    loss.backward(create_graph=True)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    for p in module.parameters():
        p.grad = None
    penalty = sum((n + 1) * grad.square().sum() for n, grad in enumerate(grads))
    penalty.backward()
    second = [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]
    clear()
    return second


def on_uneven_data(rank):
    """The second rank has no batch left in the second turn, and goes through its first one again."""
    module = lockstep.replicate(rank.make(Ways), process_group=rank.group)
    reference = copy.deepcopy(module)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    batches = [[x, x + 1], [x + 2]]
    for turn, batch in enumerate(lockstep.batches(batches[rank.rank], module)):
        active = [each[turn] for each in batches if turn < len(each)]
        got = second_order(module, [module(batch, (0, 1), 3)], module.zero_grad)
        wanted = second_order(reference, [reference(each, (0, 1), 3) for each in active], reference.zero_grad)
        torch.testing.assert_close(got[:4], wanted[:4])
    return turn


def test_a_rank_that_has_run_out_takes_part():
    assert run_ranks(2, on_uneven_data) == [1, 1]


WAYS = {
    "other layers on each rank": ([(0, 1), (2, 1)], 3),
    "more layers on one rank": ([(0,), (0, 1)], 2),
    "nothing in common": ([(0,), (1,)], 2),
    "one rank's gradients are constant": ([(0,), (0,)], (1, 3)),
}


def ways(rank, ways, power):
    module = lockstep.replicate(rank.make(Ways), process_group=rank.group)
    reference = copy.deepcopy(module)
    powers = power if isinstance(power, tuple) else (power, power)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    for step in range(3):
        parts = [(x + r + step, way, p) for r, (way, p) in enumerate(zip(ways, powers, strict=True))]
        got = second_order(module, [module(*parts[rank.rank])], module.zero_grad)
        wanted = second_order(reference, [reference(*part) for part in parts], reference.zero_grad)
        for a, b in zip(got, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("way", "power"), WAYS.values(), ids=WAYS)
def test_ranks_may_use_other_parameters(way, power):
    run_ranks(2, ways, way, power)


class InPieces(torch.autograd.Function):
    """A function of x whose backward runs a backward of its own, as checkpointing does; to any order."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.function(x), grad, create_graph=graph)
        return x.grad, None


class Twice(nn.Module):
    """A layer whose gradient comes in two pieces, the second one when the first has been sent."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()

    def forward(self, x, pieces=True):
        squares = [lambda y: self.twice(y).pow(2), lambda y: self.twice(y).pow(3)]
        inputs = [x.clone().requires_grad_() for _ in squares]
        outputs = [InPieces.apply(y, f) if pieces else f(y) for y, f in zip(inputs, squares, strict=True)]
        return self.first(x).pow(2).sum() + sum(each.sum() for each in outputs)


def in_two_pieces(rank):
    module = lockstep.replicate(rank.make(Twice), process_group=rank.group, bucket_cap_mb=1e-6)
    reference = copy.deepcopy(module)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    for step in range(3):
        parts = [x + r + step for r in range(rank.world)]
        got = second_order(module, [module(parts[rank.rank])], module.zero_grad)
        wanted = second_order(reference, [reference(part, pieces=False) for part in parts], reference.zero_grad)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_a_gradient_that_comes_in_two_pieces_has_the_graphs_of_both():
    run_ranks(2, in_two_pieces)


def with_new_layers(rank, change):
    """A layer is put in before the round, in which the ranks agree on it."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    lockstep.replicate(module, process_group=rank.group)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    module(x).square().sum().backward()
    module.zero_grad()
    layer = rank.make(lambda: nn.Linear(2, 2).double())
    if change == "replaced":
        module[0] = layer
    else:
        module.insert(0, layer)  # its parameters have the numbers that others have had
    reference = copy.deepcopy(module)
    parts = [x + r for r in range(rank.world)]
    got = second_order(module, [module(parts[rank.rank]).square().sum()], module.zero_grad)
    wanted = second_order(reference, [reference(part).square().sum() for part in parts], reference.zero_grad)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change", ["replaced", "inserted"])
def test_gradients_of_new_parameters_have_graphs_in_their_first_round(change):
    run_ranks(2, with_new_layers, change)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_that_has_a_graph_on_one_rank_only_has_one_on_all():
    """The loss of rank 0 is linear. Going back through the mean takes both ranks."""

    def call(rank):
        model, seen = lockstep.replicate(nn.ParameterList([torch.full((1,), 2.0)]), process_group=rank.group), []
        (weight,) = model
        for _ in range(2):
            (weight**3 if rank.rank else 3 * weight).sum().backward(create_graph=True)
            mean, weight.grad = weight.grad, None
            with model.no_sync():
                (mean * mean).sum().backward()
            seen.append(weight.grad)
            weight.grad = None
            (weight * 1.0).sum().backward()  # synchronises
            weight.grad = None
        return seen

    # the mean is (3 + 3 * 2 ** 2) / 2, and its derivative 2 * 3 * 2 on rank 1, which the other rank's half goes to, too
    assert run_ranks(2, call) == [[None] * 2, [2 * 7.5 * 12] * 2]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
def test_a_pass_through_gradients_comes_to_parameters_on_one_rank_only(hosts):
    """It is a round on both: the gradient of rank 0 is constant, and what goes back from the mean goes to rank 1."""

    def call(rank):
        model, seen = lockstep.replicate(nn.Linear(1, 1, bias=False), process_group=rank.group), []
        nn.init.constant_(model.weight, 2.0)
        for _ in range(3):
            output = model(torch.ones(1, 1))
            (output.square() if rank.rank else output).sum().backward(create_graph=True)
            mean, model.weight.grad = model.weight.grad, None
            mean.square().sum().backward()
            seen.append(model.weight.grad.item())
            model.zero_grad()
        return seen

    # the mean is (1 + 2 * 2) / 2, its derivative 2 / 2
    assert run_ranks(2, call, hosts=hosts) == [[2 * 2.5] * 3] * 2


class Pair(nn.Module):
    """Two weights, of which losses are made as they are told, and many more."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (2.0, 3.0))
        self.more = nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(40))

    def forward(self, loss):
        return loss(self.a, self.b).sum()


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("way", ["create_graph", "mean_over_ranks"])
def test_buckets_leave_after_the_means_of_the_pass(way, hosts):
    """On rank 0 the gradient of b is whole before the pass comes to the mean, on rank 1 it goes through that."""
    losses = (lambda a, b: a.square() + b), (lambda a, b: a.square() * b)

    def call(rank):
        module = lockstep.replicate(Pair(), process_group=rank.group, bucket_cap_mb=1e-6)
        for _ in range(3):
            loss = module(losses[rank.rank])
            if way == "create_graph":
                loss.backward(create_graph=True)
                grad, module.a.grad = module.a.grad, None
                module.zero_grad()
            else:
                grad = lockstep.mean_over_ranks(torch.autograd.grad(loss, module.a, create_graph=True)[0], rank.group)
            (grad.square().sum() + module(lambda a, b: b)).backward()
            seen = module.a.grad.item(), module.b.grad.item()
            module.zero_grad()
        return seen

    # the mean is a + a * b, that is 8; its derivatives 1 + b and a; b itself counts once more
    assert run_ranks(2, call, hosts=hosts) == [(2 * 8 * 4, 2 * 8 * 2 + 1)] * 2


def test_what_no_rank_goes_back_from_has_no_gradient():
    """The penalty is of the gradient of a alone, which goes back to a alone."""

    def call(rank):
        module = lockstep.replicate(Pair(), process_group=rank.group)
        module(lambda a, b: a.square() + b.square()).backward(create_graph=True)
        grad = module.a.grad
        module.zero_grad()
        grad.square().sum().backward()
        return module.a.grad.item(), module.b.grad

    assert run_ranks(2, call) == [(2 * 4 * 2, None)] * 2


def test_means_of_what_has_a_graph_on_one_rank_only_have_one_on_all():
    def call(rank):
        x = torch.full((1,), 3.0, requires_grad=rank.rank == 1)
        mean = lockstep.mean_over_ranks(x * 2, rank.group)
        mean.square().sum().backward()
        without = lockstep.mean_over_ranks(x.detach(), rank.group)
        return None if x.grad is None else x.grad.item(), without.requires_grad

    assert run_ranks(2, call) == [(None, False), (2 * 6.0 * 2, False)]


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
@pytest.mark.parametrize("way", ["create_graph", "mean_over_ranks"])
def test_a_pass_that_fails_on_one_rank_before_or_after_a_mean_fails_on_all(way, place, derive, hosts):
    """Two means, of which the pass comes to the later one first; ranks go on afterwards."""

    def mean_of_gradient(rank, module, loss):
        if way == "mean_over_ranks":
            (own,) = torch.autograd.grad(loss, module.a, create_graph=True)
            return lockstep.mean_over_ranks(own, rank.group)
        loss.backward(create_graph=True)
        mean, module.a.grad = module.a.grad, None
        return mean

    def call(rank):
        module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
        for step in range(3):
            a = module.a * 1
            first = mean_of_gradient(rank, module, module(lambda _, b, a=a: a.square() + 0 * b) + sum(module.more))
            passed = first * 1
            second = mean_of_gradient(rank, module, (passed * module.a).sum())
            module.zero_grad()
            penalty = (second * 1).sum()
            if step == 1 and rank.rank == 1:
                penalty = second * 1
                where = {"before the first": penalty, "between": passed, "after the second": a}[place]
                where.register_hook(divide_by_zero)
                penalty = penalty.sum()
            try:
                seen.append(derive(module, penalty).item())
            except (PeerError, ZeroDivisionError) as error:
                seen.append(type(error))
            module.zero_grad()
        return seen

    found = run_ranks(2, call, hosts=hosts)
    if place == "after the second" and derive is grad:
        assert found == [[found[0][0]] * 3, [found[0][0], ZeroDivisionError, found[0][0]]]  # this rank's own affair
    else:
        assert [seen[1] for seen in found] == [PeerError, ZeroDivisionError]
        assert {value for seen in found for value in (seen[0], seen[2])} == {found[0][0]}


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_goes_through_the_means_behind_its_outputs_that_do_not_lead_to_its_inputs(fails, hosts):
    """On another rank they may; so a pass that fails on one rank fails on all."""

    def call(rank):
        module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
        for _ in range(2):
            module(lambda a, b: a.square()).backward(create_graph=True)
            mean, b = module.a.grad, module.b * 1
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
        return seen

    found = run_ranks(2, call, hosts=hosts)
    assert found == [[error if fails else 1.0, 0.5] * 2 for error in (PeerError, ZeroDivisionError)]


INPUTS = {
    "no graph": lambda a, x: x.detach() * 5,
    "another graph": lambda a, x: x * 5,
    "the same graph": lambda a, x: a * x * 5,
}


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("first", INPUTS)
def test_grad_through_a_mean_that_leads_to_the_inputs_on_one_rank_only(first, unused, hosts):
    def call(rank):
        a, x = (torch.full((1,), value, requires_grad=True) for value in (2.0, 3.0))
        seen = []
        for _ in range(2):
            loss = a**3 * x if rank.rank else INPUTS[first](a, x)
            mean = lockstep.mean_over_ranks(loss, rank.group)
            if unused or rank.rank or first == "the same graph":
                (grad,) = torch.autograd.grad(mean.square().sum(), [a], allow_unused=unused)
            else:  # an error of this rank alone
                with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                    torch.autograd.grad(mean.square().sum(), [a])
                grad = None
            seen.append(grad if grad is None else grad.item())
            (own,) = torch.autograd.grad(lockstep.mean_over_ranks(a * 2, rank.group), a)
            seen.append(own.item())
        return seen

    # the mean is (15 + 24) / 2, or (30 + 24) / 2; what goes back is twice that
    twice = 2 * (27.0 if first == "the same graph" else 19.5)
    of_first = twice * 15 if first == "the same graph" else None
    assert run_ranks(2, call, hosts=hosts) == [[of_first, 2.0] * 2, [twice * 12 * 3, 2.0] * 2]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("constant", [0, 1])
def test_means_of_gradients_that_are_constant_on_one_rank(constant, hosts):
    """A pass through their mean comes to parameters on the other rank only, and is a round on both. Those of a third
    order are refused: on that rank nothing leads from the second mean to the first."""
    losses = [lambda a, b: 3 * a + b, lambda a, b: a.square() * b]

    def call(rank):
        module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
        for _ in range(2):
            loss = module(losses[rank.rank != constant])
            (own,) = torch.autograd.grad(loss, module.a, create_graph=True)
            mean = lockstep.mean_over_ranks(own, rank.group)
            mean.square().sum().backward(retain_graph=True)
            seen.append((module.a.grad.item(), module.b.grad.item()))
            module.zero_grad()
            (grad,) = torch.autograd.grad(mean.square().sum(), module.a, create_graph=True, allow_unused=True)
            grad = module.a.detach() if grad is None else grad
            first, second = (2, 0) if constant else (0, 2)
            words = f"through {first} earlier mean.s. over the ranks on rank 0, and through {second} on rank 1"
            with pytest.raises(AgreementError, match=words):
                lockstep.mean_over_ranks(grad, rank.group)
        return seen

    # the mean is (3 + 2 * 2 * 3) / 2, that is 7.5; a's derivative 2 * 3 / 2, b's 2 * 2 / 2
    assert run_ranks(2, call, hosts=hosts) == [[(2 * 7.5 * 3, 2 * 7.5 * 2)] * 2] * 2


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("way", ["create_graph", "mean_over_ranks"])
def test_a_pass_that_fails_before_a_mean_of_gradients_that_are_constant_on_one_rank(way, failing, hosts):
    """On rank 0 nothing leads from the mean to parameters; the round is one of both ranks."""
    losses = (lambda a, b: 3 * a), (lambda a, b: a.square() * b)

    def call(rank):
        module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
        for step in range(3):
            loss = module(losses[rank.rank])
            if way == "create_graph":
                loss.backward(create_graph=True)
                mean = module.a.grad
                module.zero_grad()
            else:
                (own,) = torch.autograd.grad(loss, module.a, create_graph=True)
                mean = lockstep.mean_over_ranks(own, rank.group)
            penalty = mean * 1
            if step == 1 and rank.rank == failing:
                penalty.register_hook(divide_by_zero)
            try:
                penalty.square().sum().backward()
                seen.append(module.a.grad.item())
            except (PeerError, ZeroDivisionError) as error:
                seen.append(type(error))
            module.zero_grad()
        return seen

    errors = [ZeroDivisionError if rank == failing else PeerError for rank in range(2)]
    assert run_ranks(2, call, hosts=hosts) == [[45.0, error, 45.0] for error in errors]


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("orders", [2, 3, 4])
def test_gradients_of_any_order_where_those_of_one_rank_are_constant(orders, hosts):
    """Nothing on that rank leads from its later means to its earlier ones; it takes part in all."""
    losses = (lambda a, b: 3 * a + b), (lambda a, b: a**5 * b / 10)

    def of_order(module, loss, clear):
        for _ in range(orders - 1):
            loss.backward(create_graph=True)
            grad = module.a.grad
            clear()
            loss = (grad / 100).square().sum()
        loss.backward()
        found = module.a.grad, module.b.grad
        clear()
        return found

    def call(rank):
        module, reference = lockstep.replicate(Pair(), process_group=rank.group), Pair()
        for _ in range(2):
            got = of_order(module, module(losses[rank.rank]), module.zero_grad)
            wanted = of_order(reference, sum(reference(loss) for loss in losses) / 2, reference.zero_grad)
            torch.testing.assert_close(got, wanted)

    run_ranks(2, call, hosts=hosts)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
def test_a_pass_that_a_hook_begins_and_that_fails_before_a_mean_fails_on_all(hosts):
    """The mean is in the graph of the inner pass alone."""

    def call(rank):
        module, seen = lockstep.replicate(Pair(), process_group=rank.group), []
        for step in range(3):
            module(lambda a, b: a.square()).backward(create_graph=True)
            mean = module.a.grad * 1
            module.zero_grad()
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
        return seen

    # the mean is 2 * a, that is 4; the inner pass gives 2 * 4 * 2, and b gets that and 1, times a
    assert run_ranks(2, call, hosts=hosts) == [[34.0, error, 34.0] for error in (PeerError, ZeroDivisionError)]
