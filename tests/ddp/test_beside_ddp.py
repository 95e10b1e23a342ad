"""Where ours is better than PyTorch's DistributedDataParallel and its two composable `replicate`: theirs, then ours.

Each case runs PyTorch's version and ours in the same two processes, and shows the reference failing or differing; it
gets `rank` and `implementation` ("torch" or "lockstep") and returns what can be compared. All cases share one launch.
Numbers are those of threads at pytorch/pytorch in which people report what the case shows.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import lockstep
from ddp_reference import Branches, ddp_class, failure, scalars
from processes import run_processes
from small_modules import fails_in_backward, one_weight, x_of

pytestmark = pytest.mark.around

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def replicate_of(implementation: str) -> Callable[..., Any]:
    return replicate_of_torch if implementation == "torch" else lockstep.replicate


def sharded_replicate(module: nn.Module) -> nn.Module:
    """PyTorch's newer `replicate`, on the machinery of its fully sharded training."""
    return replicate_with_fsdp(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def run_cases(rank: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        for implementation in ("torch", "lockstep"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if implementation == "torch" else "error")
                warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
                warnings.filterwarnings("ignore", message="rank .* each rank trains its own")  # the whole batch
                results.setdefault(name, {})[implementation] = CASES[name](rank, implementation)
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_processes(2, run_cases, sorted(CASES), timeout=100)


@pytest.fixture
def of(outcomes, request):
    """Return what each rank got in the case that the test is named after: (torch's by rank, ours by rank)."""
    name = request.node.name.removeprefix("test_")
    return tuple([outcome[name][implementation] for outcome in outcomes] for implementation in ("torch", "lockstep"))


def as_plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def collectives(call: Callable[[], Any]) -> dict[str, int]:
    """How many collectives of each kind the call issues: PyTorch's in C++, lockstep's over the group's companion."""
    with profile(acc_events=True) as profiled:
        call()
    names = [event.name for event in profiled.events()]
    labels = {"allreduce": "all_reduce", "broadcast": "broadcast"}
    return {
        kind: sum(name == f"c10d::{kind}_" or name.startswith(f"lockstep::collective ({label}") for name in names)
        for kind, label in labels.items()
    }


# ---------------------------------------------------------------- because parameters received gradients


@case
def whatever_is_called(rank, implementation):
    results = {}
    for name, call in {
        "the wrapped module": lambda wrapper, x: wrapper.module(x),
        "a submodule": lambda wrapper, x: wrapper.module[0](x),
        "another method": lambda wrapper, x: wrapper.module.twice(x),
    }.items():
        wrapper = ddp_class(implementation)(Twice(one_weight()))
        call(wrapper, x_of(rank)).sum().backward()
        results[name] = scalars(wrapper)
    attached = replicate_of(implementation)(Twice(one_weight()))
    attached(x_of(rank)).sum().backward()  # the reference begins at the first forward
    attached.zero_grad()
    attached[0](x_of(rank)).sum().backward()
    results["a submodule, in place"] = scalars(attached)
    return results


class Twice(nn.Sequential):
    """A method beside forward."""

    def twice(self, x):
        return 2 * self(x)


@pytest.mark.around
def test_whatever_is_called(of):
    theirs, ours = of
    assert [[*each.values()] for each in theirs] == [[[r], [r], [2 * r], [r]] for r in (1.0, 2.0)]  # never synchronised
    assert [[*each.values()] for each in ours] == [[[1.5], [1.5], [3.0], [1.5]]] * 2


@case
def several_forwards_before_one_backward(rank, implementation):
    """Each forward uses another branch."""
    wrapper = ddp_class(implementation)(Branches(), find_unused_parameters=True)
    loss = sum(wrapper(x_of(rank), name).sum() for name in "abc")
    return failure(loss.backward)[0][:1], scalars(wrapper)


def test_several_forwards_before_one_backward(of):
    theirs, ours = of
    assert all(error == ["RuntimeError"] for error, _ in theirs)  # "mark a variable ready only once"
    assert ours == [([], [1.5] * 3)] * 2


# --------------------------------------------------------------------------- parameters without gradients


@case
def used_differently_by_each_rank(rank, implementation):
    """`a` on rank 0, `b` on rank 1, `c` on none; `c` had a gradient before. Without a flag."""
    wrapper = ddp_class(implementation)(Branches())
    wrapper.module.c.weight.grad = torch.full((1, 1), 7.0)
    wrapper(x_of(rank), "ab"[rank.rank]).sum().backward()
    first = scalars(wrapper)
    again = failure(lambda: wrapper(x_of(rank), "a"))
    return first, again[1] if implementation == "torch" else again[0]


def test_used_differently_by_each_rank(of):
    theirs, ours = of
    assert [grads for grads, _ in theirs] == [[1.0, None, 7.0], [None, 2.0, 7.0]]  # as they were, and no error
    assert all("Expected to have finished reduction in the prior iteration" in message for _, message in theirs)
    assert ours == [([0.5, 1.0, 7.0], [])] * 2


# ------------------------------------------------------------------------------- ranks that are not alike


class Ordered(nn.Module):
    """Two layers, registered in a given order; the weight of `a` is 1, that of `b` 2."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, one_weight(1.0 if name == "a" else 2.0))


@case
def registered_in_another_order(rank, implementation):
    module = Ordered("ab" if rank.rank == 0 else "ba")
    kinds, message = failure(lambda: ddp_class(implementation)(module))
    return kinds, message, (module.a.weight.item(), module.b.weight.item())


def test_registered_in_another_order(of):
    theirs, ours = of
    assert [kinds for kinds, _, _ in theirs] == [[], []]
    assert [weights for *_, weights in theirs] == [(1.0, 2.0), (2.0, 1.0)]  # each in the other's place, in silence
    assert [weights for *_, weights in ours] == [(1.0, 2.0), (1.0, 2.0)]
    for kinds, message, _ in ours:
        assert kinds[0] == "AgreementError"
        assert {"RuntimeError", "ValueError"} <= set(kinds)
        assert "where rank 0 has parameter a.weight" in message
        assert "rank 1 has parameter b.weight" in message


@case
def made_equal_at_the_call(rank, implementation):
    module = one_weight(5.0 * rank.rank)
    module.register_buffer("count", torch.full((), rank.rank))
    replicate_of(implementation)(module)
    return module.weight.item(), module.count.item()


def test_made_equal_at_the_call(of):
    theirs, ours = of
    assert theirs == [(0.0, 0), (5.0, 1)]  # not before the first forward
    assert ours == [(0.0, 0), (0.0, 0)]


# --------------------------------------------------------------- decided when backward runs; freezing again


@case
def no_sync_is_decided_in_backward(rank, implementation):
    results = []
    for around_forward in (True, False):
        wrapper = ddp_class(implementation)(one_weight())
        with wrapper.no_sync() if around_forward else contextlib.nullcontext():
            loss = wrapper(x_of(rank)).sum()
        with contextlib.nullcontext() if around_forward else wrapper.no_sync():
            loss.backward()
        results += scalars(wrapper)
    return results


def test_no_sync_is_decided_in_backward(of):
    theirs, ours = of
    assert theirs == [[1.0, 1.5], [2.0, 1.5]]
    assert ours == [[1.5, 1.0], [1.5, 2.0]]


@case
def frozen_and_unfrozen_after_the_call(rank, implementation):
    def step():
        wrapper.zero_grad()
        wrapper(x_of(rank), "abc").sum().backward()
        return scalars(wrapper)

    module = Branches()
    module.b.requires_grad_(False)
    wrapper, results = ddp_class(implementation)(module), []
    for layer, trained in ((module.b, True), (module.a, False)):
        layer.requires_grad_(trained)
        results.append(step())
    return results, failure(step)[0][:1]


def test_frozen_and_unfrozen_after_the_call(of):
    theirs, ours = of
    # `b` never; then none of them, and then nothing works any more
    assert theirs == [([[1.5, r, 1.5], [None, r, r]], ["RuntimeError"]) for r in (1.0, 2.0)]
    assert ours == [([[1.5, 1.5, 1.5], [None, 1.5, 1.5]], [])] * 2


# ---------------------------------------------------------------------- the module stays what it was


@case
def the_module_stays_what_it_was(rank, implementation):
    module = Twice(one_weight(3.0))
    before = [*module.state_dict()]
    replicate_of(implementation)(module)
    module(x_of(rank)).sum().backward()
    errors, kinds = {}, []
    for name, duplicate in {
        "deepcopy": lambda: copy.deepcopy(module),
        "pickle": lambda: pickle.loads(pickle.dumps(module)),
        "save": lambda: save_and_load(module),
    }.items():
        errors[name] = failure(lambda: kinds.append(type(duplicate()).__name__))[0][:1]  # noqa: B023
    return [*module.state_dict()] == before, isinstance(module, Twice), errors, kinds


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_module_stays_what_it_was(of):
    theirs, ours = of
    for *same, errors, _ in theirs:
        assert same == [True, True]
        assert errors["deepcopy"]
        assert errors["pickle"]
        assert errors["save"]
    assert ours == [(True, True, {"deepcopy": [], "pickle": [], "save": []}, ["Twice"] * 3)] * 2


# ------------------------------------------------------------------------------------------- buffers


class Average(nn.Module):
    """Multiplies by a running average of its inputs, a new tensor each time, which backward then needs."""

    def __init__(self):
        super().__init__()
        self.layer = one_weight()
        self.register_buffer("average", torch.zeros(1))

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.detach().flatten()
        return self.layer(x) * self.average


@case
def what_backward_has_saved_is_not_overwritten(rank, implementation):
    local, wrapper = Average(), ddp_class(implementation)(Average())
    for module in (local, wrapper):
        losses = [module(x_of(rank)).sum() for _ in range(2)]
        for loss in losses:  # after the first, buffers are made equal, while the second is still pending
            with contextlib.suppress(RuntimeError):  # PyTorch's own up to 2.11: overwritten, and autograd notices
                loss.backward()
    (own,) = scalars(local)
    parts = rank.gather(torch.tensor(own))
    return scalars(wrapper), torch.stack(parts).mean().item()


def test_what_backward_has_saved_is_not_overwritten(of):
    theirs, ours = of
    assert [got == [wanted] for got, wanted in theirs] == [False, False]  # since 2.13 in silence
    assert [got == [wanted] for got, wanted in ours] == [True, True]


def normalised():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@case
def buffers_cost_no_collective(rank, implementation):
    wrapper = ddp_class(implementation)(normalised())
    for _ in range(3):  # past the steps in which plans are made
        wrapper(torch.randn(4, 2)).sum().backward()
    return collectives(lambda: wrapper(torch.randn(4, 2)).sum().backward())


def test_buffers_cost_no_collective(of):
    theirs, ours = of
    assert [each["broadcast"] > 0 for each in theirs] == [True, True]
    assert ours == [{"broadcast": 0, "allreduce": 1}] * 2


@case
def buffers_follow_a_policy(rank, implementation):
    policies = {} if implementation == "torch" else {"rank0": 1.0, "mean": 1.5, "local": rank.rank + 1.0}
    results = {}
    for policy, wanted in policies.items():
        module = normalised()
        replicated = lockstep.replicate(module, buffer_policy=policy)
        module[1].running_mean.fill_(rank.rank + 1.0)
        replicated[0](torch.ones(1, 2)).sum().backward()
        results[policy] = module[1].running_mean.tolist() == [wanted] * 3
    return results


def test_buffers_follow_a_policy(of):
    _, ours = of
    assert ours == [dict.fromkeys(("rank0", "mean", "local"), True)] * 2


# --------------------------------------------------------------------------------------------- hooks


def clips_and_compresses(group, bucket):
    """Clipping before PyTorch's own compression, which communicates."""
    bucket.set_buffer(bucket.buffer().clamp(max=1.5))
    return default_hooks.bf16_compress_hook(group, bucket)


@case
def a_hook_that_calls_one_of_torch(rank, implementation):
    wrapper = ddp_class(implementation)(one_weight())
    wrapper.register_comm_hook(None, clips_and_compresses)
    wrapper(x_of(rank)).sum().backward()
    return scalars(wrapper)


def test_a_hook_that_calls_one_of_torch(of):
    assert of[0] == of[1] == [[1.25]] * 2


# ------------------------------------------------------------------------------------- without a flag


class Recomputed(nn.Module):
    """The same layer twice, each time recomputed in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = one_weight(), reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


@case
def checkpointing(rank, implementation):
    results = []
    for reentrant in (True, False):
        wrapper = ddp_class(implementation)(Recomputed(reentrant))
        loss = wrapper(x_of(rank).requires_grad_()).sum()
        error = failure(loss.backward)[0][:1]
        results.append((error, scalars(wrapper)))
    return results


def test_checkpointing(of):
    theirs, ours = of
    assert theirs == [[([], [grad]), ([], [3.0])] for grad in (2.5, 3.5)]  # wrong, and other on each rank, in silence
    assert ours == [[([], [3.0])] * 2] * 2


@case
def several_backwards_for_a_forward(rank, implementation):
    wrapper = ddp_class(implementation)(Branches())
    shared = wrapper(x_of(rank), "abc")
    shared.sum().backward(retain_graph=True)
    shared.sum().backward()
    return scalars(wrapper)


def test_several_backwards_for_a_forward(of):
    theirs, ours = of
    assert theirs[0] != theirs[1]  # the second one stays this rank's
    assert ours == [[3.0] * 3] * 2


class Shared(nn.Module):
    """One weight under two names, and a sparse embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)
        self.layer = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.layer.weight
        self.spare = nn.Linear(3, 3)

    def forward(self, rows):
        return self.again(torch.tanh(self.layer(self.embedding(rows))))


def train(network, forward, rows):
    """Three steps on the rows that the function gives for each; returns all values."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(forward(rows(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        dense = [p for p in network.parameters() if p.grad is not None and not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, 0.05)
        scaler.step(optimizer)
        scaler.update()
    return list(network.state_dict().values())


@case
def scaled_clipped_shared_sparse(rank, implementation):
    """Beside the whole batch in one process; `spare` is never used."""
    local = rank.make(lambda: Shared().double())
    module = copy.deepcopy(local)
    wrapper = ddp_class(implementation)(module)
    wanted = train(local, local, lambda step: (torch.arange(4) + step) % 4)
    got: list[torch.Tensor] = []
    errors, _ = failure(
        lambda: got.extend(train(module, wrapper, lambda step: ((torch.arange(4) + step) % 4).chunk(2)[rank.rank]))
    )
    close = [torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(got, wanted, strict=False)]
    return errors[:1], len(close), all(close)


def test_scaled_clipped_shared_sparse(of):
    theirs, ours = of
    assert theirs == [(["RuntimeError"], 0, True)] * 2  # it wants find_unused_parameters
    assert ours == [([], 5, True)] * 2


# ------------------------------------------------------------ the newer replicate of PyTorch


@case
def weights_that_differ_at_first(rank, implementation):
    """#140183: each rank has drawn its own."""
    module = one_weight(rank.rank + 1.0)
    (sharded_replicate if implementation == "torch" else lockstep.replicate)(module)
    module(torch.ones(1, 1)).sum().backward()
    return as_plain(module.weight.detach()).item(), type(module.weight).__name__


def test_weights_that_differ_at_first(of):
    assert of == ([(1.0, "DTensor"), (2.0, "DTensor")], [(1.0, "Parameter")] * 2)


@case
def gradients_of_different_parameters(rank, implementation):
    """Rank 0 uses `a`, rank 1 uses `b`."""
    module = Branches()
    (sharded_replicate if implementation == "torch" else lockstep.replicate)(module)
    module(torch.ones(1, 1), "ab"[rank.rank]).sum().backward()
    grads = [as_plain(parameter.grad) for parameter in module.parameters()]
    return [None if grad is None else grad.item() for grad in grads]


def test_gradients_of_different_parameters(of):
    # PyTorch adds the gradient of one to that of the other. The mean is 0.5 for each.
    assert of == ([[1.0, None, None], [None, 1.0, None]], [[0.5, 0.5, None]] * 2)


@case
def overlap_with_the_rest_of_backward(rank, implementation):
    """Eight layers of 64 KiB; the gradient of the first comes last."""
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    if implementation == "torch":
        sharded_replicate(module)
        return collectives(lambda: module(torch.ones(1, 128)).sum().backward())["allreduce"], 0
    lockstep.replicate(module, bucket_cap_mb=0.125)
    module(torch.ones(1, 128)).sum().backward()
    before: list[int] = []
    module[0].weight.register_hook(lambda grad: before.append(lockstep.loop.statistics(module).calls["collective"]))
    start = lockstep.loop.statistics(module).calls["collective"]
    module(torch.ones(1, 128)).sum().backward()
    return lockstep.loop.statistics(module).calls["collective"] - start, before[0] - start


def test_overlap_with_the_rest_of_backward(of):
    assert of == ([(1, 0)] * 2, [(4, 3)] * 2)  # all-reduces, and how many of them left before the last gradient came


# ------------------------------------------------------------------------- gradients


@case
def static_graph_and_no_sync(rank, implementation):
    """#187732: two micro-batches."""
    wrapper = ddp_class(implementation)(one_weight(), static_graph=True)

    def train():
        with wrapper.no_sync():
            wrapper(x_of(rank)).sum().backward()
        wrapper(x_of(rank)).sum().backward()

    return failure(train)[1], scalars(wrapper)


def test_static_graph_and_no_sync(of):
    theirs, ours = of
    assert all("INTERNAL ASSERT FAILED" in message for message, _ in theirs)
    assert ours == [("None", [3.0])] * 2


@case
def means_of_means(rank, implementation):
    """Six rows on rank 0, two on rank 1: the mean over eight is 1.5."""
    rows = torch.full((6, 1), 1.0) if rank.rank == 0 else torch.full((2, 1), 3.0)
    wrapper = ddp_class(implementation)(one_weight())
    if implementation == "torch":
        wrapper(rows).mean().backward()
    else:
        for last, part in enumerate(rows.split([len(rows) - 1, 1])):  # in two micro-batches of unequal size, too
            with lockstep.accumulate(wrapper, last=bool(last), weight=len(part)):
                wrapper(part).sum().backward()
    return scalars(wrapper)


def test_means_of_means(of):
    assert of == ([[2.0]] * 2, [[1.5]] * 2)


@case
def steps_without_the_last_synchronisation(rank, implementation):
    """Optimizer steps on gradients that no backward has synchronised; each is told."""
    wrapper = ddp_class(implementation)(one_weight())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="rank .* each rank trains its own")  # under PyTorch's class
        for _ in range(3):
            with wrapper.no_sync():
                wrapper(x_of(rank)).sum().backward()
            optimizer.step()
    message = "" if implementation == "torch" else failure(lambda: lockstep.check_in_sync(wrapper))[1]
    return [str(warning.message) for warning in caught], message


def test_steps_without_the_last_synchronisation(of):
    theirs, ours = of
    assert theirs == [([], "")] * 2
    for rank, (told, message) in enumerate(ours):
        assert len(told) == 3
        assert all(
            f"rank {rank}: SGD.step() uses the gradient of parameter weight of this rank alone" in t for t in told
        )
        assert "parameter module.weight is out of sync" in message


@case
def second_order(rank, implementation):
    """#63929: a gradient penalty, by backward(create_graph=True). L = w^2 x, so (dL/dw)^2 = (2 w mean(x))^2."""
    wrapper = ddp_class(implementation)(one_weight(2.0))
    (weight,) = wrapper.parameters()

    def penalty():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(Using )?backward\\(.*create_graph=True")
            (wrapper(x_of(rank)) * weight).sum().backward(create_graph=True)
        grad, weight.grad = weight.grad, None
        grad.square().sum().backward()
        return weight.grad.item()

    return failure(penalty)


def test_second_order(of):
    theirs, ours = of
    assert theirs == [([], "12.0"), ([], "24.0")]  # wrong, and other on each rank, in silence
    for kinds, message in ours:  # see test_gradients_by_autograd_grad
        assert "RuntimeError" in kinds
        assert "element 0 of tensors does not require grad" in message


@case
def gradients_by_autograd_grad(rank, implementation):
    """The same by torch.autograd.grad, which stays on its rank unless it is asked for."""
    wrapper = ddp_class(implementation)(one_weight(2.0))
    (weight,) = wrapper.parameters()
    (grad,) = torch.autograd.grad((wrapper(x_of(rank)) * weight).sum(), weight, create_graph=True)
    first = grad.item()
    if implementation == "lockstep":
        grad = lockstep.loop.mean_over_ranks(grad)
    grad.square().sum().backward()
    return first, grad.item(), weight.grad.item()


def test_gradients_by_autograd_grad(of):
    theirs, ours = of
    assert [grad for _, grad, _ in theirs] == [4.0, 8.0]
    assert ours == [(4.0, 6.0, 36.0), (8.0, 6.0, 36.0)]


# ----------------------------------------------------------------------------- flags and their cost


class Box:
    """A container that PyTorch does not look into."""

    def __init__(self, **entries):
        self.__dict__.update(entries)


class Boxed(Branches):
    """Puts its output into a box."""

    def forward(self, x, names):
        return Box(out=super().forward(x, names))


@case
def outputs_of_an_unknown_kind(rank, implementation):
    wrapper = ddp_class(implementation)(Boxed(), find_unused_parameters=True)
    error = failure(lambda: wrapper(x_of(rank), "ab").out.sum().backward())[1]
    return error, scalars(wrapper)


def test_outputs_of_an_unknown_kind(of):
    theirs, ours = of
    assert all("Expected to mark a variable ready only once" in message for message, _ in theirs)
    assert ours == [("None", [1.5, 1.5, None])] * 2


class Two(nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = one_weight(), one_weight()

    def forward(self, x):
        return self.a(x), self.b(x)


@case
def an_output_left_out_with_a_static_graph(rank, implementation):
    """#97030, #79171: left out of the loss at the first step, used at the second."""
    wrapper = ddp_class(implementation)(Two(), static_graph=True)
    results = []
    for used in (slice(1), slice(2)):
        wrapper.zero_grad()
        sum(out.sum() for out in wrapper(x_of(rank))[used]).backward()
        results.append(scalars(wrapper))
    return results


def test_an_output_left_out_with_a_static_graph(of):
    theirs, ours = of
    assert theirs == [[[1.5, None], [1.5, grad]] for grad in (1.0, 2.0)]  # never synchronised, in silence
    assert ours == [[[1.5, None], [1.5, 1.5]]] * 2


@case
def looking_for_unused_parameters(rank, implementation):
    """Costs a collective of its own, in every step."""
    wrapper = ddp_class(implementation)(Branches(), find_unused_parameters=implementation == "torch")

    def step():
        wrapper(x_of(rank), "ab"[rank.rank]).sum().backward()

    for _ in range(3):
        step()
    return collectives(step)


def test_looking_for_unused_parameters(of):
    theirs, ours = of
    assert [each["allreduce"] for each in theirs] == [2, 2]
    assert [each["allreduce"] for each in ours] == [1, 1]


@case
def gradients_and_buckets(rank, implementation):
    """#37030: by default, gradients are a second copy of what the buckets hold."""
    wrapper = ddp_class(implementation)(Two())
    for _ in range(2):
        wrapper.zero_grad(set_to_none=True)
        sum(out.sum() for out in wrapper(x_of(rank))).backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in wrapper.parameters()})


def test_gradients_and_buckets(of):
    assert of == ([2, 2], [1, 1])


@case
def a_model_without_anything_to_train(rank, implementation):
    module = one_weight().requires_grad_(False)
    return failure(lambda: ddp_class(implementation)(module)(x_of(rank)).item())


def test_a_model_without_anything_to_train(of):
    theirs, ours = of
    assert all("doesn't have any parameter that requires a gradient" in message for _, message in theirs)
    assert ours == [([], "1.0"), ([], "2.0")]


@case
def options_that_do_not_exist(rank, implementation):
    """Taken in silence at the call by the reference."""
    replicate = replicate_of_torch if implementation == "torch" else lockstep.replicate
    kinds, message = failure(lambda: bool(replicate(one_weight(), buket_cap_mb=1)))
    return kinds[-4:], message


def test_options_that_do_not_exist(of):
    theirs, ours = of
    assert theirs == [([], "True")] * 2
    for kinds, message in ours:
        assert "TypeError" in kinds
        assert "'buket_cap_mb'; did you mean bucket_cap_mb?" in message


# --------------------------------------------------------------------- optimizers, copies, compilation


@case
def optimizers_in_backward(rank, implementation):
    """#67570: a step in a hook of the parameter, registered before and after wrapping."""
    values = []
    for before in (True, False):
        module = one_weight(10.0)

        def step(parameter):
            with torch.no_grad():
                parameter -= parameter.grad
            parameter.grad = None

        if before:
            module.weight.register_post_accumulate_grad_hook(step)
        wrapper = ddp_class(implementation)(module)
        if not before:
            module.weight.register_post_accumulate_grad_hook(step)
        error = failure(lambda: wrapper(x_of(rank)).sum().backward())[0]  # noqa: B023
        values.append("failed" if error else module.weight.item())
    return values


def test_optimizers_in_backward(of):
    theirs, ours = of
    assert theirs[0] != theirs[1]  # on gradients that are this rank's alone
    assert ours == [[8.5, 8.5]] * 2


@case
def groups_of_their_own(rank, implementation):
    """#73825: a process group cannot be pickled."""
    group = dist.new_group([0, 1])
    if implementation == "torch":
        return failure(lambda: pickle.dumps(ddp_class("torch")(one_weight(), process_group=group)))[0]
    module = lockstep.replicate(one_weight(4.0), process_group=group)
    return pickle.loads(pickle.dumps(module)).weight.item(), copy.deepcopy(module)(x_of(rank)).item()


def test_groups_of_their_own(of):
    theirs, ours = of
    assert all(kinds for kinds in theirs)
    assert ours == [(4.0, 4.0), (4.0, 8.0)]


@case
def compiled_blocks_and_modules(rank, implementation):
    """#109774: whatever is compiled, the wrapper, the module or a block."""
    if implementation == "torch":  # the module inside is synchronised by forward of the wrapper alone
        wrapper = ddp_class("torch")(one_weight())
        compiled = torch.compile(wrapper.module, backend="eager")
        compiled(x_of(rank)).sum().backward()
        return scalars(wrapper)
    results = []
    for what in ("module", "block", "wrapper", "wrapped module"):
        module = nn.Sequential(one_weight(), one_weight())
        if what == "block":
            module[0] = torch.compile(module[0], backend="eager")
        wrapped = ddp_class("lockstep")(module) if "wrap" in what else lockstep.replicate(module)
        called = {"wrapped module": module, "block": module}.get(what, wrapped)
        called = called if what == "block" else torch.compile(called, backend="eager")
        for _ in range(2):
            module.zero_grad()
            called(x_of(rank)).sum().backward()
        results.append(scalars(module))
    return results


def test_compiled_blocks_and_modules(of):
    theirs, ours = of
    assert theirs == [[1.0], [2.0]]
    assert ours == [[[1.5, 1.5]] * 4] * 2


# ------------------------------------------------------------------------------------------- failures

SOON = timedelta(seconds=2)
_groups: list[Any] = []  # kept open: what the other rank sees is a time-out, and not that a connection ends


def group_of_its_own() -> Any:
    """A group that a case may break. Its collectives time out soon."""
    _groups.append(dist.new_group([0, 1], timeout=SOON))
    return _groups[-1]


@case
def another_shape(rank, implementation):
    """#73547: which parameter is it?"""
    module = nn.Sequential(one_weight(), nn.Linear(2, 3 + rank.rank))
    kinds, message = failure(lambda: ddp_class(implementation)(module, process_group=group_of_its_own()))
    return kinds[:1], message


def test_another_shape(of):
    theirs, ours = of
    assert not any("1.weight" in message for _, message in theirs)
    for kinds, message in ours:
        assert kinds == ["AgreementError"]
        assert (
            "parameter 1.weight: rank 0 has float32 of shape (3, 2), trained; rank 1 has float32 of shape (4, 2)"
            in message
        )


class Fragile(nn.Sequential):
    """Two layers; backward may fail between them."""

    def forward(self, x, fails):
        return self[1](fails_in_backward(self[0](x), fails))


@case
def a_failure_on_one_rank(rank, implementation):
    """#46874, #163546: backward fails on rank 1."""
    wrapper = ddp_class(implementation)(Fragile(one_weight(), one_weight()), process_group=group_of_its_own())
    results = []
    for fails in (False, rank.rank == 1, False):
        wrapper.zero_grad()
        kinds, message = failure(lambda: wrapper(x_of(rank), fails).sum().backward())  # noqa: B023
        results.append((kinds[:1], message, scalars(wrapper)))
        if implementation == "torch" and kinds:
            break  # the group is broken
    return results


def test_a_failure_on_one_rank(of):
    (first, second), ours = of
    assert second[1][:2] == (["ArithmeticError"], "a bad batch")
    assert "Timed out waiting 2000ms" in first[1][1]
    assert "rank 1" not in first[1][1]

    first, second = ours
    assert second[1][:2] == (["ArithmeticError"], "a bad batch")
    assert first[1][0] == ["PeerError"]
    assert "backward failed on rank 1 in round 2" in first[1][1]
    assert first[2] == second[2] == ([], "None", [1.5, 1.5])  # both go on with the next batch


def batches(rank, wrapper, weighted):
    """Gradients 1, 2 and 3; the first batch is bad on rank 1, which leaves it out, or gives it no weight."""
    results: list[Any] = []
    for value in (1.0, 2.0, 3.0):
        bad = rank.rank == 1 and value == 1.0
        wrapper.zero_grad()
        if weighted:
            with lockstep.accumulate(wrapper, weight=0 if bad else 1):
                (wrapper(torch.full((1, 1), value)).sum() * (0 if bad else 1)).backward()
            results += scalars(wrapper)
        elif not bad:
            kinds, message = failure(lambda: wrapper(torch.full((1, 1), value)).sum().backward())  # noqa: B023
            results += [message] if kinds else scalars(wrapper)
    return results


@case
def a_batch_that_one_rank_leaves_out(rank, implementation):
    """#44353: collectives pair off by one, and at the end there is a time-out."""
    left_out = batches(rank, ddp_class(implementation)(one_weight(), process_group=group_of_its_own()), False)
    if implementation == "torch":
        return left_out, None
    return left_out, batches(rank, ddp_class(implementation)(one_weight()), True)


def test_a_batch_that_one_rank_leaves_out(of):
    ((first, _), (second, _)), ours = of
    assert first[:2] == second == [1.5, 2.5]
    assert "the same backward passes" not in first[2]

    (first, _), _ = ours
    assert "backward() failed" in first[-1]
    assert "did not run the same backward passes (one batch less" in first[-1]
    assert [weighted for _, weighted in ours] == [[1.0, 2.0, 3.0]] * 2
