"""What people report about PyTorch's DistributedDataParallel and its two composable `replicate`: theirs, then ours.

Each test runs PyTorch's version and ours in the same two processes, and shows the reference failing or differing.
Numbers are those of threads at pytorch/pytorch. Not here, but in test_better_than_ddp.py: submodules called past the
wrapper, parameters unused at the first backward, unfreezing, another order of registration, no_sync around forward
only, buffers overwritten before backward has read them, layers that are recomputed, several hooks.
"""

from __future__ import annotations

import copy
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
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import lockstep
from ddp_reference import Branches, ddp_class, failure, one_weight, scalars
from processes import run_processes

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def x_of(rank: Any) -> torch.Tensor:
    return torch.full((1, 1), rank.rank + 1.0)


def sharded_replicate(module: nn.Module) -> nn.Module:
    """PyTorch's newer `replicate`, on the machinery of its fully sharded training."""
    return replicate_with_fsdp(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def run_cases(rank: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        for implementation in ("torch", "lockstep"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if implementation == "torch" else "error")
                results.setdefault(name, {})[implementation] = CASES[name](rank, implementation)
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_processes(2, run_cases, sorted(CASES), timeout=60)


@pytest.fixture
def of(outcomes, request):
    """What each rank got in the case that the test is named after: (torch's by rank, ours by rank)."""
    name = request.node.name.removeprefix("test_")
    return tuple([outcome[name][implementation] for outcome in outcomes] for implementation in ("torch", "lockstep"))


def as_plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def collectives(call: Callable[[], Any]) -> dict[str, int]:
    """How many collectives of each kind the call issues, in Python or in C++."""
    with profile() as profiled:
        call()
    names = [event.name for event in profiled.events()]
    return {kind: sum(f"c10d::{kind}_" == name for name in names) for kind in ("allreduce", "broadcast")}


# ------------------------------------------------------------ the newer replicate of PyTorch (findings 1, 2, 3)


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
    module[0].weight.register_hook(lambda grad: before.append(lockstep.statistics(module).calls["collective"]))
    start = lockstep.statistics(module).calls["collective"]
    module(torch.ones(1, 128)).sum().backward()
    return lockstep.statistics(module).calls["collective"] - start, before[0] - start


def test_overlap_with_the_rest_of_backward(of):
    assert of == ([(1, 0)] * 2, [(4, 3)] * 2)  # all-reduces, and how many of them left before the last gradient came


# ------------------------------------------------------------------------- gradients (findings 5, 12)


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
    """Optimizer steps on gradients that no backward has synchronised; the second one in a row is told."""
    wrapper = ddp_class(implementation)(one_weight())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
        assert len(told) == 1
        assert f"rank {rank}: parameter weight was changed while its gradient was only" in told[0]
        assert "parameter module.weight is out of sync" in message


@case
def second_order(rank, implementation):
    """#63929: a gradient penalty, by backward(create_graph=True). L = w^2 x, so (dL/dw)^2 = (2 w mean(x))^2."""
    wrapper = ddp_class(implementation)(one_weight(2.0))
    (weight,) = wrapper.parameters()

    def penalty():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
            (wrapper(x_of(rank)) * weight).sum().backward(create_graph=True)
        grad, weight.grad = weight.grad, None
        grad.square().sum().backward()
        return weight.grad.item()

    return failure(penalty)


def test_second_order(of):
    theirs, ours = of
    assert theirs == [([], "12.0"), ([], "24.0")]  # wrong, and other on each rank, in silence
    assert ours == [([], str(8.0 * 2.0 * 1.5**2))] * 2


@case
def gradients_by_autograd_grad(rank, implementation):
    """The same by torch.autograd.grad, which stays on its rank unless it is asked for."""
    wrapper = ddp_class(implementation)(one_weight(2.0))
    (weight,) = wrapper.parameters()
    (grad,) = torch.autograd.grad((wrapper(x_of(rank)) * weight).sum(), weight, create_graph=True)
    first = grad.item()
    if implementation == "lockstep":
        grad = lockstep.mean_over_ranks(grad)
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

_groups: list[Any] = []  # kept open: what the other rank sees is a time-out, and not that a connection ends


def group_of_its_own() -> Any:
    """A group that a case may break. Its collectives time out after a second."""
    _groups.append(dist.new_group([0, 1], timeout=timedelta(seconds=1)))
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
        assert "parameter 1.weight: float32 of shape (3, 2), trained on rank 0, float32 of shape (4, 2)" in message


class Fails(torch.autograd.Function):
    """Raises in backward, if told so."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("a bad batch")
        return grad, None


class Fragile(nn.Sequential):
    """Two layers; backward may fail between them."""

    def forward(self, x, fails):
        return self[1](Fails.apply(self[0](x), fails))


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
    assert "Timed out waiting 1000ms" in first[1][1]
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
    assert "round 3 failed" in first[-1]
    assert "did not run the same backward passes (one batch less" in first[-1]
    assert [weighted for _, weighted in ours] == [[1.0, 2.0, 3.0]] * 2
