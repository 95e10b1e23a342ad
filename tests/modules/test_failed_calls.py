"""A call of replicate() or DistributedDataParallel() that fails leaves no trace, and a second, right call works."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.distributed.comm import collectives
from lockstep.distributed.reduction.module.managed_parameters import owner_of
from lockstep.distributed.reduction.module.selection import _replicated
from lockstep.distributed.reduction.rank_state import RankState
from lockstep.distributed.reduction.scheduler import scheduler_of
from lockstep.distributed.replication.replication import find_replication
from lockstep.errors import AgreementError, CommunicationError, HookError, LockstepError
from lockstep.shares.share_state import world_of
from programs.ranks import on_ranks
from threaded import run_ranks


class Net(nn.Module):
    """Hooks of the user on the module and on a parameter, a gradient, a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.ran = []
        self.register_forward_hook(lambda module, args, output: None)
        self.register_load_state_dict_post_hook(lambda module, keys: None)
        self.first.weight.grad = torch.ones(2, 2)

    def forward(self, x):
        return self.norm(self.first(x))


class HookedNet(Net):
    """Has a post-accumulate hook, which shares refuse."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self.ran.append)


def contents(thing):
    """Return what is in a dictionary of hooks or slots, and which object it is."""
    kept = list(map(id, getattr(thing, "kept", ())))
    return id(thing), type(thing), [(key, id(value)) for key, value in (thing or {}).items()], kept


def state(module, rank):
    """Everything on a module, its parameters, and in the registries, that a call may touch."""
    parts = list(module.modules())
    parameters = list(module.parameters())
    return {
        "parts": [(id(each), type(each), type(vars(each))) for each in parts],
        "attributes": [[(name, id(value)) for name, value in vars(each).items()] for each in parts],
        "dictionaries": [contents(value) for each in parts for value in vars(each).values() if isinstance(value, dict)],
        "gradients": [(id(each), id(each.grad), each.grad is not None and each.grad.tolist()) for each in parameters],
        "hooks": [contents(each._post_accumulate_grad_hooks) for each in parameters]
        + [contents(each._backward_hooks) for each in parameters],
        "owners": [owner_of(each) for each in parameters],
        "registered": [(find_replication(each), each in _replicated) for each in parts],
        "methods": [hasattr(module, name) for name in ("no_sync", "register_comm_hook", "set_requires_gradient_sync")],
        "reducers": list(scheduler_of(rank.group).modules),
        "numbers": numbers_of(scheduler_of(rank.group).modules),
        "shares": (world_of(rank.group).joined, list(world_of(rank.group)._modules)),
    }


def numbers_of(modules):
    """Return what ranks agree on as they register a module: after a failed call they must still agree."""
    return modules.exclusive, modules.next_id, modules.order


def assert_same(before, after, places=()):
    different = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    assert not different, places[-1:]


@contextlib.contextmanager
def unchanged(rank, *modules):
    """After the block all is as it was before."""
    before = [state(module, rank) for module in modules]
    yield
    for module, earlier in zip(modules, before, strict=True):
        assert_same(earlier, state(module, rank))


class Injected(Exception):
    pass


class Injection:
    """Raises in the k-th function of the library that this thread calls, as it is called first."""

    def __init__(self, k):
        self._left, self._seen = k, set()

    def __enter__(self):
        sys.setprofile(self._profile)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _profile(self, frame, event, _):
        code = frame.f_code
        if event != "call" or code in self._seen or not code.co_filename.startswith(SOURCE):
            return
        self._seen.add(code)
        if code.co_name in NO_PLACES or is_out_of_scope(frame):
            return
        self._left -= 1
        if not self._left:
            raise Injected(code.co_qualname)


SOURCE = str(Path(lockstep.__file__).parent)
COMMUNICATION = (
    "/distributed/comm/",
    "/shm/",
    "/phases.py",
    "/_base/buckets.py",
    "/_base/digests.py",
    "/_base/abilities.py",
    "/_base/run_all.py",
)
"""A rank that fails inside of a collective is lost: test_a_failure_inside_of_a_collective."""
NO_PLACES = ("broadcast_values", "<genexpr>")
"""Functions that only communicate, and calls that are no calls: a generator is resumed when it is closed."""


def is_out_of_scope(frame):
    """Return True if a frame belongs to a collective, to the undoing of a failed call, or to the end of another
    reducer."""
    while frame is not None:
        code = frame.f_code
        if code.co_qualname in ("ExitStack.__exit__", "Reducer.__del__"):
            return True
        if any(part in code.co_filename for part in COMMUNICATION):
            return True
        frame = frame.f_back
    return False


def by_replicate(module, rank, **options):
    return lockstep.replicate(module, process_group=rank.group, **options)


def by_wrapper(module, rank, **options):
    return lockstep.DistributedDataParallel(module, process_group=rank.group, **options)


def by_shares(module, rank, **options):
    return lockstep.replicate(module, process_group=rank.group, shares=2, loss="mean", **options)


def check_means(module, rank):
    module.zero_grad()
    module.first(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    assert module.first.weight.grad.tolist() == [[1.5, 1.5]] * 2


WAYS = {"beside another": (by_replicate, HookedNet), "wrapper": (by_wrapper, HookedNet), "shares": (by_shares, Net)}


@pytest.mark.parametrize(
    ("failing", "hosts", "stride"),
    [
        pytest.param([1], "", 4, id="one rank, gloo, every fourth place"),
        pytest.param([1], "", 1, id="one rank, gloo", marks=pytest.mark.around),
        pytest.param([0, 1], "aa", 1, id="all ranks, shm", marks=pytest.mark.around),
        pytest.param([1], "aa", 1, id="one rank, shm", marks=pytest.mark.soak),
        pytest.param([0, 1], "", 1, id="all ranks, gloo", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("way", ["wrapper", "shares", pytest.param("beside another", marks=pytest.mark.around)])
def test_an_exception_at_any_place(way, failing, hosts, stride):
    make, net = WAYS[way]

    def call(rank):
        places = []
        fails = rank.rank in failing
        others = [by_replicate(Net(), rank)] if way == "beside another" else []
        while True:
            module = net()
            before = state(module, rank)
            injection = Injection(stride * len(places) + 1) if fails else contextlib.nullcontext()
            try:
                with injection:
                    kept = make(module, rank)
            except Injected as error:
                places.append(str(error))
            except AgreementError as error:  # of another rank; one that fails earlier calls again, and is waited for
                assert "rank 1 cannot replicate its module: Injected: " in str(error)  # noqa: PT017  # in one of two
            else:
                break
            assert_same(before, state(module, rank), places)
            module.first(torch.ones(1, 2)).sum().backward()  # by itself: nothing communicates
            assert module.first.weight.grad.tolist() == [[2.0, 2.0]] * 2
        for each in (module, *others) if make in (by_replicate, by_wrapper) else ():
            check_means(each, rank)
        del kept
        return places

    places = run_ranks(2, call, hosts=hosts)
    assert all(len(places[each]) > 50 / stride for each in failing)


@pytest.mark.parametrize("make", [by_replicate, by_wrapper, by_shares])
@on_ranks(2)
def test_ranks_that_differ_can_try_again(rank, make):
    module = Net()
    module.extra = nn.Linear(1, 1 + rank.rank)
    with unchanged(rank, module), pytest.raises(AgreementError, match="ranks differ in parameter extra"):
        make(module, rank)
    del module.extra
    model = make(module, rank)
    if make is not by_shares:
        check_means(module, rank)
    assert model is not None


@on_ranks(2)
def test_a_wrong_option_and_a_wrong_hook(rank):
    module = Net()
    for options in ({"bucket_cap": 3}, {"bucket_cap_mb": -1}, {"ignored_modules": 3}):
        with unchanged(rank, module), pytest.raises((LockstepError, TypeError)):
            by_replicate(module, rank, **options)
    by_replicate(module, rank)
    with pytest.raises(HookError):
        module.register_comm_hook(None, 3)
    check_means(module, rank)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@on_ranks(2, "hosts", group_timeout=0.5)
def test_another_rank_never_comes(rank):
    if rank.rank == 1:
        return
    module = Net()
    with unchanged(rank, module), pytest.raises(CommunicationError):
        by_replicate(module, rank)
    module(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
def test_a_failure_inside_of_a_collective(hosts, monkeypatch):
    """The rank that fails is lost to the others; the module of each is as before."""
    real = collectives.plan_buckets

    def fails_on_rank_1(specs):
        if threading.current_thread().name == "rank 1":
            raise Injected
        return real(specs)

    monkeypatch.setattr(collectives, "plan_buckets", fails_on_rank_1)

    def call(rank):
        module = Net()
        for error in (Injected if rank.rank == 1 else CommunicationError, CommunicationError):
            with unchanged(rank, module), pytest.raises(error):
                by_replicate(module, rank)

    run_ranks(2, call, hosts=hosts, group_timeout=0.5)


@on_ranks(2)
def test_a_failure_of_a_second_module_leaves_the_first_alone(rank):
    first = by_replicate(Net(), rank)
    second = HookedNet()
    with unchanged(rank, first, second), contextlib.ExitStack() as stack:
        if rank.rank == 1:
            second.register_forward_hook = raises
            stack.callback(vars(second).pop, "register_forward_hook")
        with pytest.raises((Injected, AgreementError)):
            by_replicate(second, rank)
    with pytest.raises((Injected, AgreementError)):  # takes the parameters over
        outer = nn.ModuleList([first])
        by_wrapper(outer if rank.rank == 0 else nn.ModuleList([first, nn.Linear(1, 1)]), rank)
    check_means(first, rank)
    by_replicate(second, rank)
    check_means(second, rank)
    check_means(first, rank)


@pytest.mark.parametrize(
    "outer", [lambda module: module, lambda module: nn.ModuleList([module])], ids=["itself", "part"]
)
def test_a_module_is_not_taken_over_by_a_call_that_fails(outer, monkeypatch):
    """Rank 1 fails when rank 0 has attached another reducer to the module already."""
    real = RankState.set_requires_sync

    def fails_on_rank_1(*args):
        if threading.current_thread().name == "rank 1" and calling:
            raise Injected
        return real(*args)

    monkeypatch.setattr(RankState, "set_requires_sync", fails_on_rank_1)
    calling = []

    def call(rank):
        module = by_replicate(Net(), rank)
        with unchanged(rank, module):
            calling.append(rank)
            with pytest.raises((Injected, AgreementError)):
                by_wrapper(outer(module), rank)
            calling.remove(rank)
        check_means(module, rank)

    run_ranks(2, call)


def raises(*args, **kwargs):
    raise Injected


@on_ranks(2)
def test_a_module_that_fails_to_start_in_its_first_forward_can_start_later(rank):
    module = by_replicate(nn.Sequential(nn.LazyLinear(2)), rank)
    methods = sorted(name for name in ("no_sync", "register_comm_hook") if hasattr(module, name))
    with torch.no_grad():
        module(torch.ones(1, 2 + rank.rank))
    with pytest.raises(AgreementError):
        module(torch.ones(1, 2 + rank.rank))
    assert not lockstep.replicate.state(module).ready
    module[0] = nn.Linear(2, 2)
    module(torch.full((1, 2), rank.rank + 1.0)).sum().backward()
    assert (methods, module[0].weight.grad.tolist()) == (["no_sync", "register_comm_hook"], [[1.5, 1.5]] * 2)
