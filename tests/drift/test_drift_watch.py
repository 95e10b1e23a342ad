"""What is looked at, and when; as plain functions."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep._base.digests import slice_digest
from lockstep.distributed.reduction.module import drift
from lockstep.distributed.reduction.module.equal_values import Differences
from lockstep.distributed.reduction.module.optimizer_numbers import (
    SAME_NUMBERS,
    Known,
    difference_in_numbers,
    numbers_of,
)
from lockstep.distributed.reduction.module.value_digests import APART, ROUNDS, Look, Table, comparable_state

DOCS = Path(__file__).parents[2] / "docs"


def table(*sizes):
    return Table([(str(number), torch.zeros(size)) for number, size in enumerate(sizes)])


@pytest.mark.parametrize(
    "sizes", [(3,), (3, 4), [5] * 30, [5] * 33, [5] * 65, [5] * 300, [1 << 20] * 9, (1 << 22, 7), [40_000] * 200]
)
def test_all_values_are_looked_at_within_256_rounds(sizes):
    here = table(*sizes)
    for first in (0, 1, 77, 10_000):
        looks = [here.due(number) for number in range(first, first + ROUNDS)]
        assert {*itertools.chain(*looks)} == {*range(len(here.slices))}
        apart = [number for number, look in enumerate(looks) if look]
        assert max(b - a for a, b in itertools.pairwise(apart)) <= APART
        assert max(map(len, looks)) <= -(-len(here.slices) // (ROUNDS // APART)) + 1


def test_a_slice_has_at_most_64_kib_and_slices_cover_everything():
    here = table(5, 40_000, 16_384, *[1] * 33)
    slices = [(each.parameter, each.start) for each in here.slices]
    assert slices[:5] == [(0, 0), (1, 0), (1, 16384), (1, 32768), (2, 0)]
    assert slices[5:] == [(number, 0) for number in range(3, 36)]
    assert table().due(0) == range(0)


def test_a_look_at_few_parameters_has_one_slice_as_small_as_all_looks_allow():
    for sizes, size in (([4096] * 4 + [64] * 4, 595), ([40_000], 1143), ([1 << 16] * 8, 1 << 14)):
        here = table(*sizes)
        assert here.slices[0].stop == size
        assert max(len(here.due(number)) for number in range(ROUNDS)) == 1


def test_no_memory_is_read_that_a_program_has_freed():
    parameter = nn.Parameter(torch.arange(40.0))
    here = Table([("a", parameter)])
    assert here.sample() == bytes(torch.arange(4.0).view(torch.uint8).tolist())
    look = Look(here, 0, whole=True)
    look.take([], here.ids, [], state=True)
    assert look.digest() not in (0, 1)
    parameter.untyped_storage().resize_(0)
    assert here.sample() is None
    look.take([], here.ids, [], state=True)
    assert look.digest() == 1  # of nothing


def test_slices_grow_with_the_module_so_that_a_look_is_no_thousand_launches():
    layers = [(str(number), torch.empty(4096, 11008, device="meta")) for number in range(160)]
    here = Table([*layers, ("bias", torch.empty(5, device="meta"))])
    assert max(each.stop - each.start for each in here.slices) == 1 << 22
    assert max(len(here.due(number)) for number in range(ROUNDS)) < 60


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]


def digest_of_look(values, *, large):
    """The digest of a whole look at two parameters, of which these are a slice in the middle of the large one, or the
    small one."""
    first, second = torch.ones(3 << 14).to(values.dtype), torch.ones_like(values)
    (first[1 << 14 : (1 << 14) + len(values)] if large else second).copy_(values)
    here = Table([("a", first), ("b", second)])
    look = Look(here, 0, whole=True)
    look.take([], here.ids, [], state=True)
    return look.digest()


DIGESTS = {
    "slice": (lambda values: int(slice_digest(values)), 8),
    "look, large": (lambda values: digest_of_look(values, large=True), 1),
    "look, small": (lambda values: digest_of_look(values, large=False), 1),
}
"""And of how many bits of a byte: a look has digests of slices."""


@pytest.mark.parametrize(("digest", "bits"), DIGESTS.values(), ids=DIGESTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_and_every_place_of_a_slice_counts(dtype, digest, bits):
    values = torch.arange(1, 41).to(dtype)
    before, data = digest(values), values.view(torch.uint8)
    for place in range(len(data)):
        for bit in [(place + each) % 8 for each in range(bits)]:
            data[place] ^= 1 << bit
            assert digest(values) != before
            data[place] ^= 1 << bit
    assert digest(values) == before
    values[[3, 21]] = values[[21, 3]]
    assert digest(values) != before
    values[[3, 21]] = values[[21, 3]]
    if dtype.is_floating_point:
        values[[3, 21]] *= -1
        assert digest(values) != before


def test_equal_bits_have_equal_digests_even_if_they_are_no_number():
    values = torch.full((5,), torch.nan)
    assert slice_digest(values) == slice_digest(values.clone())
    assert slice_digest(torch.zeros(5)) != slice_digest(-torch.zeros(5)) != slice_digest(values)


def numbers(**group):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0].update(group)
    return dict(numbers_of(optimizer, lambda group: True).lines())


def test_all_numbers_of_a_group_count_but_those_that_say_how_and_those_of_schedulers():
    lines = numbers(lr=torch.tensor(0.5), betas=(0.9, 1), own=3, text="x", foreach=True, fused=False, initial_lr=2.0)
    names = {name.removeprefix("optimizer SGD, group 0, "): text for name, text in lines.items()}
    assert names == {
        "betas": "(0.9, 1)",
        "dampening": "0",
        "lr": "0.5",
        "maximize": "0",
        "momentum": "0",
        "nesterov": "0",
        "own": "3",
        "weight_decay": "0",
    }


def test_equal_numbers_of_other_types_are_equal():
    assert numbers(lr=1) == numbers(lr=1.0) == numbers(lr=torch.tensor(1.0)) == numbers(lr=True)
    assert numbers(lr=float("nan")) == numbers(lr=float("nan")) != numbers(lr=float("inf"))


def test_the_first_number_that_differs_is_named_with_all_values():
    told = {0: numbers(lr=0.1), 1: numbers(lr=0.01), 2: numbers(lr=0.1)}
    assert difference_in_numbers(told) == "optimizer SGD, group 0, lr: 0.1 on ranks 0, 2, 0.01 on rank 1"
    assert difference_in_numbers({0: told[0], 2: told[2]}) == ""
    assert difference_in_numbers({}) == ""
    more = {**told[0], "optimizer SGD, group 1, lr": "3"}
    assert difference_in_numbers({0: told[0], 1: more}) == "optimizer SGD, group 1, lr: nothing on rank 0, 3 on rank 1"


def test_numbers_are_read_again_where_a_group_has_become_another():
    first, second, rate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), torch.tensor(0.1)
    for own, tensors, changes, same in (
        ({"lr": 0.1}, [], {}, True),
        ({"lr": 0.1}, [], {"lr": 0.2}, False),
        ({"lr": 0.1}, [], {"momentum": 0.9}, False),
        ({"lr": 0.1}, [], {"lr": torch.tensor([0.1, 0.1])}, False),
        ({"lr": 0.1}, [], {"params": [second]}, False),
        ({"lr": 0.1}, [], {"params": [first, second]}, False),
        ({"lr": rate}, [rate], {}, True),
        ({"lr": rate}, [rate], {"lr": rate.clone()}, False),  # written in place later, perhaps
    ):
        group = {"params": [first], **own}
        known = Known([dict(group)], numbers_of(torch.optim.SGD([first]), bool), 1, tensors)
        group.update(changes)
        assert known.is_as_before([group]) is same, changes
    assert not Known([], known.numbers, 1, []).is_as_before([group]), "a tensor on the CPU may be written in place"


class Own(torch.optim.AdamW):
    pass


def test_state_is_compared_of_pytorch_s_own_optimizers():
    for kind, names in ((torch.optim.AdamW, ["exp_avg", "exp_avg_sq"]), (Own, [])):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter])
        assert comparable_state(optimizer, parameter) == []
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert [name for name, _ in comparable_state(optimizer, parameter)] == names


def causes():
    """Return the causes that errors name."""
    weights, states, buffers = ["parameter a", "parameter b"], ["exp_avg of parameter a in Adam"], ["buffer c"]
    named = (weights, weights + states, weights[:1], states, buffers)
    found = [Differences(names, 1, "", 2).cause for names in named]
    return [*found, drift._LOCAL, drift._SINCE_REPLICATED, f"Numbers of an optimizer differ: {SAME_NUMBERS}"]


def test_pages_name_causes_in_the_words_of_errors():
    page = (DOCS / "distributed_reference.md").read_text().replace("`", "")
    for each in causes():
        assert f"| {each.replace(': ', ' | ', 1)} |" in page
    begins = [each.partition(":")[0] for each in causes()]
    gallery = (DOCS / "gallery.md").read_text().partition("\n## Ranks that drift apart\n")[2].replace("`", "")
    said = [row.strip("| ").split(" | ")[1] for row in gallery.splitlines() if row.startswith("| ")][1:]
    assert [each for each in said if each not in begins and not each.startswith("optimizer SGD, group 0, lr: ")] == []
