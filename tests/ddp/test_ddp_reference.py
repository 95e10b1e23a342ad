"""Gradients of PyTorch's DistributedDataParallel and of ours: whole batches, accumulation, unused parameters."""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_reference import Branches, Mixed, both, both_since_2_13, ddp_class, failure, gradients, own, scalars, values
from processes import on_processes, run_processes
from programs.networks import Applying
from small_modules import fails_in_backward, one_weight, x_of

# ------------------------------------------------------------------------------------ against one process

TRAININGS = [  # are gradients kept and zeroed, is the wrapped module saved and loaded, options
    (True, False, {}),
    (True, False, {"gradient_as_bucket_view": True}),
    (False, True, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}),
    (False, False, {"bucket_cap_mb": 0.001, "static_graph": True}),
    (True, True, {"find_unused_parameters": True, "bucket_cap_mb": 0.0001, "batched_grad_copy": True}),
    (False, False, {"bucket_cap_mb_list": [0.0001, 0.001]}),
]


def descend(module, keep_gradients):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
                if keep_gradients:
                    parameter.grad.requires_grad_(False)
                    parameter.grad.zero_()
                else:
                    parameter.grad = None


def saved_and_loaded(ddp):
    file = io.BytesIO()
    torch.save(ddp, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def train_beside(rank, implementation):
    """Trains a module on whole batches and a wrapped copy on this rank's parts; the values of both after each step."""
    after = []
    for keep_gradients, save, options in TRAININGS:
        local = rank.make(Mixed)
        ddp = ddp_class(implementation)(copy.deepcopy(local) if rank.rank == 0 else rank.make(Mixed, seed=1), **options)
        for step in range(5):
            draw = torch.randn(2 * rank.world, 5, generator=torch.Generator().manual_seed(step))
            x, y = draw[:, :3], draw[:, 3:]
            F.mse_loss(local(x), y).backward()
            F.mse_loss(ddp(own(rank, x)), own(rank, y)).backward()
            descend(local, keep_gradients)
            descend(ddp, keep_gradients)
            after.append((values(local), values(ddp)))
            if save and step == 2:
                ddp = saved_and_loaded(ddp)
    return after


@both_since_2_13
@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_a_batch_train_as_the_whole_batch(implementation, world):
    for steps in zip(*run_processes(world, train_beside, implementation), strict=True):
        for local, wrapped in steps:
            torch.testing.assert_close(wrapped, local, rtol=1.3e-6, atol=5e-5)
            assert all(torch.equal(a, b) for a, b in zip(wrapped, steps[0][1], strict=True))  # the same on every rank


# ------------------------------------------------------------------------------------------- accumulation


@both
@on_processes(2)
def test_accumulated_gradients_are_averaged_at_the_next_synchronised_backward(rank, implementation):
    x = x_of(rank)
    for options in ({}, {"gradient_as_bucket_view": True}):
        seen = {}
        ddp = ddp_class(implementation)(one_weight(), **options)
        with torch.no_grad(), ddp.no_sync():
            ddp(x)
        flags = [ddp.require_backward_grad_sync]
        with ddp.no_sync():
            with ddp.no_sync():
                ddp(x).sum().backward()
            flags.append(ddp.require_backward_grad_sync)
            seen["inside"] = scalars(ddp)
            ddp(x).sum().backward()
        flags.append(ddp.require_backward_grad_sync)
        seen["before"] = scalars(ddp)
        for name in ("after", "again"):
            ddp(x).sum().backward()
            seen[name] = scalars(ddp)
        ddp.module.weight.grad = torch.full((1, 1), 10.0 * (rank.rank + 1))
        ddp(x).sum().backward()
        seen["onto others"] = scalars(ddp)
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        assert [*flags, ddp.require_backward_grad_sync] == [True, False, True, True]
        assert seen == {
            "inside": [rank.rank + 1],
            "before": [2 * (rank.rank + 1)],
            "after": [4.5],  # the mean of 3 and 6
            "again": [6.0],
            "onto others": [16.5],  # the mean of 10 + 1 and 20 + 2
        }


def no_sync_around_half(rank, implementation):
    seen = []
    for half in ("forward", "backward"):
        ddp = ddp_class(implementation)(one_weight())
        if half == "forward":
            with ddp.no_sync():
                out = ddp(x_of(rank))
            out.sum().backward()
        else:
            out = ddp(x_of(rank))
            with ddp.no_sync():
                out.sum().backward()
        seen += scalars(ddp)
    return seen


def test_lockstep_decides_in_backward_the_reference_in_forward():
    assert run_processes(2, no_sync_around_half, "lockstep") == [[1.5, 1.0], [1.5, 2.0]]
    assert run_processes(2, no_sync_around_half, "torch") == [[1.0, 1.5], [2.0, 1.5]]


# -------------------------------------------------------------------------------------- unused parameters


def use_branches(rank, implementation, options):
    """Gradients after each of several steps in which ranks use different layers."""
    make, results = ddp_class(implementation), []
    other = "a" if rank.rank == 0 else "b"
    for view in (False, True):
        ddp = make(Branches(), gradient_as_bucket_view=view, **options)
        ddp(x_of(rank), other).sum().backward()
        seen = [scalars(ddp)]
        for parameter in ddp.parameters():
            parameter.grad = torch.full_like(parameter, 8.0)
        ddp(x_of(rank), other).sum().backward()
        results.append([*seen, scalars(ddp)])
    return results


@both
@pytest.mark.parametrize("flag", ["find_unused_parameters", "static_graph"])
def test_unused_on_some_ranks_counts_as_zero_and_on_all_is_left_alone(implementation, flag):
    results = run_processes(2, use_branches, implementation, {flag: True})
    assert results == [[[[0.5, 1.0, None], [8.5, 9.0, 8.0]]] * 2] * 2


def test_lockstep_needs_no_flag():
    results = run_processes(2, use_branches, "lockstep", {})
    assert results == [[[[0.5, 1.0, None], [8.5, 9.0, 8.0]]] * 2] * 2


STEPS = [("a", "a"), ("ab", "ab"), ("a", "ab"), ("c", "c"), ("abc", "abc")]  # what ranks 0 and 1 use


@both
@on_processes(2)
def test_control_flow_may_change_from_step_to_step(rank, implementation):
    wanted = [
        [1.5, None, None],
        [1.5, 1.5, None],
        [1.5, 1.0, None],
        [None, None, 1.5],
        [1.5, 1.5, 1.5],
        [0.5, 1.0, 1.5],
    ]
    x = x_of(rank)
    ddp = ddp_class(implementation)(Branches(), find_unused_parameters=implementation == "torch", bucket_cap_mb=1e-6)
    seen = []
    for names in STEPS:
        ddp.zero_grad()
        ddp(x, names[rank.rank]).sum().backward()
        seen.append(scalars(ddp))
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x, "ab"[rank.rank]).sum().backward()
    ddp(x, "c").sum().backward()  # a and b have waited for this
    assert [*seen, scalars(ddp)] == wanted


def two_outputs():
    """A tuple or a dict of two outputs, and a layer that nothing uses."""

    def forward(m, x, as_dict=False):
        pair = m.a(x), m.b(x)
        return {"pair": pair, "sum": sum(pair)} if as_dict else pair

    return Applying(forward, (), a=one_weight(2.0), b=one_weight(3.0), unused=one_weight())


@both
@on_processes(2)
def test_an_output_left_out_of_the_loss_leaves_its_gradient_alone(rank, implementation):
    wanted = [[None, 1.0, None], [3.0, 3.0, None], [3.0, 4.0, None], [3.0, 5.0, None]]
    results = []
    for as_dict in (False, True):
        ddp = ddp_class(implementation)(two_outputs(), find_unused_parameters=implementation == "torch")
        for step in range(4):
            outputs = ddp(torch.ones(1, 1), as_dict=as_dict)
            a, b = outputs["pair"] if as_dict else outputs
            (a * b if step == 1 else b).sum().backward()
            results.append(scalars(ddp))
    assert results == wanted * 2


# ------------------------------------------------------------------------------------ shared parameters, views


def shared_and_unused():
    """A bias under two names, in a layer that nothing uses."""
    unused, bias = nn.Linear(2, 1, bias=False), nn.Parameter(torch.zeros(1))
    unused.bias = bias
    return Applying(lambda m, x: m.used(x), (), unused=unused, used=one_weight(), bias=bias)


@both
@on_processes(2)
def test_a_parameter_in_two_places_has_one_gradient(rank, implementation):
    make, results = ddp_class(implementation), []
    for view, to_none in itertools.product((False, True), repeat=2):
        twice, added = [lambda m, x: x + m.added * (rank.rank + 1)] * 2, nn.Parameter(torch.ones(1000))
        module = nn.Sequential(*(Applying(plus, (), added=added) for plus in twice))
        ddp = make(module, bucket_cap_mb=0.001, gradient_as_bucket_view=view)
        for _ in range(3):
            ddp.zero_grad(set_to_none=to_none)
            ddp(torch.zeros(())).sum().backward()
            results += gradients(ddp)
    unused = make(shared_and_unused(), find_unused_parameters=implementation == "torch")
    unused(x_of(rank)).sum().backward()
    torch.testing.assert_close(results, [torch.full((1000,), 3.0)] * 12)
    used = {name: p.grad is not None for name, p in unused.module.named_parameters()}
    assert used == {"bias": False, "unused.weight": False, "used.weight": True}
    assert [*unused.state_dict()] == ["module.bias", "module.unused.weight", "module.unused.bias", "module.used.weight"]


@both
@on_processes(2)
def test_optimizers_work_on_views_of_buckets(rank, implementation):
    """PyTorch's own are views, which cannot be detached in place."""
    ddp = ddp_class(implementation)(one_weight(), gradient_as_bucket_view=True)
    ddp(x_of(rank)).sum().backward()
    detached = failure(ddp.module.weight.grad.detach_)[0][:1]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for to_none in (False, True, False):
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        ddp(x_of(rank)).sum().backward()
    assert detached == (["RuntimeError"] if implementation == "torch" else [])
    assert (ddp.module.weight.item(), scalars(ddp)) == (-3.5, [1.5])


# --------------------------------------------------------------------------------- steps out of the ordinary


@both
@on_processes(2)
def test_steps_out_of_the_ordinary(rank, implementation):
    make, x, seen = ddp_class(implementation), x_of(rank), {}

    ddp = make(one_weight(), find_unused_parameters=True)
    torch._C._functions.UndefinedGrad()(ddp(x).sum()).backward()
    seen["an undefined gradient, then another"] = scalars(ddp)
    ddp(x).sum().backward()
    seen["an undefined gradient, then another"] += scalars(ddp)

    ddp = make(one_weight())
    for _ in range(3):
        ddp(x)
    ddp(x).sum().backward()
    seen["outputs that nobody uses"] = scalars(ddp)

    ddp = make(one_weight(), static_graph=True)
    for _ in range(3):
        ddp.zero_grad()
        (ddp(x) + ddp(x)).sum().backward()
    seen["two forwards, one backward"] = scalars(ddp)

    ddp = make(one_weight())
    ddp.forward(input=x).sum().backward()
    seen["forward called by name, with a keyword"] = scalars(ddp)

    ddp = make(one_weight())
    with torch.no_grad():
        out = ddp(x)
    seen["no_grad"] = [out.requires_grad, ddp.module.weight.requires_grad, *scalars(ddp)]
    if rank.rank == 0:  # without buffers a forward talks to nobody
        assert [ddp.eval()(x).item() for _ in range(3)] == [1.0, 1.0, 1.0]
    ddp.train()(x).sum().backward()
    seen["after inference"] = scalars(ddp)

    ddp = make(one_weight())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autograd: gradients with a graph make cycles
        for _ in range(3):
            ddp.module.weight.grad = None
            ddp(x).pow(2).sum().backward(create_graph=True)
    seen["create_graph"] = scalars(ddp)

    ddp = make(one_weight(), find_unused_parameters=True)
    loss = ddp(x).sum()
    loss /= 2
    loss.backward()
    seen["an output changed in place"] = scalars(ddp)
    assert seen == {
        "an undefined gradient, then another": [None, 1.5],
        "outputs that nobody uses": [1.5],
        "two forwards, one backward": [3.0],
        "forward called by name, with a keyword": [1.5],
        "no_grad": [False, True, None],
        "after inference": [1.5],
        "create_graph": [5.0],
        "an output changed in place": [0.75],
    }


@on_processes(2)
def test_lockstep_synchronises_each_of_two_backwards_through_one_forward(rank):
    ddp = ddp_class("lockstep")(two_outputs())
    a, b = ddp(x_of(rank))
    a.sum().backward()
    first = scalars(ddp)
    b.sum().backward()
    assert (first, scalars(ddp)) == ([1.5, None, None], [1.5, 1.5, None])


@both
@on_processes(2)
def test_a_module_may_be_wrapped_again(rank, implementation):
    """After a failed backward, and after the process group has been destroyed and made anew."""
    make, module = ddp_class(implementation), nn.Sequential(one_weight(), one_weight())
    ddp = make(module)
    with pytest.raises(KeyError):
        ddp(fails_in_backward(x_of(rank).requires_grad_(), error=KeyError)).sum().backward()
    if implementation == "torch":  # ours has nothing of the failed pass left
        ddp._remove_autograd_hooks()
    module.zero_grad()
    again = make(module)
    again(x_of(rank)).sum().backward()
    seen = [scalars(again)]
    del ddp, again
    module.zero_grad()
    group = torch.distributed.new_group([0, 1])
    third = make(module, process_group=group)
    third(x_of(rank)).sum().backward()
    assert [*seen, scalars(third)] == [[1.5, 1.5]] * 2


@both
@on_processes(2)
def test_functional_call(rank, implementation):
    ddp = ddp_class(implementation)(nn.Linear(1, 1, bias=False))
    before = ddp.module.weight.detach().clone()
    weight = torch.tensor([[3.0]], requires_grad=True)
    out = torch.func.functional_call(ddp, {"module.weight": weight}, x_of(rank))
    out.backward()
    unchanged = torch.equal(before, ddp.module.weight) and ddp.module.weight.grad is None
    ddp(x_of(rank)).sum().backward()
    found = (out.item(), weight.grad.item(), unchanged, gradients(ddp)[0].item())
    assert found == [(3.0, 1.0, True, 1.5), (6.0, 2.0, True, 1.5)][rank.rank]
