"""Where the values of parameters and buffers lie, whatever their class, layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep._base.inner_tensors import as_bytes, check_trained, describe, inner_tensors, inner_tensors_of, read_bytes
from lockstep.errors import NotReplicableError
from tensor_classes import DTYPES, Attributed, Marked, Opaque, Packed, Quantised, State


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype_can_be_written_and_compared(dtype):
    tensor = torch.empty(2, 3, dtype=dtype).t()
    (inner,) = inner_tensors(tensor)
    assert inner.shape == (3, 2)
    assert inner.stride() == (1, 3)
    wanted = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    value = (wanted % 2).bool() if dtype is torch.bool else wanted.view(inner.dtype)
    inner.copy_(value.view(3, 2))
    assert torch.equal(inner.clone(), value.view(3, 2))
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert torch.equal(memory.view(inner.dtype).view(2, 3).t(), value.view(3, 2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5.0).view(1, 5)[:, 2],
        torch.ones(()).expand(1, 1),
        torch.tensor([[1j, 2]]).conj().t(),
        torch.tensor([1j]).conj().imag,
        torch.empty(0, 3),
    ],
    ids=["one of a column", "one expanded", "conjugated", "negated", "none"],
)
def test_bytes_of_any_strides(tensor):
    values = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    assert as_bytes(tensor).view(tensor.dtype).tolist() == values.flatten().tolist()
    assert bytes(read_bytes(tensor)) == bytes(values.untyped_storage())


def test_a_plain_parameter_is_itself_and_needs_no_description():
    parameter = nn.Parameter(torch.ones(2))
    (inner,) = inner_tensors(parameter)
    assert type(inner) is torch.Tensor
    assert inner.data_ptr() == parameter.data_ptr()
    assert not inner.requires_grad
    assert not describe(parameter)


def test_a_class_that_says_where_its_values_lie():
    payload, scale = torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1)
    packed = nn.Parameter(Packed(payload, scale), requires_grad=False)
    inner_tensors(packed)[0].fill_(5)
    inner_tensors(packed)[1].fill_(0.5)
    assert packed.whole().tolist() == [[2.5] * 3] * 2
    assert describe(packed) == "Packed of payload, int8 (2, 3), scale, float32 (2, 1), 'bits', 8"


def test_nested_classes():
    inside = Packed(torch.zeros(2, dtype=torch.int8), torch.ones(1))
    assert len(inner_tensors(Packed(torch.zeros(2, dtype=torch.uint8), inside))) == 3


def test_attributes_of_a_frozen_class_belong_to_its_values():
    state = State(torch.ones(3), nested=State(torch.zeros(1), "fp8"))
    parameter = Quantised(torch.zeros(4, dtype=torch.uint8), state)
    own, absmax, nested = inner_tensors(parameter)
    assert own.data_ptr() == parameter.data_ptr()
    assert type(own) is torch.Tensor
    assert absmax.data_ptr() == state.absmax.data_ptr()
    assert nested.data_ptr() == state.nested.absmax.data_ptr()
    assert "'nf4'" in describe(parameter)
    assert describe(parameter) != describe(Quantised(torch.zeros(4, dtype=torch.uint8), State(torch.ones(3), "fp4")))


def test_attributes_of_trained_and_plain_parameters_are_the_programs_own():
    trained, plain = Marked(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    trained.main_grad = plain.main_grad = torch.ones(2)
    assert len(inner_tensors(trained)) == len(inner_tensors(plain)) == 1


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(layout):
    options = {"blocksize": (1, 1)} if layout.startswith("bs") else {}
    sparse = torch.eye(3).to_sparse(layout=getattr(torch, f"sparse_{layout}"), **options)
    *_, values = inner_tensors(sparse)
    values.fill_(7)
    assert torch.equal(sparse.to_dense(), 7 * torch.eye(3))
    assert f"sparse_{layout}" in describe(sparse)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors():
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    assert "scale 0.5" in describe(tensor)
    inner_tensors(tensor)[0].fill_(6)
    assert tensor.dequantize().tolist() == [3.0, 3.0]


def test_a_class_that_does_not_say_where_its_values_lie_is_refused_by_name():
    with pytest.raises(NotReplicableError, match=r"^parameter w cannot be .* a Opaque does not say .* ignored_modules"):
        inner_tensors_of("parameter w", Opaque(torch.ones(2)))


def test_a_trained_class_with_code_for_operations_is_refused_by_name():
    packed = nn.Parameter(Packed(torch.zeros(2, dtype=torch.int8), torch.ones(1)))
    with pytest.raises(NotReplicableError, match=r"parameter w is trained and a Packed.* ignored_modules"):
        check_trained("w", packed)
    with pytest.raises(NotReplicableError, match=r"trained and a tensor of layout torch.sparse_coo"):
        check_trained("w", nn.Parameter(torch.eye(2).to_sparse()))


@pytest.mark.parametrize("kind", [nn.Parameter, Marked, Quantised, lambda t: nn.Parameter(t.as_subclass(Attributed))])
def test_classes_that_only_add_attributes_or_functions_are_trained(kind):
    check_trained("w", kind(torch.ones(2)))
