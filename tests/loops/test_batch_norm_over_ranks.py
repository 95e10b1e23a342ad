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
from programs.networks import Applying
from programs.ranks import on_ranks
from small_modules import fails_in_backward
from threaded import count_collectives, run_ranks

ROWS = {"2 ranks": (2, 5), "3 ranks": (3, 1, 2), "an empty rank": (4, 0, 3)}
rows_of_ranks = pytest.mark.parametrize(("world", "rows"), [(len(rows), rows) for rows in ROWS.values()], ids=ROWS)
convert = SyncBatchNorm.convert_sync_batchnorm


def images(rows, seed=0):
    return torch.randn(sum(rows), 1, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(rank, **options):
    def make():
        first = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, **options), nn.Tanh(), nn.Flatten()
        return nn.Sequential(*first, nn.Linear(12, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 1)).double()

    return rank.make(make)


def ranks_model(plain, rank, **options):
    return lockstep.replicate(convert(copy.deepcopy(plain), rank.group), process_group=rank.group, **options)


def close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def gradients(module):
    return [each.grad for each in module.parameters()]


def own_rows(rank, rows, seed=0):
    return images(rows, seed).split(rows)[rank.rank]


OPTIONS = [{}, {"momentum": None, "affine": False}, {"track_running_stats": False}]


@pytest.mark.parametrize("hosts", ["aaa"])
@rows_of_ranks
@pytest.mark.parametrize("options", OPTIONS, ids=["usual", "mean", "none"])
@on_ranks(None, "world", "hosts")
def test_training_is_that_of_one_process(rank, rows, options):
    plain = network(rank, **options)
    model = ranks_model(plain, rank)
    for step in range(3):
        for each, own, of in ((plain, images(rows, step), 1), (model, own_rows(rank, rows, step), rank.world)):
            each.zero_grad()
            (each(own).pow(2).sum() * of / sum(rows)).backward()
            torch.optim.SGD(each.parameters(), 0.1).step()
    close(gradients(model), gradients(plain))
    close(model.state_dict().values(), plain.state_dict().values())
    assert all(rank.all_equal(each) for each in model.state_dict().values())


@rows_of_ranks
@on_ranks(None, "world")
def test_a_penalty_on_gradients_has_the_gradients_of_one_process(rank, rows):
    """Twice through the statistics: the backward of the exchange is differentiable."""
    plain = network(rank)
    model = ranks_model(plain, rank)
    for each, x, ranks in ((plain, images(rows), 1), (model, own_rows(rank, rows), rank.world)):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(each(x).pow(3).sum(), x, create_graph=True)
        (ranks * grad.pow(2).sum()).backward()
    close(gradients(model), gradients(plain))


@on_ranks(2)
def test_one_exchange_in_forward_and_one_in_backward(rank):
    layer = SyncBatchNorm(3, process_group=rank.group)
    rank.gather(torch.ones(1))  # the companion is made at the first use of lockstep
    lockstep.loop.agree(False, rank.group)
    x = torch.randn(4, 3, requires_grad=True)
    forward, backward = "all_gather_single", "all_to_all_single"
    with count_collectives(rank) as seen:
        y = layer(x)
        assert [each.name for each in seen] == [forward]
        y.pow(2).sum().backward()
        assert [each.name for each in seen] == [forward, backward]
        layer(x.detach()).pow(2).sum().backward()  # no rank's rows need a gradient
        assert [each.name for each in seen] == [forward, backward, forward]
        layer.eval()
        layer(x)
    assert [each.name for each in seen] == [forward, backward, forward]


@on_ranks(2)
def test_without_gradients_and_in_eval(rank):
    rows, plain = (2, 5), network(rank)
    model = convert(copy.deepcopy(plain), rank.group)
    plain(images(rows))
    own = own_rows(rank, rows)
    with torch.no_grad():
        model(own)
    close(model.buffers(), plain.buffers())
    if rank.rank == 1:  # alone
        close([model.eval()(own)], [plain.eval()(own)])
    model[5].track_running_stats, model[5].running_mean, model[5].running_var = False, None, None
    assert model.eval()(own).shape == (len(own), 1)


@on_ranks(2, raises=AgreementError, says="rank 1 runs its forward under torch.no_grad(), rank 0 does not")
def test_ranks_of_which_one_records_no_graph(rank):
    layer = SyncBatchNorm(2, process_group=rank.group)
    with torch.set_grad_enabled(rank.rank == 0):
        layer(torch.randn(3, 2))


@on_ranks(2)
def test_rows_that_need_a_gradient_on_one_rank_only(rank):
    rows, plain = (2, 3), nn.BatchNorm1d(2).double()
    whole = rank.make(lambda: torch.randn(5, 2, dtype=torch.float64)).requires_grad_()
    own = whole.detach().split(rows)[rank.rank].clone().requires_grad_(rank.rank == 1)
    convert(copy.deepcopy(plain), rank.group)(own).pow(3).sum().backward()
    plain(whole).pow(3).sum().backward()
    if rank.rank == 0:
        assert own.grad is None
    else:
        close([own.grad], [whole.grad[2:]])


@on_ranks(
    2, raises=LayoutError, says="Expected more than 1 value per channel when training, got 1 in all ranks together"
)
def test_too_few_values(rank):
    SyncBatchNorm(2, process_group=rank.group)(torch.randn(rank.rank, 2))


@on_ranks(2)
def test_autocast(rank):
    x, layers = rank.make(lambda: (torch.randn(8, 4), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    model, found = ranks_model(layers, rank), []
    for each, rows in ((layers, x), (model, x.split([3, 5])[rank.rank])):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(each(rows))
        found[-1].float().pow(3).sum().backward()
    whole, y = found
    assert y.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(y, whole.split([3, 5])[rank.rank], rtol=0.02, atol=0.02)
    assert model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("rows", [(5, 2), (4, 0), (1, 3)])
@on_ranks(2, hosts="aa")
def test_replicas_on_each_rank(rank, rows):
    """Ranks whose modules have replicas, and rows for fewer of these than on the other rank."""
    plain = network(rank)
    module = convert(copy.deepcopy(plain), rank.group)
    plain(images(rows)).pow(2).sum().backward()
    model = lockstep.replicate(DataParallel(module, ["cpu", "cpu"]), process_group=rank.group)
    (model(own_rows(rank, rows)).pow(2).sum() * rank.world).backward()
    close(gradients(module), gradients(plain))
    close(module.buffers(), plain.buffers())


def test_other_ranks_take_no_part_in_a_group():
    """Layers of ranks that have no group, or one of a single rank, are plain batch normalisation."""
    x = torch.randn(4, 3)
    assert torch.equal(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
    synchronised = lambda rank: SyncBatchNorm(3, process_group=rank.group)(x)  # noqa: E731
    assert torch.equal(*run_ranks(1, synchronised), nn.BatchNorm1d(3)(x))


def checkpointed(reentrant):
    forward = lambda m, x: m.last(checkpoint(m.norm, m.linear(x), use_reentrant=reentrant))  # noqa: E731
    return Applying(forward, (3, 3), norm=nn.BatchNorm1d(3, momentum=0.0), last=nn.Linear(3, 1)).double()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2, hosts="aa")
def test_a_checkpointed_segment(rank, reentrant):
    """Backward runs forward again, on every rank, and no bucket of gradients comes in between."""
    x = rank.make(lambda: torch.randn(6, 3, dtype=torch.float64))
    plain = rank.make(lambda: checkpointed(reentrant))
    model = ranks_model(plain, rank, bucket_cap_mb=1e-5)
    plain(x).pow(2).sum().backward()
    for _ in range(3):
        model.zero_grad()
        (model(x.split((2, 4))[rank.rank]).pow(2).sum() * rank.world).backward()
    close(gradients(model), gradients(plain))


# -------------------------------------------------------------------------------------------------- failures


@on_ranks(2)
def test_sums_of_losses_with_weights_have_the_gradients_of_one_process(rank):
    own, plain = own_rows(rank, (5, 3)), network(rank)
    model = ranks_model(plain, rank)
    with lockstep.accumulate(model, weight=len(own)):
        model(own).square().sum().backward()
    plain(images((5, 3))).square().mean().backward()
    close(gradients(model), gradients(plain))


@pytest.mark.parametrize("skips", [False, True])
@on_ranks(2, hosts="aa")
def test_a_backward_that_fails_on_one_rank(rank, skips):
    model = ranks_model(network(rank), rank)
    loss = fails_in_backward(model(images((3,))), rank.rank == 1, KeyError).sum()
    words = "backward failed on rank 1 before it came to the statistics of SyncBatchNorm"
    error = pytest.raises(KeyError) if rank.rank else pytest.raises(PeerError, match=words)
    with lockstep.loop.skip_on(KeyError, PeerError, modules=[model]) if skips else error:
        loss.backward()
    assert lockstep.loop.skipped(model) is skips
    assert gradients(model) == [None] * len(gradients(model))
    model(images((3,))).sum().backward()


@on_ranks(2, hosts="aa")
def test_a_forward_that_skips_on_one_rank(rank):
    model = ranks_model(network(rank), rank)
    with (
        pytest.raises(CommunicationError, match=r"not the same collective|different"),
        lockstep.loop.skip_on(KeyError, modules=[model]),
    ):
        if rank.rank == 1:
            raise KeyError("a bad batch")
        model(images((3,))).sum().backward()


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


@on_ranks(1)
def test_modules_with_shares_are_refused(rank):
    with pytest.raises(OptionError, match=r"SyncBatchNorm.*shares"):
        lockstep.replicate(convert(network(rank)), process_group=rank.group, shares=2)
