"""Persistent replicas: what they are, when they are rebuilt, what is carried over, what a live graph may rely on."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lockstep
import sim
from lockstep import DataParallel
from lockstep.errors import NotReplicableError
from lockstep.local import ReplicaSet, replicate
from lockstep.local.module_copy import CACHE
from programs.networks import STRUCTURES, Applying, mlp
from programs.one_device import device_of, gradients, loss_of, on, reference, same, same_gradients

CPU = torch.device("cpu")
compiling = pytest.mark.usefixtures("compiler")


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------ gradients, beside one device


def refreshed(times=1):
    """A use that leads so many times to gradients, by one set of replicas after the other."""

    def use(network, devices, chunks):
        for _ in range(times):
            replicas = replicate(network, devices)
            assert [device_of(r) for r in replicas] == devices
            loss_of(replicas, chunks).backward()

    return use


def in_parts(network, devices, chunks):
    """A backward for each of the outputs of one forward."""
    for replica, chunk in zip(replicate(network, devices), chunks, strict=True):
        loss_of([replica], [chunk]).backward()


def after(change, builds=1):
    """A use that replicates, changes the network, and is to have its gradients after the change; None: any builds."""

    def use(network, devices, chunks):
        replicas = ReplicaSet(network, devices)
        replicas.refresh()
        change(network, replicas)
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert builds in (None, replicas.builds)

    return use


def thaw(network, replicas):
    network[0].requires_grad_(False)
    replicas.refresh()
    network[0].requires_grad_(True)


def evaluate_in_inference_mode(network, replicas):
    with torch.inference_mode():
        for replica in replicas.refresh():
            replica(torch.ones(4, 3, device=device_of(replica)))


def fail_to_rebuild(network, replicas):
    network.append(on(device_of(network), nn.LazyLinear, 2))
    for _ in range(2):
        with pytest.raises(NotReplicableError, match=r"3 is a LazyLinear"):
            replicas.refresh()
    network(torch.ones(1, 3, device=device_of(network)))


def in_threads(network, devices, chunks):
    """Beside other networks."""

    def train(network):
        for _ in range(5):
            network.zero_grad()
            refreshed()(network, devices, chunks)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, [network, *(copy.deepcopy(network) for _ in range(3))]))


USES = {
    "once": refreshed(),
    "twice": refreshed(2),
    "in parts": in_parts,
    "after freezing": after(lambda network, replicas: network[0].requires_grad_(False)),
    "after freezing and back": after(thaw),
    "after inference": after(evaluate_in_inference_mode),
    "after a move": after(lambda network, replicas: network.to(replicas.devices[-1]), None),
    "after a failed rebuild": after(fail_to_rebuild, 2),
    "in threads": in_threads,
}


@pytest.mark.parametrize("home", ["first", "cpu"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("use", USES)
def test_gradients_of_all_replicas_sum_into_the_network(devices, first, use, count, home):
    """Which may be elsewhere: as in the C++ API, on the CPU."""
    network = on(first if home == "first" else CPU, mlp)
    chunks = torch.randn(count, 5, 3).unbind()
    USES[use](network, devices(count), chunks)
    found = gradients(network)
    expected = reference(network, chunks)
    assert {p.grad.device for p in network.parameters() if p.grad is not None} == {device_of(network)}
    same(found, {name: g if g is None or use != "twice" else 2 * g for name, g in expected.items()})


def test_a_network_that_is_frozen_as_a_whole(devices, first):
    network = on(first, mlp).requires_grad_(False)
    x = torch.ones(1, 3, requires_grad=True)
    loss_of(replicate(network, devices(2)), [x, x]).backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is None for p in network.parameters())


# ------------------------------------------------------------------------------- what a replica is


def test_the_first_replica_shares_the_storage_of_the_network(devices, first):
    """As in PyTorch, so that in-place updates of its buffers reach the network. Another replica's do not."""
    network = on(first, nn.BatchNorm1d, 2)
    one, two = replicate(network, devices(2))
    assert storage(one.weight) == storage(network.weight)
    assert storage(one.running_mean) == storage(network.running_mean)
    assert storage(two.running_mean) != storage(network.running_mean)
    x = torch.randn(4, 2)
    one(x.to(first))
    two(x.to(device_of(two)) + 10)
    torch.testing.assert_close(network.running_mean.cpu(), 0.1 * x.mean(0))


def test_replicas_do_not_keep_the_replicas_that_their_network_keeps():
    network = nn.Linear(2, 2)
    for _ in range(2):
        lockstep.local.data_parallel(network, torch.ones(4, 2), ["cpu", "cpu"])
    assert CACHE in vars(network)
    assert not any(CACHE in vars(each) for each in replicate(network, ["cpu", "cpu"]))


def test_former_parameters_are_those_of_the_replica(devices, first):
    network = nn.Sequential(nn.Linear(2, 2, bias=False)).to(first)
    for _ in range(2):
        for replica in replicate(network, devices(2)):
            assert dict(replica[0]._former_parameters) == {"weight": replica[0].weight}
            assert len(replica._former_parameters) == 0
    assert not hasattr(network[0], "_former_parameters")


def test_detached_replicas_are_not_differentiable(devices, first):
    network = on(first, STRUCTURES["a buffer that needs a gradient"])
    for replica in replicate(network, devices(2), detach=True):
        assert not any(t.requires_grad for t in (*replica.parameters(), *replica.buffers()))
        assert not replica(torch.ones(1, 3, device=device_of(replica))).requires_grad
    x, detached = torch.ones(1, 3, device=first), replicate(network, devices(2), True)[0]
    torch.testing.assert_close(detached(x), network(x))
    attached = replicate(network, devices(2))[0]
    assert attached is not detached
    assert replicate(network, list(map(str, devices(2))))[0] is attached
    assert replicate(network, devices(3))[0] is not attached


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize("name", ["spectral_norm", "legacy spectral_norm"])
def test_a_power_iteration_is_that_of_the_first_replica(devices, first, name):
    network = on(first, STRUCTURES[name]).train()
    before = {name: b.clone() for name, b in network.named_buffers()}
    parallel, x = DataParallel(network, devices(2)), torch.randn(4, 3, device=first)
    parallel(x).sum().backward()
    for buffer, value in before.items():
        assert not (name.startswith("legacy") and torch.equal(network.get_buffer(buffer), value))
    assert all(p.grad.abs().sum() > 0 for p in network.parameters())
    network.eval()
    torch.testing.assert_close(parallel(x), network(x))


# ------------------------------------------------------------------------------ kinds of modules


def test_sparse_buffers_and_sparse_gradients():
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    network.register_buffer("graph", torch.eye(3).to_sparse())
    rows = torch.tensor([1, 2])
    for _ in range(2):
        replicas = replicate(network, ["cpu", "cpu"])
        assert all(r.graph.layout == torch.sparse_coo for r in replicas)
        network.zero_grad()
        sum(torch.sparse.mm(r.graph, r(rows).t()).sum() for r in replicas).backward()
        assert network[0].weight.grad.is_sparse
        assert network[0].weight.grad.to_dense().sum(1).tolist() == [0, 6, 6, 0, 0]
    network.graph = 2 * torch.eye(3).to_sparse()
    with torch.no_grad():
        assert replicate(network, ["cpu", "cpu"])[1].graph.to_dense()[0, 0] == 2


# ------------------------------------------------------------------------------------ persistence


def evaluated(replicas, x):
    with torch.no_grad():
        return [r(x.to(device_of(r))).cpu() for r in replicas]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_values_are_sent_at_each_use_and_the_host_waits_for_no_device(sim, grad):
    """Also those that were written through `.data`, which no version counter tells of."""
    network = on(sim.devices(1)[0], mlp)
    replicas = ReplicaSet(network, sim.devices(2))
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # the first one tries the connection
            replicas.refresh()
        for value in (1.0, 2.0):
            network[0].weight.data.fill_(value)
            sim.reset_copies()
            sim.reset_stream_log()
            (_, there) = replicas.refresh()
            assert list(sim.copies()) == [("sim:0", "sim:1")]
            assert not [line for line in sim.stream_log() if line.action.startswith("sync")]
            assert (there[0].weight.cpu() == value).all()


def test_parameters_that_share_a_storage_are_sent_from_it(sim):
    """Nothing is packed: the storage of an RNN's weights, or of flattened parameters, is as large as they are."""
    network = nn.Linear(100, 100).to("sim:0")
    flat = torch.randn(100 * 100 + 100 + 8, device="sim:0")
    network.weight.data, network.bias.data = flat[8:-100].view(100, 100), flat[-100:]
    replicas = ReplicaSet(network, sim.devices(2))
    replicas.refresh()
    torch.sim.reset_peak_memory_stats(0)
    before = torch.sim.memory_allocated(0)
    sim.reset_copies()
    _, there = replicas.refresh()
    assert torch.sim.max_memory_allocated(0) == before
    assert sim.copies()["sim:0", "sim:1"] == (1, flat.nbytes)
    for one, other in zip(network.parameters(), there.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_a_replaced_buffer_is_freed():
    """And what it meant in the replicas: nothing must pile up where a forward makes new buffers each time."""
    network = nn.BatchNorm1d(2)
    network.holder = [network.running_mean]  # an attribute that means the replica's own buffer
    replicas = ReplicaSet(network, [CPU, CPU])
    replicas.refresh()
    kept = network.running_mean
    in_replica = weakref.ref(replicas.refresh()[1].running_mean)
    network.running_mean = torch.ones(2)
    network.holder = [network.running_mean]
    for _ in range(2):
        replica = replicas.refresh()[1]
        assert replica.holder[0] is replica.running_mean
        assert torch.equal(replica.running_mean, torch.ones(2))
    gc.collect()
    assert in_replica() is None
    network.kept = kept  # now a plain tensor like any other
    assert replicas.refresh()[1].kept is kept


# ------------------------------------------------------------------------------------ carried over


def hook(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


class Tree(nn.Module):
    """With every kind of attribute that leads back into the tree."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
        self.last = nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(3))
        self.layers, self.unused = [self.first, self.block[0]], []
        self.stages, self.queue = {"a": [self.first]}, deque([self.first])

    def forward(self, x):
        return self.last(self.block(self.first(x)) * self.mask)

    def method(self):
        return self


def own(replica, value):
    """``value`` with names for parts that are the replica's own; other modules and tensors are "foreign"."""
    names = {id(m): f"module {name}" for name, m in replica.named_modules()}
    names |= {id(t): f"tensor {name}" for name, t in (*replica.named_parameters(), *replica.named_buffers())}

    def show(v):
        if isinstance(v, nn.Module | torch.Tensor):
            return names.get(id(v), "foreign")
        if isinstance(v, dict):
            return type(v).__name__, getattr(v, "default_factory", None), {show(k): show(x) for k, x in v.items()}
        if isinstance(v, list | tuple | deque):
            return type(v).__name__, getattr(v, "maxlen", None), [show(x) for x in v]
        if isinstance(v, set | frozenset):
            return type(v).__name__, sorted(map(show, v))
        if isinstance(v, functools.partial):
            return "partial", show(v.func), show(v.args), show(v.keywords)
        if isinstance(v, weakref.ref):
            return "weakref", show(v())
        if hasattr(v, "__self__") and hasattr(v, "__func__"):
            return "method", v.__func__, show(v.__self__)
        return v

    return show(value)


def observed(network):
    """All attributes of all modules, and which parameters are trained."""
    return {
        name: own(network, {key: value for key, value in vars(module).items() if not key.startswith("_")})
        for name, module in network.named_modules()
    } | {name: p.requires_grad for name, p in network.named_parameters()}


CARRIED = {
    "eval": lambda n: n.eval(),
    "eval of one submodule": lambda n: n.block.eval(),
    "dropout rate": lambda n: setattr(n.block[1], "p", 0.1),
    "attribute of the root": lambda n: setattr(n, "temperature", 2.0),
    "deep attribute": lambda n: setattr(n.block[2], "name", "x"),
    "attribute deleted": lambda n: delattr(n, "unused"),
    "deep attribute deleted": lambda n: delattr(n.block[2], "in_features"),
    "method replaced": lambda n: setattr(n, "forward", n.method),
    "list of layers": lambda n: setattr(n, "picked", [n.last, n.block[0]]),
    "list of layers appended to": lambda n: n.layers.append(n.last),
    "empty list appended to": lambda n: n.unused.append(n.last),
    "list item replaced": lambda n: n.layers.__setitem__(0, n.last),
    "dict changed": lambda n: n.stages.update(b=n.last),
    "list in a dict appended to": lambda n: n.stages["a"].append(n.last),
    "deque appended to": lambda n: n.queue.append(n.last),
    "dict of layers": lambda n: setattr(n, "by_name", {"a": n.last, "b": [n.block]}),
    "dict by layer": lambda n: setattr(n, "names", {n.last: "a", n.block: "b"}),
    "ordered dict": lambda n: setattr(n, "by_name", OrderedDict(a=n.last)),
    "tuple": lambda n: setattr(n, "pair", (n.first, (n.last,))),
    "set": lambda n: setattr(n, "group", {n.first, n.last}),
    "frozenset": lambda n: setattr(n, "group", frozenset({n.first})),
    "defaultdict": lambda n: setattr(n, "by_name", defaultdict(list, a=n.last)),
    "deque": lambda n: setattr(n, "line", deque([n.first], maxlen=3)),
    "nested": lambda n: setattr(n, "line", [{"a": (deque([n.first]), 1)}]),
    "partial with others in a list": lambda n: setattr(
        n, "call", functools.partial(n.last, [n.first], 3, layer=n.last)
    ),
    "bound method": lambda n: setattr(n, "shortcut", n.block[0].forward),
    "its own bound method": lambda n: setattr(n, "shortcut", n.method),
    "partial": lambda n: setattr(n, "call", functools.partial(n.block[0], n.mask, bias=n.last.bias)),
    "weak reference": lambda n: setattr(n, "parent", weakref.ref(n)),
    "weak reference to a parent": lambda n: vars(n.block[2]).update(parent=weakref.ref(n)),
    "parameters": lambda n: setattr(n, "weights", [n.first.weight, n.last.bias]),
    "buffer": lambda n: setattr(n, "buffers_too", {"m": n.mask}),
    "layer outside the slots": lambda n: vars(n).update(hidden=n.last),
    "requires_grad": lambda n: n.first.requires_grad_(False),
}


@pytest.mark.parametrize("change", CARRIED.values(), ids=CARRIED)
@pytest.mark.parametrize("used", [False, True], ids=["before the first use", "later"])
def test_what_is_set_on_the_network_is_seen_by_every_replica(devices, first, change, used):
    network = on(first, Tree)
    replicas, before = ReplicaSet(network, devices(2)), observed(network)
    if used:
        found = replicas.refresh()
        assert [observed(r) for r in found] == [before] * 2
    change(network)
    after = [observed(r) for r in replicas.refresh()]
    assert after == [observed(network)] * 2 != [before] * 2
    assert "foreign" not in str(after)
    assert replicas.builds == 1
    assert not used or replicas.refresh() == found


def test_attributes_that_hold_tensors_follow_new_ones():
    """A buffer is another tensor at each use, parameters are others after a rebuild; lists that hold them keep up."""
    network = Tree()
    network.kept = {"mask": network.mask, "weight": network.first.weight}
    replicas = ReplicaSet(network, [CPU, CPU])
    for step in range(4):
        if step == 2:
            network.double()
            network.kept = {"mask": network.mask, "weight": network.first.weight}
        if step == 3:
            network.first.weight.requires_grad_(False)
        for replica in replicas.refresh():
            assert replica.kept["mask"] is replica.mask
            assert replica.kept["weight"] is replica.first.weight


REGISTRATIONS = {
    "forward": lambda m: m.register_forward_hook(hook),
    "forward with kwargs": lambda m: m.register_forward_hook(hook, with_kwargs=True),
    "forward pre": lambda m: m.register_forward_pre_hook(hook),
    "forward pre with kwargs": lambda m: m.register_forward_pre_hook(hook, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(hook),
    "backward pre": lambda m: m.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("register", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_hooks_added_and_removed(devices, first, register, deep):
    network = on(first, Tree)
    replicas = ReplicaSet(network, devices(2))

    def calls():
        found = replicas.refresh()
        for m in (m for r in found for m in r.modules()):
            vars(m).pop("calls", None)
        loss_of(found, torch.randn(2, 5, 3, requires_grad=True).unbind()).backward()
        return [[vars(m).get("calls", 0) for m in (r, r.block[2])] for r in found]

    assert calls() == [[0, 0], [0, 0]]
    handle = register(network.block[2] if deep else network)
    assert calls() == [[0, 1], [0, 1]] if deep else [[1, 0], [1, 0]]
    handle.remove()
    assert calls() == [[0, 0], [0, 0]]
    assert replicas.builds == 1


def test_a_hook_that_is_a_method_is_called_on_the_replica():
    class Counter(Tree):
        def __init__(self):
            super().__init__()
            self.block.register_forward_hook(self.count)

        def count(self, module, args, output):
            assert module is self.block
            self.ran = True

    network = Counter()
    for replica in replicate(network, [CPU, CPU]):
        assert not hasattr(replica, "ran")
        replica(torch.ones(1, 3))
        assert replica.ran
    assert not hasattr(network, "ran")


# --------------------------------------------------------------------------- a replica is a module


def test_replicas_can_be_copied_and_saved(devices, first):
    network = on(first, mlp)
    replica = replicate(network, devices(2))[1]
    x = torch.ones(1, 3, device=device_of(replica))
    twin = copy.deepcopy(replica)
    assert torch.equal(twin(x), replica(x))
    assert all(p.is_leaf and p.requires_grad for p in twin.parameters())
    twin(x).sum().backward()
    assert all(p.grad is None for p in network.parameters())
    file = io.BytesIO()
    torch.save(replica.state_dict(), file)
    file.seek(0)
    assert torch.load(file).keys() == network.state_dict().keys()


class Plain(nn.Sequential):
    """At module level, to be pickled."""


def test_copies_of_the_network_are_clean(devices, first):
    network = on(first, Plain, nn.Linear(3, 2)).to(first)
    shared = copy.copy(network)
    replicate(network, devices(2))
    lockstep.local.data_parallel(network, torch.ones(4, 3, device=first), devices(2))
    chunks = torch.randn(2, 5, 3).unbind()
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network)), copy.copy(network), shared):
        assert twin is not network
        assert twin.state_dict().keys() == network.state_dict().keys()
        replicas = replicate(twin, devices(2))
        assert not {id(m) for m in replicas} & {id(m) for m in replicate(network, devices(2))}
        network.zero_grad()
        twin.zero_grad()
        loss_of(replicas, chunks).backward()
        same(gradients(twin), reference(twin, chunks))
    assert len(pickle.dumps(network)) < len(pickle.dumps(on(first, Plain, nn.Linear(3, 2)))) + 500


# -------------------------------------------------------------------------------------- live graphs


class Interrupted:
    """A forward over two replicas whose backward is still to come, and the gradients it must give."""

    def __init__(self, network, devices, *, parallel=False):
        self.network, self.devices = network, devices
        self.chunks = torch.randn(2, 5, 3).unbind()
        self.expected = reference(network, self.chunks)
        if parallel:
            dp = DataParallel(network, devices)
            self.again = lambda: dp(torch.cat(self.chunks).to(devices[0])).square().sum()
        else:
            self.again = lambda: loss_of(replicate(network, devices), self.chunks)
        self.loss = self.again()

    def finish(self):
        self.network.zero_grad()
        self.loss.backward()
        same(gradients(self.network), self.expected)


def spare():
    """A norm that only counts, and a layer that is not used."""

    def forward(m, x):
        y = m.body(x)
        m.norm(y.detach())
        return y

    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
    return Applying(forward, body=body, norm=nn.BatchNorm1d(2, affine=False), spare=nn.Linear(3, 3))


@pytest.fixture(params=[False, True], ids=["replicate", "DataParallel"])
def interrupted(request, devices, first):
    return Interrupted(on(first, spare), devices(2), parallel=request.param)


def evaluate(i):
    i.network.eval()
    with torch.no_grad():
        i.again()
    i.network.train()


def update_another_parameter(i):
    with torch.no_grad():
        i.network.spare.weight.add_(1)
        i.network.spare.bias.zero_()
        i.again()
    i.again()


BEFORE_BACKWARD = {
    "a second forward": lambda i: i.again(),
    "an evaluation": evaluate,
    "a whole step of others": lambda i: i.again().backward(),
    "an update of other parameters": update_another_parameter,
    "a rebuild": lambda i: (setattr(i.network, "extra", nn.Identity()), i.again()),
    "freezing": lambda i: (i.network.spare.requires_grad_(False), i.again()),
}


@pytest.mark.parametrize("use", BEFORE_BACKWARD.values(), ids=BEFORE_BACKWARD)
def test_between_a_forward_and_its_backward(interrupted, use):
    use(interrupted)
    interrupted.finish()


@pytest.mark.parametrize("replica", [0, 1])
def test_an_update_of_the_same_parameter_is_an_error_in_every_replica(devices, first, replica):
    """Also in one that has a copy of the parameter: the refresh that writes there counts as the update."""
    network = on(first, mlp)
    chunk = torch.randn(5, 3)
    loss = loss_of([replicate(network, devices(2))[replica]], [chunk])
    with torch.no_grad():
        network[2].weight.add_(1)
    replicate(network, devices(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def averaging(how):
    """Its output needs the buffer in backward, and then the buffer is updated."""

    def forward(m, x):
        y = x * m.weight * (m.average.clone() if how == "in place, as in batch norm" else m.average)
        mean = x.detach().mean(0)
        if how == "by a new tensor":
            m.average = 0.5 * m.average + 0.5 * mean
            return y
        if how == "in place, in a new tensor":
            m.average = m.average.clone()
        m.average.mul_(0.5).add_(mean, alpha=0.5)
        return y

    return Applying(forward, weight=nn.Parameter(torch.ones(3)), average=torch.ones(3))


@pytest.mark.parametrize("how", ["by a new tensor", "in place, in a new tensor", "in place, as in batch norm"])
def test_buffers_saved_for_backward_are_never_written(devices, first, how):
    """Two forwards, one backward: each replica's gradient is that of its own rows with the buffer it saw."""
    network = on(first, averaging, how)
    parallel = DataParallel(network, devices(2))
    batches = torch.randn(2, 4, 3)
    average, expected = torch.ones(3), torch.zeros(3)
    for batch in batches:
        expected += (batch * average).sum(0)  # the buffer at the start of a forward is the same on all replicas
        average = 0.5 * average + 0.5 * batch[:2].mean(0)  # the network is replica 0, which saw the first rows
    sum(parallel(batch.to(first)).sum() for batch in batches).backward()
    torch.testing.assert_close(network.weight.grad.cpu(), expected)
    torch.testing.assert_close(network.average.cpu(), average)


def test_a_buffer_that_replicas_saved_survives_the_next_use(devices, first):
    network = on(first, averaging, "by a new tensor")
    _, two = replicate(network, devices(2))
    x = torch.randn(4, 3)
    loss = (x.to(device_of(two)) * two.weight * two.average).sum()
    with torch.no_grad():
        network.average.mul_(10)  # in place, on the network
    replicate(network, devices(2))
    assert torch.equal(two.average.cpu(), torch.full((3,), 10.0))
    loss.backward()
    torch.testing.assert_close(network.weight.grad.cpu(), x.sum(0))


# --------------------------------------------------------------------------------- inside DataParallel


def counts(m, x):
    m.forwards += 1
    m.rows, m.last_input, m.instances = len(x), x.detach(), [m]
    if x.sum() < 0:
        raise ValueError("negative")
    return m.linear(x)


def counting():
    return Applying(counts, forwards=0, instances=[])


def test_state_of_every_replica_persists(devices, first):
    """And replica 0's, which is the network's, does not overwrite it; what the user sets does. Also after an error."""
    network = on(first, counting)
    parallel, x = DataParallel(network, devices(3)), torch.ones(5, 3, device=first)
    for step in range(1, 4):
        parallel(x)
        replicas = parallel.replicate(network, devices(3))
        assert replicas[0] is network
        assert [(r.forwards, r.rows) for r in replicas] == [(step, 2), (step, 2), (step, 1)]
        assert [r.last_input.device for r in replicas] == devices(3)
        assert all(r.instances == [r] for r in replicas)
    with pytest.raises(ValueError, match="negative"):
        parallel(-torch.ones(4, 3, device=first))
    assert [(r.forwards, r.rows) for r in parallel.replicate(network, devices(3))] == [(4, 2), (4, 1), (4, 1)]
    network.forwards = 100
    parallel(x)
    assert [r.forwards for r in parallel.replicate(network, devices(3))] == [101] * 3


@pytest.mark.parametrize("setting", [False, True], ids=["", "forward sets an attribute"])
def test_a_hook_that_removes_itself_is_gone_from_every_replica(devices, first, setting):
    network = on(first, mlp)
    parallel = DataParallel(network, devices(2))
    x = torch.ones(4, 3, device=first)
    if setting:
        network[1].register_forward_hook(lambda module, args, output: setattr(module, "last", object()))
    parallel(x)
    calls = []

    def once(module, args, output):
        calls.append(module)
        handle.remove()

    handle = network[0].register_forward_hook(once)
    parallel(x)
    assert calls
    calls.clear()
    parallel(x)
    assert calls == []


# ------------------------------------------------------------------------------------------ backward


def test_backward_reduces_buckets_as_gradients_become_ready():
    """A layer's gradients are summed before the backward of the layer two before it, whenever there is one."""
    count = 6
    network = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))
    replicas = ReplicaSet(network, [CPU] * 3, cap_bytes=1)
    events = []
    for i, layer in enumerate(network):
        layer.weight.register_hook(lambda _, i=i: events.append(("sum", i)))
    for _ in range(3):
        events.clear()
        total = 0
        for replica in replicas.refresh():
            x = torch.randn(2, 3)
            for i, layer in enumerate(replica):
                x = layer(x)
                x.register_hook(lambda _, i=i: events.append(("backward", i)))
            total = total + x.sum()
        total.backward()
        assert sorted(i for what, i in events if what == "sum") == list(range(count))
        for i in range(2, count):
            last_of_early_layer = max(n for n, event in enumerate(events) if event == ("backward", i - 2))
            assert events.index(("sum", i)) < last_of_early_layer


def test_buckets_hold_what_the_cap_allows():
    network = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))

    def nodes(cap_bytes):
        replica = ReplicaSet(network, [CPU], cap_bytes=cap_bytes).refresh()[0]
        return [layer.weight.grad_fn for layer in replica]

    assert len(set(nodes(1 << 20))) == 1
    assert len(set(nodes(1))) == 6
    three = nodes(2 * 4 * 4 * 4)
    assert len(set(three)) == 3
    assert three[4] is three[5] is not three[3]  # late layers first


@pytest.mark.parametrize("network_first", [False, True])
def test_sums_are_taken_in_the_order_of_the_replicas(devices, first, network_first):
    """With the network first: its own, and then the sum of the others."""
    network = on(first, mlp)
    chunks = [torch.randn(5, 3) * s for s in (1e4, 1.0, 1e-4, 1e2)]
    apart = []
    for device, chunk in zip(devices(4), chunks, strict=True):
        twin = on(device, mlp)
        twin.load_state_dict(network.state_dict())
        loss_of(twin, [chunk]).backward()
        apart.append([p.grad.to(first) for p in twin.parameters()])
    expected = [a + ((b + c) + d) if network_first else ((a + b) + c) + d for a, b, c, d in zip(*apart, strict=True)]
    replicas = ReplicaSet(network, devices(4), network_first=network_first, cap_bytes=64)
    for _ in range(5):
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(network.parameters(), expected, strict=True))


def test_hooks_on_parameters_see_the_sum_once(devices, first):
    network = on(first, mlp)
    chunks = torch.randn(2, 5, 3).unbind()
    expected = reference(network, chunks)
    seen = []
    network[0].weight.register_hook(lambda g: seen.append(g) or g * 2)
    network[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    loss_of(replicate(network, devices(2)), chunks).backward()
    assert len(seen) == 2
    same({"0.weight": network[0].weight.grad}, {"0.weight": 2 * expected["0.weight"]})


# ------------------------------------------------------------------------------ modes of the caller


def test_a_network_made_in_inference_mode(devices, first):
    with torch.inference_mode():
        network = on(first, mlp)
        x = torch.randn(4, 3)
        for _ in range(2):
            (expected,) = evaluated([network], x)
            assert all(torch.allclose(y, expected) for y in evaluated(replicate(network, devices(2)), x))
            network[0].weight.add_(1)


# ------------------------------------------------------------------------------------ torch.compile


@compiling
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.around)])
@pytest.mark.parametrize("where", ["the network", "its blocks", "in place", "blocks in place"])
def test_compiled_modules_use_the_parameters_of_their_replica(backend, where):
    plain = mlp()
    network = copy.deepcopy(plain)
    if where == "the network":
        network = torch.compile(network, backend=backend)
    elif where == "its blocks":
        network[0], network[2] = (torch.compile(network[i], backend=backend) for i in (0, 2))
    elif where == "in place":
        network.compile(backend=backend)
    else:
        network[0].compile(backend=backend)
        network[2].compile(backend=backend)
    chunks = torch.randn(2, 5, 3).unbind()
    replicas = replicate(network, [CPU, CPU])
    for replica in replicas:
        assert not {id(p) for p in replica.parameters()} & {id(p) for p in network.parameters()}
    expected = list(reference(plain, chunks).values())
    for times in (1, 2):
        loss_of(replicate(network, [CPU, CPU]), chunks).backward()
        for p, e in zip(network.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, times * e)
    (apart,) = torch.autograd.grad(loss_of([replicas[1]], chunks[:1]), [next(replicas[1].parameters())])
    assert apart.abs().sum() > 0  # the replica's own parameter is what was used
    assert replicate(network, [CPU, CPU]) == replicas


def noting(graphs):
    """A compiler that only keeps the graphs."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend


@compiling
@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="no such option in this PyTorch"
)
@pytest.mark.around
@pytest.mark.parametrize("where", ["the network", "in place"])
def test_many_compiled_replicas_stay_below_the_recompile_limit(where):
    """Each counts its own compilations: of eight, for different sizes in two modes, none runs uncompiled."""
    graphs = []
    network = Applying(lambda m, x: m.linear(x) if m.training else 2 * m.linear(x))
    plain = copy.deepcopy(network)
    if where == "the network":
        network = torch.compile(network, backend=noting(graphs), dynamic=False)
    else:
        network.compile(backend=noting(graphs), dynamic=False)
    parallel = DataParallel(network, [CPU] * 8, split=range(1, 9))
    x = torch.randn(36, 3)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for mode in (True, False):
            torch.testing.assert_close(parallel.train(mode)(x), plain.train(mode)(x))
    assert len(graphs) == 16 > torch._dynamo.config.recompile_limit


@compiling
def test_compiling_the_network_after_its_first_use():
    network, graphs = Applying(lambda m, x: 2 * m.linear(x)), []
    plain = copy.deepcopy(network)
    replicate(network, [CPU, CPU])
    network.compile(backend=noting(graphs))
    chunks = torch.randn(2, 5, 3).unbind()
    loss_of(replicate(network, [CPU, CPU]), chunks).backward()
    assert graphs
    same(gradients(network), reference(plain, chunks))


# ------------------------------------------------------------------------------------------- threads


def test_one_network_in_several_threads(devices, first):
    """Built once, whoever comes first; every evaluation is right, and gradients of all add up."""
    network = on(first, mlp)
    parallel = DataParallel(network, devices(2))
    batches = torch.randn(8, 4, 3)
    expected = reference(network, batches.unbind())
    outputs = [network(b.to(first)) for b in batches]

    def evaluate(batch):
        with torch.no_grad():
            return parallel(batch.to(first))

    def train(batch):
        parallel(batch.to(first)).square().sum().backward()

    with ThreadPoolExecutor(4) as pool:
        for got, output in zip(pool.map(evaluate, batches), outputs, strict=True):
            torch.testing.assert_close(got, output)
        list(pool.map(train, batches))
    same(gradients(network), expected)
    assert parallel.statistics().calls["build"] == 1


@pytest.mark.around
def test_a_network_that_has_replicas_loads_where_there_is_no_lockstep(tmp_path):
    network = nn.Linear(2, 1)
    replicate(network, [CPU, CPU])
    torch.save(network, tmp_path / "network.pt")
    program = (
        "import sys; sys.modules['lockstep'] = None; import torch; "
        f"network = torch.load({str(tmp_path / 'network.pt')!r}, weights_only=False); "
        "print(network(torch.ones(1, 2)).item())"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(loaded.stdout) == pytest.approx(network(torch.ones(1, 2)).item())


@pytest.mark.parametrize("how", ["load_state_dict", "double"])
def test_parameters_that_were_swapped_in_place_get_their_gradients(how, devices, first):
    network = nn.Linear(3, 2).to(first)
    parallel, x, weight = DataParallel(network, devices(2)), torch.randn(4, 3, device=first), network.weight
    parallel(x).sum().backward()
    parallel.step(lambda output: output.mean(), x)
    with sim.keeping_parameters():
        if how == "double":
            network.double()
        else:  # the swapped parameter is at the same address
            network.load_state_dict({name: value + 1 for name, value in network.state_dict().items()})
    assert network.weight is weight
    x, expected = x.to(weight.dtype), copy.deepcopy(network)
    expected.zero_grad()
    expected(x).mean().backward()
    for use in (lambda: parallel(x).mean().backward(), lambda: parallel.step(lambda output: output.mean(), x)):
        network.zero_grad()
        use()
        same_gradients(network, expected, 1.3e-6, 1e-5)
