"""`mixed_precision`: forward in lower precision, gradients on the way in another; everything kept as it is."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import AgreementError, OptionError
from threaded import run_ranks

LOW = torch.bfloat16


class Net(nn.Module):
    """A tied weight, a frozen one, buffers of two kinds, a recurrent layer, a layer whose weight its parent reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.again.bias.requires_grad_(False)
        self.memory = nn.GRU(8, 4, batch_first=True)
        self.read = nn.Linear(4, 2)
        self.kept = nn.Parameter(torch.ones(2))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.first.weight.dtype, self.norm.running_mean.dtype, self.kept.dtype))
        x = self.again(self.tied(self.norm(self.first(x))).tanh())
        x = self.memory(x[:, None])[0][:, 0]
        return nn.functional.linear(x, self.read.weight, self.read.bias) * self.kept


def batch(rank, step=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(out):
    return out.float().square().mean()


def reference(net, world, config, ignored=()):
    """The gradients, of each rank's batch by itself with casts that autograd sees, averaged as they travel."""
    sums = {}
    named = {name: p for name, p in net.named_parameters() if name not in ignored}
    for rank in range(world):
        alone = copy.deepcopy(net)
        cast = {
            name: p.to(config.param_dtype or p.dtype) for name, p in alone.named_parameters() if name not in ignored
        }
        if config.buffer_dtype is not None:
            for name, buffer in alone.named_buffers():
                if buffer.is_floating_point():
                    cast[name] = buffer.to(config.buffer_dtype)
        x = batch(rank).to(config.param_dtype or torch.float32)
        loss_of(torch.func.functional_call(alone, cast, (x,))).backward()
        for name, p in alone.named_parameters():
            if p.grad is not None:
                way = config.reduce_dtype or config.param_dtype or p.dtype
                sums.setdefault(name, []).append(p.grad.to(way) / world)
    return {name: sum(parts[1:], parts[0]).to(named[name].dtype) for name, parts in sums.items() if name in named}


def wrap(way, net, rank, **options):
    if way == "replicate":
        return lockstep.replicate(net, process_group=rank.group, **options)
    return lockstep.DistributedDataParallel(net, process_group=rank.group, **options)


CONFIGS = [
    _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32, buffer_dtype=LOW),
    _MixedPrecision(param_dtype=LOW, buffer_dtype=LOW),
    _MixedPrecision(reduce_dtype=LOW),
    _MixedPrecision(param_dtype=torch.float64, buffer_dtype=torch.float64),
]


def train(rank, way, config):
    plain = rank.make(Net)
    wanted = reference(plain, rank.world, config)
    exact = reference(plain.double(), rank.world, _MixedPrecision(param_dtype=torch.float64))
    model = wrap(way, rank.make(Net), rank, mixed_precision=config)
    net = model if way == "replicate" else model.module
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss_of(model(batch(rank.rank))).backward()
    dtype, buffer = config.param_dtype or torch.float32, config.buffer_dtype or torch.float32
    assert net.seen == [(dtype, dtype, buffer, dtype)]
    for name, parameter in net.named_parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])
        assert (parameter.grad is None) == (name not in wanted)
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=0, atol=0)
            torch.testing.assert_close(parameter.grad.double(), exact[name], rtol=0.1, atol=0.02)
            assert rank.all_equal(parameter.grad)
    assert net.norm.running_mean.dtype == torch.float32
    assert not torch.equal(net.norm.running_mean, before["norm.running_mean"])
    assert int(net.norm.num_batches_tracked) == 1
    assert rank.all_equal(net.norm.running_mean)


@pytest.mark.parametrize("hosts", ["", "aa"], ids=["gloo", "shm"])
@pytest.mark.parametrize("way", ["wrapper", "replicate"])
@pytest.mark.parametrize("config", CONFIGS, ids=["low", "low all the way", "low on the way", "higher"])
def test_gradients_are_those_of_casts_in_forward(way, config, hosts):
    run_ranks(2, train, way, config, hosts=hosts)


def alone(net, **options):
    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    options = {"mixed_precision": CONFIGS[0], **options}
    return lockstep.DistributedDataParallel(net, process_group=group, **options)


def test_what_is_ignored_is_not_cast():
    model = alone(Net(), params_and_buffers_to_ignore=["kept"])
    model(batch(0))
    assert model.module.seen == [(LOW, LOW, LOW, torch.float32)]


def test_gradients_pile_up_in_their_own_dtype():
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    model, step = alone(net), torch.full((1, 4), 2.0**-8)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    model(step).sum().backward()
    assert net.weight.grad.tolist() == [[1 + 2.0**-8] * 4]  # bfloat16 has no such number
    assert model.mixed_precision is CONFIGS[0]


class Part(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block, self.last, self.reentrant = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            nn.Linear(4, 1),
            reentrant,
        )

    def forward(self, x):
        run = (
            self.block if self.reentrant is None else lambda x: checkpoint(self.block, x, use_reentrant=self.reentrant)
        )
        return self.last(run(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_is_cast_when_it_is_computed_again(reentrant):
    nets = [Part(None), Part(reentrant)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        x = batch(0).requires_grad_()
        model = alone(net)
        model(x).square().sum().backward()
        assert type(net.block[0].weight) is nn.Parameter
    for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_new_layer_that_is_checkpointed_is_cast_when_it_is_computed_again(reentrant):
    nets, seen = [Part(None), Part(reentrant)], []
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        model = alone(net)
        net.block = nn.Linear(4, 4)
        nn.init.ones_(net.block.weight)
        nn.init.zeros_(net.block.bias)
        model(batch(0).requires_grad_()).square().sum().backward()
        seen.append(net.block.weight.grad)
    assert seen[0].dtype == torch.float32
    assert torch.equal(*seen)


@pytest.mark.parametrize("late", [False, True])
def test_a_parametrized_weight_that_is_looked_at_outside_of_forward_has_full_precision(late):
    net = nn.Linear(4, 1)
    if not late:
        nn.utils.parametrizations.weight_norm(net)
    model = alone(net)
    if late:
        nn.utils.parametrizations.weight_norm(net)
    model(batch(0)).sum().backward()
    assert net.weight.dtype == torch.float32


def test_gradients_inside_of_a_forward_that_is_called_without():
    class Inner(nn.Linear):
        def forward(self, x):
            with torch.enable_grad():
                super().forward(x).sum().backward()
            return x

    net = Inner(4, 1)
    model = alone(net, forward_sync_buffers=False)
    with torch.no_grad(), model.no_sync():
        model(torch.ones(1, 4))
    assert net.weight.grad.tolist() == [[1, 1, 1, 1]]


def test_a_backward_that_synchronises_inside_of_forward_is_an_error():
    class Inner(nn.Linear):
        def forward(self, x):
            super().forward(x).sum().backward()
            return super().forward(x)

    model = alone(nn.Sequential(Inner(4, 1)))
    with pytest.raises(AgreementError, match=r"parameter 0\.weight"):
        model(torch.ones(1, 4))
    assert type(model.module[0].weight) is nn.Parameter


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_parameters_as_they_were(error):
    class Fails(nn.Linear):
        fail = True

        def forward(self, x):
            assert self.weight.dtype == LOW
            if self.fail:
                raise error
            return super().forward(x)

    net = nn.Sequential(Fails(4, 4))
    model = alone(net)
    with pytest.raises(error):
        model(torch.ones(1, 4))
    if error is KeyError:
        assert type(net[0].weight) is nn.Parameter
    net[0].fail = False
    model(torch.ones(1, 4)).sum().backward()
    assert type(net[0].weight) is nn.Parameter
    assert net[0].weight.grad is not None


def test_evaluation_keeps_the_precision_of_buffers():
    model = alone(nn.BatchNorm1d(2).eval())
    model.module.running_mean.fill_(1 + 2.0**-20)
    with torch.inference_mode():
        model(torch.ones(3, 2))
    assert model.module.running_mean.tolist() == [1 + 2.0**-20] * 2


def test_a_buffer_that_forward_replaces_keeps_its_dtype():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x):
            self.total = self.total + x.sum()
            return x * self.weight

    model = alone(Counts())
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
    assert model.module.total.dtype == torch.float32
    assert model.module.total.item() == 6


def test_forward_from_a_second_thread_is_an_error():
    entered, errors = threading.Event(), []

    class Waits(nn.Linear):
        def forward(self, x):
            if not entered.is_set():
                entered.set()
                other.start()
                other.join()
            return super().forward(x)

    model = alone(Waits(4, 1))

    def call():
        try:
            model(torch.ones(1, 4))
        except OptionError as error:
            errors.append(str(error))

    other = threading.Thread(target=call)
    model(torch.ones(1, 4)).sum().backward()
    assert "another thread is inside" in errors[0]
    assert type(model.module.weight) is nn.Parameter


def test_copies_are_plain_and_a_copied_wrapper_casts_again():
    model = alone(Net())
    model(batch(0))  # after which no layer refers to a cast, which could not be copied
    model.module.seen.clear()
    for copied in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        copied.seen.clear()
        copied(batch(0))
        assert copied.seen == [(torch.float32,) * 4]
    again = copy.deepcopy(model)
    again(batch(0))
    assert again.module.seen == [(LOW, LOW, LOW, LOW)]


def differ(rank):
    lockstep.replicate(nn.Linear(1, 1), process_group=rank.group, mixed_precision=CONFIGS[rank.rank])


def test_another_precision_on_another_rank_is_an_error_on_every_rank():
    for error in run_ranks(2, differ, errors=True):
        assert isinstance(error, AgreementError)
        assert "mixed_precision" in str(error)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (torch.float16, "must be a torch.nn.parallel.distributed._MixedPrecision, got dtype"),
        (_MixedPrecision(param_dtype=torch.int8), "param_dtype must be a floating dtype or None, got torch.int8"),
        (_MixedPrecision(reduce_dtype="bf16"), "reduce_dtype must be a floating dtype or None, got 'bf16'"),
    ],
)
def test_what_is_no_configuration_is_refused(config, text):
    with pytest.raises(OptionError) as caught:
        alone(nn.Linear(1, 1), mixed_precision=config)
    assert text in str(caught.value)


class EarlyExit(nn.Module):
    """Rank 1 leaves after the frozen layer."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x, rank):
        x = self.frozen(x)
        return x if rank == 1 else self.trained(x)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_rank_whose_loss_reaches_no_parameter_takes_part(lazy):
    """Also where the module got ready in its first forward."""

    def call(rank):
        with torch.device("meta" if lazy else "cpu"):
            net = EarlyExit()
        config = _MixedPrecision(param_dtype=LOW)
        model = lockstep.replicate(net, process_group=rank.group, mixed_precision=config)
        if lazy:
            net.to_empty(device="cpu")
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 2, requires_grad=True), rank.rank).sum().backward()
            grads.append(net.trained.bias.grad.tolist())
        return grads

    assert run_ranks(2, call) == [[[0.5, 0.5]] * 2] * 2
