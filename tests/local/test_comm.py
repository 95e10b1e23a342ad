"""Copies and sums among devices, without autograd: `lockstep.local.comm`."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from lockstep.errors import DeviceError, LayoutError, LengthError, LockstepError
from lockstep.local import comm

CPU = torch.device("cpu")
MiB = 1 << 20


def randn(*shape, on=CPU, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).to(on)


def transfers(sim, call):
    """How many copies from one place to another a call takes; a first one tries the connections."""
    call()
    sim.reset_copies()
    call()
    return {pair: count.calls for pair, count in sim.copies().items()}


def assert_on(tensor, device, expected):
    """The tensor lies on the device and holds exactly the expected values, with their dtype and shape."""
    assert tensor.device == device
    assert tensor.dtype == expected.dtype
    assert tensor.shape == expected.shape
    assert torch.equal(tensor.cpu(), expected.cpu())


def error(kind, *parts):
    """A context that expects an error which PyTorch's own `except RuntimeError` catches, with these words in it."""
    assert issubclass(kind, LockstepError)
    assert issubclass(kind, RuntimeError)
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# -------------------------------------------------------------------------------------- broadcast


def test_on_its_own_device_a_tensor_is_returned_as_it_is(devices):
    d = devices(2)
    tensors = [randn(2, on=d[0]).requires_grad_(), randn(3, on=d[0])]
    assert comm.broadcast(tensors[0], d)[0] is tensors[0]
    assert all(a is b for a, b in zip(comm.broadcast_coalesced(tensors, d)[0], tensors, strict=True))


@pytest.mark.parametrize("source", ["host", "first", "second"])
def test_broadcast_puts_an_equal_copy_on_each_device_and_shares_storage_at_home(devices, source):
    d = devices(2)
    tensor = randn(5, 5, on={"host": CPU, "first": d[0], "second": d[1]}[source])
    copies = comm.broadcast(tensor, d)
    assert type(copies) is tuple
    for copy, device in zip(copies, d, strict=True):
        assert_on(copy, device, tensor)
        assert (copy.data_ptr() == tensor.data_ptr()) == (device == tensor.device)


def test_broadcast_to_a_device_list_with_repeats(devices):
    d0, d1 = devices(2)
    copies = comm.broadcast(torch.arange(3).to(d0), [d1, d0, d1])
    for copy, device in zip(copies, [d1, d0, d1], strict=True):
        assert_on(copy, device, torch.arange(3))


def test_a_device_may_be_an_index_a_string_or_a_device(sim):
    copies = comm.broadcast(torch.ones(1), (1, "sim:2", torch.device("sim", 3), "cpu", "sim"))
    assert [str(copy.device) for copy in copies] == ["sim:1", "sim:2", "sim:3", "cpu", "sim:0"]


def test_broadcast_fills_and_returns_the_out_tensors(devices):
    d0, d1 = devices(2)
    tensor = randn(4, 3, on=d0)
    out = [torch.empty(4, 3, device=d1), torch.empty(3, 4, device=d0).t(), tensor]
    returned = comm.broadcast(tensor, out=out)
    assert type(returned) is tuple
    assert all(a is b for a, b in zip(returned, out, strict=True))
    for target in out:
        assert_on(target, target.device, tensor)


def test_broadcast_needs_exactly_one_of_devices_and_out():
    t = torch.ones(1)
    with error(LayoutError, "Exactly one of 'devices' and 'out'", "devices=['cpu']", "out=["):
        comm.broadcast(t, ["cpu"], out=[t])
    with error(LayoutError, "Exactly one of 'devices' and 'out'", "devices=None", "out=None"):
        comm.broadcast(t)


def test_broadcast_names_an_out_tensor_of_another_shape_or_dtype():
    t = torch.ones(2, 3)
    with error(
        LayoutError, "Expected all output tensors to have same shape as the source", "at index 1", "(3, 2)", "(2, 3)"
    ):
        comm.broadcast(t, out=[torch.empty(2, 3), torch.empty(3, 2)])
    with error(LayoutError, "Output tensor at index 0", "torch.float64", "torch.float32"):
        comm.broadcast(t, out=[torch.empty(2, 3, dtype=torch.float64)])


@pytest.mark.parametrize("call", [comm.broadcast, lambda t, d: comm.broadcast_coalesced([t], d)])
def test_an_empty_device_list_and_a_lone_device_are_errors_that_say_so(call):
    with error(LengthError, "at least one device"):
        call(torch.ones(1), [])
    with error(DeviceError, "expected a list of devices, got 'cpu'", "['cpu']"):
        call(torch.ones(1), "cpu")


# ---------------------------------------------------------------------------- broadcast_coalesced


def mixed_tensors(on):
    """Many sizes, dtypes and layouts, as a module's parameters and buffers have them."""
    sizes = [2**i for i in (0, 3, 12, 5, 0, 7)]
    floats = [randn(n, on=on) for n in sizes]
    others = [
        randn(3, 4, on=on, dtype=torch.float64),
        randn(2, 3, 4, 5, on=on).to(memory_format=torch.channels_last),
        randn(2, 3, 2, 2, 2, on=on).to(memory_format=torch.channels_last_3d),
        torch.arange(7).to(on),
        torch.tensor([True, False, True]).to(on),
        randn(3, on=on, dtype=torch.complex64),
        randn(5, on=on, dtype=torch.bfloat16),
        torch.empty(0, 3, device=on),
        torch.tensor(2.5, device=on),
        randn(4, 6, on=on)[:, ::2],
        randn(3, 1, on=on).expand(3, 4),
        randn(4, 6, on=on).t(),
    ]
    return [*floats[:3], *others, *floats[3:]]


@pytest.mark.parametrize("buffer_size", [1, 100, 5000, 10 * MiB])
def test_broadcast_coalesced_equals_broadcasting_one_by_one(devices, buffer_size):
    d = devices(3)
    tensors = mixed_tensors(d[0])
    rows = comm.broadcast_coalesced(tensors, [d[1], d[0], d[2]], buffer_size)
    assert [len(row) for row in rows] == [len(tensors)] * 3
    for row, device in zip(rows, [d[1], d[0], d[2]], strict=True):
        for copy, tensor in zip(row, tensors, strict=True):
            assert_on(copy, device, tensor)
            if device == d[0]:
                assert copy.data_ptr() == tensor.data_ptr()


def test_broadcast_coalesced_from_the_host(sim):
    tensors = mixed_tensors(CPU)
    for row, device in zip(comm.broadcast_coalesced(tensors, [0, 1]), sim.devices(2), strict=True):
        for copy, tensor in zip(row, tensors, strict=True):
            assert_on(copy, device, tensor)


def test_broadcast_coalesced_moves_one_buffer_for_each_dtype_and_device(sim):
    tensors = [randn(10, on="sim:0") for _ in range(20)] + [torch.arange(5, device="sim:0") for _ in range(20)]
    calls = transfers(sim, lambda: comm.broadcast_coalesced(tensors, [0, 1, 2]))
    assert calls == {("sim:0", "sim:1"): 2, ("sim:0", "sim:2"): 2}


def test_the_buffer_size_caps_what_travels_together(sim):
    tensors = [randn(256, on="sim:0") for _ in range(8)]  # a KiB each
    for cap, buffers in [(8 << 10, 1), (2 << 10, 4), (1, 8), (3 << 10, 3)]:
        calls = transfers(sim, lambda cap=cap: comm.broadcast_coalesced(tensors, [1], cap))
        assert calls == {("sim:0", "sim:1"): buffers}
        rows = [tensors, [t.to("sim:1") for t in tensors]]
        calls = transfers(sim, lambda cap=cap, rows=rows: comm.reduce_add_coalesced(rows, 0, cap))
        assert calls == {("sim:1", "sim:0"): buffers}


def test_coalesced_calls_at_home_move_nothing(sim):
    tensors = [randn(4, on="sim:0"), torch.arange(3, device="sim:0")]
    assert transfers(sim, lambda: comm.broadcast_coalesced(tensors, [0, 0])) == {}
    assert transfers(sim, lambda: comm.reduce_add_coalesced([tensors, tensors], 0)) == {}


def test_broadcast_coalesced_keeps_memory_formats(sim):
    image = randn(2, 3, 4, 5, on="sim:0").to(memory_format=torch.channels_last)
    transposed = randn(4, 6, on="sim:0").t()
    for tensors in ([image, transposed], [image]):  # in a buffer, and alone
        copies = comm.broadcast_coalesced(tensors, [1])[0]
        assert [copy.stride() for copy in copies] == [tensor.stride() for tensor in tensors]
    assert comm.broadcast(image, [1])[0].is_contiguous(memory_format=torch.channels_last)


def test_copies_elsewhere_are_independent_of_the_source_and_of_each_other(sim):
    tensors = [randn(3, on="sim:0"), randn(4, on="sim:0")]
    before = [t.clone() for t in tensors]
    copies = comm.broadcast_coalesced(tensors, [1, 1])
    for row in copies:
        for copy in row:
            version = copy._version
            others = [(t, t._version, t.clone()) for r in copies for t in r if t is not copy]
            copy.zero_()
            assert copy._version == version + 1
            assert all(t._version == v and torch.equal(t, old) for t, v, old in others)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_broadcast_coalesced_names_the_tensor_on_another_device(sim):
    with error(DeviceError, "one device", "tensor 0 is on sim:0", "tensor 2 on sim:1"):
        comm.broadcast_coalesced([randn(1, on="sim:0"), randn(1, on="sim:0"), randn(1, on="sim:1")], [0, 1])


def test_coalesced_calls_without_tensors_give_none():
    assert comm.broadcast_coalesced([], ["cpu", "cpu"]) == [[], []]
    assert comm.reduce_add_coalesced([[], []], "cpu") == ()


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_size_below_one_byte_is_refused(size):
    with error(LayoutError, "at least one byte", str(size)):
        comm.broadcast_coalesced([torch.ones(1)], ["cpu"], size)


def sparse(*values):
    return torch.sparse_coo_tensor([[0, 2, 0]], list(values), (4,), check_invariants=True)


def test_sparse_tensors_travel_beside_dense_ones():
    tensors = [torch.ones(2), sparse(1.0, 2.0, 3.0), torch.arange(2)]
    for row in comm.broadcast_coalesced(tensors, ["cpu", "cpu"]):
        assert [t.layout for t in row] == [torch.strided, torch.sparse_coo, torch.strided]
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(row, tensors, strict=True))


# ------------------------------------------------------------------------------------- reduce_add


def test_reduce_add_sums_onto_the_current_device(sim):
    x, y = randn(3, 4, on="sim:0"), randn(3, 4, on="sim:1")
    assert_on(comm.reduce_add((x, y)), torch.device("sim:0"), x.cpu() + y.cpu())
    with torch.accelerator.device_index(1):
        assert_on(comm.reduce_add((x, y)), torch.device("sim:1"), x.cpu() + y.cpu())


def test_without_a_destination_what_is_all_on_the_host_stays_there(sim):
    assert comm.reduce_add([torch.ones(1), torch.ones(1)]).device == CPU
    assert comm.reduce_add_coalesced([[torch.ones(1)], [torch.ones(1)]])[0].device == CPU
    assert comm.gather([torch.ones(1), torch.ones(1)]).device == CPU


@pytest.mark.parametrize("destination", [-1, "cpu", "first", "elsewhere"])
def test_every_call_with_a_destination_goes_there(devices, destination):
    d = devices(3)
    target = {"first": d[0], "elsewhere": d[2]}.get(destination, CPU)
    given = destination if destination in (-1, "cpu") else target
    x, y = randn(2, 3, on=d[0]), randn(2, 3, on=d[1])
    calls = [
        lambda: comm.reduce_add([x, y], given),
        lambda: comm.reduce_add_coalesced([[x], [y]], given)[0],
        lambda: comm.gather([x, y], 0, given),
    ]
    total = x.cpu() + y.cpu()
    for call, expected in zip(calls, [total, total, torch.cat([x.cpu(), y.cpu()])], strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_on(call(), target, expected)
        if given == -1:
            assert [w.category for w in caught] == [FutureWarning]
            assert "Using -1 to represent CPU tensor is deprecated" in str(caught[0].message)
        else:
            assert caught == []


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


@pytest.mark.parametrize("target", ["first", "second", "host"])
def test_sums_leave_their_inputs_alone(devices, target):
    d = devices(2)
    target = {"first": d[0], "second": d[1], "host": CPU}[target]
    rows = [[randn(3, on=device), randn(2, 2, on=device)] for device in (d[0], d[1], d[0])]
    before = [[(t.clone(), t._version) for t in row] for row in rows]
    comm.reduce_add_coalesced(rows, target)
    for column in zip(*rows, strict=True):
        comm.reduce_add(column, target)
    for row, old in zip(rows, before, strict=True):
        assert all(torch.equal(t, o) and t._version == v for t, (o, v) in zip(row, old, strict=True))


@pytest.mark.parametrize("buffer_size", [1, 100, 10 * MiB])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_reduce_add_coalesced_equals_reduce_add_of_each(devices, count, buffer_size):
    d = devices(3)
    rows = [mixed_tensors(device) for device in d[:count]]
    sums = comm.reduce_add_coalesced(rows, d[1], buffer_size)
    assert type(sums) is tuple
    for total, column in zip(sums, zip(*rows, strict=True), strict=True):
        assert_on(total, d[1], comm.reduce_add(column, d[1]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_reduce_add_coalesced_gives_new_tensors_with_versions_of_their_own(devices, count):
    d = devices(3)
    rows = [[randn(3, on=device), randn(4, on=device)] for device in d[:count]]
    for target in (d[0], d[2]):
        first, second = comm.reduce_add_coalesced(rows, target)
        inputs = [(t, t.clone()) for row in rows for t in row]
        versions = first._version, second._version
        first.zero_()
        assert (first._version, second._version) == (versions[0] + 1, versions[1])
        assert second.abs().sum() > 0
        assert all(torch.equal(t, old) for t, old in inputs)


def test_reduce_add_coalesced_keeps_memory_formats(devices):
    d = devices(2)
    rows = [[randn(2, 3, 4, 5, on=x).to(memory_format=torch.channels_last), randn(4, 6, on=x).t()] for x in d]
    for target in (d[0], d[1], CPU):
        sums = comm.reduce_add_coalesced(rows, target)
        assert [t.stride() for t in sums] == [t.stride() for t in rows[0]]


def test_summands_may_differ_in_memory_format(devices):
    d = devices(2)
    plain, image = randn(2, 3, 4, 5, on=d[0]), randn(2, 3, 4, 5, on=d[1]).to(memory_format=torch.channels_last)
    for target in (d[0], d[1]):
        for total in comm.reduce_add_coalesced([[plain, plain], [image, image]], target):
            assert_on(total, target, plain.cpu() + image.cpu())


def test_sparse_sums_stay_sparse():
    a, b, c = sparse(1.0, 2.0, 3.0), sparse(10.0, 20.0, 30.0), sparse(0.5, 0.5, 0.5)
    expected = (a.to_dense() + b.to_dense()) + c.to_dense()
    total = comm.reduce_add([a, b, c])
    dense, coalesced = comm.reduce_add_coalesced([[torch.ones(2), t] for t in (a, b, c)])
    assert torch.equal(dense, torch.full((2,), 3.0))
    for result in (total, coalesced):
        assert result.layout == torch.sparse_coo
        assert torch.equal(result.coalesce().to_dense(), expected)
    assert torch.equal(a.to_dense(), sparse(1.0, 2.0, 3.0).to_dense())


@pytest.mark.parametrize("sparse_first", [True, False])
def test_where_sparse_summands_meet_dense_ones_the_sum_is_dense(sparse_first):
    summands = [sparse(1.0, 2.0, 3.0), torch.ones(4)]
    rows = [[t, torch.ones(1)] for t in (summands if sparse_first else summands[::-1])]
    total, beside = comm.reduce_add_coalesced(rows)
    assert total.layout == torch.strided
    assert torch.equal(total, torch.tensor([5.0, 1.0, 3.0, 1.0]))
    assert torch.equal(beside, torch.tensor([2.0]))


def test_sums_name_the_input_that_differs():
    a = torch.ones(2, 3)
    for call in (comm.reduce_add, lambda inputs: comm.reduce_add_coalesced([[t] for t in inputs])):
        with error(LayoutError, "reduce_add", "input 2 has invalid size: got (3, 2)", "expected (2, 3)"):
            call([a, a, torch.ones(3, 2)])
        with error(LayoutError, "input 1 has invalid type: got torch.float64", "expected torch.float32"):
            call([a, a.double()])
    with error(LayoutError, "input 1 has invalid type", "torch.sparse_coo", "torch.strided"):
        comm.reduce_add([a, a.to_sparse()])


def test_sums_of_nothing_and_of_lists_that_differ_in_length_are_errors():
    with error(LengthError, "reduce_add expects at least one tensor, got none"):
        comm.reduce_add([])
    with error(LengthError, "reduce_add_coalesced", "at least one device"):
        comm.reduce_add_coalesced([])
    with error(LengthError, "input 0 has 2", "input 1 has 1"):
        comm.reduce_add_coalesced([[torch.ones(1)] * 2, [torch.ones(1)]])


def test_reduce_add_coalesced_names_the_input_whose_tensors_are_on_several_devices(sim):
    rows = [[randn(1, on="sim:0"), randn(1, on="sim:0")], [randn(1, on="sim:0"), randn(1, on="sim:1")]]
    with error(DeviceError, "input 1", "tensor 0 is on sim:0", "tensor 1 on sim:1"):
        comm.reduce_add_coalesced(rows, 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex128])
def test_every_dtype_can_be_summed(devices, dtype):
    d = devices(2)
    x, y = torch.tensor([1, 0, 3]).to(dtype), torch.tensor([1, 1, 2]).to(dtype)
    assert_on(comm.reduce_add([x.to(d[0]), y.to(d[1])], d[0]), d[0], x + y)
    assert_on(comm.reduce_add_coalesced([[x.to(d[0])] * 2, [y.to(d[1])] * 2], d[0])[1], d[0], x + y)


def test_conjugate_views_arrive_as_values(devices):
    d = devices(2)
    c = randn(3, dtype=torch.complex64).to(d[0]).conj()
    assert_on(comm.broadcast_coalesced([c, c], [d[1]])[0][0].resolve_conj(), d[1], c.cpu().resolve_conj())
    assert_on(comm.reduce_add_coalesced([[c], [c.to(d[1])]], d[0])[0].resolve_conj(), d[0], 2 * c.cpu().resolve_conj())


# ---------------------------------------------------------------------------------------- scatter


@pytest.mark.parametrize("source", ["host", "first"])
@pytest.mark.parametrize(
    ("chunk_sizes", "dim"), [(None, 0), ((2, 4), 0), (None, 1), ((2, 4), 1), ((1, 5), -1), (None, -2), ((0, 6), 0)]
)
def test_scatter_gives_each_device_its_slice(devices, source, chunk_sizes, dim):
    d = devices(2)
    tensor = randn(6, 6, on=CPU if source == "host" else d[0])
    chunks = comm.scatter(tensor, d, chunk_sizes, dim)
    sizes = chunk_sizes or (3, 3)
    assert type(chunks) is tuple
    for chunk, expected, device in zip(chunks, tensor.cpu().split(sizes, dim), d, strict=True):
        assert_on(chunk, device, expected)


def test_a_chunk_for_the_tensors_own_device_is_a_view(devices):
    d = devices(2)
    tensor = randn(6, 4, on=d[0])
    first, second = comm.scatter(tensor, d, (2, 4))
    assert first.data_ptr() == tensor.data_ptr()
    assert (second.data_ptr() == tensor[2:].data_ptr()) == (d[0] == d[1])


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (9, 8, [2, 1, 1, 1, 1, 1, 1, 1]),
        (7, 3, [3, 2, 2]),
        (2, 3, [1, 1]),
        (1, 4, [1]),
        (0, 2, [0]),
        (8, 4, [2, 2, 2, 2]),
    ],
)
def test_an_even_scatter_differs_by_at_most_one_and_leaves_no_device_idle(devices, rows, parts, sizes):
    tensor = torch.arange(rows)
    chunks = comm.scatter(tensor, devices(parts))
    assert [len(chunk) for chunk in chunks] == sizes
    assert torch.equal(torch.cat([chunk.cpu() for chunk in chunks]), tensor)


def test_scatter_keeps_channels_last(sim):
    image = randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for chunk in comm.scatter(image, [0, 1]):
        assert chunk.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_fills_and_returns_the_out_tensors_and_takes_their_sizes(devices, dim):
    d = devices(2)
    tensor = randn(6, 6, on=d[0])
    shapes = [(2, 6), (4, 6)] if dim == 0 else [(6, 2), (6, 4)]
    out = [torch.empty(shape, device=device) for shape, device in zip(shapes, (d[1], d[0]), strict=True)]
    returned = comm.scatter(tensor, dim=dim, out=out)
    assert all(a is b for a, b in zip(returned, out, strict=True))
    for target, expected in zip(out, tensor.cpu().split((2, 4), dim), strict=True):
        assert_on(target, target.device, expected)


def test_scatter_names_what_does_not_fit():
    t = torch.ones(6, 2)
    two = ["cpu", "cpu"]
    with error(LengthError, "Expected devices and chunk_sizes to be of same length", "= 2", "= 3"):
        comm.scatter(t, two, (1, 2, 3))
    with error(LengthError, "Expected at least one device to scatter to"):
        comm.scatter(t, ())
    with error(LengthError, "Expected at least one device to scatter to"):
        comm.scatter(t)
    for sizes, total in [((2, 3), 5), ((7, -1), 6), ((4, 4), 8)]:
        with error(LayoutError, "sum to 6", "dim 0", "(6, 2)", str(sizes), f"sum to {total}"):
            comm.scatter(t, two, sizes)
    for dim in (2, -3):
        with error(LayoutError, f"dim {dim} is out of range", "(6, 2)", "2 dimensions"):
            comm.scatter(t, two, dim=dim)
    with error(LayoutError, "dim 0 is out of range", "()"):
        comm.scatter(torch.tensor(1.0), two)


def test_scatter_names_out_tensors_that_do_not_fit():
    t = torch.ones(6, 2)
    with error(LayoutError, "'devices' must not be specified"):
        comm.scatter(t, ["cpu"], out=[torch.empty(6, 2)])
    with error(LayoutError, "'chunk_sizes' must not be specified"):
        comm.scatter(t, chunk_sizes=(6,), out=[torch.empty(6, 2)])
    with error(LengthError, "Expected at least one output tensor to scatter to"):
        comm.scatter(t, out=[])
    with error(LayoutError, "Output tensor at index 0 has incorrect shape", "(6,)", "(6, 2)"):
        comm.scatter(t, out=[torch.empty(6), torch.empty(6, 2)])
    with error(LayoutError, "Output tensor at index 1 has incorrect shape", "(3, 3)"):
        comm.scatter(t, out=[torch.empty(3, 2), torch.empty(3, 3)])
    with error(LayoutError, "Total size for output tensors along scatter dim 0 does not match", "expected 6", "got 5"):
        comm.scatter(t, out=[torch.empty(3, 2), torch.empty(2, 2)])
    with error(LayoutError, "Output tensor at index 1", "torch.float16", "torch.float32"):
        comm.scatter(t, out=[torch.empty(3, 2), torch.empty(3, 2, dtype=torch.float16)])


def test_scatter_copies_on_the_given_streams(sim):
    tensor = torch.arange(6)
    comm.scatter(tensor, [0, 1])
    side = torch.Stream(device="sim:1")
    sim.reset_stream_log()
    comm.scatter(tensor, [0, 1], streams=[None, side])
    ran_on = {line.target: line.stream for line in sim.stream_log() if line.action == "copy"}
    assert ran_on == {"sim:0": 0, "sim:1": side.stream_id}


def test_fewer_streams_than_devices_lose_no_chunk():
    with error(LengthError, "one stream for each of 2 devices", "got 1"):
        comm.scatter(torch.ones(4), ["cpu", "cpu"], streams=[None])


# ----------------------------------------------------------------------------------------- gather


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_gather_concatenates_on_the_destination(devices, dim):
    d = devices(2)
    sizes = [(2, 3), (4, 3)] if dim in (0, -2) else [(3, 2), (3, 4)]
    x, y = (randn(size, on=device) for size, device in zip(sizes, d, strict=True))
    expected = torch.cat([x.cpu(), y.cpu()], dim)
    for target in (d[0], d[1], CPU):
        assert_on(comm.gather((x, y), dim, target), target, expected)


def test_gather_goes_to_the_current_device_by_default(sim):
    x, y = randn(2, 3, on="sim:0"), randn(2, 3, on="sim:1")
    with torch.accelerator.device_index(1):
        assert_on(comm.gather((x, y)), torch.device("sim:1"), torch.cat([x.cpu(), y.cpu()]))


def test_gather_takes_one_copy_for_each_tensor_elsewhere(sim):
    tensors = [randn(2, 3, on=d) for d in ("sim:0", "sim:1", "sim:2", "cpu")]
    calls = transfers(sim, lambda: comm.gather(tensors, 0, 0))
    assert calls == {("sim:1", "sim:0"): 1, ("sim:2", "sim:0"): 1, ("cpu", "sim:0"): 1}


def test_gather_takes_tensors_on_the_host_too(devices):
    (d,) = devices(1)
    x, y = randn(2), randn(1, on=d)
    assert_on(comm.gather([x, y], destination=d), d, torch.cat([x, y.cpu()]))


def test_gather_fills_and_returns_out(devices):
    d = devices(3)
    x, y = randn(2, 3, on=d[0]), randn(1, 3, on=d[1])
    out = torch.empty(3, 3, device=d[2])
    assert comm.gather([x, y], out=out) is out
    assert_on(out, d[2], torch.cat([x.cpu(), y.cpu()]))


def test_tensors_without_dimensions_become_a_vector(devices):
    d = devices(2)
    scalars = [torch.tensor(1.5, device=d[0]), torch.tensor(2.5, device=d[1])]
    assert_on(comm.gather(scalars, destination=d[0]), d[0], torch.tensor([1.5, 2.5]))
    assert_on(comm.gather(scalars, -1, d[0]), d[0], torch.tensor([1.5, 2.5]))


@pytest.mark.parametrize(
    ("layout", "shape"), [(torch.channels_last, (2, 3, 4, 5)), (torch.channels_last_3d, (2, 3, 2, 4, 5))]
)
def test_gather_keeps_channels_last(devices, layout, shape):
    images = [randn(shape, on=d).to(memory_format=layout) for d in devices(2)]
    result = comm.gather(images, 0, "cpu")
    assert result.is_contiguous(memory_format=layout)
    assert torch.equal(result, torch.cat([image.cpu() for image in images]))


def test_gather_of_tensors_without_rows(devices):
    d = devices(3)
    pieces = [torch.empty(0, 2, device=d[0]), randn(2, 2, on=d[1]), torch.empty(0, 2, device=d[2])]
    assert_on(comm.gather(pieces, 0, d[0]), d[0], pieces[1].cpu())
    assert comm.gather(pieces[::2], 0, "cpu").shape == (0, 2)


def test_sparse_tensors_can_be_gathered():
    a, b = torch.eye(2).to_sparse(), torch.ones(1, 2).to_sparse()
    result = comm.gather([a, b], 0, "cpu")
    assert result.layout == torch.sparse_coo
    assert torch.equal(result.to_dense(), torch.cat([torch.eye(2), torch.ones(1, 2)]))


def test_gather_names_what_does_not_fit():
    t = torch.ones(2, 3)
    with error(LengthError, "Expected at least one tensor to gather from"):
        comm.gather(())
    with error(LayoutError, "'destination' must not be specified", "cpu"):
        comm.gather([t], 0, "cpu", out=t)
    with error(LayoutError, "Expected all input tensors to have the same number of dimensions", "index 1 has 1", "2"):
        comm.gather([t, torch.ones(2)])
    with error(LayoutError, "same number of dimensions", "index 1 has 0"):
        comm.gather([torch.ones(1), torch.tensor(1.0)])
    with error(LayoutError, "Input tensor at index 1 has invalid shape (2, 4)", "(2, 3)", "dim 0"):
        comm.gather([t, torch.ones(2, 4)])
    with error(LayoutError, "Input tensor at index 1", "torch.float64", "torch.float32"):
        comm.gather([t, t.double()])
    with error(LayoutError, "dim 2 is out of range"):
        comm.gather([t, t], 2)
    with error(LayoutError, "Expected out to have shape (4, 3)", "(3, 3)"):
        comm.gather([t, t], out=torch.ones(3, 3))
    with error(LayoutError, "Output tensor", "torch.int64", "torch.float32"):
        comm.gather([t, t], out=torch.ones(4, 3, dtype=torch.int64))


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


@pytest.mark.parametrize(
    "call",
    [
        lambda d: comm.broadcast(torch.ones(2), d),
        lambda d: comm.broadcast_coalesced([torch.ones(2)], d),
        lambda d: comm.scatter(torch.ones(2), d),
        lambda d: comm.reduce_add([torch.ones(2)], d[0]),
        lambda d: comm.gather([torch.ones(2)], 0, d[0]),
    ],
)
def test_a_device_that_is_not_there_is_named(call, sim):
    with error(DeviceError, "no accelerator with index 99", "sim:0 to sim:7"):
        call([99])
    with error(DeviceError, "cuda:0 is not available", "'cpu' and sim:0 to sim:7"):
        call(["cuda:0"])


def test_the_current_device_changes_no_result(sim):
    x, y = randn(4, on="sim:0"), randn(4, on="sim:1")
    with torch.accelerator.device_index(5):
        assert [t.device.index for t in comm.broadcast(x, [2, 0])] == [2, 0]
        assert [t.device.index for t in comm.scatter(torch.ones(4), [2, 3])] == [2, 3]
        assert comm.reduce_add([x, y], 1).device.index == 1
        assert comm.reduce_add_coalesced([[x], [y]], 1)[0].device.index == 1
        assert comm.gather([x, y], 0, 2).device.index == 2
        assert torch.accelerator.current_device_index() == 5


TREES = [
    ("sim:0", [1, 2, 3, 4, 5, 6, 7], ["01", "02", "13", "04", "15", "26", "37"]),
    ("sim:2", [0, 1], ["20", "21"]),
    ("sim:0", ["cpu", 1, 2, 3], ["0c", "01", "02", "13"]),
    ("cpu", [0, 1, 2], ["c0", "c1", "02"]),
]


@pytest.mark.parametrize(("home", "places", "expected"), TREES)
def test_values_reach_many_devices_as_a_tree_of_copies(sim, home, places, expected):
    source = torch.arange(5.0, device=home)
    targets = [torch.zeros(5, device=place if place == "cpu" else f"sim:{place}") for place in places]
    comm.fill_all(targets, source)  # tries the connections
    for target in targets:
        target.zero_()
    sim.reset_copies()
    comm.fill_all(targets, source)
    found = {(one.removeprefix("sim:")[0] + other.removeprefix("sim:")[0]) for one, other in sim.copies()}
    assert found == set(expected)
    assert all(torch.equal(target.cpu(), source.cpu()) for target in targets)
