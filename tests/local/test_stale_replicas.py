"""Whatever is done to a network between two uses, the next one has it: in evaluation without gradients, too."""

import itertools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from lockstep import DataParallel

scripting = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
CPUS = ["cpu", "cpu"]


def evaluate(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


def normed(*features: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b)) for a, b in itertools.pairwise(features)))


def unnoticed(network, first, devices, change, rows=6, features=4):
    """Evaluate three times, change the network, and compare with the network itself."""
    network = network.to(first).eval()
    parallel = DataParallel(network, devices)
    x = torch.randn(rows, features).to(first)
    for _ in range(3):
        evaluate(parallel, x)
    change(network)
    torch.testing.assert_close(evaluate(parallel, x).cpu(), evaluate(network, x).cpu())
    return parallel


# ----------------------------------------------------------------------- buffers and parameters

UNVERSIONED = {
    "a buffer through data": lambda n: n[0][1].running_mean.data.fill_(5),
    "a parameter through data": lambda n: n[0][0].weight.data.mul_(0.5),
    "one element": lambda n: n[0][0].weight.data[1, 2].add_(0.25),
    "the same values in another order": lambda n: n[0][0].weight.data.copy_(n[0][0].weight.data.flip(0)),
    "all parameters": lambda n: [p.data.mul_(0.9) for p in n.parameters()],
    "transposed": lambda n: setattr(n[0][0].weight, "data", n[0][0].weight.data.t()),
    "a buffer that is transposed": lambda n: setattr(n.table, "data", n.table.data.t()),
}


class Tabled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*normed(4, 4))
        self.register_buffer("table", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.table


@pytest.mark.parametrize("change", UNVERSIONED.values(), ids=UNVERSIONED)
def test_writes_that_no_version_counter_knows(devices, first, change):
    unnoticed(Tabled(), first, devices(3), change)


def test_a_write_through_numpy():
    unnoticed(Tabled(), torch.device("cpu"), CPUS, lambda n: n[0][1].running_mean.numpy().fill(5))


def test_fewer_rows_of_the_same_data(devices, first):
    def prune(network: nn.Module) -> None:
        network[0].weight.data = network[0].weight.data[:2]
        network[0].bias.data = network[0].bias.data[:2]
        network[1].weight.data = network[1].weight.data[:, :2]

    unnoticed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), first, devices(2), prune)


def test_other_rows_and_columns_with_the_same_strides_and_number(devices, first):
    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))
            self.whole = torch.arange(16.0).reshape(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] * self.weight.sum(0)[:2]

    network = Slim()
    network.weight.data = network.whole[:2, :3]
    network.to(first)
    whole = network.weight.data.new_tensor(network.whole.tolist())
    network.weight.data = whole[:2, :3]
    unnoticed(network, first, devices(2), lambda n: setattr(n.weight, "data", whole[:3, :2]))


def test_weights_exchanged_between_two_evaluations(sim):
    """As a moving average is put in and taken out."""
    network = normed(4, 3).to("sim:0").eval()
    average = [p.detach() * 0.5 for p in network.parameters()]
    parallel = DataParallel(network, sim.devices(2))
    x = torch.randn(4, 4, device="sim:0")
    parallel(x).sum().backward()
    for _ in range(3):
        evaluate(parallel, x)
        stored = [p.data.clone() for p in network.parameters()]
        for parameter, value in zip(network.parameters(), average, strict=True):
            parameter.data.copy_(value)
        torch.testing.assert_close(evaluate(parallel, x).cpu(), evaluate(network, x).cpu())
        for parameter, value in zip(network.parameters(), stored, strict=True):
            parameter.data.copy_(value)
        torch.testing.assert_close(evaluate(parallel, x).cpu(), evaluate(network, x).cpu())


# ------------------------------------------------------------------------------------- structure


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleDict({"a": nn.Tanh()})
        self.other = nn.ModuleDict({"c": nn.Sigmoid(), "d": nn.ReLU()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.one.values():
            x = module(x)
        for module in self.other.values():
            x = 2 * module(x)
        return x


def move_module(network: nn.Module) -> None:
    network.one["c"] = network.other.pop("c")


@pytest.mark.parametrize("grad", [False, True], ids=["evaluation", "training"])
def test_slots_moved_between_containers(devices, first, grad):
    network = Chain().to(first)
    parallel = DataParallel(network, devices(2))
    x = torch.randn(4, 4).to(first)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            parallel(x)
        move_module(network)
        torch.testing.assert_close(parallel(x).cpu(), network(x).cpu())


# ------------------------------------------------------------------------------------ attributes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.k


class Negated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def increment(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output + 1


OUT_OF_THE_WAY = {
    "class": lambda n: setattr(n.linear, "__class__", Negated),
    "dictionary": lambda n: setattr(n, "__dict__", {**vars(n), "k": 3.0}),
    "renamed": lambda n: vars(n).update(k=vars(n).pop("unused")),
    "hook in the dictionary": lambda n: n.linear._forward_hooks.update({12345: double}),
    "another dictionary of hooks": lambda n: setattr(n, "_forward_hooks", OrderedDict({1: double})),
    "hooks reordered": lambda n: n._forward_hooks.move_to_end(next(iter(n._forward_hooks))),
}


@pytest.mark.parametrize("change", OUT_OF_THE_WAY.values(), ids=OUT_OF_THE_WAY)
def test_attributes_and_hooks_changed_out_of_the_way(devices, first, change):
    network = Scaled()
    network.unused = 7.0
    network.register_forward_hook(double)
    network.register_forward_hook(increment)
    unnoticed(network, first, devices(2), change)


@scripting
def test_attributes_of_scripted_modules(devices, first):
    unnoticed(torch.jit.script(Scaled()), first, devices(2), lambda n: setattr(n, "k", 3.0))


class Nested(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.nested = [self.one]
        for _ in range(depth):
            self.nested = [self.nested]
        self.depth = depth

    def inner(self) -> list:
        found = self.nested
        for _ in range(self.depth):
            found = found[0]
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner():
            x = layer(x)
        return x


@pytest.mark.parametrize("depth", [1, 10, 40])
def test_lists_nested_deeply(devices, first, depth):
    unnoticed(Nested(depth), first, devices(2), lambda n: n.inner().append(n.two))
    unnoticed(Nested(depth), first, devices(2), lambda n: n.inner().__setitem__(0, n.two))


def test_plain_lists_may_be_nested_without_end():
    network = nn.Linear(2, 2)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    network.deep = deep
    assert DataParallel(network, CPUS)(torch.ones(2, 2)).shape == (2, 2)


class Strict:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value == other.value

    __hash__ = None


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor: object = True
        self.strict: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * (1 if self.strict is None else self.strict.value)


def test_equal_values_of_other_types_and_objects_that_cannot_be_compared(devices, first):
    network = Typed().to(first)
    parallel = DataParallel(network, devices(2))
    x = torch.arange(4, device=first)
    assert parallel(x).dtype == torch.int64
    network.factor = 1.0
    assert parallel(x).dtype == torch.float32
    for value in (None, Strict(2), Strict(3), None):
        network.strict = value
        assert torch.equal(parallel(x).cpu(), network(x).cpu())


def test_a_tensor_that_forward_stores_is_not_read(sim):
    class Auxiliary(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            self.auxiliary = output.mean()
            return output

    parallel = DataParallel(Auxiliary(4, 4).to("sim:0"), sim.devices(2))
    x = torch.randn(4, 4, device="sim:0")
    for _ in range(3):
        parallel(x)
    sim.reset_copies()
    parallel(x)
    assert not any(target == "cpu" for _, target in sim.copies())


# ------------------------------------------------------------------------------- plain containers


@pytest.mark.parametrize("size", [10, 5000], ids=["few", "many"])
@pytest.mark.parametrize("change", ["add", "first", "middle", "last"])
def test_a_layer_put_into_a_plain_list(devices, first, size, change):
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.things: list = list(range(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for thing in (self.things[0], self.things[3], self.things[-1]):
                x = thing(x) if isinstance(thing, nn.Module) else x
            return x

    changes = {
        "add": lambda n: n.things.append(n.linear),
        "first": lambda n: n.things.__setitem__(0, n.linear),
        "middle": lambda n: n.things.__setitem__(3, n.linear),
        "last": lambda n: n.things.__setitem__(-1, n.linear),
    }
    parallel = unnoticed(Listed(), first, devices(2), changes[change])
    replica = parallel._replicas.refresh()[1]
    assert replica.linear in (replica.things[0], replica.things[3], replica.things[-1])


# ----------------------------------------------------------------------- what replicas do to themselves


class Counter(nn.Module):
    """Counts in a buffer, and notes in a flag, whether there was a negative number, in the rows of this replica."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.seen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.seen
        if x[0, 0] < 0:
            self.count += 1
            self.seen = True
        return x * 0 + self.count + 100 * before


@pytest.mark.parametrize("grad", [False, True], ids=["evaluation", "training"])
def test_state_that_only_the_last_replica_writes_starts_from_the_networks(devices, first, grad):
    network = Counter().to(first).train(grad)
    parallel = DataParallel(network, devices(2))
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            network.seen = False
            assert parallel(torch.tensor([[1.0], [-1.0]], device=first)).flatten().tolist() == [0, 1]


def test_state_that_every_replica_writes_stays_with_each(devices, first):
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.largest = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest = max(self.largest, float(x.max()))
            return x * 0 + self.largest

    network = Largest().to(first)
    parallel = DataParallel(network, devices(2))

    def outputs(*numbers: float) -> list[float]:
        return parallel(torch.tensor(numbers, device=first).unsqueeze(1)).flatten().tolist()

    assert outputs(1, 2) == [1, 2]
    assert outputs(0, 5) == [1, 5]
    assert outputs(0, 0) == [1, 5]
    network.largest = 0.5
    assert outputs(0, 0) == [0.5, 0.5]
