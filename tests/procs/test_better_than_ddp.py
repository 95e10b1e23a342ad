"""What is better here than in PyTorch: each case runs PyTorch's version and ours in the same two processes.

Names begin with the number of the point in the list of what has to be better. A case gets `rank` and `implementation`
("torch" or "lockstep") and returns what can be compared; all cases share a few launches.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import lockstep
from ddp_reference import Branches, ddp_class, failure, one_weight, scalars
from processes import run_processes

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def replicate_of(implementation: str) -> Callable[..., Any]:
    return replicate_of_torch if implementation == "torch" else lockstep.replicate


def x_of(rank: Any) -> torch.Tensor:
    return torch.full((1, 1), rank.rank + 1.0)


def run_cases(rank: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        for implementation in ("torch", "lockstep"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if implementation == "torch" else "error")
                outcome = CASES[name](rank, implementation)
            results.setdefault(name, {})[implementation] = outcome
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_processes(2, run_cases, sorted(CASES), timeout=60)


@pytest.fixture
def of(outcomes, request):
    """What each rank got in the case that the test is named after: (torch's by rank, ours by rank)."""
    name = request.node.name.removeprefix("test_")
    return tuple([outcome[name][implementation] for outcome in outcomes] for implementation in ("torch", "lockstep"))


# ---------------------------------------------------------------- 1: because parameters received gradients


@case
def point_1_whatever_is_called(rank, implementation):
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


def test_point_1_whatever_is_called(of):
    theirs, ours = of
    assert [[*each.values()] for each in theirs] == [[[r], [r], [2 * r], [r]] for r in (1.0, 2.0)]  # never synchronised
    assert [[*each.values()] for each in ours] == [[[1.5], [1.5], [3.0], [1.5]]] * 2


@case
def point_1_several_forwards_before_one_backward(rank, implementation):
    """Each forward uses another branch."""
    wrapper = ddp_class(implementation)(Branches(), find_unused_parameters=True)
    loss = sum(wrapper(x_of(rank), name).sum() for name in "abc")
    return failure(loss.backward)[0][:1], scalars(wrapper)


def test_point_1_several_forwards_before_one_backward(of):
    theirs, ours = of
    assert all(error == ["RuntimeError"] for error, _ in theirs)  # "mark a variable ready only once"
    assert ours == [([], [1.5] * 3)] * 2


# --------------------------------------------------------------------------- 2: parameters without gradients


@case
def point_2_used_differently_by_each_rank(rank, implementation):
    """`a` on rank 0, `b` on rank 1, `c` on none; `c` had a gradient before. Without a flag."""
    wrapper = ddp_class(implementation)(Branches())
    wrapper.module.c.weight.grad = torch.full((1, 1), 7.0)
    wrapper(x_of(rank), "ab"[rank.rank]).sum().backward()
    first = scalars(wrapper)
    again = failure(lambda: wrapper(x_of(rank), "a"))
    return first, again[1] if implementation == "torch" else again[0]


def test_point_2_used_differently_by_each_rank(of):
    theirs, ours = of
    assert [grads for grads, _ in theirs] == [[1.0, None, 7.0], [None, 2.0, 7.0]]  # as they were, and no error
    assert all("Expected to have finished reduction in the prior iteration" in message for _, message in theirs)
    assert ours == [([0.5, 1.0, 7.0], [])] * 2


# ------------------------------------------------------------------------------- 3: ranks that are not alike


class Ordered(nn.Module):
    """Two layers, registered in a given order; the weight of `a` is 1, that of `b` 2."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, one_weight(1.0 if name == "a" else 2.0))


@case
def point_3_registered_in_another_order(rank, implementation):
    module = Ordered("ab" if rank.rank == 0 else "ba")
    kinds, message = failure(lambda: ddp_class(implementation)(module))
    return kinds, message, (module.a.weight.item(), module.b.weight.item())


def test_point_3_registered_in_another_order(of):
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
def point_3_made_equal_at_the_call(rank, implementation):
    module = one_weight(5.0 * rank.rank)
    module.register_buffer("count", torch.full((), rank.rank))
    replicate_of(implementation)(module)
    return module.weight.item(), module.count.item()


def test_point_3_made_equal_at_the_call(of):
    theirs, ours = of
    assert theirs == [(0.0, 0), (5.0, 1)]  # not before the first forward
    assert ours == [(0.0, 0), (0.0, 0)]


# --------------------------------------------------------------- 4: decided when backward runs; freezing again


@case
def point_4_no_sync_is_decided_in_backward(rank, implementation):
    results = []
    for around_forward in (True, False):
        wrapper = ddp_class(implementation)(one_weight())
        with wrapper.no_sync() if around_forward else contextlib.nullcontext():
            loss = wrapper(x_of(rank)).sum()
        with contextlib.nullcontext() if around_forward else wrapper.no_sync():
            loss.backward()
        results += scalars(wrapper)
    return results


def test_point_4_no_sync_is_decided_in_backward(of):
    theirs, ours = of
    assert theirs == [[1.0, 1.5], [2.0, 1.5]]
    assert ours == [[1.5, 1.0], [1.5, 2.0]]


@case
def point_4_frozen_and_unfrozen_after_the_call(rank, implementation):
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


def test_point_4_frozen_and_unfrozen_after_the_call(of):
    theirs, ours = of
    # `b` never; then none of them, and then nothing works any more
    assert theirs == [([[1.5, r, 1.5], [None, r, r]], ["RuntimeError"]) for r in (1.0, 2.0)]
    assert ours == [([[1.5, 1.5, 1.5], [None, 1.5, 1.5]], [])] * 2


# ---------------------------------------------------------------------- 5: the module stays what it was


@case
def point_5_the_module_stays_what_it_was(rank, implementation):
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


def test_point_5_the_module_stays_what_it_was(of):
    theirs, ours = of
    for *same, errors, _ in theirs:
        assert same == [True, True]
        assert errors["deepcopy"]
        assert errors["pickle"]
        assert errors["save"]
    assert ours == [(True, True, {"deepcopy": [], "pickle": [], "save": []}, ["Twice"] * 3)] * 2


# ------------------------------------------------------------------------------------------- 6: buffers


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
def point_6_what_backward_has_saved_is_not_overwritten(rank, implementation):
    local, wrapper = Average(), ddp_class(implementation)(Average())
    for module in (local, wrapper):
        losses = [module(x_of(rank)).sum() for _ in range(2)]
        for loss in losses:  # after the first, buffers are made equal, while the second is still pending
            loss.backward()
    (own,) = scalars(local)
    parts = rank.gather(torch.tensor(own))
    return scalars(wrapper), torch.stack(parts).mean().item()


def test_point_6_what_backward_has_saved_is_not_overwritten(of):
    theirs, ours = of
    assert [got == [wanted] for got, wanted in theirs] == [False, False]  # wrong, in silence
    assert [got == [wanted] for got, wanted in ours] == [True, True]


def normalised():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@case
def point_6_buffers_cost_no_collective(rank, implementation):
    wrapper = ddp_class(implementation)(normalised())
    for _ in range(3):  # past the steps in which plans are made
        wrapper(torch.randn(4, 2)).sum().backward()
    with profile() as profiled:
        wrapper(torch.randn(4, 2)).sum().backward()
    names = [event.name for event in profiled.events()]
    return {kind: sum(f"c10d::{kind}_" == name for name in names) for kind in ("broadcast", "allreduce")}


def test_point_6_buffers_cost_no_collective(of):
    theirs, ours = of
    assert [each["broadcast"] > 0 for each in theirs] == [True, True]
    assert ours == [{"broadcast": 0, "allreduce": 1}] * 2


@case
def point_6_buffers_follow_a_policy(rank, implementation):
    policies = {} if implementation == "torch" else {"rank0": 1.0, "mean": 1.5, "local": rank.rank + 1.0}
    results = {}
    for policy, wanted in policies.items():
        module = normalised()
        replicated = lockstep.replicate(module, buffer_policy=policy)
        module[1].running_mean.fill_(rank.rank + 1.0)
        replicated[0](torch.ones(1, 2)).sum().backward()
        results[policy] = module[1].running_mean.tolist() == [wanted] * 3
    return results


def test_point_6_buffers_follow_a_policy(of):
    _, ours = of
    assert ours == [dict.fromkeys(("rank0", "mean", "local"), True)] * 2


# --------------------------------------------------------------------------------------------- 7: hooks


@case
def point_7_hooks_in_a_chain(rank, implementation):
    """One that doubles, one that rounds to whole numbers; neither divides."""
    wrapper = ddp_class(implementation)(one_weight())
    error = failure(
        lambda: [
            wrapper.register_comm_hook(None, hook) for hook in (lambda state, bucket: 2 * bucket.buffer(), nearest)
        ]
    )
    if implementation == "torch":
        return error[1]
    wrapper(x_of(rank) + 0.2).sum().backward()
    return scalars(wrapper)


def nearest(state, bucket):
    return bucket.buffer().round()


def test_point_7_hooks_in_a_chain(of):
    theirs, ours = of
    assert all("can only be called once" in message for message in theirs)
    assert ours == [[3.0]] * 2  # 2.4 -> 2, 4.4 -> 4; their mean


@case
def point_7_hooks_and_a_hook_of_torch(rank, implementation):
    """Clipping before PyTorch's own compression, which communicates."""
    if implementation == "torch":
        return None
    wrapper = lockstep.DistributedDataParallel(one_weight())
    wrapper.register_comm_hook(None, lambda state, bucket: bucket.buffer().clamp(max=1.5))
    wrapper.register_comm_hook(None, default_hooks.bf16_compress_hook)
    wrapper(x_of(rank)).sum().backward()
    return scalars(wrapper)


def test_point_7_hooks_and_a_hook_of_torch(of):
    assert of[1] == [[1.25]] * 2


# ------------------------------------------------------------------------------------- 8: without a flag


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
def point_8_checkpointing(rank, implementation):
    results = []
    for reentrant in (True, False):
        wrapper = ddp_class(implementation)(Recomputed(reentrant))
        loss = wrapper(x_of(rank).requires_grad_()).sum()
        error = failure(loss.backward)[0][:1]
        results.append((error, scalars(wrapper)))
    return results


def test_point_8_checkpointing(of):
    theirs, ours = of
    assert theirs == [[([], [grad]), ([], [3.0])] for grad in (2.5, 3.5)]  # wrong, and other on each rank, in silence
    assert ours == [[([], [3.0])] * 2] * 2


@case
def point_8_several_backwards_for_a_forward(rank, implementation):
    wrapper = ddp_class(implementation)(Branches())
    shared = wrapper(x_of(rank), "abc")
    shared.sum().backward(retain_graph=True)
    shared.sum().backward()
    return scalars(wrapper)


def test_point_8_several_backwards_for_a_forward(of):
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
def point_8_scaled_clipped_shared_sparse(rank, implementation):
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


def test_point_8_scaled_clipped_shared_sparse(of):
    theirs, ours = of
    assert theirs == [(["RuntimeError"], 0, True)] * 2  # it wants find_unused_parameters
    assert ours == [([], 5, True)] * 2
