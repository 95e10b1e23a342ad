"""Weights are of a window: from its first block to the backward that synchronises gradients stay as they are."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn

import lockstep
import small_modules
from lockstep.errors import OptionError, PeerError
from programs.ranks import on_ranks, replicated, scalars
from small_modules import chain, fails_in_backward, one_weight


class Net(nn.Module):
    """A gradient of `x` for each weight; of as many weights as there are layers."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(chain(count)).double()

    def forward(self, x, used=slice(None)):
        return sum(layer(x) for layer in self.layers[used])


def x_of(rank, value=1.0):
    return small_modules.x_of(rank, value, torch.float64)


def net(rank, count=2):
    return replicated(rank, lambda: Net(count))


def backward(model, x, weight=None, last=True, part=False):
    """One micro-batch; `part`: past the module's forward."""
    with lockstep.accumulate(model, last=last, weight=weight):
        (Net.forward(model, x) if part else model(x)).sum().backward()


def to_none(model):
    model.zero_grad()


def to_zero(model):
    model.zero_grad(set_to_none=False)


by_all_or_one = pytest.mark.parametrize("by", [[0, 1], [1]])
clears = pytest.mark.parametrize("clear", [to_none, to_zero], ids=lambda each: each.__name__)
parts = pytest.mark.parametrize("part", [False, True], ids=["module", "part"])


def refused(call, *args, **kwargs):
    """Return what a round raises here."""
    with pytest.raises((OptionError, PeerError)) as caught:
        call(*args, **kwargs)
    return caught.value


def next_batch(rank, model):
    """No gradient is left; what the next batch gives all parameters."""
    left = scalars(model)
    backward(model, x_of(rank), weight=1)
    return left, scalars(model)


def check_refused_by(ranks, rank, model, error, message):
    """These ranks have said why, the others have heard of it, and the next batch is right on all."""
    tells = rank.rank in ranks
    assert type(error) is (OptionError if tells else PeerError)
    assert (message if tells else f"backward failed on rank {ranks[0]}") in str(error)
    assert next_batch(rank, model) == ([None, None], [1.5, 1.5])


# ---------------------------------------------------------------------------------------- it begins without gradients

GRADIENTS_BEFORE = {
    "reduced": lambda model, x: model(x).sum().backward(),
    "reduced with a weight": lambda model, x: backward(model, x, weight=1),
    "piled up": lambda model, x: backward(model, x, last=False),
    "by hand": lambda model, x: setattr(model.layers[0].weight, "grad", torch.ones(1, 1, dtype=torch.float64)),
}


@pytest.mark.parametrize("before", GRADIENTS_BEFORE)
@pytest.mark.parametrize("blocks", [1, 2])
@by_all_or_one
@parts
@on_ranks(2)
def test_gradients_before_the_first_block_are_an_error(rank, before, blocks, by, part):
    message = "parameter layers.0.weight had a gradient when the first block of accumulate(weight=...)"
    model = net(rank)
    GRADIENTS_BEFORE[before](model, x_of(rank))
    if rank.rank not in by:
        model.zero_grad()
    for _ in range(blocks - 1):
        backward(model, x_of(rank), weight=1, last=False, part=part)
    check_refused_by(by, rank, model, refused(backward, model, x_of(rank), weight=1, part=part), message)


@clears
@parts
@on_ranks(2)
def test_gradients_that_are_none_or_zero_are_none(rank, clear, part):
    model, seen = net(rank), []
    for _ in range(3):
        backward(model, x_of(rank), weight=1, last=False, part=part)
        backward(model, x_of(rank), weight=1, part=part)
        seen.append(scalars(model))
        clear(model)
    assert seen == [[1.5, 1.5]] * 3


# -------------------------------------------------------------------------------- gradients stay as they are inside it

CHANGES = {
    "to none": to_none,
    "to zero": to_zero,
    "by an optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "one to none": lambda model: to_none(model.layers[1]),
    "one to zero": lambda model: to_zero(model.layers[1]),
    "in place": lambda model: [p.grad.zero_() for p in model.parameters()],
    "scaled": lambda model: [p.grad.mul_(3.0) for p in model.parameters()],
    "replaced": lambda model: [setattr(p, "grad", p.grad * 3.0) for p in model.parameters()],
}
CHANGED = "was written, replaced or given up since a backward pass with a weight"


@pytest.mark.parametrize("change", CHANGES)
@by_all_or_one
@parts
@on_ranks(2)
def test_gradients_that_are_changed_between_blocks_are_an_error(rank, change, by, part):
    model = net(rank)
    backward(model, x_of(rank), weight=10, last=False, part=part)
    if rank.rank in by:
        CHANGES[change](model)
    check_refused_by(by, rank, model, refused(backward, model, x_of(rank), weight=1, part=part), CHANGED)


@clears
@pytest.mark.parametrize("passes", [0, 1])
@on_ranks(2)
def test_gradients_that_are_given_up_between_forward_and_backward_are_an_error(rank, clear, passes):
    """Also after another backward in the same block."""

    def in_the_block(rank, model):
        with lockstep.accumulate(model, weight=1):
            for _ in range(passes):
                with model.no_sync():
                    model(x_of(rank)).sum().backward()
            loss = model(x_of(rank)).sum()
            clear(model)
            loss.backward()

    model = net(rank)
    if not passes:
        backward(model, x_of(rank), weight=10, last=False)
    check_refused_by([0, 1], rank, model, refused(in_the_block, rank, model), CHANGED)


@on_ranks(2)
def test_several_backwards_in_one_block_count_as_one(rank):
    model = net(rank)
    backward(model, x_of(rank), weight=1, last=False)
    with lockstep.accumulate(model, weight=2):
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        with lockstep.accumulate(model, last=False):
            model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
    assert scalars(model) == [12 / 6] * 2


@on_ranks(2)
def test_blocks_inside_of_one_another_count_each(rank):
    model = net(rank)
    with lockstep.accumulate(model, weight=2):
        backward(model, x_of(rank), weight=1, last=False)
        model(x_of(rank)).sum().backward()
    assert scalars(model) == [6 / 6] * 2


@clears
@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_backward_after_the_one_that_has_synchronised_in_a_block_is_an_error(rank, clear, fails):
    model, x = net(rank), x_of(rank)
    with lockstep.accumulate(model, weight=4):
        if fails:
            with pytest.raises((ValueError, PeerError)):
                model(fails_in_backward(model.layers[0](x), rank.rank == 1, ValueError)).sum().backward()
        else:
            model(x).sum().backward()
        clear(model)
        error = refused(model(x).sum().backward)
    check_refused_by([0, 1], rank, model, error, "follows the one that has synchronised in the same block")


# ------------------------------------------------------------------------------------------------ it ends with a round


@on_ranks(2)
def test_weights_go_with_a_round_that_has_failed(rank):
    model = net(rank)
    backward(model, x_of(rank), weight=10, last=False)
    x = model.layers[1](x_of(rank))
    with pytest.raises(ValueError if rank.rank else PeerError):
        backward(model, fails_in_backward(x, rank.rank == 1, ValueError), weight=2)
    assert next_batch(rank, model) == ([None, None], [1.5, 1.5])


@on_ranks(2)
def test_weights_go_with_a_round_of_several_modules_that_has_failed(rank):
    a, b = net(rank, 1), net(rank, 1)
    x = x_of(rank).requires_grad_()
    with lockstep.accumulate(a, last=False, weight=10), lockstep.accumulate(b, last=False, weight=10):
        (a(x) + b(x)).sum().backward()
    with (
        pytest.raises(ValueError if rank.rank else PeerError),
        lockstep.accumulate(a, weight=10),
        lockstep.accumulate(b, weight=10),
    ):
        (a(x) + b(fails_in_backward(x, error=ValueError) if rank.rank else x)).sum().backward()
    with lockstep.accumulate(a, weight=1), lockstep.accumulate(b, weight=1):
        (a(x) + b(x)).sum().backward()
    assert (scalars(a), scalars(b)) == ([1.5], [1.5])


@on_ranks(2)
def test_a_window_that_is_refused_for_one_of_several_modules(rank):
    """The other one is reduced all the same."""
    a, b = net(rank), net(rank)
    if rank.rank:
        a.layers[0].weight.grad = torch.ones(1, 1, dtype=torch.float64)
    refusal = pytest.raises(OptionError if rank.rank else PeerError)
    with refusal, lockstep.accumulate(a, weight=1), lockstep.accumulate(b, weight=1):
        (a(x_of(rank)) + b(x_of(rank))).sum().backward()
    assert (scalars(a), scalars(b)) == ([None, None], [1.5, 1.5])


# ------------------------------------------------------------------------------------------ exceptions leave its blocks


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_a_block_that_fails_before_its_backward_does_not_count(rank, last, first):
    """Another one may stand in for it."""
    model = net(rank)
    if not first:
        backward(model, x_of(rank), weight=1, last=False)
    if rank.rank:
        with pytest.raises(KeyError), lockstep.accumulate(model, last=last, weight=100):
            raise KeyError
        with pytest.raises(RuntimeError), lockstep.accumulate(model, last=last, weight=100):
            model(torch.ones(3, 3).double())
    backward(model, x_of(rank), weight=1)
    assert scalars(model) == [1.5, 1.5]


@on_ranks(2)
def test_a_block_that_fails_before_any_backward_leaves_no_window(rank):
    model = net(rank)
    model(x_of(rank)).sum().backward()
    with pytest.raises(KeyError), lockstep.accumulate(model, weight=100):
        raise KeyError
    for _ in range(2):
        model(x_of(rank)).sum().backward()  # without a weight, on top of the gradients that are there
    assert scalars(model) == [4.5, 4.5]


def after_a_backward(model, x):
    backward(model, x)
    raise KeyError


def in_a_backward(model, x):
    backward(model, fails_in_backward(model.layers[0](x), error=KeyError))


def in_a_backward_within(model, x):
    with pytest.raises(KeyError):
        in_a_backward(model, x)


@pytest.mark.parametrize("how", [after_a_backward, in_a_backward, in_a_backward_within], ids=lambda how: how.__name__)
@pytest.mark.parametrize("blocks", [0, 1])
@on_ranks(2)
def test_what_has_accumulated_in_a_block_that_fails_is_given_up_on_all_ranks(rank, how, blocks):
    model = net(rank)
    for _ in range(blocks):
        backward(model, x_of(rank), weight=1, last=False)
    try:
        with lockstep.accumulate(model, last=False, weight=1):
            if rank.rank:
                how(model, x_of(rank))
            else:
                backward(model, x_of(rank))
    except KeyError:
        pass
    check_refused_by(
        [1],
        rank,
        model,
        refused(backward, model, x_of(rank), weight=1),
        "gradients that have accumulated with a weight are not complete",
    )


@pytest.mark.parametrize("how", [after_a_backward, in_a_backward], ids=lambda how: how.__name__)
@pytest.mark.parametrize("context", [False, True])
@on_ranks(2)
def test_a_micro_batch_that_fails_may_be_left_out(rank, how, context):
    """The whole window is, on all ranks, and nobody sees an error."""
    model = net(rank)
    if context:
        with lockstep.accumulate(model, last=False, weight=1), lockstep.loop.skip_on(KeyError, modules=[model]):
            how(model, x_of(rank)) if rank.rank else backward(model, x_of(rank))
    else:
        try:
            with lockstep.accumulate(model, last=False, weight=1):
                how(model, x_of(rank)) if rank.rank else backward(model, x_of(rank))
        except KeyError:
            with model.no_sync():
                lockstep.loop.skip_batch(model)
    backward(model, x_of(rank), weight=1)
    assert (lockstep.loop.skipped(model), *next_batch(rank, model)) == (True, [None, None], [1.5, 1.5])


@on_ranks(2)
def test_a_step_after_one_that_was_left_out_is_not_left_out(rank):
    """Also where the program asks after each micro-batch, outside of batches()."""
    model = net(rank)
    found = []
    for step in range(3):
        model.zero_grad()
        for number in range(2):
            with (
                lockstep.accumulate(model, last=number == 1, weight=1),
                lockstep.loop.skip_on(KeyError, modules=[model]),
            ):
                (after_a_backward if rank.rank and (step, number) == (0, 0) else backward)(model, x_of(rank))
            if lockstep.loop.skipped(model):
                break
        found.append(scalars(model))
    assert found == [[None, None], [1.5, 1.5], [1.5, 1.5]]


@on_ranks(2)
def test_an_exception_after_the_round_of_a_block_is_of_no_window(rank):
    model = net(rank)
    with pytest.raises(KeyError), lockstep.accumulate(model, weight=2):
        model(x_of(rank)).sum().backward()
        raise KeyError
    model.zero_grad()
    assert next_batch(rank, model) == ([None, None], [1.5, 1.5])


# ------------------------------------------------------------------------- gradients that tell little by themselves


class Lora(nn.Module):
    """A layer whose first part gets a gradient of zero for as long as its second part is zero."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.other = (nn.Parameter(torch.full((2,), v, dtype=torch.float64)) for v in (1.0, 0.0, 1.0))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, used, x):
        terms = {"lora": self.a * self.b * x, "a": self.a * self.b.detach() * x, "other": self.other * x}
        return self.empty.sum() if used == "empty" else terms[used].sum()


def lora(rank, clear, cap=None):
    """With gradients in the memory of a bucket, from a round before."""
    model = lockstep.replicate(Lora(), process_group=rank.group, bucket_cap_mb=cap)
    sum(model(used, 1.0) for used in ("lora", "other", "empty")).backward()
    clear(model)
    return model


@clears
@parts
@pytest.mark.parametrize("cap", [None, 1.6e-5], ids=["one bucket", "several"])
@on_ranks(2)
def test_a_gradient_that_is_zero_or_has_no_elements_has_a_weight(rank, clear, part, cap):
    model, half = lora(rank, clear, cap), 3 / 40
    for used, expected in (
        (["lora", "other"], [0, half, half]),
        (["a", "other"], [0, 0, half]),
        (["empty", "other"], [0, 0, half]),
        (["empty", "empty", "a", "other"], [0, 0, 3 / 80]),
        (["a", "lora"], [0, half, 0]),
    ):
        for number, each in enumerate(used):
            with lockstep.accumulate(model, last=number == len(used) - 1, weight=10):
                (model.forward(each, rank.rank + 1.0) if part else model(each, rank.rank + 1.0)).backward()
        found = [0.0 if p.grad is None else p.grad[0].item() for p in (model.a, model.b, model.other)]
        assert found == pytest.approx(expected)
        clear(model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:backward.create_graph=True. went through")
@pytest.mark.parametrize("count", [1, 2])
@parts
@on_ranks(2)
def test_with_create_graph_which_sets_another_tensor(rank, count, part):
    model = net(rank, count)
    for last in (False, False, True):
        with lockstep.accumulate(model, last=last, weight=1):
            (Net.forward(model, x_of(rank)) if part else model(x_of(rank))).sum().backward(create_graph=True)
    assert scalars(model) == [(3 + 6) / 6] * count


@on_ranks(2)
def test_a_backward_in_another_thread_than_the_block(rank):
    model, seen = net(rank), []
    for part in (False, True):
        model.zero_grad()
        for last in (False, True):
            with lockstep.accumulate(model, last=last, weight=1):
                loss = (Net.forward(model, x_of(rank)) if part else model(x_of(rank))).sum()
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
        seen.append(scalars(model))
    assert seen == [[1.5, 1.5]] * 2


# ----------------------------------------------------------------------------------------- batches that count nothing


@clears
@on_ranks(2)
def test_a_batch_that_counts_nothing_has_no_weight(rank, clear):
    """Rank 0 has one of three batches, of two micro-batches each. What counts nothing adds zeros to its gradients."""
    model = lora(rank, clear)
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        clear(model)
        for used in ("a", "a" if number < 2 else "other"):
            with lockstep.accumulate(model, last=used == "other", weight=5):
                model.forward(used, rank.rank + 1.0).backward()
        if number < 2:
            with lockstep.accumulate(model, weight=5):
                model.forward("other", rank.rank + 1.0).backward()
    found = [0.0 if p.grad is None else p.grad[0].item() for p in (model.a, model.b, model.other)]
    assert found == [0.0, 0.0, pytest.approx(2 / 10)]


@parts
@clears
@on_ranks(2)
def test_what_has_accumulated_before_a_rank_runs_out_has_its_weight(rank, clear, part):
    """Rank 0 has one of three micro-batches; then a loop inside of another goes on with a window."""
    model, seen = net(rank), []
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        backward(model, x_of(rank), weight=1, last=number == 2, part=part)
    seen.append(scalars(model))
    clear(model)
    for _ in lockstep.batches([0], model):
        for _ in lockstep.batches([0] * (1 + rank.rank), model):
            backward(model, x_of(rank), weight=1, last=False, part=part)
        backward(model, x_of(rank), weight=1, part=part)
    assert [*seen, scalars(model)] == [[7 / 4] * 2, [8 / 5] * 2]


@on_ranks(2)
def test_a_backward_that_fails_in_a_batch_that_counts_nothing_is_nobodys(rank):
    model = net(rank)
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        with lockstep.accumulate(model, last=number == 2, weight=1):
            if number == 1 and rank.rank == 0:
                with pytest.raises(KeyError):
                    in_a_backward(model, x_of(rank))
            else:
                model(x_of(rank)).sum().backward()
    assert scalars(model) == [7 / 4] * 2


@pytest.mark.parametrize("how", ["none", "zero", "module"])
@on_ranks(2)
def test_what_is_given_up_without_a_weight_in_a_batch_that_counts_nothing_does_not_count(rank, how):
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number, _ in enumerate(lockstep.batches([0] * (1 + rank.rank), model)):
        if number and how == "module":
            model.zero_grad(set_to_none=False)
        elif number:
            optimizer.zero_grad(set_to_none=how == "none")
        backward(model, x_of(rank), last=bool(number))
    assert scalars(model) == [2.0, 2.0]


@clears
@on_ranks(2)
def test_gradients_given_up_in_a_batch_that_counts_nothing_are_an_error(rank, clear):
    model = net(rank)
    for number, _ in enumerate(lockstep.batches([0] * (1 + rank.rank), model)):
        if number == 0:
            backward(model, x_of(rank), weight=1, last=False)
        else:
            if rank.rank == 0:
                clear(model)
            error = refused(backward, model, x_of(rank), weight=1)
    check_refused_by([0], rank, model, error, CHANGED)


@parts
@pytest.mark.parametrize("weight", [None, 1])
@pytest.mark.parametrize("piles", [False, True])
@on_ranks(2)
def test_a_module_that_changes_in_a_batch_that_counts_nothing_is_an_error(rank, part, weight, piles):
    """Rank 0 has run out, and the others may go on, so they hear of it."""

    message = "parameter layers.1.weight was put into the module or taken out of it within a window"
    model, error = net(rank), None
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        if number == 1:
            model.layers[1] = one_weight().double()
            if piles:
                backward(model, x_of(rank), last=False, part=part)
        if number == 1 + piles:
            error = refused(backward, model, x_of(rank), weight=None if piles else weight, part=part)
        else:
            backward(model, x_of(rank), last=number != 1, part=part)
            model.zero_grad()
    model.zero_grad()
    check_refused_by([0], rank, model, error, message)


# ----------------------------------------------------------------------------------------------- modules that change


@parts
@pytest.mark.parametrize("all_new", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@on_ranks(2)
def test_a_module_that_has_changed_before_the_first_block(rank, all_new, count, part):
    model, seen = net(rank), []
    for _ in range(2):
        for index in (0, 1) if all_new else (1,):
            model.layers[index] = one_weight().double()
        for number in range(count):
            backward(model, x_of(rank), 2 * rank.rank + 1.0, number == count - 1, part)
        seen.append(scalars(model))
        model.zero_grad()
    assert seen == [[3 / 4] * 2] * 2


@on_ranks(2)
def test_a_new_parameter_with_a_gradient_is_none_to_begin_with(rank):
    message = "parameter layers.1.weight had a gradient when the first block of accumulate(weight=...)"
    model = net(rank)
    model.layers[1] = one_weight().double()
    model.layers[1].weight.grad = torch.ones(1, 1, dtype=torch.float64)
    error = refused(backward, model, x_of(rank), weight=1)
    check_refused_by([0, 1], rank, model, error, message)


@parts
@pytest.mark.parametrize("how", ["replaced", "and put back", "in the last block"])
@by_all_or_one
@on_ranks(2)
def test_a_module_that_changes_between_blocks_is_an_error(rank, how, by, part):
    def last(rank, model):
        with lockstep.accumulate(model, weight=1):
            if how == "in the last block" and rank.rank in by:
                model.layers[1] = one_weight().double()
            (Net.forward(model, x_of(rank)) if part else model(x_of(rank))).sum().backward()

    message = "parameter layers.1.weight was put into the module or taken out of it within a window"
    model = net(rank)
    backward(model, x_of(rank), weight=3, last=False)
    kept = model.layers[1]
    if how != "in the last block" and rank.rank in by:
        model.layers[1] = one_weight().double()
    backward(model, x_of(rank), weight=3, last=False, part=part)
    if how == "and put back":
        model.layers[1] = kept
    error = refused(last, rank, model)
    model.layers[1] = kept
    check_refused_by(by, rank, model, error, message)


@on_ranks(2)
def test_a_pass_that_reaches_new_parameters_alone_has_a_weight(rank):
    """Past the module's forward, and an exception after it."""
    model = net(rank, 2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with lockstep.accumulate(model, last=False, weight=3):
        model.layers[0](x_of(rank)).sum().backward()
    with lockstep.accumulate(model, weight=1):
        model.layers[0](x_of(rank)).sum().backward()
    assert scalars(model)[0] == (2 + 4) / 8
    model.zero_grad()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(KeyError), lockstep.accumulate(model, last=False, weight=3):
        model.layers[0](x_of(rank)).sum().backward()
        raise KeyError
    check_refused_by([0, 1], rank, model, refused(backward, model, x_of(rank), weight=1), "are not complete")


# ------------------------------------------------------------------------------------------------------- all together


class Expected:
    """What every rank's gradients must be."""

    def __init__(self, world):
        self.reduced, self.piled, self.weight = 0.0, [0.0] * world, 0.0
        self.there = [False] * world
        """By rank, whether there are any."""
        self.is_open = self.is_broken = False

    def block(self, values, weights, reaches):
        self.is_open = True
        self.piled = [a + b for a, b in zip(self.piled, values, strict=True)]
        self.there = [a or b for a, b in zip(self.there, reaches, strict=True)]
        self.weight += sum(weights)

    def round(self):
        self.reduced = sum(self.piled) / self.weight if self.weight else 0.0
        self.piled, self.weight, self.is_open = [0.0] * len(self.piled), 0.0, False
        self.there = [True] * len(self.piled)

    def zero(self, to_none):
        self.is_broken = self.is_broken or (self.is_open and any(self.there))
        self.reduced, self.piled = 0.0, [0.0] * len(self.piled)
        self.there = [there and not to_none for there in self.there]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
@on_ranks(2)
def test_any_order_of_things(rank, seed):
    for number in range(30):
        draw = random.Random(f"{seed}, {number}")
        model, expected = net(rank, draw.choice([1, 3])), Expected(rank.world)
        part = draw.random() < 0.5
        for _ in range(8):
            step = draw.choice(["local"] * 3 + ["round"] * 3 + ["failure", "zero", "exception"])
            values, weights = ([draw.randrange(5) for _ in range(rank.world)] for _ in range(2))
            reaches = [step != "local" or draw.random() < 0.6 for _ in range(rank.world)]
            values = [value * reach for value, reach in zip(values, reaches, strict=True)]
            after, to_none = draw.random() < 0.5, draw.random() < 0.5
            x = torch.full((1, 1), float(values[rank.rank]), dtype=torch.float64)
            if step == "zero" or (not expected.is_open and any(expected.there)):
                model.zero_grad(to_none)
                expected.zero(to_none)
            if step == "local":
                with lockstep.accumulate(model, last=False, weight=weights[rank.rank]):
                    loss = (Net.forward(model, x) if part else model(x)) if reaches[rank.rank] else x.requires_grad_()
                    loss.sum().backward()
                expected.block(values, weights, reaches)
            elif step == "round" and expected.is_broken:
                refused(backward, model, x, weights[rank.rank], True, part)
                expected = Expected(rank.world)
            elif step == "round":
                backward(model, x, weights[rank.rank], True, part)
                expected.block(values, weights, reaches)
                expected.round()
            elif step == "failure":
                with pytest.raises((ValueError, PeerError, OptionError)), lockstep.accumulate(model, weight=7):
                    y = model(x)
                    (y + model(fails_in_backward(y, rank.rank == 1, ValueError))).sum().backward()
                expected = Expected(rank.world)
            elif step == "exception":
                with pytest.raises(KeyError), lockstep.accumulate(model, last=False, weight=7):
                    if after:
                        model(x).sum().backward()
                        expected.block(values, weights, reaches)
                        expected.is_broken = True
                    raise KeyError
            wanted = expected.reduced + expected.piled[rank.rank]
            for grad in scalars(model):
                assert (grad or 0.0) == pytest.approx(wanted), f"program {number} of {seed}, after {step}"
