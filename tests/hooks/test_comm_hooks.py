"""Communication hooks: PyTorch's own on ranks as threads, what comes of one, what they see, and what is refused.

Annotations of hooks are looked at, so they may not all be strings in this file.
"""

import copy
import functools
import gc
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.futures import Future

import lockstep
from lockstep.distributed.reduction.buckets.comm_hooks import GradBucket
from lockstep.errors import HookError, PeerError
from programs.ranks import on_ranks, replicated
from small_modules import chain, error_of, fails_in_backward, one_weight, x_of
from threaded import count_collectives, run_ranks


def done(value):
    future = Future()
    future.set_result(value)
    return future


MIB = 1 << 20


def network(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def prepared(rank, *hooks, make=network, **options):
    """A replicated network, the same at each call, with hooks `(state, hook)`."""
    model = replicated(rank, make, **options)
    for state, hook in hooks:
        model.register_comm_hook(state, hook)
    return model


def rows(rank, step, count=4, dtype=torch.float32):
    """This rank's part of a batch."""
    x = torch.randn(count * rank.world, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return x.chunk(rank.world)[rank.rank]


def train(rank, model, steps, first=0):
    """The gradients of each step."""
    seen = []
    for step in range(first, first + steps):
        model.zero_grad()
        dtype = next(model.parameters()).dtype
        model(rows(rank, step, dtype=dtype)).square().mean().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
    return seen


def close(got, wanted, tolerance):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------- PyTorch's own

SIMPLE = {
    "allreduce": (default_hooks.allreduce_hook, 1e-7),
    "fp16": (default_hooks.fp16_compress_hook, 1e-3),
    "bf16": (default_hooks.bf16_compress_hook, 1e-2),
    "fp16 around allreduce": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-3),
    "bf16 around allreduce": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
}


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("cap", [25, 1e-4])
@on_ranks(2)
def test_hooks_of_torch_reduce_to_the_mean(rank, name, cap):
    hook, tolerance = SIMPLE[name]
    wanted = train(rank, prepared(rank), 3)
    model = prepared(rank, (rank.group, hook), bucket_cap_mb=cap)
    got = train(rank, model, 3)
    close(got, wanted, tolerance)
    assert all(rank.all_equal(gradient) for step in got for gradient in step)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


class LikeNccl:
    """`torch.distributed` whose all_gather has a future as NCCL's: one tensor of all parts. Gloo's lists the parts."""

    group = dist.group

    @staticmethod
    def all_gather(*args, **kwargs):
        future = dist.all_gather(*args, **kwargs).get_future().then(lambda gathered: [torch.stack(gathered.value())])
        return SimpleNamespace(get_future=lambda: future)


@pytest.mark.parametrize("cap", [25, 1e-4])
@pytest.mark.parametrize(
    "hook",
    [
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
        functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=16),
    ],
)
def test_quantisation_of_torch_reduces_to_about_the_mean(hook, cap, monkeypatch):
    monkeypatch.setattr(quantization_hooks, "dist", LikeNccl)

    def call(rank):
        wanted = train(rank, prepared(rank), 3)
        got = train(rank, prepared(rank, (rank.group, hook), bucket_cap_mb=cap), 3)
        close(got, wanted, 2e-2)
        assert all(rank.all_equal(gradient) for step in got for gradient in step)

    run_ranks(2, call)


def wide():
    """PowerSGD of rank 4 loses nothing here, from whatever random numbers it starts: ranks share those of torch."""
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.usefixtures("draws_in_turn")
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.numpy
@on_ranks(2)
def test_power_sgd_loses_nothing_if_it_keeps_all(rank, batched, warm):
    state = powerSGD_hook.PowerSGDState(
        rank.group,
        4,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
        warm_start=warm,
        use_error_feedback=warm,
        batch_tensors_with_same_shape=batched,
    )
    model = prepared(rank, (state, powerSGD_hook.powerSGD_hook), make=wide, bucket_cap_mb=1e-5)
    got = train(rank, model, 8)
    close(got, train(rank, prepared(rank, make=wide), 8), 1e-4)
    assert all(rank.all_equal(gradient) for step in got for gradient in step)
    assert state.iter == 8


@pytest.mark.usefixtures("draws_in_turn")
@pytest.mark.numpy
def test_batched_power_sgd_gives_every_rank_the_same(monkeypatch):
    # In torch 2.13 the batched hook hands over matrices where batches of them are asked for, and fails by itself.
    orthogonalize = powerSGD_hook._orthogonalize
    monkeypatch.setattr(powerSGD_hook, "_orthogonalize", lambda matrix: orthogonalize(matrix.unsqueeze(0)))

    def call(rank):
        state = powerSGD_hook.PowerSGDState(rank.group, 1, start_powerSGD_iter=2)
        model = prepared(rank, (state, powerSGD_hook.batched_powerSGD_hook))
        got = train(rank, model, 5)
        assert all(rank.all_equal(gradient) for step in got for gradient in step)
        close(got[0], train(rank, prepared(rank), 1)[0], 1e-6)

    run_ranks(2, call)


@pytest.mark.usefixtures("draws_in_turn")
@pytest.mark.parametrize("wrap", [default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper])
@pytest.mark.numpy
@on_ranks(2)
def test_power_sgd_in_lower_precision(rank, wrap):
    state = powerSGD_hook.PowerSGDState(rank.group, 4, start_powerSGD_iter=2, min_compression_rate=0.1)
    model = prepared(rank, (state, wrap(powerSGD_hook.powerSGD_hook)), make=wide)
    got = train(rank, model, 4)
    close(got, train(rank, prepared(rank, make=wide), 4), 3e-2)
    assert all(rank.all_equal(gradient) for step in got for gradient in step)


def test_post_local_sgd_averages_at_first_and_in_the_subgroup_later():
    stores = [dist.HashStore(), dist.HashStore()]

    def call(rank):
        alone = dist.ProcessGroupGloo(stores[rank.rank], 0, 1)
        results = {}
        for local in (True, False):
            state = post_localSGD_hook.PostLocalSGDState(rank.group, alone, 2, post_local_gradient_allreduce=local)
            model = prepared(rank, (state, post_localSGD_hook.post_localSGD_hook))
            results[local] = train(rank, model, 4)
        mean = train(rank, prepared(rank), 4)
        plain = rank.make(network)
        own = train(rank, plain, 4)
        for got in results.values():
            close(got[:2], mean[:2], 1e-7)
            close(got[2:], own[2:], 0)
            assert not rank.all_equal(got[2][0])

    run_ranks(2, call)


@on_ranks(2)
def test_noop_leaves_each_rank_its_own_gradients_undivided(rank):
    model = prepared(rank, (None, debugging_hooks.noop_hook))
    close(train(rank, model, 2), train(rank, rank.make(network), 2), 0)


class StepAtOnce:
    """What the hook asks of an optimizer."""

    def __init__(self, rate):
        self.rate = rate

    @torch.no_grad()
    def step_param(self, parameter, gradient):
        parameter.sub_(gradient, alpha=self.rate)


@on_ranks(2)
def test_an_optimizer_fused_behind_a_hook_steps_with_the_mean(rank):
    state = optimizer_overlap_hooks._OptimizerHookState(StepAtOnce(0.1))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model, plain = prepared(rank, (rank.group, hook), bucket_cap_mb=1e-4), prepared(rank)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        train(rank, model, 1, first=step)
        train(rank, plain, 1, first=step)
        sgd.step()
    close(list(model.parameters()), list(plain.parameters()), 1e-6)
    lockstep.check_in_sync(model)


@on_ranks(2)
def test_hooks_of_torch_reduce_sparse_gradients(rank):
    def make():
        return nn.Sequential(nn.EmbeddingBag(6, 3, sparse=True), nn.Linear(3, 1)).double()

    model, plain = prepared(rank, (rank.group, default_hooks.allreduce_hook), make=make), prepared(rank, make=make)
    ids = torch.tensor([[0, 1], [1, 5]][rank.rank : rank.rank + 1])
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(ids).sum().backward()
        assert model[0].weight.grad.is_sparse
        torch.testing.assert_close(model[0].weight.grad.coalesce(), plain[0].weight.grad.coalesce())
        torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad)


# ---------------------------------------------------------------------------------- what comes of one


def one_step(rank, *hooks):
    """The gradient that rank r has r + 1 of."""
    model = prepared(rank, *hooks, make=one_weight)
    model(x_of(rank)).sum().backward()
    return model.weight.grad.item()


def doubled(state, bucket):
    return bucket.buffer() * 2


def one_more(state, bucket):
    return bucket.buffer() + 1


def doubled_in_place(state, bucket):
    return bucket.buffer().mul_(2)


def replaced(state, bucket):
    bucket.set_buffer(bucket.buffer() + 1)
    return bucket.buffer()


def rounded(state, bucket):
    return bucket.buffer().bfloat16()


def reduced(state, bucket):
    return default_hooks.allreduce_hook(state, bucket)


def summed(state, bucket):
    """Sums, without dividing."""
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(lambda f: f.value()[0])


def doubled_then_reduced(state, bucket):
    bucket.set_buffer(doubled(None, bucket))
    return reduced(state, bucket)


HOOKS = {  # ranks have 1 and 2
    "transform": (doubled, 3.0),
    "in place": (doubled_in_place, 3.0),
    "set_buffer": (replaced, 2.5),
    "other dtype": (rounded, 1.5),
    "reduce": (reduced, 1.5),
    "sum": (summed, 3.0),
    "transform, then reduce": (doubled_then_reduced, 3.0),
}


@pytest.mark.parametrize(("hook", "expected"), HOOKS.values(), ids=HOOKS)
def test_what_hooks_make_of_gradients(hook, expected):
    assert run_ranks(2, lambda rank: one_step(rank, (rank.group, hook))) == [expected] * 2


@on_ranks(2)
def test_a_module_has_one_hook(rank):
    model = prepared(rank, (None, doubled), make=one_weight)
    for _ in range(2):
        with pytest.raises(HookError, match=r"only be called once. This module's communication hook is doubled"):
            model.register_comm_hook(None, one_more)
        model.zero_grad()
        model(x_of(rank)).sum().backward()
    assert model.weight.grad.item() == 3.0


@on_ranks(2)
def test_averaging_divides_before_it_adds(rank):
    # Each rank's 40000 fits into float16, their sum does not.
    model = prepared(rank, (None, lambda state, bucket: bucket.buffer().half()), make=one_weight)
    model(torch.full((1, 1), 40000.0)).sum().backward()
    assert (model.weight.grad.item(), model.weight.grad.dtype) == (40000.0, torch.float32)


@on_ranks(2)
def test_a_hook_may_be_added_between_steps(rank):
    seen, model = [], prepared(rank, make=one_weight, buffer_policy="mean")
    model.register_buffer("kept", torch.tensor(float(rank.rank)))
    for hook in (None, doubled, None):
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(2):
            model.zero_grad()
            model(x_of(rank)).sum().backward()
        seen.append(model.weight.grad.item())
    assert seen == [1.5, 3.0, 3.0]


@on_ranks(2)
def test_hooks_do_not_run_without_synchronisation_and_get_all_that_has_piled_up(rank):
    seen = []

    def look(state, bucket):
        seen.append(bucket.buffer().item())
        return bucket.buffer()

    model = prepared(rank, (None, look), make=one_weight)
    with model.no_sync():
        model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
    assert seen == []
    model(x_of(rank)).sum().backward()
    assert (seen, model.weight.grad.item()) == [([3.0], 4.5), ([6.0], 4.5)][rank.rank]


@on_ranks(2)
def test_weights_count_with_hooks_too(rank):
    model = prepared(rank, (rank.group, doubled_then_reduced), make=one_weight)
    for last in (False, True):
        with lockstep.accumulate(model, last=last, weight=rank.rank + 1):
            model(torch.full((1, 1), 3.0)).sum().backward()
    assert model.weight.grad.item() == pytest.approx(2 * 12 / 6)


@on_ranks(2)
def test_unused_parameters_and_buffers_with_hooks(rank):
    model = prepared(rank, (rank.group, reduced), make=lambda: nn.ModuleList(one_weight() for _ in range(3)))
    model.register_buffer("unseen", torch.zeros(1))
    branches = nn.Module()
    branches.parts = nn.ModuleList(one_weight() for _ in range(3))
    branches.register_buffer("kept", torch.tensor(float(rank.rank)))
    lockstep.replicate(branches, process_group=rank.group)
    branches.register_comm_hook(rank.group, reduced)
    for step in range(3):
        branches.zero_grad()
        branches.kept.fill_(step + rank.rank)
        branches.parts[rank.rank](torch.full((1, 1), 2.0)).sum().backward()
        assert branches.kept.item() == step
    found = [None if part.weight.grad is None else part.weight.grad.item() for part in branches.parts]
    assert found == [1.0, 1.0, None]


# ---------------------------------------------------------------------------------- what they see


def test_the_bucket_answers_to_the_names_of_torch():
    def methods(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert methods(dist.GradBucket) <= methods(GradBucket)
    for name in methods(GradBucket):
        assert inspect.getdoc(getattr(GradBucket, name))


def test_what_is_in_a_bucket():
    def call(rank):
        seen = []

        def look(state, bucket):
            assert state == "the state"
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            gradients, parameters, buffer = bucket.gradients(), bucket.parameters(), bucket.buffer()
            assert [g.shape for g in gradients] == [p.shape for p in parameters]
            assert {g.untyped_storage().data_ptr() for g in gradients} == {buffer.untyped_storage().data_ptr()}
            assert buffer.dim() == 1
            assert torch.equal(torch.cat([g.flatten() for g in gradients]), buffer)
            seen.append((bucket.index(), bucket.is_last(), [names[id(parameter)] for parameter in parameters]))
            return buffer

        model = prepared(rank, ("the state", look), bucket_cap_mb=230 / MIB)
        train(rank, model, 1)
        first = seen.copy()
        train(rank, model, 1)
        return first, seen[len(first) :]

    (first, second), *others = run_ranks(2, call)
    assert others == [(first, second)]
    assert first == [(0, False, ["2.bias", "2.weight", "0.bias"]), (1, True, ["0.weight"])]
    assert [(i, last) for i, last, _ in second] == [(i, i == len(second) - 1) for i in range(len(second))]
    assert sorted(name for *_, names in second for name in names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@on_ranks(2)
def test_gradients_are_this_ranks_own_and_large_ones_have_a_bucket_of_their_own(rank):
    small, large = (1025, 1.0, 1), 1024 * 1025
    seen = []

    def look(state, bucket):
        seen.append((bucket.buffer().numel(), bucket.buffer()[0].item(), len(bucket.gradients())))
        return bucket.buffer()

    model = prepared(rank, (None, look), make=lambda: nn.Linear(1024, 1025))
    model(torch.full((1, 1024), rank.rank + 1.0)).sum().backward()
    assert sorted(seen) == [small, (large, rank.rank + 1.0, 1)]
    assert model.weight.grad[0, 0].item() == 1.5
    assert model.bias.grad[0].item() == 1.0


@on_ranks(2)
def test_a_sparse_bucket(rank):
    seen = []

    def look(state, bucket):
        (gradient,) = bucket.gradients()
        seen.append((bucket.buffer().is_sparse, gradient.is_sparse, bucket.parameters()[0] is model.weight))
        return bucket.buffer() * 2

    model = prepared(rank, (None, look), make=lambda: nn.Embedding(4, 1, sparse=True))
    model(torch.tensor([rank.rank, 3])).sum().backward()
    assert seen == [(True, True, True)]
    assert model.weight.grad.is_sparse is True
    assert model.weight.grad.to_dense().flatten().tolist() == [1.0, 1.0, 0.0, 2.0]


@on_ranks(2)
def test_hooks_run_once_for_each_bucket_and_the_report_goes_alone(rank):
    model = prepared(rank, (None, doubled), bucket_cap_mb=1e-4)  # four
    train(rank, model, 2)
    with count_collectives(rank) as sent:
        train(rank, model, 1)
    assert ([each.name for each in sent], lockstep.loop.statistics(model).calls["hook"]) == (["all_reduce"] * 5, 12)


@on_ranks(2)
def test_set_buffer_wants_as_many_elements(rank):
    def cut(state, bucket):
        bucket.set_buffer(bucket.buffer()[1:])

    with pytest.raises(HookError, match=r"bucket 0: set_buffer\(\) got 0 elements, expected 1"):
        one_step(rank, (None, cut))


# ---------------------------------------------------------------------------------- refused


def wrong_bucket(state, bucket: int):
    return bucket


def wrong_return(state, bucket) -> int:
    return bucket


def wrong_text(state, bucket) -> "dict[str, int]":
    return bucket


REFUSED = {
    "number": (3, TypeError, "Communication hook must be callable. Got int"),
    "none": (None, TypeError, "Communication hook must be callable. Got NoneType"),
    "bucket": (
        wrong_bucket,
        ValueError,
        "bucket annotation should be dist.GradBucket. Got <class 'int'> in wrong_bucket",
    ),
    "return": (wrong_return, ValueError, "return annotation should be torch.futures.Future[torch.Tensor]"),
    "text": (wrong_text, ValueError, "return annotation should be torch.futures.Future[torch.Tensor]"),
}


@pytest.mark.parametrize(("hook", "kind", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_cannot_be_a_hook_is_refused_when_it_is_registered(hook, kind, message, wrapped):
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    replicate = lockstep.DistributedDataParallel if wrapped else lockstep.replicate
    model = replicate(one_weight(), process_group=group)
    with pytest.raises(kind) as caught:
        model.register_comm_hook(None, hook)

    assert message in str(caught.value)
    assert isinstance(caught.value, HookError)
    model(torch.full((1, 1), 3.0)).sum().backward()  # as if nothing had been registered
    assert next(model.parameters()).grad.item() == 3.0


class Callable:
    """Not a function."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.Tensor:
        return bucket.buffer() * 2


def annotated(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return done(bucket.buffer())


def annotated_plainly(state: object, bucket: GradBucket) -> Future:
    return done(bucket.buffer())


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (annotated, 1),
        (annotated_plainly, 1),
        (Callable(), 2),
        (functools.partial(doubled), 2),
        (lambda *both: both[1].buffer(), 1),
    ],
)
def test_what_can_be_a_hook(hook, expected):
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    model = lockstep.replicate(one_weight(), process_group=group)
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 1)).sum().backward()
    assert next(model.parameters()).grad.item() == expected


RETURNED = {
    "nothing": (None, "callback must return a torch.futures.Future object, but got NoneType"),
    "number": (1, "callback must return a torch.futures.Future object, but got int"),
    "list": ([torch.ones(1)], "callback must return a torch.futures.Future object, but got list"),
    "too much": (torch.ones(2), "set_buffer() got 2 elements, expected 1"),
    "future of nothing": (lambda: done(None), "expected a future of a Tensor or of a list of one, got one of NoneType"),
    "future of a list": (
        lambda: done([torch.ones(1)] * 2),
        "expected a future of a Tensor or of a list of one, got one of list",
    ),
}


@pytest.mark.parametrize(("returned", "message"), RETURNED.values(), ids=RETURNED)
@on_ranks(2)
def test_what_a_hook_returns_is_checked(rank, returned, message):
    def odd(state, bucket):
        return returned() if callable(returned) else returned

    with pytest.raises(HookError) as caught:
        one_step(rank, (None, odd))
    assert isinstance(caught.value, RuntimeError)
    assert message in str(caught.value)


def test_a_future_of_a_list_of_one_is_a_future_of_that():
    assert run_ranks(2, lambda rank: one_step(rank, (None, lambda s, b: done([b.buffer() * 7])))) == [7.0, 14.0]


def raising(state, bucket):
    if state:
        raise KeyError(state.pop())
    return bucket.buffer()


def failing_later(state, bucket):
    future = default_hooks.allreduce_hook(state[0], bucket)
    return future.then(lambda _: 1 / 0) if state[1:] and state.pop() else future


@pytest.mark.parametrize("cap", [25, 1e-4])
@on_ranks(2)
def test_training_goes_on_after_hooks_that_raise_on_all_ranks(rank, cap):
    model = prepared(rank, (["once"], raising), bucket_cap_mb=cap)
    with pytest.raises(KeyError, match="once"):
        train(rank, model, 1)
    close(train(rank, model, 2), train(rank, prepared(rank), 2), 1e-7)


@on_ranks(2)
def test_training_goes_on_after_a_future_that_failed_on_all_ranks(rank):
    model = prepared(rank, ([rank.group, "once"], failing_later))
    with pytest.raises(RuntimeError, match="division by zero"):
        train(rank, model, 1)
    close(train(rank, model, 2), train(rank, prepared(rank), 2), 1e-7)


# ---------------------------------------------------------------------------------- odds and ends


@on_ranks(2)
def test_copies_have_no_hooks(rank):
    model = prepared(rank, (None, doubled), make=one_weight)
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 1)).sum().backward()
    assert (copied.weight.grad.item(), type(copied) is nn.Linear) == (1.0, True)


@on_ranks(2)
def test_hooks_registered_before_there_is_a_group_count_from_the_first_backward(rank):
    model = lockstep.DistributedDataParallel(rank.make(one_weight), process_group=rank.group, init_sync=False)
    model.register_comm_hook(None, doubled)
    model(x_of(rank)).sum().backward()
    assert model.module.weight.grad.item() == 3.0


@on_ranks(2)
def test_two_modules_on_one_group_have_hooks_of_their_own(rank):
    one = prepared(rank, (None, doubled), make=one_weight)
    other = prepared(rank, (rank.group, reduced), make=one_weight)
    x = x_of(rank)
    for _ in range(2):
        one.zero_grad()
        other.zero_grad()
        (one(x) + other(x)).sum().backward()
    assert (one.weight.grad.item(), other.weight.grad.item()) == (3.0, 1.5)


@on_ranks(1)
def test_the_number_of_a_bucket_is_not_that_of_a_parameter_which_had_the_same_address(rank):
    seen = []

    def look(state, bucket):
        seen.append(bucket.index())
        return bucket.buffer()

    model = prepared(rank, (None, look), make=lambda: nn.Sequential(one_weight()))
    for _ in range(2):
        model(x_of(rank)).sum().backward()
    address = id(model[0].weight)
    kept = []
    for put_in in (lambda: nn.Parameter(torch.ones(1, 1)), lambda: _parameter_at(address, kept)):
        model[0].weight = put_in()
        for _ in range(3):
            model(x_of(rank)).sum().backward()
        gc.collect()
    assert seen[1] != seen[-1]


def _parameter_at(address, kept):
    """A parameter where there has been another; skips if there is none in a while."""
    while len(kept) < 100_000:
        kept.append(nn.Parameter(torch.ones(1, 1)))
        if id(kept[-1]) == address:
            return kept[-1]
    return pytest.skip("the memory was not used again")


@on_ranks(1)
def test_the_number_of_a_bucket_in_the_first_round_of_a_new_plan(rank):
    """All that layers had which were replaced is no new one's, in any round; at last each has a number of its own."""
    seen = []

    def look(state, bucket):
        names = {id(p): name for name, p in model.named_parameters()}
        seen.append((bucket.index(), {names.get(id(p)) for p in bucket.parameters()}))
        return bucket.buffer()

    model = prepared(rank, (None, look), make=lambda: chain(3), bucket_cap_mb=1e-6)
    for _ in range(3):
        model(x_of(rank)).sum().backward()
    before = {number for number, _ in seen}
    model[1], model[2] = rank.make(one_weight), rank.make(one_weight)
    seen.clear()
    for _ in range(4):
        model(x_of(rank)).sum().backward()
    news = [(number, names) for number, names in seen if names & {"1.weight", "2.weight"}]
    assert before & {number for number, _ in news} == set()
    *_, (one, named), (other, other_named) = news
    assert one != other
    assert named | other_named == {"1.weight", "2.weight"}


@pytest.mark.numpy
@on_ranks(2)
def test_power_sgd_after_a_layer_was_replaced_by_one_of_another_shape(rank):
    state = powerSGD_hook.PowerSGDState(
        rank.group, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5
    )
    layers = lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False))  # noqa: E731
    model = prepared(rank, (state, powerSGD_hook.powerSGD_hook), make=layers, bucket_cap_mb=1e-6)
    for step in range(10):
        if step == 6:
            model[1] = rank.make(lambda: nn.Linear(16, 32, bias=False))
        model.zero_grad()
        model(torch.full((1, 16), rank.rank + 1.0)).sum().backward()
    assert all(rank.all_equal(p.grad) for p in model.parameters())


@on_ranks(2)
def test_a_hook_that_fails_in_a_round_that_has_failed_hides_neither_error_nor_disturbs_the_next_round(rank):
    """Rank 1 fails in backward; while it sends the zeros that rank 0 waits for, its own hook fails, too."""
    failing = [False]

    def hook(state, bucket: GradBucket) -> Future:
        future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
        if failing[0] and not bucket.buffer().any():  # not a bucket that has left before backward failed
            return future.then(lambda _: 1 / 0)
        return future.then(lambda future: future.value()[0] / rank.world)

    model = prepared(rank, (rank.group, hook), bucket_cap_mb=1e-5)
    train(rank, model, 2)  # by now each layer has a bucket of its own
    model.zero_grad()
    failing[0] = rank.rank == 1
    x = rows(rank, 2).requires_grad_()
    loss = model(fails_in_backward(x, rank.rank == 1)).sum()
    assert error_of(loss.backward) is (ArithmeticError if rank.rank else PeerError)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    failing[0] = False
    assert all(map(rank.all_equal, train(rank, model, 1, first=3)[0]))
