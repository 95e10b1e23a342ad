"""The differentiable calls: Broadcast, ReduceAddCoalesced, Gather, Scatter, ReduceAdd, and the edges of replicas."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lockstep.local import Broadcast, Gather, ReduceAddCoalesced, Scatter, gather, scatter
from lockstep.local.functions import link
from programs.one_device import same

# PyTorch 2.11, of the simulated accelerators' streams.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
CPU = torch.device("cpu")


def leaf(*shape, on=CPU, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).to(on).requires_grad_()


def full(size, value):
    return torch.full((size,), float(value), dtype=torch.float64)


def linked(tensors, places, groups=None):
    """Copies of the tensors on each of the places, made differentiable: a list for each place."""
    copies = [t.detach().to(place, copy=True) for place in places for t in tensors]
    flat = link(copies, groups or list(range(len(tensors))), tensors)
    assert all(a is b for a, b in zip(flat, copies, strict=True))
    return [flat[i : i + len(tensors)] for i in range(0, len(flat), len(tensors))]


# --------------------------------------------------------------------------- beside one device, in float64

PLACES = {"one": [0], "two": [0, 1], "three": [0, 1, 2], "first twice": [0, 1, 0], "second twice": [1, 1]}


def of_both(call):
    """Two tensors on the source, which come to each place."""
    return (
        lambda p, s: [((3,), s), ((2, 2), s)],
        call,
        lambda p, *tensors: tensors * len(p),
        lambda p, s: [place for place in p for _ in range(2)],
    )


def of_rows(dim, call):
    """A tensor on each place, which come together on the source; dim None: tensors without dimensions."""
    size = {0: lambda n: (n, 2), None: lambda n: ()}.get(dim, lambda n: (2, n))
    return (
        lambda p, s: [(size(n), place) for n, place in enumerate(p, 1)],
        call,
        lambda p, *tensors: [torch.cat([t.reshape(1) if dim is None else t for t in tensors], dim or 0)],
        lambda p, s: [s],
    )


def of_chunks(dim, sizes_of, call):
    """A tensor on the source, of which each place gets a chunk: of the sizes that `sizes_of` gives for so many."""

    def inputs(p, s):
        rows = sum(sizes_of(len(p)))
        return [((rows, 2) if dim == 0 else (2, rows), s)]

    def chunks(p, x):
        return x.split(sizes_of(len(p)), dim)

    return inputs, call, chunks, lambda p, s: p[: len(sizes_of(len(p)))]


def own(n):
    return [1, *[2] * (n - 1)]


CALLS = {  # the inputs, the call, what it does on one device, and where its outputs are
    "Broadcast": of_both(lambda p, s, *tensors: Broadcast.apply(p, *tensors)),
    "link": of_both(lambda p, s, *tensors: [copy for row in linked(tensors, p) for copy in row]),
    "link, in one bucket": of_both(lambda p, s, *tensors: [copy for row in linked(tensors, p, [0, 0]) for copy in row]),
    "ReduceAddCoalesced": (
        lambda p, s: [(shape, place) for place in p for shape in ((3,), (2, 2))],
        lambda p, s, *tensors: ReduceAddCoalesced.apply(s, 2, *tensors),
        lambda p, *tensors: [sum(tensors[::2]), sum(tensors[1::2])],
        lambda p, s: [s, s],
    ),
    **{
        f"Gather along {dim}": of_rows(dim, lambda p, s, *tensors, dim=dim: [Gather.apply(s, dim or 0, *tensors)])
        for dim in (0, 1, -1, None)
    },
    **{
        f"gather along {dim}": of_rows(dim, lambda p, s, *tensors: [gather([{"y": t} for t in tensors], s)["y"]])
        for dim in (0, None)
    },
    **{
        f"Scatter along {dim}": of_chunks(
            dim, lambda n: [2, *[1] * (n - 1)], lambda p, s, x, dim=dim: Scatter.apply(p, None, dim, x)
        )
        for dim in (0, 1)
    },
    "Scatter of fewer rows": of_chunks(0, lambda n: [1] * max(1, n - 1), lambda p, s, x: Scatter.apply(p, None, 0, x)),
    **{
        f"Scatter along {dim}, by sizes": of_chunks(
            dim, own, lambda p, s, x, dim=dim: Scatter.apply(p, own(len(p)), dim, x)
        )
        for dim in (0, -1)
    },
    "scatter": of_chunks(
        0, lambda n: [2, *[1] * (n - 1)], lambda p, s, x: [share["x"] for share in scatter({"x": x}, p)]
    ),
}


def gradients(loss, inputs, **options):
    found = torch.autograd.grad(loss, inputs, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]


def derivatives(outputs, inputs, weights):
    """Outputs, and gradients of a function of them and of a function of these gradients; zeros where there are none."""
    loss = sum((y**3 * w.to(y.device)).sum().to(CPU) for y, w in zip(outputs, weights, strict=True) if w is not None)
    once = gradients(loss.abs(), inputs, create_graph=True)
    twice = gradients(sum((g.abs() ** 2).sum().to(CPU) for g in once), inputs)
    return [*outputs, *once, *twice]


@pytest.mark.parametrize("used", ["all", "last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("source", ["host", "first"])
@pytest.mark.parametrize("current", [0, 5])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_values_gradients_and_their_gradients_are_those_of_one_device(
    devices, kind, name, places, current, source, dtype, used
):
    """Wherever they are wanted, and whichever device is current."""
    inputs, call, alone, targets = CALLS[name]
    d, places = devices(3), PLACES[places]
    p, s = [d[i] for i in places], CPU if source == "host" else d[0]
    given = [leaf(*shape, on=place, dtype=dtype) for shape, place in inputs(p, s)]
    plain = [t.detach().cpu().requires_grad_() for t in given]
    expected = alone(p, *plain)
    weights = [torch.randn_like(y) for y in expected]
    if used == "last":
        weights[:-1] = [None] * (len(weights) - 1)
    with torch.accelerator.device_index(current) if kind == "sim" else torch.enable_grad():
        outputs = call(p, s, *given)
        found = derivatives(outputs, given, weights)
        assert kind == "cpu" or torch.accelerator.current_device_index() == current
    assert [t.device for t in found] == [*targets(p, s), *[t.device for t in given] * 2]
    same(found, derivatives(expected, plain, weights), 1e-12, 1e-12)


# -------------------------------------------------------------------------------------- Broadcast


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


def test_integers_are_scattered_and_summed_without_a_gradient(devices):
    d = devices(2)
    chunks = Scatter.apply(d, None, 0, torch.arange(3).to(d[0]))
    assert [c.tolist() for c in chunks] == [[0, 1], [2]]
    total, count = ReduceAddCoalesced.apply(
        d[0], 2, *(t for i, c in enumerate(d, 3) for t in (leaf(2, on=c), torch.tensor(i).to(c)))
    )
    assert [c.requires_grad for c in (*chunks, total, count)] == [False, False, True, False]
    assert count == 7


def test_every_copy_has_a_gradient_of_its_own_where_a_device_stands_twice_in_the_list(devices):
    d0, d1 = devices(2)
    copies = Broadcast.apply([d0, d1, d0], leaf(2, on=d0))
    loss = sum((i * copy).sum().to(CPU) for i, copy in enumerate(copies, start=1))
    assert [grad.tolist() for grad in torch.autograd.grad(loss, copies)] == [[1, 1], [2, 2], [3, 3]]


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


# ----------------------------------------------------------------------------------------- Gather, Scatter


def test_gather_of_inputs_of_which_only_one_needs_a_gradient(devices):
    d = devices(2)
    x, y = torch.ones(2, device=d[0]), leaf(1, on=d[1], dtype=torch.float32)
    Gather.apply(d[0], 0, x, y).sum().backward()
    assert torch.equal(y.grad.cpu(), torch.ones(1))
    assert x.grad is None
    assert not Gather.apply(d[0], 0, x, x).requires_grad


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


# ------------------------------------------------------------------------------------- every call


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


# ---------------------------------------------------------------------------------- GradientEdges


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


def test_replicas_with_sparse_and_dense_gradients_sum_densely():
    weight = leaf(5, 2)
    (first,), (second,) = linked([weight], [CPU, CPU])
    (nn.functional.embedding(torch.tensor([1]), first, sparse=True).sum() + second.sum()).backward()
    expected = torch.ones(5, 2, dtype=torch.float64)
    expected[1] = 2
    assert torch.equal(weight.grad, expected)
