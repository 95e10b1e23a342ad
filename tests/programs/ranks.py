"""Ranks as threads that train replicas, and what one process computes for them: the oracle for rounds."""

from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch

import lockstep
from lockstep.errors import AgreementError
from small_modules import one_weight
from threaded import run_ranks


def on_ranks(world, *parameters, raises=None, says=(), **options):
    """The test is called on each of so many ranks, with the rank before its own arguments.

    `options` are those of `run_ranks`. `parameters` names some of them that the test is parametrized with instead, and
    gets as well if it asks for them. Without `world` there are as many ranks as `hosts` has letters. With `raises` each
    rank is to end with that error, whose message has what it `says`, one text or several.
    """
    return called_by(run_ranks, world, parameters, raises, says, options)


def called_by(run, world, parameters, raises, says, options, given_by_run=1):
    """Decorate a test of one rank, which `run` is to call on all of them, with so many arguments before its own."""
    options = {"world": world, **options}
    texts = [says] if isinstance(says, str) else says

    def decorate(function):
        arguments = list(inspect.signature(function).parameters.values())[given_by_run:]
        own = [argument.name for argument in arguments]

        @functools.wraps(function)
        def test(**given):
            chosen = options | {name: given[name] for name in parameters}
            count = chosen.pop("world") or len(chosen["hosts"])
            ended = run(count, function, *map(given.get, own), errors=raises is not None, **chosen)
            for error in [getattr(each, "error", each) for each in ended] if raises else ():
                assert isinstance(error, raises), error
                assert all(text in str(error) for text in texts), error

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for_ranks = [inspect.Parameter(name, kind) for name in parameters if name not in own]
        test.__signature__ = inspect.Signature([*for_ranks, *arguments])
        function.__qualname__ += ".__wrapped__"  # where other processes find it
        return test

    return decorate


def error_on_all(world, function, *args, error=AgreementError, **options):
    """The message of the error with which `function(rank, *args)` ends on every rank, in the same words."""

    def call(rank):
        with pytest.raises(error) as caught:
            function(rank, *args)
        return str(caught.value)

    (message,) = set(run_ranks(world, call, **options))
    return message


def replicated(rank, make=one_weight, **options):
    """What `make` makes, the same on every rank, replicated over the rank's group."""
    return lockstep.replicate(rank.make(make), process_group=rank.group, **options)


def rows(step, rank, *shape, dtype=torch.float64):
    """Random numbers that are a rank's part of a step: three rows of three, or of another shape."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape or (3, 3), generator=generator, dtype=torch.float64).to(dtype)


def clear(*modules, set_to_none=True):
    for module in modules:
        module.zero_grad(set_to_none=set_to_none)


def scalars(*modules):
    """The gradients of parameters of one element, as numbers."""
    return [None if p.grad is None else p.grad.item() for module in modules for p in module.parameters()]


def scalars_of(*modules, loss):
    """The same after a backward pass, before which there are none."""
    clear(*modules)
    loss.backward()
    return scalars(*modules)


# ------------------------------------------------------------------------------ beside one process


def same_gradients(rank, module, reference, rtol=1e-11, atol=1e-13):
    """Gradients are those of the reference, of the same dtypes, and the same bits on every rank."""
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.dtype == q.grad.dtype, name
            torch.testing.assert_close(
                p.grad, q.grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert rank.all_equal(p.grad), name


def same_as_one_process(rank, module, loss, steps=4, *, change=None, optimizer=None, then=None, rtol=1e-11, atol=1e-13):
    """Train a replicated module beside a copy in one process that has the losses of all ranks, and compare gradients.

    `loss(module, step, rank)` is a rank's part of the step, of which the copy has the mean over the ranks. Both are
    first handed to `change(module, step)`, and to `then(module)` when gradients are there, which returns the same of
    both. Between steps gradients become None or zeros, and `optimizer` makes an optimizer for each, which steps.
    """
    reference = copy.deepcopy(module)
    optimizers = [optimizer(each.parameters()) for each in (module, reference)] if optimizer else []
    for step in range(steps):
        for each in (module, reference):
            clear(each, set_to_none=step % 3 != 1)
            if change is not None:
                change(each, step)
        loss(module, step, rank.rank).backward()
        (sum(loss(reference, step, r) for r in range(rank.world)) / rank.world).backward()
        same_gradients(rank, module, reference, rtol, atol)
        if then is not None:
            torch.testing.assert_close(then(module), then(reference))
        for each in optimizers:
            each.step()
    torch.testing.assert_close(list(module.parameters()), list(reference.parameters()))
    lockstep.check_in_sync(module, rank.group)


# ------------------------------------------------------------------------------ beside this rank alone


def own_gradients(module, loss):
    """The gradients of this rank alone, zeros where there is none. Buffers are as before afterwards."""
    before = [buffer.clone() for buffer in module.buffers()]
    parameters = list(module.parameters())
    found = torch.autograd.grad(loss(module), parameters, allow_unused=True)
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.copy_(value)
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, found, strict=True)]


def mean_of(tensors):
    return sum(tensors) / len(tensors)


def holds_means(rank, module, own, mean=mean_of, rtol=1e-6, atol=1e-6):
    """Return True if gradients are the means of what the ranks have, the same bits on all; where there are none, they
    count as zero."""
    for parameter, gradient in zip(module.parameters(), own, strict=True):
        wanted = mean(rank.gather(gradient))
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        assert (got.dtype, got.device) == (parameter.dtype, rank.device)
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
        assert rank.all_equal(got)
    return True


def makes_means(rank, module, loss, **how):
    """Return True if the backward pass of `loss(module)` makes the means of what it makes on each rank alone."""
    module.zero_grad()
    own = own_gradients(module, loss)
    loss(module).backward()
    return holds_means(rank, module, own, **how)
