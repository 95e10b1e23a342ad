"""Replicas whose means divide by different numbers: a step is what one backward pass over the whole batch is."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel
from lockstep.errors import OptionError
from lockstep.local import SyncBatchNorm
from programs.networks import Applying
from programs.one_device import same, same_gradients

IGNORED = -100
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LABELS = torch.tensor([IGNORED, IGNORED, IGNORED, 0, IGNORED, 2, 1, 1, 0])
SPLIT = [3, 4, 2]  # the first replica has no label that counts
SMOOTHED = {"label_smoothing": 0.1}


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def labels_of(target):
    return (target != IGNORED).sum()


def beside_one_device(devices, loss_fn, target=LABELS, model=None, alone=None, **options):
    """A step has the loss and the gradients of the loss function, or of ``alone``, on one device."""
    first = devices(1)[0]
    torch.manual_seed(0)
    plain = (nn.Linear(4, 3) if model is None else model).double().to(first)
    if isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn).to(first)
    x, target, module = drawn(len(target), 4).to(first), target.to(first), copy.deepcopy(plain)
    expected = (alone or loss_fn)(plain(x), target)
    expected.backward()
    module = DataParallel(SyncBatchNorm.convert_sync_batchnorm(module), devices(3), split=SPLIT)
    loss = module.step(loss_fn, x, target, **options)
    same([loss], [expected.detach()], 1e-12, 1e-12)
    same_gradients(module, plain)


def likelihood(output, target):
    return F.nll_loss(output.log_softmax(1), target)


CRITERIA = {
    "labels": nn.CrossEntropyLoss(),
    "another label": lambda output, target: F.cross_entropy(output, target.clamp(0), ignore_index=1),
    "classes": nn.CrossEntropyLoss(weight=WEIGHTS),
    "a class of weight 0": nn.CrossEntropyLoss(weight=WEIGHTS * torch.tensor([0, 1, 1])),
    "smoothed": nn.CrossEntropyLoss(**SMOOTHED),
    "smoothed classes": nn.CrossEntropyLoss(weight=WEIGHTS, **SMOOTHED),
    "function": F.cross_entropy,
    "function inside": likelihood,
    "partial": partial(F.cross_entropy, **SMOOTHED),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum inside": lambda output, target: F.cross_entropy(output, target, reduction="sum"),
}


@pytest.mark.parametrize("target", [LABELS, LABELS.clamp(0), torch.full((9,), IGNORED)], ids=["some", "all", "none"])
@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_means_over_labels(devices, criterion, target):
    beside_one_device(devices, criterion, target)


def test_a_mean_over_labels_of_texts(devices):
    beside_one_device(
        devices,
        lambda output, target: F.cross_entropy(output.unflatten(1, (3, 5)), target),
        torch.where(torch.arange(5) < torch.arange(1, 10).unsqueeze(1) // 2, drawn(9, 5).sign().long() + 1, IGNORED),
        nn.Linear(4, 15),
    )


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="since PyTorch 2.13")
def test_a_criterion_with_a_layer():
    criterion = nn.LinearCrossEntropyLoss(3, 3, ignore_index=IGNORED, **SMOOTHED).double()
    beside_one_device(lambda count: [torch.device("cpu")] * count, criterion)
    in_chunks = nn.LinearCrossEntropyLoss(3, 3, options=nn.LinearCrossEntropyOptions()).double()
    with pytest.warns(UserWarning, match="computed in chunks"):
        DataParallel(nn.Linear(4, 3).double(), ["cpu"] * 2).step(in_chunks, drawn(9, 4), LABELS)


OF_ROWS = {
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHTS), drawn(9, 3).softmax(1)),
    "elements, weighted": (nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS), drawn(9, 3).sigmoid()),
    "classes": (nn.MultiMarginLoss(weight=WEIGHTS), LABELS.clamp(0)),
    "several classes": (nn.MultiLabelSoftMarginLoss(weight=WEIGHTS), drawn(9, 3).sign().clamp(0)),
    "rows": (nn.KLDivLoss(reduction="batchmean"), drawn(9, 3).softmax(1)),
    "sum": (nn.L1Loss(reduction="sum"), drawn(9, 3)),
    "sum, partial": (partial(F.l1_loss, reduction="sum"), drawn(9, 3)),
}


@pytest.mark.parametrize(("criterion", "target"), OF_ROWS.values(), ids=OF_ROWS)
def test_other_criteria(criterion, target):
    """On the CPU: simulated accelerators lack some of them."""
    beside_one_device(lambda count: [torch.device("cpu")] * count, criterion, target)


def own_mean(output, target):
    """0 / 0 without labels, and its gradient, too."""
    counts = target != IGNORED
    return F.cross_entropy(output, target, reduction="none").sum() / counts.sum()


@pytest.mark.parametrize("on", [None, "cpu"])
@pytest.mark.parametrize("model", [None, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))])
def test_a_mean_whose_divisor_the_program_says(devices, model, on):
    seen = []

    def weight(target):
        seen.append(target.tolist())
        return labels_of(target).to(on)

    beside_one_device(devices, own_mean, model=copy.deepcopy(model), weight=weight)
    assert seen == [part.tolist() for part in LABELS.split(SPLIT)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_module_that_returns_its_loss(devices, first, checkpointed):
    """As models of language do."""

    def loss(m, x, target):
        return F.cross_entropy(m.linear(x), target)

    def forward(m, given):
        return checkpoint(loss, m, *given, use_reentrant=False) if checkpointed else loss(m, *given)

    plain = Applying(forward, (4, 3)).double().to(first)
    module, x, target = copy.deepcopy(plain), drawn(9, 4).to(first), LABELS.to(first)
    plain((x, target)).backward()
    parallel = DataParallel(module, devices(3), split=SPLIT)
    parallel.step(lambda loss: loss, (x, target))
    same_gradients(module, plain)
    module.zero_grad()
    parallel.step(lambda loss: loss * 1, (x, target), weight=lambda given: labels_of(given[1]))
    same_gradients(module, plain)


def test_fewer_rows_than_devices_and_a_target_without_rows(devices, first):
    module = nn.Linear(4, 3).double().to(first)
    parallel, x = DataParallel(module, devices(3)), drawn(2, 4).to(first)
    parallel.step(lambda output, factor: (output * factor).mean(), x, 2.0, weight=lambda factor: 1)
    torch.testing.assert_close(module.bias.grad, torch.full_like(module.bias, 2 / 3))


def focal(**options):
    """A criterion of its own, with these options."""
    criterion = nn.Module()
    vars(criterion).update(options, forward=own_mean)
    return criterion


NOTICED = {
    "a multiple": (lambda output, target: F.cross_entropy(output, target) / 2, "there is a cross entropy in it"),
    "a sum": (lambda output, target: F.cross_entropy(output, target) + output.square().mean(), "a cross entropy in it"),
    "classes": (lambda output, target: F.cross_entropy(output, target, WEIGHTS) / 2, "a cross entropy in it"),
    "ignores": (focal(ignore_index=IGNORED), "loss_fn has an ignore_index"),
    "weighted": (focal(weight=WEIGHTS), "loss_fn has weights of classes"),
    "partial": (partial(own_mean, ignore_index=IGNORED), "loss_fn has an ignore_index"),
}


@pytest.mark.parametrize(("loss_fn", "message"), NOTICED.values(), ids=NOTICED)
def test_a_mean_that_cannot_be_seen_through_is_a_warning(loss_fn, message):
    parallel, x = DataParallel(nn.Linear(4, 3).double(), ["cpu"] * 2), drawn(9, 4)
    if isinstance(loss_fn, partial):
        loss_fn = partial(lambda output, target, ignore_index: own_mean(output, target), **loss_fn.keywords)
    with pytest.warns(UserWarning, match=message) as caught:
        parallel.step(loss_fn, x, LABELS)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.step(loss_fn, x, LABELS, weight=labels_of)
        DataParallel(parallel.module, ["cpu"]).step(loss_fn, x, LABELS)


def test_a_sum_of_means_over_labels_of_which_all_rows_have_equally_many_is_right(devices):
    beside_one_device(devices, lambda o, y: F.cross_entropy(o, y) + o.square().mean(), LABELS.clamp(0))


def test_smoothing_alone_without_a_divisor_is_an_error(devices, first):
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS * torch.tensor([0, 1, 1]), **SMOOTHED).to(first)
    parallel = DataParallel(nn.Linear(4, 3).double().to(first), devices(2))
    with pytest.raises(OptionError, match="all labels of a replica are of classes with weight 0"):
        parallel.step(criterion, drawn(4, 4).to(first), torch.tensor([0, 0, 1, 2]).to(first))
    assert parallel.module.weight.grad is None


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_none(devices, first, wrong):
    parallel = DataParallel(nn.Linear(4, 3).double().to(first), devices(2))
    with pytest.raises(OptionError, match=f"a weight of {float(wrong)} for the part of replica 0"):
        parallel.step(likelihood, drawn(4, 4).to(first), LABELS[5:].to(first), weight=lambda target: wrong)
