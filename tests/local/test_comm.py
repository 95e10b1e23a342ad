"""Copies and sums among devices, without autograd: `lockstep.local.comm`."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

from lockstep.local import Broadcast, Gather, ReduceAdd, comm, gather

CPU = torch.device("cpu")


def randn(*shape, on=CPU, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).to(on)


def assert_on(tensor, device, expected):
    """The tensor lies on the device and holds exactly the expected values, with their dtype and shape."""
    assert tensor.device == device
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.cpu(), expected.cpu())


# -------------------------------------------------------------------------------------- broadcast


def test_coalesced_calls_without_tensors_give_none():
    assert comm.broadcast_coalesced([], ["cpu", "cpu"]) == [[], []]
    assert comm.reduce_add_coalesced([[], []], "cpu") == ()
    assert Broadcast.apply(["cpu", "cpu"]) == ()


# ------------------------------------------------------------------------------------- reduce_add


def test_without_a_destination_it_is_the_current_device_unless_all_is_on_the_host(sim):
    x, y = randn(3, 4, on="sim:0"), randn(3, 4, on="sim:1")
    for index in (0, 1):
        with torch.accelerator.device_index(index):
            assert_on(comm.reduce_add((x, y)), torch.device("sim", index), x.cpu() + y.cpu())
            assert_on(comm.gather((x, y)), torch.device("sim", index), torch.cat([x.cpu(), y.cpu()]))
    assert comm.reduce_add([torch.ones(1), torch.ones(1)]).device == CPU
    assert comm.reduce_add_coalesced([[torch.ones(1)], [torch.ones(1)]])[0].device == CPU
    assert comm.gather([torch.ones(1), torch.ones(1)]).device == CPU


@pytest.mark.parametrize("destination", [-1, "cpu", "first", "third"])
def test_every_call_with_a_destination_goes_there(devices, destination):
    d = devices(3)
    given = {"first": d[0], "third": d[2]}.get(destination, destination)
    target = CPU if destination in (-1, "cpu") else given
    x, y = randn(2, 3, on=d[0]), randn(2, 3, on=d[1])
    total = x.cpu() + y.cpu()
    for call, expected in (
        (lambda: comm.reduce_add([x, y], given), total),
        (lambda: ReduceAdd.apply(given, x, y), total),
        (lambda: comm.reduce_add_coalesced([[x], [y]], given)[0], total),
        *(
            (call, torch.cat([x.cpu(), y.cpu()]))
            for call in (
                lambda: comm.gather([x, y], 0, given),
                lambda: Gather.apply(given, 0, x, y),
                lambda: gather([x, y], given),
            )
        ),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_on(call(), target, expected)
        assert [w.category for w in caught] == [FutureWarning] * (given == -1)
        assert all("Using -1 to represent CPU tensor is deprecated" in str(w.message) for w in caught)


def awkward(n, on):
    """Summands whose sum depends on the order in which it is taken."""
    return [torch.tensor([1e8, 1.0, 0.1]).mul(sign * scale).to(d) for d, (sign, scale) in zip(on, n, strict=True)]


ORDERS = [((1, 1.0), (-1, 1.0), (1, 1e-7)), ((1, 1e-7), (1, 1.0), (-1, 1.0)), ((1, 1.0), (1, 1e-7), (-1, 1.0))]


@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_taken_in_the_order_of_the_inputs(devices, order, target):
    d = devices(3)
    inputs = awkward(order, d)
    a, b, c = (t.cpu() for t in inputs)
    expected = (a + b) + c
    assert_on(comm.reduce_add(inputs, d[target]), d[target], expected)
    rows = [[t, t[:2]] for t in inputs]
    for together in (rows, [row[:1] for row in rows]):
        assert_on(comm.reduce_add_coalesced(together, d[target])[0], d[target], expected)


def test_the_orders_of_that_test_do_differ():
    sums = [(a + b) + c for a, b, c in (awkward(order, [CPU] * 3) for order in ORDERS)]
    assert not torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


def test_conjugate_views_arrive_as_values(devices):
    d = devices(2)
    c = randn(3, dtype=torch.complex64).to(d[0]).conj()
    assert_on(comm.broadcast_coalesced([c, c], [d[1]])[0][0].resolve_conj(), d[1], c.cpu().resolve_conj())
    assert_on(comm.reduce_add_coalesced([[c], [c.to(d[1])]], d[0])[0].resolve_conj(), d[0], 2 * c.cpu().resolve_conj())


# ----------------------------------------------------------------------------- layouts, in every call


def images(on, layout=torch.channels_last, shape=(4, 3, 4, 5)):
    return randn(*shape, on=on).to(memory_format=layout)


def kept(d):
    """Calls of tensors in other layouts than the usual, and what they give, which has the layouts of the first."""
    both = [images(d[0]), randn(4, 6, on=d[0]).t()]
    rows = [both, [images(d[1]), randn(4, 6, on=d[1]).t()]]
    three = [images(x, torch.channels_last_3d, (2, 3, 2, 4, 5)) for x in d]
    yield both, comm.broadcast_coalesced(both, [d[1]])[0]  # in a buffer
    yield both[:1], comm.broadcast_coalesced(both[:1], [d[1]])[0]  # and alone
    yield both[:1], comm.broadcast(both[0], [d[1]])
    for target in (*d, CPU):
        yield both, comm.reduce_add_coalesced(rows, target)
    yield [both[0][:2]] * 2, comm.scatter(images(CPU), d)
    yield [torch.cat([both[0], both[0]])], [comm.gather([row[0] for row in rows], 0, "cpu")]
    yield [torch.cat([three[0], three[0]])], [comm.gather(three, 0, "cpu")]


def test_memory_formats_are_kept(devices):
    for given, found in kept(devices(2)):
        assert [t.stride() for t in found] == [t.stride() for t in given]
        assert [t.shape for t in found] == [t.shape for t in given]


def sparse(*values):
    return torch.sparse_coo_tensor([[0, 2, 0]], list(values), (4,), check_invariants=True)


def test_sparse_tensors_travel_beside_dense_ones_and_can_be_gathered():
    tensors = [torch.ones(2), sparse(1.0, 2.0, 3.0), torch.arange(2)]
    for row in comm.broadcast_coalesced(tensors, ["cpu", "cpu"]):
        assert [t.layout for t in row] == [torch.strided, torch.sparse_coo, torch.strided]
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(row, tensors, strict=True))
    result = comm.gather([torch.eye(2).to_sparse(), torch.ones(1, 2).to_sparse()], 0, "cpu")
    assert result.layout == torch.sparse_coo
    assert torch.equal(result.to_dense(), torch.cat([torch.eye(2), torch.ones(1, 2)]))


A, B, C = (1.0, 2.0, 3.0), (10.0, 20.0, 30.0), (0.5, 0.5, 0.5)
SPARSE = {  # summands, and the layout of their sum
    "sparse ones": (lambda: [sparse(*A), sparse(*B), sparse(*C)], torch.sparse_coo),
    "a sparse one first": (lambda: [sparse(*A), torch.ones(4)], torch.strided),
    "a dense one first": (lambda: [torch.ones(4), sparse(*A)], torch.strided),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sums_of_sparse_tensors_are_dense_where_one_of_them_is(name):
    make, layout = SPARSE[name]
    total, beside = comm.reduce_add_coalesced([[t, torch.ones(1)] for t in make()])
    sums = [total] if layout == torch.strided else [total, comm.reduce_add(make())]
    for found in sums:
        assert found.layout == layout
        assert torch.equal(found.to_dense(), functools.reduce(torch.add, [t.to_dense() for t in make()]))
    assert beside.item() == len(make())


# ----------------------------------------------------------------------------- scatter and gather


def test_a_chunk_for_the_tensors_own_device_is_a_view(devices):
    d = devices(2)
    tensor = randn(6, 4, on=d[0])
    first, second = comm.scatter(tensor, d, (2, 4))
    assert first.data_ptr() == tensor.data_ptr()
    assert (second.data_ptr() == tensor[2:].data_ptr()) == (d[0] == d[1])


def test_scatter_copies_on_the_given_streams(sim):
    tensor = torch.arange(6)
    comm.scatter(tensor, [0, 1])
    side = torch.Stream(device="sim:1")
    sim.reset_stream_log()
    comm.scatter(tensor, [0, 1], streams=[None, side])
    ran_on = {line.target: line.stream for line in sim.stream_log() if line.action == "copy"}
    assert ran_on == {"sim:0": 0, "sim:1": side.stream_id}


# ------------------------------------------------------------------------------- what all calls do


def test_plain_calls_are_outside_autograd(devices):
    d = devices(2)
    x = randn(4, 2, on=d[0]).requires_grad_()
    y = x.detach().to(d[1]).requires_grad_()
    elsewhere = [[device] for device in d if device != x.device]
    results = [
        *(t for device in elsewhere for t in comm.broadcast(x, device)),
        *(t for device in elsewhere for t in comm.broadcast_coalesced([x, x], device)[0]),
        comm.reduce_add([x, y], d[0]),
        comm.reduce_add([x], d[0]),
        *comm.reduce_add_coalesced([[x, x], [y, y]], d[0]),
        *comm.scatter(x, d),
        comm.gather([x, y], 0, d[0]),
    ]
    assert not any(result.requires_grad for result in results)


TREES = [
    ("sim:0", [1, 2, 3, 4, 5, 6, 7], ["01", "02", "13", "04", "15", "26", "37"]),
    ("sim:2", [0, 1], ["20", "21"]),
    ("sim:0", ["cpu", 1, 2, 3], ["0c", "01", "02", "13"]),
    ("cpu", [0, 1, 2], ["c0", "c1", "02"]),
]


@pytest.mark.parametrize(("home", "targets", "expected"), TREES)
def test_values_reach_many_devices_as_a_tree_of_copies(sim, home, targets, expected):
    source = torch.arange(5.0, device=home)
    targets = [torch.zeros(5, device=place if place == "cpu" else f"sim:{place}") for place in targets]
    comm.fill_all(targets, source)  # tries the connections
    for target in targets:
        target.zero_()
    sim.reset_copies()
    comm.fill_all(targets, source)
    found = {(one.removeprefix("sim:")[0] + other.removeprefix("sim:")[0]) for one, other in sim.copies()}
    assert found == set(expected)
    assert all(torch.equal(target.cpu(), source.cpu()) for target in targets)
