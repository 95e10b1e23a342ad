"""A weight belongs to the gradients that it came with: given up, failed, reduced, kept from before, past the module."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import OptionError, PeerError
from small_modules import fails_in_backward
from threaded import run_ranks


class Net(nn.Module):
    """A gradient of `x` for each weight; of as many weights as there are layers."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False).double() for _ in range(count)])
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x, used=slice(None)):
        return sum(layer(x) for layer in self.layers[used])


def x_of(rank, value=1.0):
    return torch.full((1, 1), value * (rank.rank + 1), dtype=torch.float64)


def net(rank, count=2, **options):
    return lockstep.replicate(Net(count), process_group=rank.group, **options)


def grads(module):
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


def backward(model, x, weight=None, last=True, part=False):
    """One micro-batch; `part`: past the module's forward."""
    with lockstep.accumulate(model, last=last, weight=weight):
        (Net.forward(model, x) if part else model(x)).sum().backward()


def to_none(model):
    model.zero_grad()


def to_zero(model):
    model.zero_grad(set_to_none=False)


clears = pytest.mark.parametrize("clear", [to_none, to_zero], ids=lambda each: each.__name__)
counts = pytest.mark.parametrize("count", [1, 2])
parts = pytest.mark.parametrize("part", [False, True], ids=["module", "part"])


# ------------------------------------------------------------------------------------------ given up


@clears
@counts
@parts
def test_a_weight_goes_with_gradients_that_are_given_up(clear, count, part):
    def call(rank):
        model, seen = net(rank, count), []
        for first in (10, None):
            backward(model, x_of(rank), weight=first, last=False, part=part)
            backward(model, x_of(rank), weight=first, last=False, part=part)
            clear(model)
            backward(model, x_of(rank), weight=1, part=part)
            seen.append(grads(model))
            clear(model)
        return seen

    assert run_ranks(2, call) == [[[1.5] * count] * 2] * 2


@clears
def test_a_weight_goes_with_gradients_that_are_given_up_between_forward_and_backward(clear):
    def call(rank):
        model = net(rank)
        backward(model, x_of(rank), weight=10, last=False)
        with lockstep.accumulate(model, weight=1):
            loss = model(x_of(rank)).sum()
            clear(model)
            loss.backward()
        return grads(model)

    assert run_ranks(2, call) == [[1.5, 1.5]] * 2


def test_a_weight_stays_with_gradients_that_were_scaled_or_replaced():
    def call(rank):
        model, seen = net(rank), []
        for scale in (
            lambda p: p.grad.mul_(3.0),
            lambda p: setattr(p, "grad", p.grad * 3.0),
            lambda p: setattr(p.grad, "data", p.grad.data * 3.0),
        ):
            backward(model, x_of(rank), weight=1, last=False)
            for p in model.parameters():
                scale(p)
            backward(model, x_of(rank), weight=2)
            seen.append(grads(model))
            model.zero_grad()
        return seen

    assert run_ranks(2, call) == [[[2.0, 2.0]] * 3] * 2  # (3 + 1 + 6 + 2) / (1 + 2 + 1 + 2)


@clears
def test_gradients_that_are_given_up_in_part_are_an_error_on_every_rank(clear):
    def call(rank):
        model = net(rank)
        backward(model, x_of(rank), weight=10, last=False)
        if rank.rank:
            clear(model.layers[0])
        with pytest.raises(OptionError if rank.rank else PeerError) as caught:
            backward(model, x_of(rank), weight=1)
        model.zero_grad()
        backward(model, x_of(rank), weight=1)
        return str(caught.value), grads(model)

    (told, first), (message, second) = run_ranks(2, call)
    assert first == second == [1.5, 1.5]
    assert "backward failed on rank 1" in told
    assert (
        "gradient of layers.0.weight that has accumulated on this rank was given up, that of layers.1.weight" in message
    )


# ------------------------------------------------------------------------------------------ failed


@pytest.mark.parametrize("again", ["in the same block", "in another"])
def test_a_weight_goes_with_a_round_that_has_failed(again):
    def call(rank):
        model = net(rank)
        backward(model, x_of(rank), weight=10, last=False)
        with lockstep.accumulate(model, weight=2):
            with pytest.raises(ValueError if rank.rank else PeerError):
                x = model.layers[1](x_of(rank))
                model(fails_in_backward(x, error=ValueError) if rank.rank else x).sum().backward()
            model.zero_grad()
            if again == "in the same block":
                model(x_of(rank)).sum().backward()
        if again == "in another":
            backward(model, x_of(rank), weight=2)
        return grads(model)

    assert run_ranks(2, call) == [[0.75, 0.75]] * 2


def test_a_weight_goes_with_a_round_of_several_modules_that_has_failed():
    def call(rank):
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
        a.zero_grad()
        b.zero_grad()
        with lockstep.accumulate(a, weight=1), lockstep.accumulate(b, weight=1):
            (a(x) + b(x)).sum().backward()
        return grads(a), grads(b)

    assert run_ranks(2, call) == [([1.5], [1.5])] * 2


# ------------------------------------------------------------------------------------------ reduced


@pytest.mark.parametrize("cap", [None, 1e-7])
def test_gradients_from_before_are_not_divided_again(cap):
    def call(rank):
        model, seen = net(rank, bucket_cap_mb=cap), []
        for _ in range(3):
            backward(model, x_of(rank), weight=4)
            seen.append(grads(model)[0])
        backward(model, x_of(rank))  # without a weight: 1.5 on top
        return seen, grads(model)

    assert run_ranks(2, call) == [([0.375, 0.75, 1.125], [2.625, 2.625])] * 2


def test_gradients_from_before_of_another_kind_are_kept():
    """Put there by hand, other ones on each rank; of parameters that this rank, or no rank, has used."""

    def call(rank):
        model = net(rank, 3)
        for n, layer in enumerate(model.layers):
            layer.weight.grad = torch.full((1, 1), 10.0 * n + rank.rank, dtype=torch.float64)
        with lockstep.accumulate(model, weight=4):
            model(x_of(rank), slice(0, 1 + rank.rank)).sum().backward()
        return grads(model)

    first, second = run_ranks(2, call)
    assert first[:2] == second[:2] == [0.5 + 3 / 8, 10.5 + 2 / 8]
    assert (first[2], second[2]) == (20.0, 21.0)


def test_several_backwards_in_one_block_count_as_one():
    def call(rank):
        model = net(rank)
        with lockstep.accumulate(model, weight=4):
            model(x_of(rank)).sum().backward()
            model(x_of(rank, 2.0)).sum().backward()
        first = grads(model)
        model.zero_grad()
        backward(model, x_of(rank), weight=1, last=False)
        with lockstep.accumulate(model, weight=2):
            with model.no_sync():
                model(x_of(rank)).sum().backward()
            model(x_of(rank)).sum().backward()
            model(x_of(rank)).sum().backward()
        return first, grads(model)

    assert run_ranks(2, call) == [([9 / 8] * 2, [pytest.approx(12 / 6)] * 2)] * 2


@counts
def test_gradients_from_before_are_not_divided_again_past_the_module(count):
    def call(rank):
        model, seen = net(rank, count), []
        for _ in range(3):
            backward(model, x_of(rank), weight=4, part=True)
            seen.append(grads(model))
        return seen

    assert run_ranks(2, call) == [[[0.375 * n] * count for n in (1, 2, 3)]] * 2


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


def micro_batches(model, rank, used, part=True, **options):
    """One for each, with a weight of 10; the gradients of ``a``, ``b`` and ``other``."""
    for number, each in enumerate(used):
        with lockstep.accumulate(model, last=number == len(used) - 1, weight=10):
            (model.forward(each, rank.rank + 1.0) if part else model(each, rank.rank + 1.0)).backward(**options)
    return [None if p.grad is None else p.grad[0].item() for p in (model.a, model.b, model.other)]


def of_first_order(rank, clear, part, cap):
    model, seen = lora(rank, clear, cap), []
    for used in (
        ["lora", "other"],
        ["a", "other"],
        ["empty", "other"],
        ["empty", "empty", "a", "other"],
        ["a", "lora"],
    ):
        seen.append([value or 0.0 for value in micro_batches(model, rank, used, part)])
        clear(model)
    return seen


@clears
@parts
@pytest.mark.parametrize("cap", [None, 1.6e-5], ids=["one bucket", "several"])
def test_a_weight_stays_whose_gradient_is_zero_or_has_no_elements(clear, part, cap):
    half, quarter = 3 / 40, 3 / 80
    expected = [[0, half, half], [0, 0, half], [0, 0, half], [0, 0, quarter], [0, half, 0]]
    for result in run_ranks(2, of_first_order, clear, part, cap):
        assert result == [[pytest.approx(value) for value in each] for each in expected]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:backward.create_graph=True. went through a replicated module")
@counts
def test_past_the_module_with_create_graph_which_sets_another_tensor(count):
    def call(rank):
        model = net(rank, count)
        for last in (False, True):
            with lockstep.accumulate(model, last=last, weight=1):
                Net.forward(model, x_of(rank)).sum().backward(create_graph=True)
        return grads(model)

    assert run_ranks(2, call) == [[(2 + 4) / 4] * count] * 2


@parts
@pytest.mark.parametrize("how", ["in place", "data", "none"])
def test_a_weight_goes_with_gradients_that_are_given_up_by_hand(part, how):
    def call(rank):
        model = net(rank)
        backward(model, x_of(rank), weight=10, last=False, part=part)
        for p in model.parameters():
            match how:
                case "in place":
                    p.grad.zero_()
                case "data":
                    p.grad.data.zero_()
                case "none":
                    p.grad = None
        backward(model, x_of(rank), weight=1, part=part)
        return grads(model)

    assert run_ranks(2, call) == [[1.5, 1.5]] * 2


@parts
def test_zeros_that_were_written_may_have_been_scaled_or_given_up(part):
    """Which of the two only the module's own ``zero_grad()`` tells: by the others it is an error on every rank."""

    def call(rank, scale):
        model, zeros = net(rank), torch.zeros(1, 1, dtype=torch.float64)
        backward(model, zeros, weight=1, last=False, part=part)
        for p in model.parameters() if scale and rank.rank else ():
            p.grad.mul_(2.0)
        if not scale:
            model.zero_grad(set_to_none=False)
        try:
            backward(model, x_of(rank), weight=1, part=part)
        except (OptionError, PeerError) as error:
            return type(error), "were zero, and were written in place since" in str(error)
        return grads(model)

    assert run_ranks(2, call, False) == [[1.5, 1.5]] * 2
    assert run_ranks(2, call, True) == [(PeerError, False), (OptionError, True)]


def test_past_the_module_in_another_thread_is_an_error_on_every_rank():
    def call(rank):
        model, errors = net(rank), []

        def work(loss):
            try:
                loss.backward()
            except OptionError as error:
                errors.append(str(error))

        with lockstep.accumulate(model, weight=1):
            loss = Net.forward(model, x_of(rank)).sum()
            if rank.rank:
                thread = threading.Thread(target=work, args=(loss,))
                thread.start()
                thread.join()
            else:
                with pytest.raises(PeerError):
                    loss.backward()
        model.zero_grad()
        with lockstep.accumulate(model, weight=1):
            thread = threading.Thread(target=model(x_of(rank)).sum().backward)
            thread.start()
            thread.join()
        return ["in another thread than the one" in each for each in errors], grads(model)

    assert run_ranks(2, call) == [([], [1.5, 1.5]), ([True], [1.5, 1.5])]


class Stubborn(Net):
    """Keeps some of its gradients."""

    def zero_grad(self, set_to_none=True):
        self.layers[0].zero_grad(set_to_none)


@clears
def test_a_method_of_that_name_that_gives_up_part_is_an_error(clear):
    def call(rank):
        model = lockstep.replicate(Stubborn(2), process_group=rank.group)
        backward(model, x_of(rank), weight=10, last=False)
        clear(model)
        with pytest.raises(OptionError, match=r"layers.0.weight .* was given up, that of layers.1.weight"):
            backward(model, x_of(rank), weight=1)
        return True

    assert run_ranks(2, call) == [True] * 2


def in_a_padded_batch(rank, clear):
    """Rank 0 has one of three batches, of two micro-batches each. What counts nothing adds zeros to its gradients."""
    model = lora(rank, clear)
    for number, _ in enumerate(lockstep.batches([0] * (1 + 2 * rank.rank), model)):
        for used in ("a", "a" if number < 2 else "other"):
            with lockstep.accumulate(model, last=used == "other", weight=5):
                model.forward(used, rank.rank + 1.0).backward()
    return [0.0 if p.grad is None else p.grad[0].item() for p in (model.a, model.b, model.other)]


@clears
def test_a_batch_that_counts_nothing_leaves_weights_as_they_are(clear):
    assert run_ranks(2, in_a_padded_batch, clear) == [[0.0, 0.0, pytest.approx(2 / 40)]] * 2


def given_up_in_a_padded_batch(rank, weighs, how):
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number, _ in enumerate(lockstep.batches([0] * (1 + rank.rank), model)):
        if number and how == "module":
            model.zero_grad(set_to_none=False)
        elif number:
            optimizer.zero_grad(set_to_none=how == "none")
        backward(model, x_of(rank), weight=10 ** (1 - number) if weighs else None, last=bool(number))
    return grads(model)


@pytest.mark.parametrize("how", ["none", "zero", "module"])
@pytest.mark.parametrize("weighs", [True, False])
def test_what_is_given_up_in_a_batch_that_counts_nothing_does_not_count(weighs, how):
    assert run_ranks(2, given_up_in_a_padded_batch, weighs, how) == [[2.0, 2.0]] * 2


# ------------------------------------------------------------------------------------------ all together


class Expected:
    """What every rank's gradients must be: what has been reduced, and what has piled up with its weights."""

    def __init__(self, world):
        self.reduced, self.piled, self.weights = 0.0, [0.0] * world, [0.0] * world
        self.empty = [True] * world
        """By rank, whether nothing has piled up."""

    def backward(self, gradients, weights, synchronised, reaches):
        self.piled = [a + b for a, b in zip(self.piled, gradients, strict=True)]
        self.weights = [a + b for a, b in zip(self.weights, weights, strict=True)]
        self.empty = [a and not b for a, b in zip(self.empty, reaches, strict=True)]
        if synchronised:
            total = sum(self.weights)
            self.reduced += sum(self.piled) / total if total else 0.0
            self.lose()

    def lose(self):
        self.piled, self.weights, self.empty = ([each] * len(self.piled) for each in (0.0, 0.0, True))

    def step(self):
        """Weights that came with no gradient go."""
        self.weights = [0.0 if empty else each for each, empty in zip(self.weights, self.empty, strict=True)]


class Nothing(torch.optim.Optimizer):
    """Leaves parameters as they are."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        pass


def programs(rank, seed):
    for number in range(30):
        draw = random.Random(f"{seed}, {number}")
        model, expected = net(rank, draw.choice([1, 3])), Expected(rank.world)
        part = draw.random() < 0.5
        for _ in range(8):
            step = draw.choice(["local"] * 3 + ["round", "round", "to none", "to zero", "failure", "step"])
            values, weights = ([draw.randrange(5) for _ in range(rank.world)] for _ in range(2))
            reaches = [step == "round" or draw.random() < 0.6 for _ in range(rank.world)]
            values = [value * reach for value, reach in zip(values, reaches, strict=True)]
            x = torch.full((1, 1), float(values[rank.rank]), dtype=torch.float64)
            if step in ("local", "round"):
                if reaches[rank.rank]:
                    backward(model, x, weights[rank.rank], step == "round", part)
                else:
                    with lockstep.accumulate(model, last=False, weight=weights[rank.rank]):
                        x.requires_grad_().sum().backward()
                expected.backward(values, weights, step == "round", reaches)
            elif step == "step":
                Nothing(model.parameters()).step()
                expected.step()
            elif step == "failure":
                with pytest.raises(ValueError if rank.rank else PeerError), lockstep.accumulate(model, weight=7):
                    y = model(x)
                    (y + model(fails_in_backward(y, error=ValueError) if rank.rank else y)).sum().backward()
                model.zero_grad()
                expected = Expected(rank.world)
            else:
                (to_none if step == "to none" else to_zero)(model)
                expected = Expected(rank.world)
            wanted = expected.reduced + expected.piled[rank.rank]
            for grad in grads(model):
                assert (grad or 0.0) == pytest.approx(wanted), f"program {number} of {seed}, after {step}"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_any_order_of_things(seed):
    run_ranks(2, programs, seed)


def given_up_before_weights(rank):
    """What has piled up without a weight and was given up, is not missed between weighted micro-batches."""
    model = net(rank, 2)
    with model.no_sync():
        model(x_of(rank, 7.0)).sum().backward()
    model.zero_grad()
    for last, used in ((False, slice(0, 1)), (True, slice(None))):
        with lockstep.accumulate(model, last=last, weight=2):
            model(x_of(rank), used).sum().backward()
    return grads(model)


def test_gradients_given_up_before_the_first_weight_are_not_missed():
    assert run_ranks(2, given_up_before_weights) == [[(2 + 4) / 8, (1 + 2) / 8]] * 2


def weighted_after_loading(rank):
    """The first micro-batch gives gradients to new parameters alone, and past the module's forward."""
    model = net(rank, 2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with lockstep.accumulate(model, last=False, weight=3):
        model.layers[0](x_of(rank)).sum().backward()
    with lockstep.accumulate(model, weight=1):
        model.layers[0](x_of(rank)).sum().backward()
    return grads(model)[0]


def test_parameters_that_were_replaced_have_the_weights_of_all_their_gradients():
    assert run_ranks(2, weighted_after_loading) == [(2 + 4) / 8] * 2


# ------------------------------------------------------------------------------------ new parameters


def with_earlier(rank, part, all_new, count):
    """A layer that is put in with a gradient, the one of the other layer being as old; the gradients."""
    model = net(rank)
    for index in (0, 1) if all_new else (1,):
        model.layers[index] = Net(1).layers[0]
    for p in model.parameters():
        p.grad = torch.full_like(p, 10.0)
    for number in range(count):
        backward(model, x_of(rank), 2 * rank.rank + 1.0, number == count - 1, part)
    return grads(model)


@pytest.mark.parametrize("all_new", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@parts
def test_what_a_new_parameter_has_had_before_is_not_divided_by_weights(all_new, count, part):
    mean = 10 + (1.0 + 2.0) / 4
    assert run_ranks(2, with_earlier, part, all_new, count) == [[mean] * 2] * 2


@clears
def test_the_weight_of_a_new_parameters_gradient_goes_with_it(clear):
    def run(rank):
        model = net(rank, 1)
        model.layers[0] = Net(1).layers[0]
        backward(model, x_of(rank), 100.0, last=False)
        clear(model)
        backward(model, x_of(rank), 2 * rank.rank + 1.0)
        return grads(model)

    assert run_ranks(2, run) == [[3 / 4]] * 2


@pytest.mark.parametrize("weight", [None, 100.0])
@pytest.mark.parametrize("part", [False, True], ids=["module", "part"])
def test_gradients_of_a_layer_that_was_replaced_are_nobodys(weight, part):
    """What ``zero_grad()`` passes by, since it is in the module no more, is neither given up nor still there."""

    def run(rank):
        model, seen = net(rank), []
        for replaced in ([1], [0, 1]):
            backward(model, x_of(rank), weight, last=False, part=part)
            for index in replaced:
                model.layers[index] = Net(1).layers[0]
            model.zero_grad()
            backward(model, x_of(rank), 1.0, part=part)
            seen.append(grads(model))
            model.zero_grad()
        return seen

    assert run_ranks(2, run) == [[[1.5, 1.5]] * 2] * 2


def test_the_weight_of_gradients_stays_when_another_layer_is_replaced():
    def run(rank):
        model = net(rank)
        backward(model, x_of(rank), 3.0, last=False)
        model.layers[1] = Net(1).layers[0]
        backward(model, x_of(rank), 1.0)
        return grads(model)

    assert run_ranks(2, run) == [[6 / 8, 3 / 8]] * 2


@clears
def test_a_layer_that_was_taken_out_and_put_back_counts_again(clear):
    """Giving up its gradient alone is an error, as if it had always been there."""

    def run(rank):
        model = net(rank)
        backward(model, x_of(rank), 3.0, last=False)
        kept, model.layers[1] = model.layers[1], Net(1).layers[0]
        backward(model, x_of(rank), 3.0, last=False)
        model.layers[1] = kept
        clear(kept)
        with pytest.raises(OptionError) as caught:
            backward(model, x_of(rank), 1.0)
        return "that has accumulated on this rank was given up" in str(caught.value)

    assert run_ranks(2, run) == [True, True]


def test_gradients_given_up_are_not_missed_beside_a_new_one_from_past_the_module():
    """The pass comes to a new parameter first, past the module's forward, and then to the module."""

    def run(rank):
        model, seen = net(rank), []
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        backward(model, x_of(rank), 100.0, last=False)
        model.zero_grad()
        with model.no_sync():
            model.layers[1](model(x_of(rank), slice(0, 1))).sum().backward()
            seen.append(grads(model))
        model(x_of(rank)).sum().backward()
        return [*seen, grads(model)]

    assert run_ranks(2, run) == [[[1.0, 1.0], [3.0, 3.0]], [[2.0, 2.0], [3.0, 3.0]]]
