"""SyncBatchNorm over ranks: what one process computes with all rows, in one exchange; or an error on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import DataParallel
from lockstep.errors import AgreementError, CommunicationError, LayoutError, OptionError, PeerError
from lockstep.local import SyncBatchNorm
from processes import run_processes
from threaded import count_collectives, run_ranks

ROWS = {"2 ranks": (2, 5), "3 ranks": (3, 1, 2), "an empty rank": (4, 0, 3)}
rows_of_ranks = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
convert = SyncBatchNorm.convert_sync_batchnorm


def images(rows, seed=0):
    return torch.randn(sum(rows), 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(**options):
    torch.manual_seed(0)
    first = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, **options), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*first, nn.Linear(12, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1)).double()


def ranks_model(plain, rank, **options):
    return lockstep.replicate(convert(copy.deepcopy(plain), rank.group), process_group=rank.group, **options)


def close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def gradients(module):
    return [each.grad for each in module.parameters()]


@rows_of_ranks
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None, "affine": False}, {"track_running_stats": False}], ids=["usual", "mean", "none"]
)
def test_training_is_that_of_one_process(rows, options):
    plain = network(**options)
    start, losses = copy.deepcopy(plain), []
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses.append(plain(images(rows, step)).pow(2).mean())
        losses[-1].backward()
        optimizer.step()

    def work(rank):
        model = ranks_model(start, rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            own = model(images(rows, step).split(rows)[rank.rank])
            (own.pow(2).sum() * rank.world / sum(rows)).backward()
            optimizer.step()
        close(gradients(model), gradients(plain))
        close(model.state_dict().values(), plain.state_dict().values())
        assert all(rank.all_equal(each) for each in model.state_dict().values())

    run_ranks(len(rows), work, hosts="a" * len(rows))


@rows_of_ranks
def test_a_penalty_on_gradients_has_the_gradients_of_one_process(rows):
    """Twice through the statistics: the backward of the exchange is differentiable."""
    plain = network()

    def penalty(model, x, ranks=1):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        (ranks * grad.pow(2).sum()).backward()

    penalty(plain, images(rows))

    def work(rank):
        model = ranks_model(plain_before, rank)
        penalty(model, images(rows).split(rows)[rank.rank].detach(), rank.world)
        close(gradients(model), gradients(plain))

    plain_before = network()
    run_ranks(len(rows), work)


def test_one_exchange_in_forward_and_one_in_backward():
    def work(rank):
        layer = SyncBatchNorm(3, process_group=rank.group)
        rank.gather(torch.ones(1))  # the companion is made at the first use of lockstep
        lockstep.loop.agree(False, rank.group)
        x = torch.randn(4, 3, requires_grad=True)
        with count_collectives(rank) as seen:
            y = layer(x)
            forward = [each.name for each in seen]
            y.pow(2).sum().backward()
            both = [each.name for each in seen]
            layer(x.detach()).pow(2).sum().backward()  # no rank's rows need a gradient
            third = [each.name for each in seen]
            layer.eval()
            layer(x)
        return forward, both, third, [each.name for each in seen]

    forward, both = ["all_gather_single"], ["all_gather_single", "all_to_all_single"]
    for seen in run_ranks(2, work):
        assert seen == (forward, both, both + forward, both + forward)


def test_without_gradients_and_in_eval():
    rows, plain = (2, 5), network()
    plain(images(rows))

    def work(rank):
        model = convert(rank.make(network), rank.group)
        own = images(rows).split(rows)[rank.rank]
        with torch.no_grad():
            model(own)
        close(model.buffers(), plain.buffers())
        if rank.rank == 1:  # alone
            close([model.eval()(own)], [copy.deepcopy(plain).eval()(own)])
        model[5].track_running_stats, model[5].running_mean, model[5].running_var = False, None, None
        assert model.eval()(own).shape == (len(own), 1)

    run_ranks(2, work)


def test_ranks_of_which_one_records_no_graph():
    def work(rank):
        layer = SyncBatchNorm(2, process_group=rank.group)
        with torch.set_grad_enabled(rank.rank == 0):
            layer(torch.randn(3, 2))

    for error in run_ranks(2, work, errors=True):
        assert isinstance(error, AgreementError)
        assert "rank 1 runs its forward under torch.no_grad(), rank 0 does not" in str(error)


def test_rows_that_need_a_gradient_on_one_rank_only():
    rows, plain = (2, 3), nn.BatchNorm1d(2).double()
    x = torch.randn(5, 2, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    plain(whole).pow(3).sum().backward()

    def work(rank):
        own = x.split(rows)[rank.rank].clone().requires_grad_(rank.rank == 1)
        convert(copy.deepcopy(plain), rank.group)(own).pow(3).sum().backward()
        return own.grad

    grads = run_ranks(2, work)
    assert grads[0] is None
    close(grads[1:], [whole.grad[2:]])


def test_too_few_values():
    def work(rank):
        SyncBatchNorm(2, process_group=rank.group)(torch.randn(rank.rank, 2))

    for error in run_ranks(2, work, errors=True):
        assert isinstance(error, LayoutError)
        assert "Expected more than 1 value per channel when training, got 1 in all ranks together" in str(error)


def test_autocast():
    x = torch.randn(8, 4)
    layers = torch.manual_seed(0) and nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def run(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(rows)
        y.float().pow(3).sum().backward()
        return y

    whole = run(layers, x)

    def work(rank):
        model = ranks_model(layers, rank)
        y = run(model, x.split([3, 5])[rank.rank])
        assert y.dtype == whole.dtype == torch.bfloat16
        torch.testing.assert_close(y, whole.split([3, 5])[rank.rank], rtol=0.02, atol=0.02)
        assert model[0].weight.grad.dtype == torch.float32

    run_ranks(2, work)


@pytest.mark.parametrize("rows", [(5, 2), (4, 0), (1, 3)])
def test_replicas_on_each_rank(rows):
    """Ranks whose modules have replicas, and rows for fewer of these than on the other rank."""
    plain = network()
    plain(images(rows)).pow(2).sum().backward()

    def work(rank):
        module = convert(rank.make(network), rank.group)
        model = lockstep.replicate(DataParallel(module, ["cpu", "cpu"]), process_group=rank.group)
        (model(images(rows).split(rows)[rank.rank]).pow(2).sum() * rank.world).backward()
        close(gradients(module), gradients(plain))
        close(module.buffers(), plain.buffers())

    run_ranks(2, work, hosts="aa")


def test_other_ranks_take_no_part_in_a_group():
    """Layers of ranks that have no group, or one of a single rank, are plain batch normalisation."""
    x = torch.randn(4, 3)
    assert torch.equal(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
    run_ranks(1, lambda rank: torch.equal(SyncBatchNorm(3, process_group=rank.group)(x), nn.BatchNorm1d(3)(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_segment(reentrant):
    """Backward runs forward again, on every rank, and no bucket of gradients comes in between."""
    rows, x = (2, 4), torch.randn(6, 3, dtype=torch.float64)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.0), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.norm, self.first(x), use_reentrant=reentrant))

    torch.manual_seed(0)
    plain = Checkpointed().double()
    start = copy.deepcopy(plain)
    plain(x).pow(2).sum().backward()

    def work(rank):
        model = ranks_model(start, rank, bucket_cap_mb=1e-5)
        for _ in range(3):
            model.zero_grad()
            (model(x.split(rows)[rank.rank]).pow(2).sum() * rank.world).backward()
        close(gradients(model), gradients(plain))

    run_ranks(2, work, hosts="aa")


# -------------------------------------------------------------------------------------------------- failures


def test_sums_of_losses_with_weights_have_the_gradients_of_one_process():
    def work(rank):
        own = [slice(0, 5), slice(5, 8)][rank.rank]
        model = ranks_model(rank.make(network), rank)
        with lockstep.accumulate(model, weight=own.stop - own.start):
            model(images((5, 3))[own]).square().sum().backward()
        return gradients(model)

    plain = network()
    plain(images((5, 3))).square().mean().backward()
    for found in run_ranks(2, work):
        close(found, gradients(plain))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("no gradient")


@pytest.mark.parametrize("skips", [False, True])
def test_a_backward_that_fails_on_one_rank(skips):
    def work(rank):
        model = ranks_model(rank.make(network), rank)
        y = model(images((3,)))
        loss = (Fails.apply(y) if rank.rank == 1 else y).sum()
        if not skips:
            loss.backward()
            return
        with lockstep.loop.skip_on(KeyError, PeerError, modules=[model]):
            loss.backward()
        assert lockstep.loop.skipped(model)
        assert gradients(model) == [None] * len(gradients(model))
        model(images((3,))).sum().backward()

    errors = run_ranks(2, work, errors=True, hosts="aa")
    if skips:
        assert errors == [None, None]
        return
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[0], PeerError)
    assert "backward failed on rank 1 before it came to the statistics of SyncBatchNorm" in str(errors[0])


def test_a_forward_that_skips_on_one_rank():
    def work(rank):
        model = ranks_model(rank.make(network), rank)
        with lockstep.loop.skip_on(KeyError, modules=[model]):
            if rank.rank == 1:
                raise KeyError("a bad batch")
            model(images((3,))).sum().backward()

    for error in run_ranks(2, work, errors=True, hosts="aa"):
        assert isinstance(error, CommunicationError)
        assert "not the same collective" in str(error) or "different" in str(error)


def fails_before_its_layer(rank):
    with lockstep.session(device="cpu") as run:
        model = lockstep.DistributedDataParallel(convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        model(torch.randn(3 + run.rank, 2)).sum().backward()
        assert rank.all_equal(model.module[1].running_var)
        if run.rank == 1:
            raise KeyError("a bad batch")
        model(torch.randn(3, 2))


def test_in_a_session_whose_rank_1_fails():
    outcomes = run_processes(2, fails_before_its_layer, errors=True)
    assert isinstance(outcomes[1].error, KeyError)
    assert "rank 1 failed" in str(outcomes[0].error)
    assert "KeyError" in str(outcomes[0].error)


# -------------------------------------------------------------------------------------------------- conversion


def test_pytorchs_class_is_converted_and_states_load_both_ways():
    group = object()
    theirs = nn.Sequential(nn.SyncBatchNorm(3, momentum=0.3, process_group=group))
    theirs[0].running_mean.add_(1)
    state = copy.deepcopy(theirs.state_dict())
    ours = convert(theirs)
    assert type(ours[0]) is SyncBatchNorm
    assert (ours[0].process_group, ours[0].momentum) == (group, 0.3)
    assert copy.deepcopy(ours)[0].process_group is group
    for module in (convert(nn.Sequential(nn.BatchNorm1d(3))), nn.Sequential(nn.SyncBatchNorm(3))):
        module.load_state_dict(state)
        assert module[0].running_mean.tolist() == [1, 1, 1]
    nn.Sequential(nn.SyncBatchNorm(3)).load_state_dict(ours.state_dict())


def test_modules_with_shares_are_refused():
    with pytest.raises(OptionError, match=r"SyncBatchNorm.*shares"):
        run_ranks(1, lambda rank: lockstep.replicate(convert(network()), process_group=rank.group, shares=2))
