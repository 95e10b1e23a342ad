"""Communication hooks on PyTorch's DistributedDataParallel and ours: what is refused, what they see, PyTorch's own.

The reference compares annotations as they are, so they may not be strings in this file.
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn import functional as F

import lockstep
from ddp_reference import Bag, Branches, both, ddp_class, failure, gradients, scalars
from processes import on_processes, run_processes
from small_modules import filled, one_weight, x_of


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


# ------------------------------------------------------------------------------------------------- refused


def wrong_bucket(state, bucket: int):
    return done(bucket)


def wrong_return(state, bucket: GradBucket) -> int:
    return done(bucket)


def annotated(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return done(bucket.buffer())


def returns_a_number(state, bucket):
    return 1


def raises(state, bucket):
    raise KeyError("in the hook")


def fails_later(state, bucket):
    return done(bucket.buffer()).then(lambda future: 1 / 0)


@both
@on_processes(2)
def test_what_is_refused(rank, implementation):
    make, results = ddp_class(implementation), {}
    ddp = make(one_weight())
    for hook in (1, {}, wrong_bucket, wrong_return):
        results[str(hook).split(" at ")[0]] = failure(lambda hook=hook: ddp.register_comm_hook(None, hook))
    ddp.register_comm_hook(state=None, hook=annotated)
    results["twice"] = failure(lambda: ddp.register_comm_hook(None, annotated))
    ddp(x_of(rank)).sum().backward()
    undisturbed = scalars(ddp)
    for hook in (returns_a_number, raises, fails_later):
        ddp = make(one_weight(), process_group=dist.new_group())  # a rank whose hook always fails is lost to its group
        ddp.register_comm_hook(None, hook)
        results[hook.__name__] = failure(lambda ddp=ddp: ddp(x_of(rank)).sum().backward())
    wanted = {
        "1": (TypeError, "Communication hook must be callable."),
        "{}": (TypeError, "Communication hook must be callable."),
        "<function wrong_bucket": (ValueError, "bucket annotation should be dist.GradBucket."),
        "<function wrong_return": (ValueError, "return annotation should be torch.futures.Future[torch.Tensor]"),
        "twice": (RuntimeError, "register_comm_hook or register_builtin_comm_hook can only be called once."),
        "returns_a_number": (RuntimeError, "callback must return a torch.futures.Future object, but got"),
        "raises": (KeyError, "in the hook"),
        "fails_later": (RuntimeError, ""),
    }
    assert results.keys() == wanted.keys()
    for name, (kind, message) in wanted.items():
        assert kind.__name__ in results[name][0], (name, results[name])
        assert message in results[name][1], (name, results[name])
    assert undisturbed == [rank.rank + 1.0]  # a hook that sums nothing leaves each rank its own, undivided


# ------------------------------------------------------------------------------------------ what they see


def look(seen, bucket):
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (bucket.gradients(), bucket.parameters())]
    seen.append((bucket.index(), bucket.is_last(), shapes[0] == shapes[1], bucket.buffer().tolist(), len(shapes[0])))
    views = [gradient.untyped_storage().data_ptr() for gradient in bucket.gradients()]
    assert views == [bucket.buffer().untyped_storage().data_ptr()] * len(views)
    return done(bucket.buffer() * 10)


def see(rank, implementation):
    make, results = ddp_class(implementation), []
    for options in ({}, {"bucket_cap_mb": 1e-6}, {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True}):
        ddp, seen = make(filled(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))), **options), []
        ddp.register_comm_hook(seen, look)
        for _ in range(3):  # the buckets of the reference are final in the second step
            seen.clear()
            ddp.zero_grad()
            ddp(x_of(rank)).sum().backward()
        results.append((seen, [gradient.flatten().tolist() for gradient in gradients(ddp)]))
    ddp, seen = make(Branches(), find_unused_parameters=True), []
    ddp.register_comm_hook(seen, look)
    ddp(x_of(rank), "ab"[rank.rank]).sum().backward()
    results.append((seen, scalars(ddp)))
    return results


@both
def test_what_hooks_see(implementation):
    for rank, (whole, small, views, unused) in enumerate(run_processes(2, see, implementation)):
        x = rank + 1.0
        flat = {"w1": [x, x], "b1": [1.0, 1.0], "w2": [x + 1, x + 1], "b2": [1.0]}  # this rank's own, undivided
        for seen, grads in (whole, small, views):
            assert [index for index, *_ in seen] == [*range(len(seen))]
            assert [last for _, last, *_ in seen] == [False] * (len(seen) - 1) + [True]
            assert all(same for _, _, same, *_ in seen)
            found = sorted(itertools.chain(*(buffer for *_, buffer, _ in seen)))
            assert found == sorted(itertools.chain(*flat.values()))
            assert grads == [[10 * value for value in values] for values in flat.values()]
        assert [count for *_, count in whole[0]] == [4]
        assert [count for *_, count in small[0]] == [count for *_, count in views[0]] == [1] * 4
        seen, grads = unused
        assert sorted(seen[-1][3]) == [0, 0, x]
        assert grads == [10 * x * (rank == 0), 10 * x * (rank == 1), None]


@both
@on_processes(2)
def test_hooks_that_chain_futures(rank, implementation):
    """Hooks that reduce by themselves, with callbacks on their futures."""
    make = ddp_class(implementation)

    def tenfold_and_half(state, bucket):
        assert state == "state"
        future = rank.group.allreduce([bucket.buffer() / rank.world]).get_future()
        return future.then(lambda f: 10 * f.value()[0]).then(lambda f: 0.5 * f.value())

    def replaced(state, bucket):
        return done(torch.ones_like(bucket.buffer())).then(lambda f: f.value() + 1)

    def mean(state, bucket):
        return rank.group.allreduce([bucket.buffer()]).get_future().then(lambda f: f.wait()[0] / rank.world)

    for hook, state, wanted in ((tenfold_and_half, "state", 15.0), (replaced, None, 2.0), (mean, None, 3.0)):
        for view in (False, True):
            ddp = make(one_weight(), gradient_as_bucket_view=view)
            ddp.register_comm_hook(state, hook)
            with ddp.no_sync():
                ddp(x_of(rank)).sum().backward()
            ddp(x_of(rank)).sum().backward()
            assert scalars(ddp) == [wanted], (hook.__name__, view)
    rows, target = torch.tensor([[0, 1], [1, 2], [5, 5], [9, 0]]), torch.tensor([0, 1, 2, 3])
    local = rank.make(Bag)
    ddp = make(copy.deepcopy(local))
    ddp.register_comm_hook(None, mean)
    F.cross_entropy(local(rows), target).backward()
    F.cross_entropy(ddp(rows.chunk(2)[rank.rank]), target.chunk(2)[rank.rank]).backward()
    torch.testing.assert_close(gradients(ddp)[0].to_dense(), gradients(local)[0].to_dense())


# ------------------------------------------------------------------------------------------- PyTorch's own


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def train(rank, ddp, steps):
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        x = torch.randn(4 * rank.world, 6, generator=torch.Generator().manual_seed(step))
        ddp(x.chunk(rank.world)[rank.rank]).square().mean().backward()
        seen.append(gradients(ddp))
    return seen


def power_sgd_state(**options):
    return power_sgd.PowerSGDState(None, 4, start_powerSGD_iter=2, min_compression_rate=1, **options)


def register_builtin(ddp, kind):
    """Register PyTorch's hook in C++, or, with lockstep's wrapper, the hook in Python that the error names instead."""
    if isinstance(ddp, lockstep.DistributedDataParallel):
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        ddp.register_comm_hook(None, hooks[kind.name])
    else:
        ddp._register_builtin_comm_hook(kind)


@both
@on_processes(2)
def test_hooks_of_torch(rank, implementation):
    make, results = ddp_class(implementation), {}

    def run(name, register, steps=2):
        ddp = make(rank.make(network), bucket_cap_mb=0.0002)
        register(ddp)
        results[name] = train(rank, ddp, steps)

    run("none", lambda ddp: None)
    for kind in (DDPCommHookType.ALLREDUCE, DDPCommHookType.FP16_COMPRESS):
        run(kind.name, lambda ddp, kind=kind: register_ddp_comm_hook(comm_hook_type=kind, model=ddp, state=rank.group))
    for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
        run(f"builtin {kind.name}", lambda ddp, kind=kind: register_builtin(ddp, kind))
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    run("fp16 wrapper", lambda ddp: ddp.register_comm_hook(rank.group, wrapped))
    state = post_local_sgd.PostLocalSGDState(None, torch.distributed.group.WORLD, start_localSGD_iter=1)
    run("post-local SGD", lambda ddp: ddp.register_comm_hook(state, post_local_sgd.post_localSGD_hook))
    noop = make(rank.make(network))
    register_ddp_comm_hook(DDPCommHookType.NOOP, noop)
    (summed,) = train(rank, noop, 1)
    for gradient in summed:
        torch.distributed.all_reduce(gradient.div_(rank.world))
    results["noop"] = [summed]
    wanted = results.pop("none")
    assert len(results) == 7
    for name, steps in results.items():
        loose = 1e-6 if name in ("ALLREDUCE", "builtin ALLREDUCE", "post-local SGD", "noop") else 2e-3
        for got, right in zip(steps, wanted, strict=False):
            torch.testing.assert_close(got, right, rtol=loose, atol=loose, msg=name)


@pytest.mark.numpy
@on_processes(2)
def test_lockstep_keeps_collectives_in_order_that_hooks_start_in_callbacks(rank):
    """With several buckets over Gloo those of the reference meet the wrong ones: it fails or hangs."""
    ddp = lockstep.DistributedDataParallel(rank.make(network), bucket_cap_mb=1e-5)
    state = power_sgd.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    train(rank, ddp, 20)
    assert [rank.all_equal(parameter.grad) for parameter in ddp.parameters()] == [True] * 4


@both
@pytest.mark.numpy
@on_processes(2)
def test_power_sgd(rank, implementation):
    """PowerSGD of as high a rank as the matrices have, so that nothing is lost."""
    make, results = ddp_class(implementation), {}
    plain = make(rank.make(network))
    results["none"] = train(rank, plain, 12)
    for feedback, warm, batched in itertools.product((False, True), repeat=3):
        options = {"use_error_feedback": feedback, "warm_start": warm, "batch_tensors_with_same_shape": batched}
        ddp = make(rank.make(network))
        ddp.register_comm_hook(power_sgd_state(**options), power_sgd.powerSGD_hook)
        results[str(options)] = train(rank, ddp, 12)
    wanted = results.pop("none")
    assert len(results) == 8
    for name, steps in results.items():
        torch.testing.assert_close(steps, wanted, rtol=1e-3, atol=1e-5, msg=name)


@both
@pytest.mark.numpy
@on_processes(2)
def test_the_state_of_power_sgd_can_be_saved(rank, implementation):
    """PowerSGD of rank 1, its state saved and gone on with in another wrapper."""
    make = ddp_class(implementation)
    first, second = (make(rank.make(lambda: nn.Linear(6, 8, bias=False))) for _ in range(2))
    state = power_sgd.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    first.register_comm_hook(state, power_sgd.powerSGD_hook)
    train(rank, first, 20)
    file = io.BytesIO()
    torch.save(state, file)
    second.register_comm_hook(torch.load(io.BytesIO(file.getvalue()), weights_only=False), power_sgd.powerSGD_hook)
    first, second = train(rank, first, 3), train(rank, second, 3)
    torch.testing.assert_close(first, second)
