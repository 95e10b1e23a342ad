"""Whatever is done to a network between two uses, the next one has it: in evaluation without gradients, too."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from lockstep import DataParallel
from lockstep.local import ReplicaSet
from programs.networks import Applying, scripted
from programs.one_device import gradients, loss_of, on, reference, same

CPUS = ["cpu", "cpu"]


def blocks():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    network.append(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    network.register_buffer("count", torch.ones(1))
    return network


def tabled():
    forward = lambda m, x: m.norm(m.linear(x)) @ m.table  # noqa: E731
    return Applying(forward, (3, 3), norm=nn.BatchNorm1d(3), table=torch.arange(9.0).view(3, 3))


def slim():
    """A weight that is a part of a larger tensor."""
    whole = torch.arange(16.0).view(4, 4)
    weight = nn.Parameter(torch.empty(0))
    weight.data = whole[:2, :3]
    return Applying(lambda m, x: x[:, :1] * m.weight.sum(0)[:2], weight=weight, whole=[whole])


def double(module, args, output):
    return 2 * output


def scaled():
    network = Applying(lambda m, x: m.linear(x) * m.k, k=1.0, unused=7.0)
    network.register_forward_hook(double)
    network.register_forward_hook(lambda module, args, output: output + 1)
    return network


def chain():
    def forward(m, x):
        for each in (m.linear, *m.one.values(), *m.other.values()):
            x = 2 * each(x) if each in m.other.values() else each(x)
        return x

    return Applying(
        forward, one=nn.ModuleDict({"a": nn.Tanh()}), other=nn.ModuleDict({"c": nn.Sigmoid(), "d": nn.ReLU()})
    )


def inner(network):
    found = network.nested
    for _ in range(network.depth):
        found = found[0]
    return found


def nested(depth):
    def forward(m, x):
        for layer in inner(m):
            x = layer(x)
        return x

    network = Applying(forward, (3, 3), two=nn.Linear(3, 3), depth=depth)
    network.nested = [network.linear]
    for _ in range(depth):
        network.nested = [network.nested]
    return network


def listed(size):
    def forward(m, x):
        for thing in (m.things[0], m.things[3], m.things[-1]):
            x = thing(x) if isinstance(thing, nn.Module) else m.first(x)
        return x

    return Applying(forward, (3, 3), first=nn.Linear(3, 3), things=list(range(size)))


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def set_data(make, *names):
    """A change: each of the parameters has other data."""

    def change(network):
        for parameter in map(network.get_parameter, names):
            parameter.data = make(parameter.data)

    return change


def flatten(n):
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(n.parameters()).detach(), n.parameters())


REBUILDS = {
    "swap a submodule": lambda n: n.__setitem__(0, nn.Linear(3, 4)),
    "swap a submodule's child": lambda n: n[3].__setitem__(0, nn.Linear(2, 2)),
    "add a submodule": lambda n: n.append(nn.Tanh()),
    "add a nested submodule": lambda n: n[3].append(nn.Tanh()),
    "remove a submodule": lambda n: n.__delitem__(3),
    "swap a parameter": lambda n: setattr(n[0], "bias", nn.Parameter(torch.ones(4))),
    "add a parameter": lambda n: n[3].register_parameter("extra", nn.Parameter(torch.ones(2))),
    "remove a parameter": lambda n: setattr(n[0], "bias", None),
    "add a buffer": lambda n: n[3].register_buffer("extra", torch.ones(2)),
    "remove a buffer": lambda n: delattr(n, "count"),
    "buffer to None": lambda n: setattr(n, "count", None),
    "dtype": lambda n: n.double(),
    "tie two parameters": lambda n: setattr(n[3][1], "weight", n[3][0].weight),
}
ELSEWHERE = {
    "other data": set_data(lambda d: d * 2, "0.weight"),
    "the same data in another layout": set_data(lambda d: d.view(4, 2).t(), "2.weight"),
    "a square matrix transposed": set_data(torch.Tensor.t, "3.1.weight"),
    "fewer rows of the same data": set_data(lambda d: d[:1], "3.1.weight", "3.1.bias"),
    "another shape": set_data(lambda d: d.repeat(2, *[1] * (d.dim() - 1)), "3.1.weight", "3.1.bias"),
    "one long tensor": flatten,
}
TABLED = {
    "a buffer through data": lambda n: n.norm.running_mean.data.fill_(5),
    "a parameter through data": lambda n: n.linear.weight.data.mul_(0.5),
    "one element": lambda n: n.linear.weight.data[1, 2].add_(0.25),
    "the same values in another order": lambda n: n.linear.weight.data.copy_(n.linear.weight.data.flip(0)),
    "all parameters": lambda n: [p.data.mul_(0.9) for p in n.parameters()],
    "transposed": set_data(torch.Tensor.t, "linear.weight"),
    "a buffer that is transposed": lambda n: setattr(n.table, "data", n.table.data.t()),
    "a parameter in place": lambda n: n.linear.weight.mul_(2),
    "a buffer in place": lambda n: n.norm.running_mean.add_(1),
    "another buffer": lambda n: setattr(n.norm, "running_var", torch.full((3,), 4.0)),
    "a state": lambda n: n.load_state_dict({name: t + 1 for name, t in n.state_dict().items()}),
}
SCALED = {
    "class": lambda n: setattr(n.linear, "__class__", Negated),
    "dictionary": lambda n: setattr(n, "__dict__", {**vars(n), "k": 3.0}),
    "renamed": lambda n: vars(n).update(k=vars(n).pop("unused")),
    "hook in the dictionary": lambda n: n.linear._forward_hooks.update({12345: double}),
    "another dictionary of hooks": lambda n: setattr(n, "_forward_hooks", OrderedDict({1: double})),
    "hooks reordered": lambda n: n._forward_hooks.move_to_end(next(iter(n._forward_hooks))),
}
INTO_A_LIST = {
    "append": lambda found, layer: found.append(layer),
    "first": lambda found, layer: found.__setitem__(0, layer),
    "middle": lambda found, layer: found.__setitem__(3, layer),
    "last": lambda found, layer: found.__setitem__(-1, layer),
}
CHANGES = {
    **{name: (blocks, change, 2) for name, change in REBUILDS.items()},
    **{f"data: {name}": (blocks, change, None) for name, change in ELSEWHERE.items()},
    **{f"values: {name}": (tabled, change, None) for name, change in TABLED.items()},
    **{f"out of the way: {name}": (scaled, change, None) for name, change in SCALED.items()},
    "data: other rows and columns, as many and with the same strides": (
        slim,
        lambda n: setattr(n.weight, "data", n.whole[0][:3, :2]),
        None,
    ),
    "a module to another container": (chain, lambda n: n.one.update({"c": n.other.pop("c")}), None),
    **{
        f"a list nested {depth} deep: {how}": (
            partial(nested, depth),
            lambda n, how=how: INTO_A_LIST[how](inner(n), n.two),
            None,
        )
        for depth in (1, 10, 40)
        for how in ("append", "first")
    },
    **{
        f"a list of {size}: {how}": (
            partial(listed, size),
            lambda n, how=how: INTO_A_LIST[how](n.things, n.linear),
            None,
        )
        for size in (10, 5000)
        for how in INTO_A_LIST
    },
}


@pytest.mark.parametrize(("make", "change", "builds"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("network_first", [False, True])
def test_the_next_use_has_it(devices, first, make, change, builds, grad, network_first):
    network = on(first, make).eval()
    replicas = ReplicaSet(network, devices(3), network_first=network_first)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            replicas.refresh()
        assert replicas.builds == 1
        with first, torch.no_grad():
            change(network)
        found = replicas.refresh()
        assert replicas.refresh() == found
    assert builds in (None, replicas.builds)
    dtype, own = next(network.parameters()).dtype, {id(m) for m in network.modules()}
    x = torch.randn(4, 3, dtype=dtype)
    for device, replica in zip(devices(3), found, strict=True):
        assert [type(m) for m in replica.modules()] == [type(m) for m in network.modules()]
        assert replica.state_dict().keys() == network.state_dict().keys()
        for key, value in network.state_dict().items():
            assert torch.equal(replica.state_dict()[key].cpu(), value.cpu())
            assert replica.state_dict()[key].dtype == value.dtype
        if replica is not network:
            lists = [value for value in vars(replica).values() if isinstance(value, list)]
            assert not any(id(thing) in own for things in lists for thing in things)
        with torch.no_grad():
            same([replica(x.to(device))], [network(x.to(first))])
    chunks = torch.randn(3, 5, 3, dtype=dtype).unbind()
    for _ in range(2):
        network.zero_grad()
        loss_of(replicas.refresh(), chunks).backward()
        same(gradients(network), reference(network, chunks))
        torch.optim.SGD(network.parameters(), 0.1).step()


def unnoticed(network, devices, change):
    """Evaluate three times, change the network, and compare with the network itself."""
    parallel, x = DataParallel(network.eval(), devices), torch.randn(6, 3).to(devices[0])
    with torch.no_grad():
        for _ in range(3):
            parallel(x)
        change(network)
        same([parallel(x)], [network(x)])


def test_a_write_through_numpy():
    unnoticed(tabled(), CPUS, lambda n: n.norm.running_mean.numpy().fill(5))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_attributes_of_scripted_modules(devices, first):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.linear = 1.0, nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x) * self.k

    unnoticed(torch.jit.script(Scaled()).to(first), devices(2), lambda n: setattr(n, "k", 3.0))
    unnoticed(scripted(nn.Linear(3, 2)).to(first), devices(2), lambda n: n[0].weight.data.mul_(3))


def test_plain_lists_may_be_nested_without_end():
    network = nn.Linear(2, 2)
    network.deep = []
    for _ in range(5000):
        network.deep = [network.deep]
    assert DataParallel(network, CPUS)(torch.ones(2, 2)).shape == (2, 2)


class Strict:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def test_equal_values_of_other_types_and_objects_that_cannot_be_compared(devices, first):
    forward = lambda m, x: x * m.factor * (1 if m.strict is None else m.strict.value)  # noqa: E731
    network = Applying(forward, factor=True, strict=None).to(first)
    parallel, x = DataParallel(network, devices(2)), torch.arange(4, device=first)
    for network.factor in (True, 1, 1.0):
        assert parallel(x).dtype == (torch.float32 if isinstance(network.factor, float) else torch.int64)
        assert all(type(r.factor) is type(network.factor) for r in parallel._replicas.refresh())
    for network.strict in (None, Strict(2), Strict(3), None):
        assert torch.equal(parallel(x).cpu(), network(x).cpu())


def test_a_tensor_that_forward_stores_is_not_read(sim):
    def forward(m, x):
        output = m.linear(x)
        m.auxiliary = output.mean()
        return output

    parallel, x = DataParallel(Applying(forward).to("sim:0"), sim.devices(2)), torch.randn(4, 3, device="sim:0")
    for _ in range(3):
        parallel(x)
    sim.reset_copies()
    parallel(x)
    assert not any(target == "cpu" for _, target in sim.copies())


# ----------------------------------------------------------------------- what replicas do to themselves


@pytest.mark.parametrize("grad", [False, True], ids=["evaluation", "training"])
def test_state_that_only_the_last_replica_writes_starts_from_the_networks(devices, first, grad):
    def forward(m, x):
        """Counts in a buffer, and notes in a flag, whether there was a negative number in the rows of this replica."""
        before = m.seen
        if x[0, 0] < 0:
            m.count += 1
            m.seen = True
        return x * 0 + m.count + 100 * before

    network = Applying(forward, count=torch.zeros(1), seen=False).to(first).train(grad)
    parallel = DataParallel(network, devices(2))
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            network.seen = False
            assert parallel(torch.tensor([[1.0], [-1.0]], device=first)).flatten().tolist() == [0, 1]
