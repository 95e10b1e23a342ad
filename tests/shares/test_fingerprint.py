"""What a fingerprint tells apart, and what it does not."""

import pytest
import torch
from torch import nn

from bit_differences import BIT_DIFFERENCES, Values
from lockstep.errors import OptionError
from lockstep.shares import fingerprint
from tensor_classes import Opaque, Packed


class Module(nn.Module):
    """One parameter, a buffer that is saved, one that is not."""

    def __init__(self, weight: torch.Tensor, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def test_names_dtypes_shapes_and_bits_count():
    zeros = torch.zeros(2, 2)
    found = [fingerprint(Module(zeros)), fingerprint(Module(zeros, "other")), fingerprint(Module(zeros.view(4)))]
    found += [fingerprint(Module(zeros.int())), fingerprint(Module(-zeros)), fingerprint(Module(zeros + 1))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("difference", BIT_DIFFERENCES)
def test_every_difference_in_bits_counts(difference):
    module = Values()
    before = fingerprint(module)
    with torch.no_grad():
        BIT_DIFFERENCES[difference][0](module)
    assert fingerprint(module) != before


def test_only_buffers_that_are_saved_count():
    module = Module(torch.zeros(2))
    before = fingerprint(module)
    module.passing += 1
    assert fingerprint(module) == before
    module.saved += 1
    assert fingerprint(module) != before


def test_inner_tensors_and_what_a_class_has_beside_them_count():
    def of(payload=1, scale=0.5, bits=8):
        return fingerprint(Module(Packed(torch.full((2, 3), payload, dtype=torch.int8), torch.tensor(scale), bits)))

    assert of() == of()
    assert len({of(), of(payload=2), of(scale=0.25), of(bits=4)}) == 4


def test_a_class_that_hides_its_values_is_an_error_by_name():
    with pytest.raises(OptionError, match=r"cannot read parameter weight: a Opaque does not say where"):
        fingerprint(Module(Opaque(torch.ones(2, 3))))


def test_memory_does_not_count():
    values = torch.arange(6.0).view(2, 3)
    assert fingerprint(Module(values)) == fingerprint(Module(values.t().contiguous().t()))


@pytest.mark.parametrize("changed", ["step", "exp_avg"])
def test_the_optimizers_state_counts_and_its_order_does_not(changed):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = fingerprint(model, optimizer)
    state = optimizer.state[model.weight]
    optimizer.state[model.weight] = dict(reversed(state.items()))
    assert fingerprint(model, optimizer) == before
    optimizer.param_groups[0]["lr"] = 7.0
    assert fingerprint(model, optimizer) == before
    state[changed] += 1
    assert fingerprint(model, optimizer) != before
    assert fingerprint(model) != before
