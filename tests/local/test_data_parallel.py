"""DataParallel as an object: its phases, attributes, state, copies, and what it tells of its work."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lockstep import DataParallel
from lockstep.errors import DeviceError, NotReplicableError
from lockstep.local import Event, ReplicaSet, data_parallel, shared
from processes import output_of
from programs.networks import Applying
from programs.one_device import gradients, same, same_gradients

CPU = torch.device("cpu")


class Net(nn.Module):
    scale = 3

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x):
        return self.body(x) + self.offset

    def double(self):  # hides nn.Module's, as attributes of the wrapped module do not
        return "the module's own"

    def describe(self):
        return f"a net of width {self.body.in_features}"


@pytest.fixture
def parallel(devices, first):
    return DataParallel(Net().to(first), devices(2))


@pytest.fixture
def x(first):
    return torch.randn(5, 4).to(first)


def mean_square(output, target=0.0):
    return (output - target).square().mean()


# ----------------------------------------------------------------------------------------- phases


def phase_of(kind, phase, calls):
    def override(self, *args):
        calls.append(args)
        return getattr(DataParallel, phase)(self, *args)

    return type(kind.__name__, (kind,), {phase: override})


def test_a_subclass_overrides_each_phase(devices, first, x):
    kind, calls = DataParallel, {name: [] for name in ("scatter", "replicate", "parallel_apply", "gather")}
    for name, found in calls.items():
        kind = phase_of(kind, name, found)
    parallel = kind(Net().to(first), devices(2))
    torch.testing.assert_close(parallel(x), parallel.module(x))
    ids = parallel.device_ids
    assert calls["scatter"] == [((x,), {}, ids)]
    assert calls["replicate"] == [(parallel.module, ids)]
    ((replicas, inputs, kwargs),) = calls["parallel_apply"]
    assert replicas[0] is parallel.module
    assert [len(share) for (share,) in inputs] == [3, 2]
    assert list(kwargs) == [{}, {}]
    ((outputs, target),) = calls["gather"]
    assert [len(output) for output in outputs] == [3, 2]
    assert target == parallel.output_device


def test_what_a_phase_returns_is_used(devices, first, x):
    class Halved(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return super().scatter(tuple(t[:2] for t in inputs), kwargs, device_ids)

        def replicate(self, module, device_ids):
            return [lambda x, replica=replica: replica(x) * 2 for replica in super().replicate(module, device_ids)]

        def parallel_apply(self, replicas, inputs, kwargs):
            return [output + 1 for output in super().parallel_apply(replicas, inputs, kwargs)]

        def gather(self, outputs, output_device):
            return super().gather(outputs[::-1], output_device)

    parallel = Halved(Net().to(first), devices(2))
    torch.testing.assert_close(parallel(x), parallel.module(x[:2]).flip(0) * 2 + 1)


def test_phases_can_be_called_one_by_one(parallel, x):
    """The way PyTorch's tutorial for data parallelism without the class does."""
    shares, kwargs = parallel.scatter((x,), {}, parallel.device_ids)
    replicas = parallel.replicate(parallel.module, parallel.device_ids[: len(shares)])
    outputs = parallel.parallel_apply(replicas, shares, kwargs)
    torch.testing.assert_close(parallel.gather(outputs, parallel.output_device), parallel.module(x))


# ------------------------------------------------------------------------------------- attributes


ATTRIBUTES = {
    "as they are": (("sim:1", ["sim:1", 0, torch.device("sim:1")], "sim:2", 1), ([1, 0, 1], 2, 1, "sim:1")),
    "none": (("cpu",), (list(range(8)), 0, 0, "sim:0")),
    "the CPU": (("cpu", ["cpu", "cpu"]), ([CPU] * 2, CPU, 0, "cpu")),
}


@pytest.mark.parametrize(("given", "expected"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes(sim, given, expected):
    place, *arguments = given
    net = Net().to(place)
    parallel = DataParallel(net, *arguments)
    assert parallel.module is net
    assert (parallel.device_ids, parallel.output_device, parallel.dim, str(parallel.src_device_obj)) == expected
    assert (parallel.split, parallel.gather_outputs) == (None, True)


def test_attributes_of_the_module_are_reached(parallel):
    """#16885 and #9176 of PyTorch, whose wrapper hides them."""
    assert parallel.scale == 3
    assert parallel.body is parallel.module.body
    assert parallel.offset is parallel.module.offset
    assert parallel.describe() == "a net of width 4"
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'no_such_thing'"):
        parallel.no_such_thing  # noqa: B018
    assert not hasattr(parallel, "no_such_thing")
    assert "Net(" in repr(parallel)


def test_attributes_of_the_module_are_set_where_they_are_read(parallel, x):
    """A new head put on the wrapper would have no effect: it reads the module's."""
    parallel.body = nn.Linear(parallel.body.in_features, 2).to(x.device)
    parallel.offset = torch.full((2,), 3.0, device=x.device)
    parallel.scale = 5
    assert parallel.module.body is parallel.body
    assert parallel.module.scale == parallel.scale == 5
    torch.testing.assert_close(parallel(x), parallel.body(x) + 3)
    assert "body.weight" not in parallel.state_dict()
    assert parallel.state_dict()["module.body.weight"].shape == (2, 4)
    del parallel.scale
    assert parallel.scale == Net.scale


def test_names_of_the_wrapper_stay_its_own(parallel):
    parallel.module.dim = parallel.module.split = "the module's own"
    parallel.dim, parallel.note = 0, "new"
    assert (parallel.module.dim, parallel.module.split) == ("the module's own",) * 2
    assert not hasattr(parallel.module, "note")
    parallel.note = "changed"
    assert parallel.note == "changed"
    outer = DataParallel(parallel, parallel.device_ids)
    assert outer.dim == 0
    assert outer.module is parallel
    parallel.eval()
    outer.train()
    assert outer.training
    assert parallel.training


def test_modes_and_hooks_of_the_wrapper(parallel, x):
    assert parallel.eval().module.training is False
    assert parallel.train().module.body.training is True
    seen = []
    parallel.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    parallel(x)
    assert seen == [(5, 3)]
    parallel.requires_grad_(False)
    assert not parallel(x).requires_grad
    assert [name for name, _ in parallel.named_parameters()] == ["module.body.weight", "module.body.bias"]


def test_what_forward_writes_to_a_parameter_the_replicas_after_it_see(x):
    """So an average is taken once for each replica, and what is the same twice is as on one device."""

    def follows(m, x):
        """A layer, and an average of its weights, which each forward takes a step further."""
        with torch.no_grad():
            for mean, weight in zip(m.average.parameters(), m.linear.parameters(), strict=True):
                mean.lerp_(weight, 0.5)
        return m.linear(x) - m.average(x)

    module = Applying(follows, (4, 3), average=nn.Linear(4, 3).requires_grad_(False))
    alone = copy.deepcopy(module)
    DataParallel(module, ["cpu", "cpu"])(x)
    alone(x.cpu())
    alone(x.cpu())
    assert torch.equal(module.average.weight, alone.average.weight)
    words = nn.Embedding(20, 4, max_norm=0.5)
    alone = copy.deepcopy(words)
    indices = torch.tensor([3, 5, 3, 7, 5, 5])
    assert torch.equal(DataParallel(words, ["cpu", "cpu"])(indices), alone(indices))
    assert torch.equal(words.weight, alone.weight)


def test_another_module_may_be_put_in(parallel, x):
    parallel(x)
    parallel.module = copy.deepcopy(parallel.module)
    nn.init.zeros_(parallel.module.body.weight)
    torch.testing.assert_close(parallel(x), parallel.module(x))
    parallel(x).sum().backward()
    assert parallel.module.body.bias.grad.tolist() == [5, 5, 5]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("use", ["forward", "step", "replicate"])
def test_device_ids_that_are_set_later_are_followed_by_every_use(devices, first, x, use, in_place):
    parallel = DataParallel(Net().to(first), devices(3))
    parallel(x)
    parallel.step(mean_square, x)
    if in_place:
        parallel.device_ids.pop()
    else:
        parallel.device_ids = devices(2)
    parallel.zero_grad()
    expected = copy.deepcopy(parallel.module)
    mean_square(expected(x)).backward()
    with parallel.timeline() as events:
        if use == "forward":
            mean_square(parallel(x)).backward()
        elif use == "step":
            parallel.step(mean_square, x)
        else:
            replicas = parallel.replicate(parallel.module, parallel.device_ids)
            mean_square(torch.cat([replicas[0](x[:3]), replicas[1](x[3:].to(devices(2)[1])).to(first)])).backward()
    if use != "replicate":
        assert sum(event.phase == "forward" for event in events) == 2
    assert len(parallel._own_replicas().refresh()) == 2  # what is not used is not kept
    torch.testing.assert_close(parallel.module.body.weight.grad, expected.body.weight.grad)


def test_device_ids_that_are_taken_away_run_the_module_as_it_is(parallel, x):
    parallel.device_ids = []
    assert not [e for e in timed(parallel, x) if e.phase == "scatter"]
    parallel.device_ids = None
    assert not [e for e in timed(parallel, x) if e.phase == "scatter"]
    parallel.step(mean_square, x)
    parallel.device_ids = ["nowhere"]
    for use in (lambda: parallel(x), lambda: parallel.step(mean_square, x)):
        with pytest.raises(DeviceError, match="nowhere"):
            use()


def timed(parallel, x):
    with parallel.timeline() as events:
        torch.testing.assert_close(parallel(x), parallel.module(x))
    return events


def test_replicas_are_built_once(parallel, x, monkeypatch):
    """By the function, too: #40581, #18837, #19540, #19125, pytorch/vision#3052, jolibrain/deepdetect#1045."""
    sets = []
    init = ReplicaSet.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        sets.append(self)

    monkeypatch.setattr(ReplicaSet, "__init__", remember)
    for _ in range(3):
        parallel(x).sum().backward()
        parallel.step(mean_square, x, torch.zeros(5, 3, device=x.device))
        with torch.no_grad():
            parallel(x)
            parallel.module.body.weight.add_(1)
    assert [replicas.builds for replicas in sets] == [1]
    assert parallel.statistics().calls["build"] == 1
    sets.clear()
    for _ in range(3):
        data_parallel(parallel.module, x, parallel.device_ids)
    assert [replicas.builds for replicas in sets] == [1]


# ------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("source", ["ours", "torch", "plain"])
def test_states_that_can_be_loaded(sim, source):
    net = Net().to("sim:0")
    wrap = {"ours": DataParallel, "torch": nn.DataParallel, "plain": lambda net, ids: net}[source]
    state = wrap(net, [0, 1]).state_dict()
    parallel = DataParallel(Net().to("sim:0"), [0, 1])
    result = parallel.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(parallel.module.body.weight, net.body.weight)
    assert parallel.state_dict().keys() == nn.DataParallel(net, [0]).state_dict().keys()
    assert list(parallel.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    nn.DataParallel(net, [0]).load_state_dict(parallel.state_dict())


def test_a_module_that_has_a_child_named_module():
    net = nn.Sequential()
    net.add_module("module", nn.Linear(2, 2))
    parallel = DataParallel(net, ["cpu", "cpu"])
    wrapped, plain = parallel.state_dict(), net.state_dict()
    assert list(wrapped) == ["module.module.weight", "module.module.bias"]
    for state in (wrapped, plain):
        state = {name: value * 0 + 2 for name, value in state.items()}
        nn.init.zeros_(net.module.weight)
        parallel.load_state_dict(state)
        assert torch.equal(net.module.weight, torch.full((2, 2), 2.0))


def test_a_state_that_does_not_fit_is_refused(parallel):
    state = parallel.state_dict()
    state.pop("module.offset")
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.offset"):
        parallel.load_state_dict(state)
    assert parallel.load_state_dict(state, strict=False).missing_keys == ["module.offset"]
    plain = parallel.module.state_dict()
    plain["other"] = plain.pop("offset")
    with pytest.raises(RuntimeError, match="offset"):
        parallel.load_state_dict(plain)
    result = parallel.load_state_dict(plain, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["offset"], ["other"])
    replaced = {name: value + 1 for name, value in parallel.module.state_dict().items()}
    parallel.load_state_dict(replaced, assign=True)
    assert parallel.module.offset is replaced["offset"]


def test_inside_another_module(devices, first, x):
    def make():
        return nn.Sequential(DataParallel(Net().to(first), devices(2)), nn.Linear(3, 2).to(first))

    outer, other = make(), make()
    names = ["module.offset", "module.body.weight", "module.body.bias"]
    assert [name for name in outer.state_dict() if name.startswith("0.")] == [f"0.{name}" for name in names]
    other.load_state_dict(outer.state_dict())
    torch.testing.assert_close(other(x), outer(x))
    outer(x).sum().backward()
    assert outer[0].module.body.weight.grad is not None
    twin = copy.deepcopy(outer)
    nn.init.zeros_(outer[0].module.body.weight)
    torch.testing.assert_close(twin(x), other(x))


def saved_and_loaded(parallel):
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda p: pickle.loads(pickle.dumps(p)), "save": saved_and_loaded}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("used", [False, True])
def test_copies(devices, first, x, how, used):
    parallel = DataParallel(Net().to(first), devices(2), dim=-2, split=[2, 1])
    if used:
        parallel(x).sum().backward()
        parallel.step(mean_square, x, torch.zeros(5, 3, device=first))
        parallel.zero_grad()
    twin = COPIES[how](parallel)
    assert type(twin) is DataParallel
    assert (twin.device_ids, twin.dim, twin.split) == (parallel.device_ids, -2, [2, 1])
    torch.testing.assert_close(twin(x), parallel(x))
    nn.init.zeros_(parallel.module.body.weight)
    assert twin.module.body.weight.abs().sum() > 0
    torch.testing.assert_close(twin(x), twin.module(x))
    twin(x).sum().backward()
    assert twin.module.body.bias.grad.tolist() == [5, 5, 5]
    assert parallel.module.body.bias.grad is None


def test_one_device_moves_the_module_there(sim):
    parallel = DataParallel(Net(), [1])
    assert parallel.module.offset.device == torch.device("sim:1")
    x = torch.randn(5, 4)
    output = parallel(x)
    torch.testing.assert_close(output, parallel.module(x.to("sim:1")))
    (alone,) = DataParallel(parallel.module, [1], gather_outputs=False)(x)
    assert torch.equal(alone.cpu(), output.cpu())


# ------------------------------------------------------------------------------------ what it tells


def test_statistics(parallel, x):
    assert parallel.statistics().calls == {}
    for _ in range(2):
        parallel(x)
    expected = {"DataParallel.forward": 2, "scatter": 2, "build": 1, "refresh": 2, "forward": 4, "gather": 2}
    statistics = parallel.statistics()
    assert statistics.calls == expected
    assert statistics.seconds.keys() == expected.keys()
    assert all(seconds > 0 for seconds in statistics.seconds.values())
    inner = sum(statistics.seconds[phase] for phase in ("scatter", "refresh", "gather"))
    assert inner < statistics.seconds["DataParallel.forward"]
    statistics.calls.clear()  # a copy
    assert parallel.statistics().calls == expected


def test_timeline(parallel, x):
    parallel(x)
    with parallel.timeline() as events, parallel.timeline() as same:
        parallel(x)
    assert all(isinstance(event, Event) and event.start <= event.end for event in events)
    assert same == events
    phases = [(event.phase, event.replica) for event in events]
    assert phases[:2] == [("scatter", None), ("refresh", None)]
    assert sorted(phases[2:4]) == [("forward", 0), ("forward", 1)]
    assert phases[4:] == [("gather", None), ("DataParallel.forward", None)]
    assert events[-1].start <= min(event.start for event in events)
    assert max(event.end for event in events[:4]) <= events[4].start
    parallel(x)
    assert len(events) == 6


def test_timeline_of_a_step(parallel, x):
    y = torch.zeros(5, 3, device=x.device)
    parallel.step(mean_square, x, y)
    with parallel.timeline() as events:
        parallel.step(mean_square, x, y)
    found = sorted((event.phase, -1 if event.replica is None else event.replica) for event in events)
    both = [(phase, replica) for phase in ("forward", "loss") for replica in (0, 1)]
    ours = [("DataParallel.step", -1), ("scatter", -1), ("refresh", -1), *both, ("backward", -1)]
    assert found == sorted(ours)


def test_labels_in_the_profiler(parallel, x):
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, acc_events=True) as trace:
        parallel(x)
        parallel.step(mean_square, x, torch.zeros(5, 3, device=x.device))
    names = {event.name for event in trace.events() if event.name.startswith("lockstep::")}
    expected = {"DataParallel.forward", "DataParallel.step", "scatter", "build", "refresh", "gather"}
    expected |= {f"{phase} (replica {i})" for phase in ("forward", "loss") for i in (0, 1)}
    assert {f"lockstep::{phase}" for phase in expected} <= names


# ----------------------------------------------------------------------- inputs, and the first device


@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (0,), None, ["cpu", "cpu"]])
@pytest.mark.parametrize("more", [{}, {"added": torch.ones(5, 5)}], ids=["", "by keyword"])
@pytest.mark.parametrize("use_class", [False, True])
def test_several_inputs(sim, ids, more, use_class):
    def function(m, one, other, number, added=0.0):
        assert isinstance(number, float)
        return number * (one * other + added)

    network, inputs = Applying(function, ()), [torch.randn(5, 5, requires_grad=True) for _ in range(2)]
    if use_class:
        output = DataParallel(network, ids)(*inputs, 2.5, **more)
    else:
        output = data_parallel(network, (*inputs, 2.5), ids, module_kwargs=more)
    expected = network(*inputs, 2.5, **more)
    assert str(output.device) == ("cpu" if ids == ["cpu", "cpu"] else f"sim:{ids[0] if ids else 0}")
    same([output], [expected])
    same(torch.autograd.grad(output.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


@pytest.mark.parametrize(
    "call",
    [
        lambda network, ids: DataParallel(network, ids[:1])(),
        lambda network, ids: DataParallel(network, ids)(),
        lambda network, ids: data_parallel(network, None, ids[:1]),
        lambda network, ids: data_parallel(network, (), ids),
    ],
)
def test_without_inputs_it_runs_once(devices, first, call):
    calls = []
    network = Applying(lambda m: calls.append(1) or torch.ones(2, 3, device=first), ())
    output = call(network, devices(2))
    assert torch.equal(output, torch.ones(2, 3, device=first))
    assert calls == [1]


def test_no_list_means_all_devices_in_order(sim):
    network, x = Applying(lambda m, x: torch.tensor([x.device.index]), ()), torch.ones(16, 3)
    for output in (data_parallel(network, x), DataParallel(network)(x)):
        assert output.tolist() == list(range(8))
        assert str(output.device) == "sim:0"


@pytest.mark.parametrize(("place", "ids"), [("sim:0", None), ("sim:0", [0, 1]), ("sim:1", [1, 0])])
def test_a_module_must_be_on_the_first_device(sim, place, ids):
    network, x = nn.Linear(4, 3), torch.randn(2, 4)
    parallel = DataParallel(network, ids)
    calls = (lambda: parallel(x), lambda: data_parallel(network, x, ids))
    for call in calls:
        with pytest.raises(DeviceError, match=f"module must have its parameters and buffers on device {place}"):
            call()
    parallel.to(place)
    expected = torch.autograd.grad(network(x.to(place)).sum(), list(network.parameters()))
    for call in calls:
        output = call()
        torch.testing.assert_close(output, network(x.to(place)))
        same(torch.autograd.grad(output.sum(), list(network.parameters())), expected)


# ------------------------------------------------------------------------------------------ devices


def test_unbalanced_devices_are_named_once(sim):
    """For whoever calls; which ones are, in test_devices.py."""
    sim.set_properties(2, total_memory=11 << 30)
    with pytest.warns(UserWarning, match="imbalance between your devices") as record:
        DataParallel(Net().to("sim:0"), [0, 1, 2])
    (warning,) = record
    assert warning.filename == __file__
    sim.set_properties(1, total_memory=12 << 30, multi_processor_count=48)  # a quarter less is not
    DataParallel(Net().to("sim:0"), [0, 1])


NO_ACCELERATOR = """
import torch
from lockstep import DataParallel
from lockstep.local import data_parallel
net = torch.nn.Linear(4, 3)
calls = []
net.register_forward_hook(lambda *args: calls.append(1))
parallel, x = DataParallel(net), torch.randn(5, 4)
assert torch.equal(parallel(x), net(x)) and torch.equal(parallel(input=x), net(x))
assert torch.equal(data_parallel(net, x), net(x))
assert parallel.device_ids == [] and parallel.module is net
assert len(calls) == 6
plain, graphs = torch.nn.Linear(4, 3), []
compiled = torch.compile(
    DataParallel(plain), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
)
assert torch.equal(compiled(x), plain(x)) and len(graphs) == 1
loss = parallel.step(lambda output, y: (output - y).square().mean(), x, torch.zeros(5, 3))
grad, net.weight.grad = net.weight.grad, None
net(x).square().mean().backward()
torch.testing.assert_close(net.weight.grad, grad)
torch.testing.assert_close(loss, net(x).square().mean().detach())
for ids in (range(torch.cuda.device_count()), [], [0], [0, 1], ("cuda:0",), [torch.device("cuda", 0), 1]):
    parallel = DataParallel(net, device_ids=ids, output_device=0, split=[2, 1])
    assert torch.equal(parallel(x), net(x)) and torch.equal(data_parallel(net, x, ids, 0), net(x))
    assert parallel.device_ids == []
    parallel.device_ids = ids
    assert torch.equal(parallel(x), net(x))
for ids in (["cpu", 0], ["nowhere"], ["meta"], [True], [None], 0, "cuda"):
    for call in (DataParallel, lambda net, ids: data_parallel(net, x, ids)):
        try:
            call(net, ids)
        except RuntimeError:
            pass
        else:
            raise AssertionError(ids)
assert torch.equal(DataParallel(net, ["cpu", "cpu"])(x), net(x))
import threading
print(sorted(t.name for t in threading.enumerate()))
"""


def test_without_accelerators_the_module_runs_as_it_is():
    assert output_of(NO_ACCELERATOR) == "['MainThread']\n"


# -------------------------------------------------------------------------------- subclasses


def test_attributes_of_a_subclass_are_its_own(devices, first, x):
    """Return True if they are set before or after the constructor of DataParallel, or later; as with PyTorch."""

    class Named(Net):
        def __init__(self):
            super().__init__()
            self.name, self.note, self.later = "net", "net", "net"

    class Mine(DataParallel):
        def __init__(self, module):
            self.note = "wrapper"
            super().__init__(module, devices(2))
            self.name = "wrapper"
            self.body = nn.Linear(3, 2)

        def forward(self, x):
            return self.body(super().forward(x))

    module = Named().to(first)
    body = module.body
    mine = Mine(module).to(first)
    mine.later = "wrapper"
    assert (mine.name, mine.note, mine.later) == ("wrapper",) * 3
    assert (module.name, module.note, module.later) == ("net",) * 3
    assert module.body is body
    assert mine(x).shape == (len(x), 2)
    assert {"body.weight", "module.body.weight"} <= mine.state_dict().keys()
    del mine.later
    assert mine.later == "net"


# ------------------------------------------------------------------ what records the calling thread


class CountsLinear(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is nn.functional.linear
        return function(*args, **(kwargs or {}))


def forward_mode(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x + 1))).tangent


RECORDED = {
    "make_fx": lambda model, x: make_fx(model)(x)(2 * x),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False)(2 * x),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(2 * x),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module()(2 * x),
    "func.grad": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "func.vmap": lambda model, x: torch.func.vmap(model)(x[:, None]),
    "func.jvp": lambda model, x: torch.func.jvp(model, (x,), (x + 1,))[1],
    "forward mode": forward_mode,
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and the profiler's labels are ignored in an export
@pytest.mark.parametrize("name", RECORDED)
def test_what_records_the_caller_records_the_module_as_it_is(name):
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(6, 4)
    parallel, expected = DataParallel(module, ["cpu", "cpu"]), RECORDED[name](module, x)
    torch.testing.assert_close(RECORDED[name](parallel, x), expected)
    with parallel.timeline() as events, torch.device("cpu"):  # which records nothing
        parallel(x)
    assert sum(event.phase == "forward" for event in events) == 2
    if name not in ("jit.trace", "export", "strict export"):
        got = RECORDED[name](lambda x: data_parallel(module, x, ["cpu", "cpu"]), x)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("step", [False, True])
def test_modes_see_all_replicas_on_one_device(step):
    parallel, x = DataParallel(nn.Linear(4, 3), ["cpu", "cpu"]), torch.randn(6, 4)
    with FlopCounterMode(display=False) as alone:
        loss = mean_square(parallel.module(x))
        if step:
            loss.backward()
    with FlopCounterMode(display=False) as counter, CountsLinear() as mode:
        parallel.step(mean_square, x) if step else parallel(x)
    assert (counter.get_total_flops(), mode.calls) == (alone.get_total_flops(), 2)


def test_a_recorded_step_is_refused():
    parallel, x = DataParallel(nn.Linear(4, 3), ["cpu", "cpu"]), torch.randn(6, 4)
    with pytest.raises(NotReplicableError, match=r"record the forward.*parallel\.module"):
        make_fx(lambda x: parallel.step(mean_square, x))(x)


def evaluate(parallel, x):
    with torch.no_grad():
        parallel(x)


@pytest.mark.parametrize("use", [lambda parallel, x: parallel.step(mean_square, x), DataParallel.forward, evaluate])
@pytest.mark.parametrize("rows", [1, 5])
def test_no_reference_cycles_are_left(parallel, x, use, rows):
    use(parallel, x[:rows])
    gc.collect()
    use(parallel, x[:rows])
    assert gc.collect() == 0


@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu", "cpu"]], ids=["none", "one", "two"])
def test_a_shared_mask_and_a_count_for_each_device_give_what_one_device_gives(devices, monkeypatch):
    """The mask mixes rows' positions, and all rows share it."""
    monkeypatch.setattr("lockstep._base.devices.all_accelerators", list)

    def forward(m, x, mask, count=None):
        assert isinstance(mask, torch.Tensor)
        out = (mask @ m.linear(x)).tanh()
        return out if count is None else out / count

    plain, x, mask = Applying(forward, (3, 3)), torch.randn(6, 3, 3), torch.randn(3, 3).tril()
    plain(x, mask).pow(2).mean().backward()
    expected, parallel = gradients(plain), DataParallel(plain, devices)
    plain.zero_grad()
    counts = torch.ones(len(devices)) if devices and len(devices) > 1 else None
    parallel(x, shared(mask), count=counts).pow(2).mean().backward()
    same(gradients(plain), expected)
    plain.zero_grad()
    parallel.step(mean_square, x, shared(mask), torch.zeros(6, 3, 3))
    same(gradients(plain), expected)
    torch.testing.assert_close(data_parallel(plain, (x, shared(mask)), devices), plain(x, mask))


@pytest.mark.parametrize("before", [nn.Sigmoid, partial(nn.Linear, 4, 4)], ids=["saves its output", "does not"])
def test_a_first_layer_that_writes_in_place_after_another_data_parallel(devices, first, x, before):
    one = nn.Sequential(nn.Linear(4, 4), before()).to(first)
    other = nn.Sequential(nn.Threshold(0.4, 0.1, inplace=True), nn.Linear(4, 2)).to(first)
    expected = copy.deepcopy(nn.Sequential(one, nn.Threshold(0.4, 0.1), other[1]))
    DataParallel(other, devices(2))(DataParallel(one, devices(2))(x)).square().sum().backward()
    expected(x).square().sum().backward()
    same_gradients(nn.Sequential(one, other), expected, 1.3e-6, 1e-5)


def test_a_call_does_not_ask_again_which_accelerators_there_are(sim, monkeypatch):
    parallel, x = DataParallel(nn.Linear(4, 4).to("sim:0"), [0, 1, 2]), torch.ones(6, 4)
    parallel(x)
    asked = []
    for name in ("is_available", "device_count"):
        ask = getattr(torch.accelerator, name)
        monkeypatch.setattr(torch.accelerator, name, lambda name=name, ask=ask: (asked.append(name), ask())[1])
    parallel(x)
    parallel.step(torch.sum, x)
    assert not asked
