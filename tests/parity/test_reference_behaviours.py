"""What PyTorch's own tests assert of DataParallel and the calls under it, in Python and in C++, held against ours.

D0 and D1 are simulated accelerators; some tests run on both kinds of device.
"""

from __future__ import annotations

import collections
import copy
import gc

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from lockstep import DataParallel
from lockstep.local import data_parallel, gather, parallel_apply, replicate, scatter

D0, D1 = torch.device("sim:0"), torch.device("sim:1")
BOTH_ORDERS = pytest.mark.parametrize("ids", [(0, 1), (1, 0)])


class Lambda(nn.Module):
    """A module made of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def double(*shape, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()


def test_buffers_that_require_a_gradient_get_it(devices, first):
    class Buffers(nn.Module):
        def __init__(self, t_rg):
            super().__init__()
            self.register_buffer("t_rg", t_rg)
            self.register_buffer("t_not_rg", t_rg.detach().clone())

        def forward(self, x):
            return x * self.t_rg + self.t_not_rg

    module = Buffers(double(100, device=first))
    parallel = DataParallel(module, devices(2))
    x = double(2, 100, device=first)

    def function(t_rg):
        module.t_rg = t_rg
        return parallel(x)

    assert gradcheck(function, (module.t_rg,), check_batched_grad=False)


def test_a_bidirectional_lstm_that_flattens_its_weights(devices, first):
    class Rnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(30, 32, 1, batch_first=True, bidirectional=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    plain = Rnn().to(first)
    parallel = DataParallel(copy.deepcopy(plain), devices(2))
    with torch.no_grad():
        parallel(torch.rand(2, 4, 30, device=first))
    x = torch.ones(4, 4, 30, device=first)
    for model in (plain, parallel):
        optimizer = torch.optim.SGD(model.parameters(), lr=10)
        output = model(x)
        nn.functional.mse_loss(output, torch.zeros_like(output)).backward()
        optimizer.step()
    torch.testing.assert_close(list(parallel.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("bare", [False, True])
def test_parallel_apply(devices, bare):
    layers = [nn.Linear(10, 5).to(device) for device in devices(2)]
    inputs = [torch.randn(2, 10).to(device) for device in devices(2)]
    outputs = parallel_apply(layers, inputs if bare else [(x,) for x in inputs], None)
    torch.testing.assert_close(outputs, [layer(x) for layer, x in zip(layers, inputs, strict=True)])


def test_parallel_apply_passes_an_exception_on(sim):
    def fail(*args):
        raise KeyError("wonderful")

    module = Lambda(fail).to(D0)
    message = r"Caught KeyError in replica \d on device 0.\nOriginal Traceback[\s\S]+wonderful"
    with pytest.raises(KeyError, match=message):
        parallel_apply((module, module), (None, None))


@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (0,), None, [0], ["cpu", "cpu"]])
@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize("as_class", [False, True])
def test_several_inputs(sim, ids, third, as_class):
    def function(var1, var2, float1, var3=None):
        assert isinstance(float1, float)
        return float1 * (var1 * var2 if var3 is None else var1 * var2 + var3)

    module = Lambda(function)
    var1, var2 = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    number, var3 = 2.5, torch.randn(5, 5)
    kwargs = {"var3": var3} if third else {}
    if as_class:
        output = DataParallel(module, ids)(var1, var2, number, **kwargs)
    else:
        output = data_parallel(module, (var1, var2, number), ids, module_kwargs=kwargs)
    expected = function(var1, var2, number, **kwargs)
    first_device = torch.device("cpu") if ids == ["cpu", "cpu"] else torch.device("sim", ids[0] if ids else 0)
    assert output.device == first_device
    torch.testing.assert_close(output.cpu(), expected)
    got = torch.autograd.grad(output.sum(), (var1, var2))
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), (var1, var2)))


def parts(*places):
    return nn.Sequential(*(nn.Linear(10, 10).to(place) for place in places))


@pytest.mark.parametrize(
    ("places", "ids"),
    [(["cpu"], ids) for ids in (None, [0, 1], [1, 0])]
    + [([D1], None), ([D0], [1, 0])]
    + [(["cpu", D0], ids) for ids in (None, [0, 1], [1, 0])]
    + [([D0, D1], ids) for ids in (None, [0, 1], [1, 0])],
)
def test_a_module_must_be_on_the_first_device(sim, places, ids):
    first = f"sim:{ids[0] if ids else 0}"
    module, x = parts(*places), torch.randn(2, 10)
    message = f"module must have its parameters and buffers on device {first}"
    with pytest.raises(RuntimeError, match=message):
        DataParallel(module, ids)(x)
    with pytest.raises(RuntimeError, match=message):
        data_parallel(module, x, ids)


@pytest.mark.parametrize(("place", "ids"), [(D0, None), (D0, [0, 1]), (D1, [1, 0])])
def test_a_module_on_the_first_device(sim, place, ids):
    module, x = parts(place), torch.randn(2, 10)
    torch.testing.assert_close(DataParallel(module, ids)(x), module(x.to(place)))
    torch.testing.assert_close(data_parallel(module, x, ids), module(x.to(place)))
    wrapper = DataParallel(parts("cpu"), ids)
    wrapper.to(place)
    assert {p.device for p in wrapper.module.parameters()} == {place}
    torch.testing.assert_close(wrapper(x), wrapper.module(x.to(place)))


@pytest.mark.parametrize("grad", [False, True])
def test_no_reference_cycles(devices, first, grad):
    parallel, x = DataParallel(nn.Linear(1, 1).to(first), devices(2)), torch.randn(1, device=first)
    gc.collect()
    with torch.set_grad_enabled(grad):
        parallel(x)
    assert gc.collect() == 0
    parallel(torch.randn(5, 1, device=first))
    assert gc.collect() == 0


def test_replicas_see_the_grad_mode(devices, first):
    def check(x):
        assert torch.is_grad_enabled()
        return x

    parallel = DataParallel(Lambda(check), devices(2))
    x = torch.rand(4, device=first)
    parallel(x)
    with torch.no_grad(), pytest.raises(AssertionError):
        parallel(x)
    with torch.inference_mode(), pytest.raises(AssertionError):
        parallel(x)


@BOTH_ORDERS
def test_data_parallel(sim, ids):
    layer, x = nn.Linear(10, 5).to(D1), torch.randn(20, 10).to(D1).requires_grad_()
    expected = layer(x)
    expected.sum().backward()
    grads, x_grad = [p.grad.clone() for p in layer.parameters()], x.grad.clone()
    layer.zero_grad()
    x.grad = None
    with torch.accelerator.device_index(ids[0]):
        layer.to(f"sim:{ids[0]}")
        output = data_parallel(layer, x, ids)
        output.sum().backward()
        assert output.device.index == ids[0]
        torch.testing.assert_close(output.cpu(), expected.cpu())
        torch.testing.assert_close([p.grad.cpu() for p in layer.parameters()], [g.cpu() for g in grads])
        torch.testing.assert_close(x.grad, x_grad)
    layer.to("sim:0")
    torch.testing.assert_close(data_parallel(layer, x, None).cpu(), expected.cpu())


def test_sparse_gradients():
    """On CPU replicas: the simulated accelerators have no sparse tensors."""
    layer, x = nn.Embedding(10, 5, sparse=True), torch.randint(10, (20, 5))
    expected = layer(x)
    expected.sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    output = data_parallel(layer, x, ["cpu", "cpu"])
    output.sum().backward()
    torch.testing.assert_close(output, expected)
    assert layer.weight.grad.is_sparse
    torch.testing.assert_close(layer.weight.grad.coalesce(), grad.coalesce())


def test_nested_input(devices, first):
    layer = nn.Linear(10, 5).to(first)
    rows = []

    def function(args):
        rows.append(args[1][0].shape[0])
        return layer(args[1][0]) if args[0].device == first else args[1][0] @ layer.weight.to(args[0].device).T

    x = torch.randn(20, 10, device=first)
    layer.bias.data.zero_()
    output = data_parallel(Lambda(function), ((x, (x, x), x),), devices(2))
    torch.testing.assert_close(output, layer(x))
    assert rows == [10, 10]


@pytest.mark.parametrize(
    "call",
    [
        lambda module, ids: DataParallel(module, ids[:1])(),
        lambda module, ids: DataParallel(module, ids)(),
        lambda module, ids: data_parallel(module, None, ids[:1]),
        lambda module, ids: data_parallel(module, (), ids),
    ],
)
def test_no_inputs(devices, first, call):
    calls = []

    def function():
        calls.append(1)
        return torch.eye(2, 3, device=first) @ torch.ones(3, 3, device=first)

    output = call(Lambda(function), devices(2))
    assert torch.equal(output, torch.ones(2, 3, device=first))
    assert output.device == first
    assert len(calls) == 1


@pytest.mark.parametrize("ids", [(0, 1), (D0, D1), ("sim:0", "sim:1"), (0, D1)])
@pytest.mark.parametrize("target", [None, 1, D1, "cpu", torch.device("cpu")])
def test_ways_to_name_a_device(sim, ids, target):
    layer, x = nn.Linear(10, 5).to(D0), torch.randn(20, 10).to(D0)
    expected = D0 if target is None else D1 if target == 1 else torch.device(target)
    for output in (DataParallel(layer, ids, target)(x), data_parallel(layer, x, ids, target)):
        assert output.device == expected
        torch.testing.assert_close(output.cpu(), layer(x).cpu())


def test_a_gradient_penalty(devices, first):
    parallel = DataParallel(nn.Linear(4, 1).to(first), devices(2))
    x = torch.ones(2, 4, device=first, requires_grad=True)
    output = parallel(x)
    (grad,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
    grad.mean().backward()
    assert parallel.module.weight.grad.tolist() == [[0.25] * 4]
    assert parallel.module.bias.grad.tolist() == [0.0]


@pytest.mark.parametrize("source", ["cpu", "first"])
def test_scatter(devices, first, source):
    x = double(4, 4, device=first if source == "first" else "cpu")
    result = scatter((x,), devices(2))
    chunks = [chunk for (chunk,) in result]
    assert [chunk.device for chunk in chunks] == devices(2)
    assert torch.equal(chunks[0].cpu(), x[:2].cpu())
    assert torch.equal(chunks[1].cpu(), x[2:].cpu())
    chunks[0].backward(torch.full_like(chunks[0], 2))
    assert torch.equal(x.grad.cpu(), torch.tensor([2.0, 2, 0, 0], dtype=torch.float64)[:, None].expand(4, 4))
    assert gradcheck(lambda y: scatter(y, devices(2)), (x,))
    assert gradgradcheck(lambda y: scatter(y, devices(2)), (x,))


@pytest.mark.parametrize("target", [-1, "cpu", 0])
@pytest.mark.parametrize("shape", [(2, 4), ()])
@pytest.mark.filterwarnings("ignore:Using -1:FutureWarning")
def test_gather(sim, target, shape):
    """Better: scalars become a vector without a warning (warnings are errors in this suite)."""
    x, y = double(*shape, device=D0), double(*shape, device=D1)
    result = gather((x, y), target)
    assert result.device == (D0 if target == 0 else torch.device("cpu"))
    assert result.shape == ((4, 4) if shape else (2,))
    halves = result.tensor_split(2)
    for half, tensor in zip(halves, (x, y), strict=True):
        assert torch.equal(half.reshape(shape).cpu(), tensor.cpu())
    grad = torch.randn_like(result)
    result.backward(grad)
    for part, tensor in zip(grad.tensor_split(2), (x, y), strict=True):
        assert tensor.grad.device == tensor.device
        assert torch.equal(tensor.grad.cpu(), part.reshape(shape).cpu())
    assert gradcheck(lambda a, b: gather((a, b), target), (x, y))
    assert gradgradcheck(lambda a, b: gather((a, b), target), (x, y))


def test_minus_one_is_deprecated(sim):
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        gather((torch.ones(1, device=D0), torch.ones(1, device=D1)), -1)


def test_dicts_with_different_keys_cannot_be_gathered(devices):
    one, other = ({"a": torch.ones(1, device=device)} for device in devices(2))
    other["b"] = other["a"]
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        gather([one, other], devices(1)[0])


@pytest.mark.parametrize("sequence", [tuple, list])
def test_replicate(devices, first, sequence):
    network = nn.Sequential(nn.Linear(10, 5), nn.Unflatten(1, (5, 1, 1)), nn.BatchNorm2d(5)).to(first).eval()
    network[2].running_mean.fill_(0.3)
    network[2].num_batches_tracked += 7
    x = torch.randn(2, 10, device=first)
    for replica, device in zip(replicate(network, sequence(devices(2))), devices(2), strict=True):
        assert {p.device for p in replica.parameters()} == {device}
        torch.testing.assert_close(replica(x.to(device)).cpu(), network(x).cpu())
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = getattr(replica[2], name)
            assert buffer.device == device
            assert torch.equal(buffer.cpu(), getattr(network[2], name).cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_inside_forward(devices, first, kind, dtype):
    layer = nn.Linear(8, 8).to(first)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        @torch.autocast(kind, dtype)
        def forward(self, x):
            return self.layer(x)

    output = DataParallel(Model(), devices(2))(torch.randn(4, 8, device=first))
    assert output.dtype == dtype


TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])


def tolerance(dtype):
    return {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.float16 else {}


class Named(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input):
        return self.layer(input["data"])


@TYPES
@pytest.mark.parametrize(
    "call",
    [
        lambda layer, ids, x: DataParallel(layer, ids)(x),
        lambda layer, ids, x: DataParallel(layer, ids)(input=x),
        lambda layer, ids, x: DataParallel(Named(layer), ids)(input={"data": x, "unused": []}),
        lambda layer, ids, x: DataParallel(Named(layer), ids)(input={"data": x, "unused": {}}),
        lambda layer, ids, x: DataParallel(Named(layer), ids)(input={"data": x, "unused": ()}),
    ],
    ids=["module", "kwargs", "list", "dict", "tuple"],
)
def test_keyword_arguments_and_empty_containers(devices, first, dtype, call):
    layer, x = nn.Linear(10, 5).to(first, dtype), torch.randn(20, 10, device=first).to(dtype)
    output = call(layer, devices(2), x)
    assert output.device == first
    torch.testing.assert_close(output, layer(x), **tolerance(dtype))


def test_empty_containers_reach_every_replica(devices, first):
    seen = []
    parallel = DataParallel(Lambda(lambda x, **kwargs: (seen.append(kwargs), x)[1]), devices(2))
    parallel(torch.ones(2, device=first), a=[], b={}, c=())
    assert seen == [{"a": [], "b": {}, "c": ()}] * 2


# ----------------------------------------------------------------------------- torch::nn::parallel


def test_replicas_of_a_network_on_the_cpu(sim):
    network = nn.Linear(3, 4)
    replicas = replicate(network, [D0, D1])
    assert len(replicas) == 2
    for replica, device in zip(replicas, (D0, D1), strict=True):
        copies = list(replica.parameters())
        assert len(copies) == 2
        for p, original in zip(copies, network.parameters(), strict=True):
            assert p.device == device
            assert p.data_ptr() != original.data_ptr()
            torch.testing.assert_close(p.cpu(), original)


def test_parallel_apply_on_mixed_devices(sim):
    a = nn.Linear(3, 4)
    places = [torch.device("cpu"), D0, D1]
    modules = [copy.deepcopy(a).to(place) for place in places]
    x = torch.ones(10, 3)
    outputs = parallel_apply(modules, [x.to(place) for place in places])
    assert [output.device for output in outputs] == places
    for output in outputs:
        torch.testing.assert_close(output.cpu(), a(x))


def test_parallel_apply_moves_outputs_to_the_devices(sim):
    modules = [Lambda(lambda x: torch.ones(5, dtype=torch.int32)) for _ in range(3)]
    places = [D1, D0, torch.device("cpu")]
    outputs = parallel_apply(modules, [torch.ones(10, 3)] * 3, devices=places)
    assert [output.device for output in outputs] == places
    for output in outputs:
        assert torch.equal(output.cpu(), torch.ones(5, dtype=torch.int32))


def test_no_list_means_all_devices_in_order(sim):
    count = torch.accelerator.device_count()
    module = Lambda(lambda x: torch.tensor([x.device.index]))
    for output in (
        data_parallel(module, torch.ones(max(10, 2 * count), 3), None),
        DataParallel(module)(torch.ones(2 * count, 3)),
    ):
        assert output.tolist() == list(range(count))
        assert output.device == D0


def test_rows_are_spread_evenly(sim):
    rows = collections.Counter()

    def function(x):
        rows[x.device.index] += len(x)
        return x

    DataParallel(Lambda(function))(torch.ones(9, 1))
    assert [rows[i] for i in range(8)] == [2, 1, 1, 1, 1, 1, 1, 1]
