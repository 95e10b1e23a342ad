"""Where ours is better than PyTorch's DistributedDataParallel and its two composable `replicate`: theirs, then ours.

Each case runs PyTorch's version and ours in the same two processes, and shows the reference failing or differing. It
gets `rank` and `implementation` ("torch" or "lockstep"), and what it returns is compared with `theirs` and `ours`. All
cases share one launch. Numbers are those of threads at pytorch/pytorch in which people report what the case shows.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import lockstep
from ddp_reference import Branches, ddp_class, failure, scalars
from processes import run_processes
from programs.networks import Applying
from small_modules import fails_in_backward, one_weight, x_of

pytestmark = pytest.mark.around


class Case(NamedTuple):
    """What each rank gets, by rank, or a function that is true of that."""

    function: Callable[..., Any]
    theirs: Any
    ours: Any


CASES: dict[str, Case] = {}


def case(theirs: Any, ours: Any) -> Callable[..., Any]:
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = Case(function, theirs, ours)
        return function

    return note


class Having:
    """Equals what has all of these in it, text or list, and not what it lacks."""

    def __init__(self, *words: str, lacks: str | None = None) -> None:
        self.words, self.lacks = words, lacks

    def __eq__(self, other: object) -> bool:
        return all(word in other for word in self.words) and (self.lacks is None or self.lacks not in other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"Having{self.words}" if self.lacks is None else f"Having{self.words} and not {self.lacks!r}"


def differ(results: list[Any]) -> bool:
    return results[0] != results[1]


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
                results.setdefault(name, {})[implementation] = CASES[name].function(rank, implementation)
    return results


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_processes(2, run_cases, sorted(CASES), timeout=100)


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


@case(
    theirs=[[[r], [r], [2 * r], [r]] for r in (1.0, 2.0)],  # never synchronised
    ours=[[[1.5], [1.5], [3.0], [1.5]]] * 2,
)
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
    return [*results.values(), scalars(attached)]


class Twice(nn.Sequential):
    """A method beside forward."""

    def twice(self, x):
        return 2 * self(x)


@case(
    theirs=[(["RuntimeError"], ANY)] * 2,  # "mark a variable ready only once"
    ours=[([], [1.5] * 3)] * 2,
)
def several_forwards_before_one_backward(rank, implementation):
    """Each forward uses another branch."""
    wrapper = ddp_class(implementation)(Branches(), find_unused_parameters=True)
    loss = sum(wrapper(x_of(rank), name).sum() for name in "abc")
    return failure(loss.backward)[0][:1], scalars(wrapper)


# --------------------------------------------------------------------------- parameters without gradients


@case(
    theirs=[
        (grads, Having("Expected to have finished reduction in the prior iteration"))
        for grads in ([1.0, None, 7.0], [None, 2.0, 7.0])  # as they were, and no error
    ],
    ours=[([0.5, 1.0, 7.0], [])] * 2,
)
def used_differently_by_each_rank(rank, implementation):
    """`a` on rank 0, `b` on rank 1, `c` on none; `c` had a gradient before. Without a flag."""
    wrapper = ddp_class(implementation)(Branches())
    wrapper.module.c.weight.grad = torch.full((1, 1), 7.0)
    wrapper(x_of(rank), "ab"[rank.rank]).sum().backward()
    first = scalars(wrapper)
    again = failure(lambda: wrapper(x_of(rank), "a"))
    return first, again[1] if implementation == "torch" else again[0]


# ------------------------------------------------------------------------------- ranks that are not alike


class Ordered(nn.Module):
    """Two layers, registered in a given order; the weight of `a` is 1, that of `b` 2."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, one_weight(1.0 if name == "a" else 2.0))


@case(
    theirs=[([], ANY, (1.0, 2.0)), ([], ANY, (2.0, 1.0))],  # each in the other's place, in silence
    ours=[
        (["AgreementError"], Having("where rank 0 has parameter a.weight", "rank 1 has parameter b.weight"), (1.0, 2.0))
    ]
    * 2,
)
def registered_in_another_order(rank, implementation):
    module = Ordered("ab" if rank.rank == 0 else "ba")
    kinds, message = failure(lambda: ddp_class(implementation)(module))
    return kinds[:1], message, (module.a.weight.item(), module.b.weight.item())


@case(
    theirs=[(0.0, 0), (5.0, 1)],  # not before the first forward
    ours=[(0.0, 0), (0.0, 0)],
)
def made_equal_at_the_call(rank, implementation):
    module = one_weight(5.0 * rank.rank)
    module.register_buffer("count", torch.full((), rank.rank))
    replicate_of(implementation)(module)
    return module.weight.item(), module.count.item()


# ------------------------------------------------------------------------------------- freezing again


@case(
    theirs=[
        ([[1.5, r, 1.5], [None, r, r]], ["RuntimeError"]) for r in (1.0, 2.0)
    ],  # `b` never; then none of them, and then nothing works any more
    ours=[([[1.5, 1.5, 1.5], [None, 1.5, 1.5]], [])] * 2,
)
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


# ---------------------------------------------------------------------- the module stays what it was


@case(
    theirs=[(True, True, dict.fromkeys(("deepcopy", "pickle", "save"), True), [])] * 2,
    ours=[(True, True, dict.fromkeys(("deepcopy", "pickle", "save"), False), ["Twice"] * 3)] * 2,
)
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
        errors[name] = bool(failure(lambda: kinds.append(type(duplicate()).__name__))[0])  # noqa: B023
    return [*module.state_dict()] == before, isinstance(module, Twice), errors, kinds


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ------------------------------------------------------------------------------------------- buffers


def normalised():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@case(
    theirs=[(True, ANY)] * 2,
    ours=[(False, 1)] * 2,
)
def buffers_cost_no_collective(rank, implementation):
    wrapper = ddp_class(implementation)(normalised())
    for _ in range(3):  # past the steps in which plans are made
        wrapper(torch.randn(4, 2)).sum().backward()
    seen = collectives(lambda: wrapper(torch.randn(4, 2)).sum().backward())
    return seen["broadcast"] > 0, seen["allreduce"]


# ------------------------------------------------------------------------------------- without a flag


@case(
    theirs=[[([], [grad]), ([], [3.0])] for grad in (2.5, 3.5)],  # wrong, and other on each rank, in silence
    ours=[[([], [3.0])] * 2] * 2,
)
def checkpointing(rank, implementation):
    results = []
    for reentrant in (True, False):

        def twice(m, x, reentrant=reentrant):
            return checkpoint(m.layer, checkpoint(m.layer, x, use_reentrant=reentrant), use_reentrant=reentrant)

        wrapper = ddp_class(implementation)(Applying(twice, (), layer=one_weight()))
        loss = wrapper(x_of(rank).requires_grad_()).sum()
        error = failure(loss.backward)[0][:1]
        results.append((error, scalars(wrapper)))
    return results


@case(
    theirs=differ,  # the second one stays this rank's
    ours=[[3.0] * 3] * 2,
)
def several_backwards_for_a_forward(rank, implementation):
    wrapper = ddp_class(implementation)(Branches())
    shared = wrapper(x_of(rank), "abc")
    shared.sum().backward(retain_graph=True)
    shared.sum().backward()
    return scalars(wrapper)


def shared():
    """One weight under two names, and a sparse embedding."""
    layer, again = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    again.weight = layer.weight
    forward = lambda m, rows: m.again(torch.tanh(m.layer(m.embedding(rows))))  # noqa: E731
    embedding, spare = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)
    return Applying(forward, (), embedding=embedding, layer=layer, again=again, spare=spare)


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


@case(
    theirs=[(["RuntimeError"], 0, True)] * 2,  # it wants find_unused_parameters
    ours=[([], 5, True)] * 2,
)
def scaled_clipped_shared_sparse(rank, implementation):
    """Beside the whole batch in one process; `spare` is never used."""
    local = rank.make(lambda: shared().double())
    module = copy.deepcopy(local)
    wrapper = ddp_class(implementation)(module)
    wanted = train(local, local, lambda step: (torch.arange(4) + step) % 4)
    got: list[torch.Tensor] = []
    errors, _ = failure(
        lambda: got.extend(train(module, wrapper, lambda step: ((torch.arange(4) + step) % 4).chunk(2)[rank.rank]))
    )
    close = [torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(got, wanted, strict=False)]
    return errors[:1], len(close), all(close)


# ------------------------------------------------------------ the newer replicate of PyTorch


@case(
    theirs=[(1.0, "DTensor"), (2.0, "DTensor")],
    ours=[(1.0, "Parameter")] * 2,
)
def weights_that_differ_at_first(rank, implementation):
    """#140183: each rank has drawn its own."""
    module = one_weight(rank.rank + 1.0)
    (sharded_replicate if implementation == "torch" else lockstep.replicate)(module)
    module(torch.ones(1, 1)).sum().backward()
    return as_plain(module.weight.detach()).item(), type(module.weight).__name__


@case(
    theirs=[
        [1.0, None, None],
        [None, 1.0, None],
    ],  # PyTorch adds the gradient of one to that of the other. The mean is 0.5 for each.
    ours=[[0.5, 0.5, None]] * 2,
)
def gradients_of_different_parameters(rank, implementation):
    """Rank 0 uses `a`, rank 1 uses `b`."""
    module = Branches()
    (sharded_replicate if implementation == "torch" else lockstep.replicate)(module)
    module(torch.ones(1, 1), "ab"[rank.rank]).sum().backward()
    grads = [as_plain(parameter.grad) for parameter in module.parameters()]
    return [None if grad is None else grad.item() for grad in grads]


@case(
    theirs=[(1, 0)] * 2,  # all-reduces, and how many of them left before the last gradient came
    ours=[(4, 3)] * 2,
)
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


# ------------------------------------------------------------------------- gradients


@case(
    theirs=[(Having("INTERNAL ASSERT FAILED"), ANY)] * 2,
    ours=[("None", [3.0])] * 2,
)
def static_graph_and_no_sync(rank, implementation):
    """#187732: two micro-batches."""
    wrapper = ddp_class(implementation)(one_weight(), static_graph=True)

    def train():
        with wrapper.no_sync():
            wrapper(x_of(rank)).sum().backward()
        wrapper(x_of(rank)).sum().backward()

    return failure(train)[1], scalars(wrapper)


@case(
    theirs=[[2.0]] * 2,
    ours=[[1.5]] * 2,
)
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


@case(
    theirs=[([], "")] * 2,
    ours=[
        (
            [Having(f"rank {rank}: SGD.step() uses the gradient of parameter weight of this rank alone")] * 3,
            Having("parameter module.weight is out of sync"),
        )
        for rank in range(2)
    ],
)
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


@case(
    theirs=[([], "12.0"), ([], "24.0")],  # wrong, and other on each rank, in silence
    ours=[(Having("RuntimeError"), Having("element 0 of tensors does not require grad"))]
    * 2,  # see gradients_by_autograd_grad
)
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


@case(
    theirs=[(ANY, 4.0, ANY), (ANY, 8.0, ANY)],
    ours=[(4.0, 6.0, 36.0), (8.0, 6.0, 36.0)],
)
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


# ----------------------------------------------------------------------------- flags and their cost


class Box:
    """A container that PyTorch does not look into."""

    def __init__(self, **entries):
        self.__dict__.update(entries)


class Boxed(Branches):
    """Puts its output into a box."""

    def forward(self, x, names):
        return Box(out=super().forward(x, names))


@case(
    theirs=[(Having("Expected to mark a variable ready only once"), ANY)] * 2,
    ours=[("None", [1.5, 1.5, None])] * 2,
)
def outputs_of_an_unknown_kind(rank, implementation):
    wrapper = ddp_class(implementation)(Boxed(), find_unused_parameters=True)
    error = failure(lambda: wrapper(x_of(rank), "ab").out.sum().backward())[1]
    return error, scalars(wrapper)


def two_outputs():
    return Applying(lambda m, x: (m.a(x), m.b(x)), (), a=one_weight(), b=one_weight())


@case(
    theirs=[[[1.5, None], [1.5, grad]] for grad in (1.0, 2.0)],  # never synchronised, in silence
    ours=[[[1.5, None], [1.5, 1.5]]] * 2,
)
def an_output_left_out_with_a_static_graph(rank, implementation):
    """#97030, #79171: left out of the loss at the first step, used at the second."""
    wrapper = ddp_class(implementation)(two_outputs(), static_graph=True)
    results = []
    for used in (slice(1), slice(2)):
        wrapper.zero_grad()
        sum(out.sum() for out in wrapper(x_of(rank))[used]).backward()
        results.append(scalars(wrapper))
    return results


@case(
    theirs=[2, 2],
    ours=[1, 1],
)
def looking_for_unused_parameters(rank, implementation):
    """Costs a collective of its own, in every step."""
    wrapper = ddp_class(implementation)(Branches(), find_unused_parameters=implementation == "torch")

    def step():
        wrapper(x_of(rank), "ab"[rank.rank]).sum().backward()

    for _ in range(3):
        step()
    return collectives(step)["allreduce"]


@case(
    theirs=[2, 2],
    ours=[1, 1],
)
def gradients_and_buckets(rank, implementation):
    """#37030: by default, gradients are a second copy of what the buckets hold."""
    wrapper = ddp_class(implementation)(two_outputs())
    for _ in range(2):
        wrapper.zero_grad(set_to_none=True)
        sum(out.sum() for out in wrapper(x_of(rank))).backward()
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in wrapper.parameters()})


@case(
    theirs=[(ANY, Having("doesn't have any parameter that requires a gradient"))] * 2,
    ours=[([], "1.0"), ([], "2.0")],
)
def a_model_without_anything_to_train(rank, implementation):
    module = one_weight().requires_grad_(False)
    return failure(lambda: ddp_class(implementation)(module)(x_of(rank)).item())


@case(
    theirs=[([], "True")] * 2,
    ours=[(Having("TypeError"), Having("'buket_cap_mb'; did you mean bucket_cap_mb?"))] * 2,
)
def options_that_do_not_exist(rank, implementation):
    """Taken in silence at the call by the reference."""
    replicate = replicate_of_torch if implementation == "torch" else lockstep.replicate
    kinds, message = failure(lambda: bool(replicate(one_weight(), buket_cap_mb=1)))
    return kinds[-4:], message


# --------------------------------------------------------------------- optimizers, copies, compilation


@case(
    theirs=differ,  # on gradients that are this rank's alone
    ours=[[8.5, 8.5]] * 2,
)
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


@case(
    theirs=[True, True],  # it is an error
    ours=[(4.0, 4.0), (4.0, 8.0)],
)
def groups_of_their_own(rank, implementation):
    """#73825: a process group cannot be pickled."""
    group = dist.new_group([0, 1])
    if implementation == "torch":
        return bool(failure(lambda: pickle.dumps(ddp_class("torch")(one_weight(), process_group=group)))[0])
    module = lockstep.replicate(one_weight(4.0), process_group=group)
    return pickle.loads(pickle.dumps(module)).weight.item(), copy.deepcopy(module)(x_of(rank)).item()


@case(
    theirs=[[1.0], [2.0]],
    ours=[[[1.5, 1.5]] * 4] * 2,
)
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


# ------------------------------------------------------------------------------------------- failures

SOON = timedelta(seconds=2)
_groups: list[Any] = []  # kept open: what the other rank sees is a time-out, and not that a connection ends


def group_of_its_own() -> Any:
    """A group that a case may break. Its collectives time out soon."""
    _groups.append(dist.new_group([0, 1], timeout=SOON))
    return _groups[-1]


@case(
    theirs=[(ANY, Having(lacks="1.weight"))] * 2,
    ours=[
        (
            ["AgreementError"],
            Having(
                "parameter 1.weight: rank 0 has float32 of shape (3, 2), trained; rank 1 has float32 of shape (4, 2)"
            ),
        )
    ]
    * 2,
)
def another_shape(rank, implementation):
    """#73547: which parameter is it?"""
    module = nn.Sequential(one_weight(), nn.Linear(2, 3 + rank.rank))
    kinds, message = failure(lambda: ddp_class(implementation)(module, process_group=group_of_its_own()))
    return kinds[:1], message


class Fragile(nn.Sequential):
    """Two layers; backward may fail between them."""

    def forward(self, x, fails):
        return self[1](fails_in_backward(self[0](x), fails))


@case(
    theirs=[
        [ANY, (ANY, Having("Timed out waiting 2000ms", lacks="rank 1"), ANY)],
        [ANY, (["ArithmeticError"], "a bad batch", ANY)],
    ],
    ours=[  # both go on with the next batch
        [ANY, (["PeerError"], Having("backward failed on rank 1 in round 2"), ANY), ([], "None", [1.5, 1.5])],
        [ANY, (["ArithmeticError"], "a bad batch", ANY), ([], "None", [1.5, 1.5])],
    ],
)
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


@case(
    theirs=[([1.5, 2.5, Having(lacks="the same backward passes")], ANY), ([1.5, 2.5], ANY)],
    ours=[
        (
            [ANY, ANY, Having("backward() failed", "did not run the same backward passes (one batch less")],
            [1.0, 2.0, 3.0],
        ),
        (ANY, [1.0, 2.0, 3.0]),
    ],
)
def a_batch_that_one_rank_leaves_out(rank, implementation):
    """#44353: collectives pair off by one, and at the end there is a time-out."""
    left_out = batches(rank, ddp_class(implementation)(one_weight(), process_group=group_of_its_own()), False)
    if implementation == "torch":
        return left_out, None
    return left_out, batches(rank, ddp_class(implementation)(one_weight()), True)


@pytest.mark.parametrize("name", CASES)
def test_theirs_and_ours(name, outcomes):
    for implementation, wanted in (("torch", CASES[name].theirs), ("lockstep", CASES[name].ours)):
        got = [outcome[name][implementation] for outcome in outcomes]
        if callable(wanted):
            assert wanted(got), f"{implementation}: {got}"
        else:
            assert got == wanted, implementation
