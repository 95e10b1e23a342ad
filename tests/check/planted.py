"""Programs with one fault each, as functions that return the case of a check."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep
from lockstep.check import Case

SGD = partial(torch.optim.SGD, lr=0.1)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(rows=12, steps=3):
    return [(torch.randn(rows, 6), torch.randint(3, (rows,))) for _ in range(steps)]


def mean_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def right():
    return Case(network(), batches(), mean_loss)


def right_adamw():
    return Case(network(), batches(), mean_loss, torch.optim.AdamW)


# ------------------------------------------------------------------------------------------------------- rows


def loader(rank, ranks, *, sharded=True, sets_epoch=True, epochs=2):
    generator = torch.Generator().manual_seed(3)
    rows = TensorDataset(torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator))
    size, place = 8 // ranks, (ranks, rank) if sharded else (1, 0)
    sampler = DistributedSampler(rows, *place, shuffle=True)
    for epoch in range(epochs):
        if sets_epoch:
            sampler.set_epoch(epoch)
        yield from DataLoader(rows, batch_size=size, sampler=sampler)


def sampled():
    return Case(network(), loader, mean_loss, steps=4)


def without_set_epoch():
    return Case(network(), partial(loader, sets_epoch=False), mean_loss, steps=4)


def without_sampler():
    return Case(network(), partial(loader, sharded=False), mean_loss, steps=2)


# ---------------------------------------------------------------------------------------------------- dropout


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x), 0.5, self.training))


def dropping():
    return Case(Dropping(), batches(), mean_loss)


class Everywhere(nn.Module):
    """Dropout in attention, between recurrent layers, and in a part that backward computes again."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        x = x.unsqueeze(1).repeat(1, 4, 1)
        x = x + self.attention(x, x, x)[0]
        x = torch.utils.checkpoint.checkpoint(lambda x: self.recurrent(x)[0][:, -1], x, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(self.last, x, use_reentrant=False)


def dropping_everywhere():
    return Case(Everywhere(), batches(), mean_loss)


def same_masks():
    torch.manual_seed(0)
    return dropping()


# ------------------------------------------------------------------------------------------------------- loss


def padded_batches():
    """Two rows with few tokens and two with many; -100 counts for nothing."""
    labels = torch.randint(3, (4, 5))
    labels[:2, 1:] = -100
    return [(torch.randn(4, 5, 6), labels)]


def token_loss(model, batch):
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def mean_of_tokens():
    return Case(network(), padded_batches(), token_loss)


def sum_over_tokens(model, optimizer, batch):
    optimizer.zero_grad()
    tokens = int((batch[1] != -100).sum())
    with lockstep.accumulate(model, weight=tokens):
        cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum").backward()
    optimizer.step()


def weighted_by_tokens():
    return Case(network(), padded_batches(), token_loss, step=sum_over_tokens)


def sum_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def summed_loss():
    return Case(network(), batches(), sum_loss)


def contrastive(model, batch):
    z = nn.functional.normalize(model(batch[0]), dim=1)
    return cross_entropy(z @ z.T.detach() / 0.1, torch.arange(len(z)))


def compares_rows():
    return Case(network(), batches(), contrastive)


def normalised():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return Case(model, batches(), mean_loss)


class Counting(nn.Module):
    """Its buffer is a statistic of the batch that nothing computes with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return self.layer(x)


def counted():
    return Case(Counting(), batches(), mean_loss)


# --------------------------------------------------------------------------------------------------- the step


def accumulating(model, optimizer, batch, *, divided):
    optimizer.zero_grad()
    parts = list(zip(batch[0].chunk(3), batch[1].chunk(3), strict=True))
    for number, part in enumerate(parts):
        with model.no_sync() if number < len(parts) - 1 else contextlib.nullcontext():
            (mean_loss(model, part) / (len(parts) if divided else 1)).backward()
    optimizer.step()


def accumulated():
    return Case(network(), batches(), mean_loss, step=partial(accumulating, divided=True))


def accumulated_without_division():
    return Case(network(), batches(), mean_loss, step=partial(accumulating, divided=False))


def never_synchronising(model, optimizer, batch):
    optimizer.zero_grad()
    with model.no_sync():
        mean_loss(model, batch).backward()
    optimizer.step()


def no_sync_around_all():
    return Case(network(), batches(), mean_loss, step=never_synchronising)


def clipping_too_early(model, optimizer, batch):
    optimizer.zero_grad()
    with model.no_sync():
        mean_loss(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def clipped_before():
    return Case(network(), batches(), step=clipping_too_early)


def clipping(model, optimizer, batch):
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def clipped():
    return Case(network(), batches(), step=clipping)


def clipped_before_beside_a_loss():
    return Case(network(), batches(), mean_loss, step=clipping_too_early)


def clipped_beside_a_loss():
    return Case(network(), batches(), mean_loss, step=clipping)


def keeping_gradients(model, optimizer, batch):
    mean_loss(model, batch).backward()
    optimizer.step()


def without_zero_grad():
    return Case(network(), batches(), mean_loss, step=keeping_gradients)


def scaled_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1 * dist.get_world_size())


def scaled_learning_rate():
    return Case(network(), batches(), mean_loss, scaled_sgd)


def rank_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1 * (1 + dist.get_rank()))


def own_learning_rate():
    return Case(network(), batches(), mean_loss, rank_sgd)


class Outside(nn.Module):
    """Its scale is used by the loss, not by ``forward``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x)


def scaled_loss(model, batch):
    return cross_entropy(getattr(model, "module", model).scale * model(batch[0]), batch[1])


def used_outside():
    return Case(Outside(), batches(), scaled_loss)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) + (self.added(x) if hasattr(self, "added") else 0)


def growing(model, optimizer, batch):
    inner = getattr(model, "module", model)
    if not hasattr(inner, "added"):
        inner.added = nn.Linear(6, 3, dtype=batch[0].dtype)
        nn.init.zeros_(inner.added.weight)
        nn.init.zeros_(inner.added.bias)
        optimizer.add_param_group({"params": inner.added.parameters()})
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    optimizer.step()


def grown():
    return Case(Growing(), batches(), step=growing)


def around_the_wrapper(model, batch):
    return cross_entropy(getattr(model, "module", model)(batch[0]), batch[1])


def past_the_wrapper():
    return Case(network(), batches(), around_the_wrapper)


def unfreezing(model, optimizer, batch):
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    optimizer.step()


def unfrozen():
    model = network()
    model[0].weight.requires_grad_(False)
    return Case(model, batches(), step=unfreezing)


def own_step_in_backward(model, optimizer, batch):
    """An optimizer in hooks, on the gradients of this rank alone."""
    if not hasattr(model, "steps_in_backward"):
        model.steps_in_backward = True
        for parameter in model.parameters():
            parameter.register_hook(partial(_subtract, parameter))
    model.zero_grad()
    mean_loss(model, batch).backward()


def _subtract(parameter, gradient):
    parameter.data.sub_(0.1 * gradient)


def steps_on_local_gradients():
    return Case(network(), batches(), step=own_step_in_backward)


# ----------------------------------------------------------------------------------------------------- wraps


def sums(model):
    """Sums the gradients over the ranks."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def divides_twice(model):
    """Averages the gradients, and divides them once more."""

    def hook(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size() ** 2

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def draws_anew(model):
    """Each rank begins with weights of its own; gradients are averaged."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        nn.init.normal_(parameter)

    def hook(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


def hangs(model):
    if dist.get_rank() == 1:
        threading.Event().wait()
    return model if dist.get_rank() else nn.parallel.DistributedDataParallel(model)


def fails(model):
    if dist.get_rank() == 1:
        raise ValueError("this rank cannot")
    return model


def takes_rank_0s(model):
    """All ranks get rank 0's gradients."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.broadcast(p.grad, 0))
    return model
