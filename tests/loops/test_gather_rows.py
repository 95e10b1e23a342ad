"""Rows of all ranks: losses that compare them have the gradients of one process, or there is an error by name."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import lockstep
from lockstep.distributed.comm.group_state import sequence_number_on
from lockstep.errors import AgreementError, CommunicationError, NotReplicableError, OptionError, PeerError
from lockstep.loop import gather_rows
from processes import on_processes
from programs.ranks import on_ranks, replicated, same_gradients
from small_modules import fails_in_backward
from threaded import run_ranks

ROWS = {1: (6,), 2: (2, 4), 3: (2, 1, 3)}
"""By the number of ranks, the rows that each has."""
worlds = pytest.mark.parametrize("world", ROWS)
as_alone = functools.partial(same_gradients, rtol=1e-12, atol=1e-14)


def parts(tensor, rank):
    return tensor.split(ROWS[rank.world])[rank.rank]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Encoder(nn.Module):
    """Features of unit length, and a temperature that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.double()

    def forward(self, x):
        return normalize(self.layers(x), dim=1)


def similar(features, scale, labels=None):
    """Each row is to be most like the next one."""
    labels = torch.arange(len(features)).roll(1) if labels is None else labels
    return scale.exp() * features @ features.T, labels


def whole_loss(model, x):
    """Each rank computes the loss of all rows."""
    features, _ = gather_rows(model(x), model)
    return cross_entropy(*similar(features, model.scale))


def own_part(model, x):
    """Each rank computes the part of its own rows, so that the mean over the ranks is the whole loss."""
    features, own = gather_rows(model(x), model)
    logits, labels = similar(features, model.scale)
    return cross_entropy(logits[own], labels[own], reduction="sum") * model.ranks / len(features)


def in_place(model, x):
    """The whole loss, of rows that are written to."""
    features, _ = gather_rows(model(x), model)
    return cross_entropy(*similar(features.mul_(2), model.scale))


def penalised(model, x):
    """With a penalty on the gradient of the features, through the rows of all ranks."""
    features = model(x)
    rows = gather_rows(features, model).rows
    loss = cross_entropy(*similar(rows, model.scale))
    (grad,) = torch.autograd.grad(loss, features, create_graph=True)
    scale = 1 / model.ranks  # each rank computes the whole loss
    return loss + model.ranks * (scale * grad).square().sum()


PAGE = (Path(__file__).parents[2] / "docs" / "whole_batch.md").read_text()


def recipes():
    """The functions of the page of recipes, by name, with what they use."""
    found = {"torch": torch, "lockstep": lockstep}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        kept = [n for n in ast.parse(block).body if isinstance(n, ast.FunctionDef | ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(kept, []), "<page>", "exec"), found)
    return found


RECIPES = recipes()  # not by each rank: threads of Python 3.11 cannot parse at the same time
X, Y = drawn(6, 5), drawn(6, 5, seed=1)
CLASSES = torch.tensor([0, 1, 0, 1, 2, 2])


def of_pairs(recipe):
    return lambda model, a, b: RECIPES[recipe](model, model(a), model(b))


LOSSES = {
    "of all rows on each rank": (whole_loss, X),
    "of its own rows on each rank": (own_part, X),
    "of rows that are written to": (in_place, X),
    "with gradients of gradients": (penalised, X),
    "clip_loss": (of_pairs("clip_loss"), X, Y),
    "clip_loss_of_own_rows": (of_pairs("clip_loss_of_own_rows"), X, Y),
    "simclr_loss": (of_pairs("simclr_loss"), X, Y),
    "triplet_loss": (lambda model, x, y: RECIPES["triplet_loss"](model, model(x), y), X, CLASSES),
    "penalty": (lambda model, x: RECIPES["penalty"](model, x, lambda f: (f @ f.T).exp().mean()), X),
}


@worlds
@pytest.mark.parametrize("loss", LOSSES)
@on_ranks(None, "world")
def test_gradients_are_those_of_one_process(rank, loss):
    loss_of, *inputs = LOSSES[loss]
    plain, model = rank.make(Encoder), replicated(rank, Encoder)
    plain.ranks, model.ranks = 1, rank.world
    loss_of(plain, *inputs).backward()
    for _ in range(2):  # the second pass is in the order of the plan
        model.zero_grad()
        loss_of(model, *(parts(each, rank) for each in inputs)).backward()
    as_alone(rank, model, plain)


@worlds
@on_ranks(None, "world")
def test_a_queue_of_negatives(rank):
    """Three steps: the queue has the keys of all ranks, in the order of the ranks, on each of them."""
    step, keys, found = RECIPES["moco_loss"], rank.make(Encoder, 1).requires_grad_(False), []
    for model, own in ((rank.make(Encoder), lambda x: x), (replicated(rank, Encoder), lambda x: parts(x, rank))):
        queue = normalize(drawn(8, 4, seed=20), dim=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for n in range(3):
            a, b = own(drawn(6, 5, seed=n)), own(drawn(6, 5, seed=10 + n))
            optimizer.zero_grad()
            loss, queue = step(model, model(a), keys(b), queue)
            loss.backward()
            optimizer.step()
        found.append([*model.parameters(), queue])
    wanted, got = found
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@worlds
@pytest.mark.parametrize("size", [1, 2, 6])
@on_ranks(None, "world")
def test_micro_batches_with_cached_gradients(rank, size):
    """The ranks have different numbers of micro-batches."""
    x, plain, model = drawn(6, 5), rank.make(Encoder), replicated(rank, Encoder)
    whole_loss(plain, x).backward()

    def loss_of(model, features):
        return cross_entropy(*similar(gather_rows(features, model).rows, model.scale))

    RECIPES["cached_backward"](model, parts(x, rank), loss_of, size)
    as_alone(rank, model, plain)


# ------------------------------------------------------------------------------------------------- its contract


@worlds
@on_ranks(None, "world")
def test_nested_rows_and_what_is_this_ranks(rank, world):
    x, labels = drawn(6, 5), torch.arange(6)
    model = lockstep.replicate(Encoder(), process_group=rank.group)
    given = {"x": parts(x, rank), "labels": parts(labels, rank), "name": "kept", "half": parts(x, rank).bfloat16()}
    given["no numbers"] = given["x"][:, :0]
    rows, own = gather_rows(given, model)
    assert torch.equal(rows["x"], x)
    assert torch.equal(rows["labels"], labels)
    assert torch.equal(rows["half"], x.bfloat16())
    assert rows["name"] == "kept"
    assert rows["no numbers"].shape == (6, 0)
    assert torch.equal(rows["labels"][own], given["labels"])
    assert rows["x"].grad_fn is None
    assert not rows["x"].requires_grad
    if world == 1:
        assert rows is given


@on_ranks(2)
def test_a_rank_without_rows(rank):
    x, model, plain = drawn(4, 5), replicated(rank, Encoder), rank.make(Encoder)
    whole_loss(model, x if rank.rank == 0 else x[:0]).backward()
    whole_loss(plain, x).backward()
    as_alone(rank, model, plain)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@on_ranks(2)
def test_one_row_of_one_number(rank, shape):
    """Where a dimension has size 1, its stride may be any: that of a batch's column, or 0 in an expanded gradient."""
    model = lockstep.replicate(nn.Linear(2, 1, bias=False).double(), process_group=rank.group)
    x = drawn(1, 2, seed=rank.rank)
    (scores, column), _ = gather_rows((model(x).view(shape), x[:, 1]), model)
    assert column.tolist() == [drawn(1, 2, seed=r)[0, 1] for r in range(2)]
    scores.sum().backward()  # the gradient of a sum is expanded
    torch.testing.assert_close(model.weight.grad, sum(drawn(1, 2, seed=r) for r in range(2)))


@on_ranks(2)
def test_only_tensors_that_need_a_gradient_somewhere_have_a_graph(rank):
    """Rank 1's features are frozen: its backward sends what rank 0 needs."""
    x = drawn(6, 5)
    model = replicated(rank, Encoder)
    features = model(parts(x, rank))
    if rank.rank == 1:
        features = features.detach()
    (rows, constant), _ = gather_rows((features, parts(x, rank)), model)
    assert rows.requires_grad
    assert not constant.requires_grad
    rows.square().sum().mul(torch.arange(1.0, 3.0).sum()).backward()
    plain = rank.make(Encoder)
    (3 * plain(x[:2]).square().sum()).backward()
    as_alone(rank, model.layers, plain.layers)
    with torch.no_grad():
        assert not gather_rows(model(parts(x, rank)), model).rows.requires_grad


@on_ranks(2)
def test_gradcheck_of_both_orders(rank):
    x = drawn(4, 3)
    model = replicated(rank, Encoder)
    given = x.split((3, 1))[rank.rank].clone().requires_grad_()
    weights = drawn(4, 3, seed=5)
    rows = gather_rows(given, model).rows
    (first,) = torch.autograd.grad((rows.pow(3) * weights).sum(), given, create_graph=True)
    own = slice(0, 3) if rank.rank == 0 else slice(3, 4)
    torch.testing.assert_close(first, 2 * 3 * x[own].square() * weights[own])
    (second,) = torch.autograd.grad(first.square().sum(), given)
    # Both ranks' losses depend on this rank's rows, and both ranks' penalties go through its graph.
    wanted = x[own].clone().requires_grad_()
    whole = 6 * wanted.square() * weights[own]
    (expected,) = torch.autograd.grad(whole.square().sum(), wanted)
    torch.testing.assert_close(second, expected)


@on_ranks(2)
def test_a_tensor_whose_rows_no_loss_uses_gets_no_gradient(rank):
    model = replicated(rank, Encoder)
    used, unused = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    gather_rows((used, unused), model).rows[0].sum().backward()
    assert unused.grad is None
    assert used.grad is not None


@on_ranks(2)
def test_under_autocast(rank):
    x, model, plain = drawn(6, 5).float(), replicated(rank, lambda: Encoder().float()), rank.make(Encoder).float()
    with torch.autocast("cpu", torch.bfloat16):
        features = model.layers(parts(x, rank))
        rows = gather_rows(features, model).rows
        assert rows.dtype == torch.bfloat16
        rows.float().square().mean().backward()
        plain.layers(x).float().square().mean().backward()
    found, wanted = model.layers[0].weight.grad, plain.layers[0].weight.grad
    assert (found - wanted).norm() < 2**-6 * wanted.norm()


@on_ranks(2, hosts="aa")
def test_collectives_are_one_each_way(rank):
    x = drawn(6, 5)
    model = replicated(rank, Encoder)
    whole_loss(model, parts(x, rank)).backward()
    before = sequence_number_on(rank.group)
    rows = gather_rows((parts(x, rank).clone().requires_grad_(), parts(x, rank)), model).rows
    forward = sequence_number_on(rank.group)
    rows[0].sum().backward()
    assert (forward - before, sequence_number_on(rank.group) - forward) == (3, 1)


# ------------------------------------------------------------------------------------------------------ errors


WRONG = {
    "dtype": (torch.ones(2, 3), torch.ones(2, 3).double(), AgreementError, "rank 0 has float32 of shape"),
    "width": (torch.ones(2, 3), torch.ones(2, 4), AgreementError, r"\(rows, 4\)"),
    "structure": (torch.ones(2, 3), [torch.ones(2, 3)] * 2, AgreementError, "the number of tensors given"),
    "scalar": (torch.ones(()), torch.ones(()), OptionError, "value without dimensions"),
    "nothing": (1.0, 1.0, OptionError, "got no tensor"),
    "rows": ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(2)], OptionError, "2 rows in|on rank 0 whose"),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), OptionError, "expected a dense"),
}


@pytest.mark.parametrize(("first", "second", "kind", "message"), WRONG.values(), ids=WRONG)
@on_ranks(2)
def test_rows_that_cannot_be_gathered_are_an_error_on_every_rank(rank, first, second, kind, message):
    model = replicated(rank, Encoder)
    with pytest.raises(kind, match=message):
        gather_rows(second if rank.rank else first, model)
    whole_loss(model, torch.ones(2, 5).double()).backward()  # the group can be used further


@pytest.mark.parametrize("calls", [(1, 0), (1, 2)])
def test_ranks_that_call_it_at_different_times_hear_of_it(calls):
    def work(rank):
        model = replicated(rank, Encoder)
        x = torch.ones(2, 5, dtype=torch.float64)
        loss = model(x).sum()
        for _ in range(calls[rank.rank]):
            loss = loss + gather_rows(model(x), model).rows.sum()
        loss.backward()

    errors = run_ranks(2, work, hosts="aa", errors=True, group_timeout=2)
    assert all(isinstance(error, CommunicationError | PeerError | AgreementError) for error in errors), errors
    assert any(
        "rows" in str(error) or "different calls" in str(error) or "different things" in str(error) for error in errors
    ), errors


@pytest.mark.parametrize("through", ["rows", "their gradients, and rows", "their gradients"])
@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_fails_on_all(rank, through):
    model = replicated(rank, Encoder)
    features = model(torch.ones(2, 5, dtype=torch.float64))
    rows = gather_rows(features, model).rows
    if through != "rows":
        # Of a loss that is linear in the rows, the gradients lead to the factors alone.
        factors = rows.square() if through.endswith("rows") else torch.ones_like(rows, requires_grad=True)
        (rows,) = torch.autograd.grad((rows * factors).sum(), features, create_graph=True)
    told = "a bad batch" if rank.rank else "backward failed on rank 1 before it came to the rows of all ranks"
    with pytest.raises(ArithmeticError if rank.rank else PeerError, match=told):
        fails_in_backward(rows, rank.rank == 1).square().sum().backward()
    assert model.layers[0].weight.grad is None
    model.zero_grad()
    whole_loss(model, torch.ones(2, 5).double()).backward()


@on_ranks(2)
def test_modules_that_it_refuses(rank):
    shares = replicated(rank, Encoder, shares=2)
    with pytest.raises(OptionError, match="without shares="):
        gather_rows(torch.ones(2, 3), shares)


def test_one_process_needs_no_replicated_module():
    x = torch.ones(2, 3)
    rows, own = gather_rows(x, Encoder())
    assert rows is x
    assert own == slice(0, 2)


@on_processes(2)
def test_several_ranks_need_a_replicated_module(rank):
    with pytest.raises(NotReplicableError, match="is not replicated"):
        gather_rows(torch.ones(2, 3), Encoder())
