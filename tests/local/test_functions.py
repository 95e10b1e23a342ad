"""The differentiable calls: Broadcast, ReduceAddCoalesced, Gather, Scatter, ReduceAdd, and the edges of replicas."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from lockstep.local import Broadcast, Gather, ReduceAdd, ReduceAddCoalesced, Scatter
from lockstep.local.functions import GradientEdges, link

# PyTorch 2.11, of the simulated accelerators' streams.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
CPU = torch.device("cpu")


def leaf(*shape, on=CPU, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).to(on).requires_grad_()


def check(function, inputs):
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def full(size, value):
    return torch.full((size,), float(value), dtype=torch.float64)


@pytest.fixture(params=["one", "two", "three", "first twice", "second twice"])
def places(request, devices):
    """Device lists of one, two and three devices, and with repeats."""
    d = devices(3)
    lists = {"one": [0], "two": [0, 1], "three": [0, 1, 2], "first twice": [0, 1, 0], "second twice": [1, 1]}
    return [d[i] for i in lists[request.param]]


@pytest.fixture(params=["host", "first"])
def source(request, devices):
    return CPU if request.param == "host" else devices(1)[0]


# -------------------------------------------------------------------------------------- Broadcast


def test_broadcast_is_twice_differentiable(places, source):
    check(lambda *tensors: Broadcast.apply(places, *tensors), (leaf(3, on=source), leaf(2, 2, on=source)))


def test_the_gradient_of_broadcast_is_the_sum_on_the_inputs_device(places, source):
    a, b = leaf(3, on=source), leaf(2, on=source)
    copies = Broadcast.apply(places, a, b)  # all tensors for the first device, then for the next
    assert [(c.device, c.shape) for c in copies] == [(place, shape) for place in places for shape in ((3,), (2,))]
    sum((i + 1) * (copies[2 * i].sum() + 10 * copies[2 * i + 1].sum()).to(CPU) for i in range(len(places))).backward()
    total = sum(range(1, len(places) + 1))
    assert a.grad.device == source
    assert torch.equal(a.grad.cpu(), full(3, total))
    assert torch.equal(b.grad.cpu(), full(2, 10 * total))
    a.grad = None
    Broadcast.apply(places, a)[-1].sum().backward()  # the others are not used, and add nothing
    assert torch.equal(a.grad.cpu(), full(3, 1))
    assert Broadcast.apply(places) == ()


def test_what_needs_no_gradient_is_broadcast_without_one(devices):
    d = devices(2)
    wanted, frozen, counter = leaf(2, on=d[0]), torch.ones(2, device=d[0]), torch.arange(2).to(d[0])
    copies = Broadcast.apply(d, frozen, wanted, counter)
    assert [c.requires_grad for c in copies] == [False, True, False] * 2
    assert all(c.grad_fn is None for c in copies if not c.requires_grad)
    (copies[1].sum().to(CPU) + copies[4].sum().to(CPU)).backward()
    assert torch.equal(wanted.grad.cpu(), torch.full((2,), 2.0, dtype=torch.float64))
    assert not any(c.requires_grad for c in Broadcast.apply(d, frozen))
    with torch.no_grad():
        assert not any(c.requires_grad for c in Broadcast.apply(d, wanted))


def test_every_copy_has_a_gradient_of_its_own_where_a_device_stands_twice_in_the_list(devices):
    d0, d1 = devices(2)
    copies = Broadcast.apply([d0, d1, d0], leaf(2, on=d0))
    loss = sum((i * copy).sum().to(CPU) for i, copy in enumerate(copies, start=1))
    assert [grad.tolist() for grad in torch.autograd.grad(loss, copies)] == [[1, 1], [2, 2], [3, 3]]


def copies_of(sim, step):
    """How many copies between two places a step takes, after one that tries the connections."""
    step()
    sim.reset_copies()
    step()
    return {pair: count.calls for pair, count in sim.copies().items()}


def test_broadcast_and_back_move_one_buffer_a_device(sim):
    weights = [leaf(4, on="sim:0") for _ in range(10)]

    def step():
        copies = Broadcast.apply([0, 1], *weights)
        torch.autograd.backward(copies, [torch.ones_like(c) for c in copies])

    assert copies_of(sim, step) == {("sim:0", "sim:1"): 1, ("sim:1", "sim:0"): 1}


@pytest.mark.parametrize("used", [1, 2])
def test_sparse_gradients_of_a_broadcast_weight_are_summed(used):
    weight = leaf(5, 2)
    copies = Broadcast.apply(["cpu", "cpu"], weight)
    rows = torch.tensor([1, 3, 1])
    sum(nn.functional.embedding(rows, copy, sparse=True).sum() for copy in copies[:used]).backward()
    grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
    expected = torch.zeros(5, 2, dtype=torch.float64)
    expected[1], expected[3] = 2.0 * used, 1.0 * used
    assert torch.equal(grad, expected)
    assert weight.grad.is_sparse == (used == 2)


def test_complex_tensors_are_differentiable(devices):
    d = devices(2)
    x = leaf(3, on=d[0], dtype=torch.complex128)
    check(lambda t: Broadcast.apply(d, t), (x,))
    check(lambda t: Scatter.apply(d, None, 0, t), (x,))


# ----------------------------------------------------------------------------- ReduceAddCoalesced


def test_reduce_add_coalesced_is_twice_differentiable(places, source):
    inputs = [t for place in places for t in (leaf(3, on=place), leaf(2, 2, on=place))]
    check(lambda *tensors: ReduceAddCoalesced.apply(source, 2, *tensors), inputs)


def test_reduce_add_coalesced_sums_device_major_and_gives_each_input_the_gradient(places, source):
    inputs = [t for i, place in enumerate(places) for t in (leaf(3, on=place), torch.full((2,), i, device=place))]
    first, second = ReduceAddCoalesced.apply(source, 2, *inputs)
    assert first.device == second.device == source
    assert torch.equal(second.cpu(), torch.full((2,), sum(range(len(places)))))
    expected = inputs[0].detach().cpu()
    for tensor in inputs[2::2]:
        expected = expected + tensor.detach().cpu()
    assert torch.equal(first.detach().cpu(), expected)
    (3 * first).sum().backward()
    for tensor, place in zip(inputs[::2], places, strict=True):
        assert tensor.grad.device == place
        assert torch.equal(tensor.grad.cpu(), torch.full((3,), 3.0, dtype=torch.float64))


# ----------------------------------------------------------------------------------------- Gather


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_gather_is_twice_differentiable(places, source, dim):
    """Also of tensors without dimensions."""
    sizes = [{0: (n, 2), None: ()}.get(dim, (2, n)) for n in range(1, len(places) + 1)]
    inputs = [leaf(*size, on=place) for size, place in zip(sizes, places, strict=True)]
    check(lambda *tensors: Gather.apply(source, dim or 0, *tensors), inputs)


@pytest.mark.parametrize("shapes", [[(2, 4), (3, 4)], [(), ()]], ids=["rows", "numbers"])
@pytest.mark.parametrize("destination", [-1, "cpu", 0, 2])
def test_gather_splits_the_gradient_back_to_the_devices_of_the_inputs(devices, kind, destination, shapes):
    d = devices(3)
    target = CPU if destination in (-1, "cpu") or kind == "cpu" else d[destination]
    x, y = (leaf(*shape, on=device) for shape, device in zip(shapes, d, strict=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = Gather.apply(destination if destination in (-1, "cpu") else target, 0, x, y)
    assert [w.category for w in caught] == [FutureWarning] * (destination == -1)
    assert result.device == target
    assert torch.equal(result.detach().cpu(), torch.cat([t.detach().cpu().reshape(-1, *t.shape[1:]) for t in (x, y)]))
    weights = torch.arange(float(result.numel()), dtype=torch.float64).view_as(result)
    result.backward(weights.to(target))
    assert (x.grad.device, y.grad.device) == (d[0], d[1])
    assert (x.grad.shape, y.grad.shape) == (x.shape, y.shape)
    assert torch.equal(torch.cat([x.grad.cpu().flatten(), y.grad.cpu().flatten()]), weights.flatten())


def test_gather_of_inputs_of_which_only_one_needs_a_gradient(devices):
    d = devices(2)
    x, y = torch.ones(2, device=d[0]), leaf(1, on=d[1], dtype=torch.float32)
    Gather.apply(d[0], 0, x, y).sum().backward()
    assert torch.equal(y.grad.cpu(), torch.ones(1))
    assert x.grad is None
    assert not Gather.apply(d[0], 0, x, x).requires_grad


# ---------------------------------------------------------------------------------------- Scatter


@pytest.mark.parametrize(("dim", "own_sizes"), [(0, False), (1, False), (-1, True), (0, True)])
def test_scatter_is_twice_differentiable(places, source, dim, own_sizes):
    sizes = [1, *[2] * (len(places) - 1)] if own_sizes else None
    rows = sum(sizes) if sizes else len(places) + 1
    shape = (rows, 2) if dim == 0 else (2, rows)
    check(lambda x: Scatter.apply(places, sizes, dim, x), (leaf(*shape, on=source),))


@pytest.mark.parametrize("rows", [4, 3, 2, 1])
def test_scatter_puts_the_gradient_of_a_chunk_into_its_rows(devices, source, rows):
    """Fewer rows than devices give fewer chunks; integers are scattered without a gradient."""
    d = devices(3)
    x = leaf(rows, 4, on=source)
    chunks, expected = Scatter.apply(d, None, 0, x), x.detach().cpu().tensor_split(3)[: min(rows, 3)]
    for i, (chunk, part, device) in enumerate(zip(chunks, expected, d, strict=False)):
        assert chunk.device == device
        assert torch.equal(chunk.detach().cpu(), part)
        x.grad = None
        chunk.backward(torch.full_like(chunk, 2.0))
        assert x.grad.device == source
        assert torch.equal(
            x.grad.cpu(), torch.cat([torch.full_like(p, 2.0 * (j == i)) for j, p in enumerate(expected)])
        )
    assert len(chunks) == len(expected)
    integers = Scatter.apply(d, None, 0, torch.arange(rows).to(source))
    assert torch.cat([c.cpu() for c in integers]).tolist() == list(range(rows))
    assert not any(c.requires_grad for c in integers)


def test_copies_from_the_host_run_on_a_side_stream_that_the_main_stream_waits_for(sim):
    x, sides = torch.randn(4), []
    Scatter.apply([0, 1], None, 0, x)
    for _ in range(2):
        sim.reset_stream_log()
        Scatter.apply([0, 1], None, 0, x)
        log = sim.stream_log()
        for device in ("sim:0", "sim:1"):
            (copied,) = [i for i, line in enumerate(log) if line.action == "copy" and line.target == device]
            side, later = log[copied].stream, [line for line in log[copied:] if line.device == device]
            events = {line.event for line in later if (line.action, line.stream) == ("record", side)}
            assert any((line.action, line.stream) == ("wait", 0) and line.event in events for line in later)
            assert any((line.action, line.stream) == ("use", 0) for line in later)
            sides.append(side)
    assert 0 not in sides
    assert sides[:2] == sides[2:]  # the same from call to call


def test_the_stream_that_is_current_when_scatter_is_called_is_the_one_that_waits(sim):
    x = torch.randn(2)
    with torch.Stream(device="sim:1") as main:
        sim.reset_stream_log()
        Scatter.apply([1], None, 0, x)
    waits = [line.stream for line in sim.stream_log() if line.action == "wait" and line.device == "sim:1"]
    assert waits == [main.stream_id]


def test_copies_between_accelerators_use_no_side_stream(sim):
    x = torch.randn(4, device="sim:0")
    Scatter.apply([0, 1], None, 0, x)
    sim.reset_stream_log()
    Scatter.apply([0, 1], None, 0, x)
    assert [line.stream for line in sim.stream_log() if line.action == "copy"] == [0]
    assert not [line for line in sim.stream_log() if line.action == "wait"]


# -------------------------------------------------------------------------------------- ReduceAdd


@pytest.mark.parametrize("target", [0, 1])
def test_reduce_add_sums_onto_one_device(devices, target):
    d = devices(2)
    a, b = torch.randn(3, device="cpu").to(d[0]), torch.randn(3).to(d[1])
    total = ReduceAdd.apply(d[target], a, b)
    assert total.device == d[target]
    assert torch.equal(total.cpu(), a.cpu() + b.cpu())
    assert not total.requires_grad


# ------------------------------------------------------------------------------------- every call


def test_gradients_land_on_their_devices_whatever_device_is_current(sim):
    x, w = leaf(4, 2), leaf(2, on="sim:1")
    with torch.accelerator.device_index(5):
        chunks = Scatter.apply([1, 2], None, 0, x)
        weights = Broadcast.apply([1, 2], w)
        out = Gather.apply("sim:1", 0, *(c * v for c, v in zip(chunks, weights, strict=True)))
        (out**2).sum().backward()
    assert (x.grad.device, w.grad.device) == (CPU, torch.device("sim:1"))
    expected_x, expected_w = (t.detach().cpu().requires_grad_() for t in (x, w))
    ((expected_x * expected_w) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, expected_x.grad)
    torch.testing.assert_close(w.grad.cpu(), expected_w.grad)


def test_each_device_computes_its_gradients_in_a_thread_of_its_own(sim):
    seen = {}

    def note(name):
        def hook(grad):
            seen[name] = threading.get_ident(), torch.accelerator.current_device_index()

        return hook

    w = leaf(2, on="sim:0")
    squares = [c * c for c in Broadcast.apply([0, 1, 2], w)]
    for i, square in enumerate(squares):
        square.register_hook(note(i))
    w.register_hook(note("sum"))
    Gather.apply("sim:0", 0, *squares).sum().backward()
    assert [seen[i][1] for i in (0, 1, 2, "sum")] == [0, 1, 2, 0]
    assert len({seen[i][0] for i in range(3)}) == 3
    assert threading.get_ident() not in {ident for ident, _ in seen.values()}
    assert seen["sum"][0] == seen[0][0]


def test_a_gradient_penalty_goes_through_all_of_them(devices):
    d = devices(2)
    linear = nn.Linear(4, 1).to(d[0])
    x = torch.ones(2, 4, device=d[0], requires_grad=True)
    chunks = Scatter.apply(d, None, 0, x)
    weights = Broadcast.apply(d, linear.weight, linear.bias)
    rows = [nn.functional.linear(c, weights[2 * i], weights[2 * i + 1]) for i, c in enumerate(chunks)]
    out = Gather.apply(d[0], 0, *rows)
    torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)[0].mean().backward()
    assert torch.equal(linear.weight.grad.cpu(), torch.full((1, 4), 0.25))
    assert torch.equal(linear.bias.grad.cpu(), torch.zeros(1))


# ---------------------------------------------------------------------------------- GradientEdges


def linked(tensors, places, groups=None):
    """Copies of the tensors on each of the places, made differentiable: a list for each place."""
    copies = [t.detach().to(place, copy=True) for place in places for t in tensors]
    flat = link(copies, groups or list(range(len(tensors))), tensors)
    assert all(a is b for a, b in zip(flat, copies, strict=True))
    return [flat[i : i + len(tensors)] for i in range(0, len(flat), len(tensors))]


def test_linking_moves_nothing(sim):
    w = leaf(3, on="sim:0")
    copies = [w.detach().clone(), w.detach().to("sim:1")]
    pointers = [c.data_ptr() for c in copies]
    sim.reset_copies()
    flat = link(copies, [0], [w])
    assert not sim.copies()
    assert [c.data_ptr() for c in flat] == pointers
    assert all(c.requires_grad for c in flat)


def test_linked_copies_are_twice_differentiable(places, source):
    groups = [0, 1]

    def function(a, b):
        copies = [t.detach().to(place, copy=True) for place in places for t in (a, b)]
        return GradientEdges.apply(copies, groups, a, b)[1:]

    check(function, (leaf(2, on=source), leaf(2, 2, on=source)))


def test_linked_copies_give_the_gradients_of_a_broadcast(places, source):
    a, b = leaf(3, on=source), leaf(2, on=source)
    flat = Broadcast.apply(places, a, b)
    found = []
    for copies in (linked([a, b], places), list(zip(flat[::2], flat[1::2], strict=True))):
        losses = [((i + 1) * x.pow(3).sum() + y.sin().sum()).to(CPU) for i, (x, y) in enumerate(copies)]
        found.append(torch.autograd.grad(sum(losses), (a, b)))
    for one, other in zip(*found, strict=True):
        assert one.device == other.device == source
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("order", [(1e8, -1e8, 1.0), (1.0, 1e8, -1e8), (1e8, None, -1e8, 1.0)])
@pytest.mark.parametrize("backwards", [False, True])
def test_gradients_are_summed_in_the_order_of_the_replicas(devices, order, backwards):
    """Also of a tensor that some replicas leave out."""
    d = devices(len(order))
    w, v = (torch.ones(1, device=d[0], requires_grad=True) for _ in range(2))
    copies = linked([w, v], d)
    terms = [(row[0] * x).sum().to(CPU) for row, x in zip(copies, order, strict=True) if x is not None]
    sum([*(terms[::-1] if backwards else terms), *(row[1].sum().to(CPU) for row in copies)]).backward()
    a, b, c = (torch.tensor(x) for x in order if x is not None)
    assert w.grad.item() == ((a + b) + c).item()
    assert v.grad.item() == len(order)


def test_untouched_tensors_get_no_gradient_and_siblings_zeros_from_a_gradient_penalty(devices):
    d = devices(2)
    used, sibling, other = tensors = [leaf(*shape, on=d[0]) for shape in [(1,), (3, 2), (4,)]]
    copies = linked(tensors, d, groups=[0, 0, 1])
    copies[1][0].sum().backward()
    assert torch.equal(used.grad.cpu(), full(1, 1))
    assert sibling.grad is other.grad is None
    x = leaf(2, on=d[0])
    rows = [w[0] * chunk for w, chunk in zip(copies, Scatter.apply(d, None, 0, x), strict=True)]
    out = Gather.apply(d[0], 0, *rows)
    (penalty,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    penalty.sum().backward()
    assert torch.equal(used.grad.cpu(), full(1, 1 + 2))
    assert torch.equal(sibling.grad.cpu(), torch.zeros(3, 2, dtype=torch.float64))
    assert (sibling.grad.device, sibling.grad.dtype) == (d[0], torch.float64)
    assert other.grad is None


@pytest.mark.parametrize("grad", [True, False])
def test_one_link_serves_several_backwards(devices, grad):
    """Also one that was made without grad mode."""
    d = devices(2)
    w = leaf(3, on=d[0])
    with torch.set_grad_enabled(grad):
        copies = [row[0] for row in linked([w], d)]
    assert all(c.requires_grad for c in copies)
    for step in range(1, 4):
        sum((c * step).sum().to(CPU) for c in copies).backward()
    assert torch.equal(w.grad.cpu(), full(3, 12))
    copies[1].sum().backward()
    assert torch.equal(w.grad.cpu(), full(3, 13))


def test_gradients_of_gradients_flow_through_a_link(devices):
    d = devices(2)
    w = leaf(3, on=d[0])
    copies = [row[0] for row in linked([w], d)]
    loss = sum(c.pow(3).sum().to(CPU) for c in copies)
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    torch.testing.assert_close(grad, 6 * w**2)
    grad.sum().backward()
    torch.testing.assert_close(w.grad, 12 * w.detach())


def test_a_bucket_is_summed_before_older_nodes_run():
    """The sum of the late layer comes before the backward of the early one, although the link was made first."""
    early, late = leaf(2), leaf(2)
    (early_copy, early_other), (late_copy, late_other) = (
        [row[0] for row in linked([w], [CPU, CPU])] for w in (early, late)
    )
    ran = []
    early.register_hook(lambda grad: ran.append("early summed"))
    late.register_hook(lambda grad: ran.append("late summed"))
    hidden = [early_copy * 2, early_other * 2]
    for h in hidden:
        h.register_hook(lambda grad: ran.append("early layer"))
    sum((h * w).sum() for h, w in zip(hidden, (late_copy, late_other), strict=True)).backward()
    assert ran == ["late summed", "early layer", "early layer", "early summed"]


@pytest.mark.parametrize("replicas", [1, 3])
def test_linked_gradients_move_in_one_buffer_for_each_replica_elsewhere(sim, replicas):
    """Those of one replica are handed on as they are."""
    weights = [leaf(3, on="sim:0") for _ in range(6)]

    def step():
        for weight in weights:
            weight.grad = None
        copies = [c for row in linked(weights, sim.devices(replicas)) for c in row]
        grads = [torch.full_like(c, 3.0) for c in copies]
        sim.reset_copies()
        torch.autograd.backward(copies, grads)
        return {pair: count.calls for pair, count in sim.copies().items()}

    step()
    step()
    assert step() == {(f"sim:{i}", "sim:0"): 1 for i in range(1, replicas)}
    assert all(torch.equal(w.grad.cpu(), full(3, 3 * replicas)) for w in weights)


def test_replicas_with_sparse_and_dense_gradients_sum_densely():
    weight = leaf(5, 2)
    (first,), (second,) = linked([weight], [CPU, CPU])
    (nn.functional.embedding(torch.tensor([1]), first, sparse=True).sum() + second.sum()).backward()
    expected = torch.ones(5, 2, dtype=torch.float64)
    expected[1] = 2
    assert torch.equal(weight.grad, expected)
