"""Parameters and buffers of any dtype, layout and class in a replicated module, over Gloo and shared memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from lockstep._base.inner_tensors import as_bytes, inner_tensors
from lockstep.errors import AgreementError, LockstepError, NotReplicableError
from programs.ranks import on_ranks
from tensor_classes import DTYPES, Marked, Opaque, Packed, Quantised, State

GROUPS = pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])


class Holder(nn.Module):
    """A weight of one row, and things that no gradient reaches."""

    def __init__(self, frozen=(), buffers=()):
        super().__init__()
        self.trained = nn.Linear(2, 1)
        for number, tensor in enumerate(frozen):
            as_parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(f"frozen{number}", as_parameter)
        for number, tensor in enumerate(buffers):
            self.register_buffer(f"buffer{number}", tensor)

    def forward(self, x):
        return self.trained(x)


def bytes_of(tensor):
    return torch.cat([as_bytes(inner.clone()) for inner in inner_tensors(tensor)])


def filled(dtype, number, *shape):
    """A tensor whose bytes are `number`, whatever they mean."""
    tensor = torch.empty(*shape, dtype=dtype)
    inner_tensors(tensor)[0].view(torch.uint8).fill_(number % 2 if dtype is torch.bool else number)
    return tensor


def trains(rank, net, **options):
    """Replicates, steps once, and returns the module."""
    lockstep.replicate(net, process_group=rank.group, **options)
    net(torch.full((1, 2), 1.0 + rank.rank)).sum().backward()
    assert net.trained.weight.grad.tolist() == [[1.5, 1.5]]
    return net


@GROUPS
@on_ranks(2, "hosts")
def test_frozen_parameters_and_buffers_of_every_dtype_are_rank_0s(rank):
    wanted = [{60 % 2 if dtype is torch.bool else 60} for dtype in DTYPES] * 2
    number = 60 + rank.rank  # 0x3c: one half, or so, as float8, and an odd number elsewhere
    of_each = [[filled(dtype, number, 2, 3) for dtype in DTYPES] for _ in range(2)]
    net = trains(rank, Holder(*of_each))
    lockstep.check_in_sync(net)
    frozen = [each for each in net.parameters() if not each.requires_grad]
    assert [set(bytes_of(each).tolist()) for each in (*frozen, *net.buffers())] == wanted


@GROUPS
@pytest.mark.parametrize("policy", ["rank0", "mean", "local"])
@pytest.mark.parametrize("elements", [6, 100_000], ids=["packed", "large"])
@on_ranks(2, "hosts")
def test_buffers_of_every_dtype_follow_their_policy(rank, policy, elements):
    net = Holder([], [filled(dtype, 60, elements) for dtype in DTYPES])
    lockstep.replicate(net, process_group=rank.group, buffer_policy=policy)
    for buffer in net.buffers():
        inner_tensors(buffer)[0].view(torch.uint8).fill_(rank.rank)
    net(torch.ones(1, 2)).sum().backward()
    if policy != "local":
        lockstep.check_in_sync(net)
    averaged = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
    for dtype, buffer in zip(DTYPES, net.buffers(), strict=True):
        found = bytes_of(buffer)
        assert policy == "local" or rank.all_equal(found)
        if policy == "mean" and dtype in averaged:
            assert set(found.tolist()) != {0}
        else:
            assert set(found.tolist()) == {rank.rank if policy == "local" else 0}


@GROUPS
@pytest.mark.parametrize("kind", ["packed", "quantised", "coo", "csr", "marked"])
@pytest.mark.filterwarnings("ignore:Sparse")
@on_ranks(2, "hosts")
def test_frozen_parameters_and_buffers_of_other_classes_are_sent_by_their_inner_tensors(rank, kind):
    def make(number):
        values = torch.full((2, 2), number, dtype=torch.int8)
        eye = torch.eye(2) * number
        return {
            "packed": lambda: Packed(values, torch.tensor(0.5 * number)),
            "quantised": lambda: Quantised(values, State(torch.ones(3) * number, nested=State(torch.ones(1) * number))),
            "coo": lambda: eye.to_sparse(),
            "csr": lambda: eye.to_sparse_csr(),
            "marked": lambda: Marked(eye, requires_grad=False),
        }[kind]()

    net = Holder([make(1 + rank.rank)], [make(1 + rank.rank)])
    frozen, kinds = net.frozen0, [type(net.frozen0), type(net.buffer0)]
    trains(rank, net)
    assert net.frozen0 is frozen
    for inner in inner_tensors(net.buffer0):
        inner.mul_(1 + rank.rank) if inner.dtype not in (torch.int64, torch.int32) else None
    net(torch.ones(1, 2)).sum().backward()
    lockstep.check_in_sync(net)
    assert [type(net.frozen0), type(net.buffer0)] == kinds
    assert [bytes_of(each).tolist() for each in (net.frozen0, net.buffer0)] == [bytes_of(make(1)).tolist()] * 2


@pytest.mark.parametrize("place", ["frozen", "buffers"])
@on_ranks(2)
def test_a_class_that_hides_its_values_is_an_error_by_name_unless_it_is_left_out(rank, place):
    net = Holder(**{place: [Opaque(torch.ones(2))]})
    name = f"{place.removesuffix('s')}0"
    with pytest.raises(LockstepError, match=rf"{name} .* Opaque .* ignored_modules"):
        trains(rank, net)
    trains(rank, Holder(**{place: [Opaque(torch.ones(2))]}), params_and_buffers_to_ignore=[name])


@on_ranks(2)
def test_a_trained_parameter_of_a_class_with_code_for_operations_is_an_error_on_every_rank(rank):
    net = Holder([nn.Parameter(Packed(torch.ones(2, dtype=torch.int8), torch.ones(1)), requires_grad=rank.rank == 1)])
    with pytest.raises(LockstepError, match=r"frozen0 is trained and a Packed, .*ignored_modules"):
        trains(rank, net)


@on_ranks(2)
def test_unfreezing_such_a_parameter_is_an_error_on_every_rank_when_it_gets_a_gradient(rank):
    net = trains(rank, Holder([Packed(torch.ones(2, 2, dtype=torch.int8), torch.ones(()))]))
    net.frozen0.requires_grad_()
    net.frozen0.grad = torch.ones(2, 2)
    net.zero_grad()
    with pytest.raises(NotReplicableError, match="frozen0 is trained and a Packed"):
        (net(torch.ones(1, 2)).sum() + (torch.ones(2, 2) @ net.frozen0.t()).sum()).backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda n: Packed(torch.ones(2 + n, dtype=torch.int8), torch.ones(1)), "shape"),
        (lambda n: Packed(torch.ones(2, dtype=torch.int8), torch.ones(1 + n)), r"scale, float32 \(2,\)"),
        (lambda n: Packed(torch.ones(2, dtype=torch.int8), torch.ones(1), 4 * (1 + n)), "'bits', 8"),
        (lambda n: [Quantised, Marked][n](torch.ones(2), requires_grad=False), "Marked"),
        (lambda n: Quantised(torch.ones(2), State(torch.ones(1), ["nf4", "fp4"][n])), "fp4"),
        (lambda n: torch.ones(2)[:: 1 - 2 * n] if n == 0 else torch.eye(2).to_sparse(), "sparse"),
    ],
    ids=["shape", "inner shape", "context", "class", "attribute", "layout"],
)
@on_ranks(2)
def test_a_difference_beside_values_is_an_error_by_name(rank, make, words):
    with pytest.raises(AgreementError, match=rf"frozen0.*{words}"):
        trains(rank, Holder([make(rank.rank)]))


@on_ranks(2)
def test_a_frozen_value_that_differs_is_found_by_check_in_sync(rank):
    net = trains(rank, Holder([Packed(torch.ones(2, dtype=torch.int8), torch.ones(()))]))
    if rank.rank:
        net.frozen0.scale.fill_(2.0)
    with pytest.raises(AgreementError, match="frozen0"):
        lockstep.check_in_sync(net)


@on_ranks(2)
def test_trained_parameters_keep_class_and_attributes(rank):
    net = Holder()
    net.trained.weight = Marked(torch.ones(1, 2))
    net.trained.weight.no_decay = True
    weight = net.trained.weight
    trains(rank, net)
    assert net.trained.weight is weight
    assert weight.is_marked
    assert weight.no_decay


class Closed(nn.Parameter):
    """Lets nobody call functions of PyTorch on it, as hypll's parameters on manifolds."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.stride:
            raise TypeError("use .tensor instead")
        return super().__torch_function__(function, types, args, kwargs or {})


@on_ranks(2)
def test_a_parameter_whose_values_cannot_be_read_is_named(rank):
    net = Holder()
    net.trained.weight = Closed(torch.ones(1, 2))
    with pytest.raises(NotReplicableError, match=r"parameter trained.weight is a Closed.*use .tensor instead"):
        trains(rank, net)
