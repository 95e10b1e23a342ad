"""Kinds of gradients: sparse, complex, half, channels last, shared, views of buckets, recomputed in backward."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_reference import Bag, both, ddp_class, failure, gradients, own, scalars
from processes import on_processes, run_processes
from small_modules import one_weight, x_of

# -------------------------------------------------------------------------------------------------- dtypes


@both
@on_processes(2)
def test_sparse_gradients_stay_sparse(rank, implementation):
    for view in (False, True):
        local = rank.make(Bag)
        ddp = ddp_class(implementation)(copy.deepcopy(local), gradient_as_bucket_view=view)
        for rows in (
            [[0, 1], [1, 2], [5, 5], [9, 0]],
            [[3, 3], [3, 3], [4, 5], [6, 7]],
        ):  # as many different rows, and not
            target = torch.tensor([0, 1, 2, 3])
            for module in (local, ddp):
                module.zero_grad()
            F.cross_entropy(local(torch.tensor(rows)), target).backward()
            F.cross_entropy(ddp(own(rank, torch.tensor(rows))), own(rank, target)).backward()
            (wanted,), (got,) = gradients(local), gradients(ddp)
            assert got.is_sparse
            torch.testing.assert_close(got.to_dense(), wanted.to_dense())


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (self.weight * x).abs().sum()


class TwoDtypes(nn.Module):
    """Half of the work in double precision."""

    def __init__(self):
        super().__init__()
        self.first, self.second = one_weight(), one_weight().double()

    def forward(self, x):
        return self.second(self.first(x).double())


@both
@on_processes(2)
def test_dtypes(rank, implementation):
    make, local = ddp_class(implementation), Complex()
    for number in range(2):
        (local(torch.full((2, 3), number + 1j)) / 2).backward()
    for view in (False, True):
        half = make(one_weight().half(), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
        half(torch.tensor([[2.0**15]]).half()).sum().backward()
        assert scalars(half) == [2.0**15]  # divided before it is summed, so that half precision does not overflow
        of_complex = make(Complex(), gradient_as_bucket_view=view)
        of_complex(torch.full((2, 3), rank.rank + 1j)).backward()
        torch.testing.assert_close(gradients(of_complex), [local.weight.grad])
        mixed = make(TwoDtypes(), gradient_as_bucket_view=view)
        mixed(x_of(rank)).sum().backward()
        assert [(p.grad.dtype == p.dtype, p.grad.item()) for p in mixed.parameters()] == [(True, 1.5)] * 2


# ------------------------------------------------------------------------------------------------- layouts

FORMATS = [torch.contiguous_format, torch.channels_last, torch.contiguous_format], [torch.channels_last] * 3
DTYPES = [torch.float] * 3, [torch.float, torch.bfloat16, torch.float]


class Convolutions(nn.Module):
    """Layers of different memory formats and dtypes, each fed its own dtype."""

    def __init__(self, formats, dtypes):
        super().__init__()
        layers = nn.Conv2d(2, 4, 2), nn.Conv2d(4, 4, 2), nn.Conv2d(4, 2, 2)
        kinds = zip(layers, formats, dtypes, strict=True)
        self.layers = nn.ModuleList(layer.to(memory_format=f, dtype=d) for layer, f, d in kinds)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


@both
@on_processes(2)
def test_gradients_are_laid_out_as_their_parameters(rank, implementation):
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    for formats, dtypes, cap in itertools.product(FORMATS, DTYPES, (1e-6, 25)):
        local = rank.make(lambda formats=formats, dtypes=dtypes: Convolutions(formats, dtypes))
        ddp = ddp_class(implementation)(copy.deepcopy(local), bucket_cap_mb=cap)
        near = 1e-5 if dtypes == DTYPES[0] else 2e-2
        for step in range(3):
            local(x).square().mean().backward()
            ddp(own(rank, x)).square().mean().backward()
            assert all(p.grad.stride() == p.stride() for p in ddp.parameters())
            torch.testing.assert_close(gradients(ddp), gradients(local), rtol=near, atol=near)
            for module in (local, ddp):
                module.zero_grad(set_to_none=step == 0)


class Plus(nn.Module):
    """Adds its parameter, times a factor."""

    def __init__(self, parameter, factor):
        super().__init__()
        self.parameter, self.factor = parameter, factor

    def forward(self, x):
        return x + self.parameter * self.factor


class SharedAndUnused(nn.Module):
    """A bias under two names, in a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(2, 1, bias=False), one_weight()
        self.bias = nn.Parameter(torch.zeros(1))
        self.unused.bias = self.bias

    def forward(self, x):
        return self.used(x)


@both
@on_processes(2)
def test_a_parameter_in_two_places_has_one_gradient(rank, implementation):
    make, results = ddp_class(implementation), []
    for view, to_none in itertools.product((False, True), repeat=2):
        parameter = nn.Parameter(torch.ones(1000))
        module = nn.Sequential(Plus(parameter, rank.rank + 1), Plus(parameter, rank.rank + 1))
        ddp = make(module, bucket_cap_mb=0.001, gradient_as_bucket_view=view)
        for _ in range(3):
            ddp.zero_grad(set_to_none=to_none)
            ddp(torch.zeros(())).sum().backward()
            results += gradients(ddp)
    unused = make(SharedAndUnused(), find_unused_parameters=implementation == "torch")
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


# ------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    """The second layer is computed again in backward, once or more."""

    def __init__(self, reentrant, times=1, shared=False):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(1, 1)
        if shared:
            self.first.weight = self.second.weight
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return x


def recompute(rank, implementation, cases):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    results = {}
    for (reentrant, times, shared, whole), options in cases:
        local = rank.make(lambda r=reentrant, t=times, s=shared: Checkpointed(r, t, s))
        ddp = ddp_class(implementation)(copy.deepcopy(local), bucket_cap_mb=1e-5, **options)
        for _ in range(3):
            for module, part in ((local, x), (ddp, own(rank, x))):
                module.zero_grad(set_to_none=False)
                part = part.clone().requires_grad_()
                out = checkpoint(module, part, use_reentrant=reentrant) if whole else module(part)
                out.square().mean().backward()
        results[str((reentrant, times, shared, whole, options))] = gradients(local), gradients(ddp)
    return results


def assert_parity(results):
    for case, (local, wrapped) in itertools.chain.from_iterable(result.items() for result in results):
        assert [grad is None for grad in wrapped] == [grad is None for grad in local], case
        for wanted, got in zip(local, wrapped, strict=True):
            if wanted is not None:
                torch.testing.assert_close(got, wanted, rtol=1.3e-6, atol=5e-5, msg=case)


@both
def test_checkpointing(implementation):
    flags = {"find_unused_parameters": True}
    static = {"static_graph": True}
    cases = [
        ((False, 1, False, False), flags),
        ((False, 2, False, False), flags),
        ((False, 2, True, False), {**flags, "gradient_as_bucket_view": True}),
        ((False, 1, False, True), flags),
        *(((True, times, False, False), static) for times in (1, 2)),
        ((True, 2, True, False), static),
    ]
    assert_parity(run_processes(2, recompute, implementation, cases))
