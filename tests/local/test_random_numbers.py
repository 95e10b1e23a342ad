"""Random numbers in replicas: each draws from a stream of its own, and a state that it reads gives the same again."""

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep import DataParallel
from lockstep.local import SyncBatchNorm, current_replica, data_parallel, parallel_apply
from lockstep.local.random_streams import _WITHOUT_GENERATOR

TIMEOUT = 20


def in_backward():
    return torch._C._current_graph_task_id() != -1


class Dropped(nn.Module):
    """A dropout in a checkpointed segment; the last replica draws between the first one's reading and drawing."""

    def __init__(self, reentrant):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.reentrant = reentrant
        self.first_has_read, self.last_has_drawn = threading.Event(), threading.Event()

    def forward(self, x):
        return checkpoint(self.segment, x * self.weight, use_reentrant=self.reentrant)

    def segment(self, x):
        replica = current_replica()
        if replica is None or in_backward() or self.last_has_drawn.is_set():
            return F.dropout(x, 0.5, True)
        if replica.index == 0:  # the checkpoint has read the state
            self.first_has_read.set()
            assert self.last_has_drawn.wait(TIMEOUT)
            return F.dropout(x, 0.5, True)
        assert self.first_has_read.wait(TIMEOUT)
        dropped = F.dropout(x, 0.5, True)
        self.last_has_drawn.set()
        return dropped

    def __deepcopy__(self, memo):
        return Dropped(self.reentrant)


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_segment_draws_the_same_numbers_again(reentrant, use_step):
    network = Dropped(reentrant)
    parallel = DataParallel(network, ["cpu", "cpu"])
    x = torch.randn(64, 8)
    if use_step:
        loss = parallel.step(lambda output: output.mean(), x)
    else:
        loss = parallel(x).mean()
        loss.backward()
    torch.testing.assert_close(network.weight.grad.sum(), loss.detach())  # the loss is linear in the weight


class DroppedTogether(nn.Module):
    """A dropout in a checkpointed segment, where the first to come lets another draw before it, if that can."""

    def __init__(self, reentrant, together):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.reentrant, self.together = reentrant, together
        self.arrivals = itertools.count()
        self.first_has_read, self.other_has_drawn = threading.Event(), threading.Event()
        self.normalised = SyncBatchNorm(8)

    def forward(self, x):
        if self.together:
            self.normalised(x)
        return checkpoint(self.segment, x * self.weight, use_reentrant=self.reentrant)

    def segment(self, x):
        if in_backward():
            return F.dropout(x, 0.5, True)
        come_earlier = next(self.arrivals)
        if come_earlier:
            assert self.first_has_read.wait(TIMEOUT)
        else:  # the checkpoint has read the state
            self.first_has_read.set()
            self.other_has_drawn.wait(0.3)  # it cannot, where the two take turns
        dropped = F.dropout(x, 0.5, True)
        if come_earlier:
            self.other_has_drawn.set()
        return dropped


@pytest.mark.parametrize("use_step", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "after a meeting"])
def test_replicas_on_one_accelerator_draw_the_same_numbers_again(sim, together, reentrant, use_step):
    device = sim.devices(1)[0]
    network = DroppedTogether(reentrant, together).to(device)
    parallel = DataParallel(network, [device] * 3)
    x = torch.randn(64, 8, device=device)
    if use_step:
        loss = parallel.step(lambda output: output.mean(), x)
    else:
        loss = parallel(x).mean()
        loss.backward()
    torch.testing.assert_close(network.weight.grad.sum(), loss.detach())


def test_a_failure_lets_the_next_replica_on_the_accelerator_run(sim):
    device = sim.devices(1)[0]
    ran = []

    def call(x):
        ran.append(current_replica().index)
        if len(ran) == 1:
            raise ValueError("the first")
        return x

    with pytest.raises(ValueError, match="the first"):
        parallel_apply([call] * 3, [torch.ones(1, device=device)] * 3)
    assert ran == [0, 1, 2]


class HostDrawn(nn.Module):
    """A mask drawn on the host in a checkpointed segment; recomputations meet between setting a state and drawing."""

    def __init__(self, meeting):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.meet = meeting.wait

    def forward(self, x):
        return checkpoint(self.segment, x * self.weight, use_reentrant=False)

    def segment(self, x):
        if in_backward():
            self.meet(TIMEOUT)
        masked = x * torch.rand(x.shape).to(x.device)
        if in_backward():
            self.meet(TIMEOUT)
        return masked


def test_segments_that_accelerators_recompute_at_the_same_time(sim):
    devices = sim.devices(2)
    network = HostDrawn(threading.Barrier(2)).to(devices[0])
    parallel = DataParallel(network, devices)
    loss = parallel(torch.randn(64, 8, device=devices[0])).mean()
    state = torch.get_rng_state()
    loss.backward()
    torch.testing.assert_close(network.weight.grad.sum(), loss.detach())
    assert torch.equal(torch.get_rng_state(), state)  # no recomputation has left its own behind


def test_a_fork_in_backward_is_the_threads_own():
    """What is set there is read and drawn from there, also by a fork within; elsewhere nothing changes."""
    parallel_apply([torch.neg, torch.neg], [torch.ones(1), torch.ones(1)])
    state, there = torch.get_rng_state(), torch.Generator().manual_seed(7).get_state()
    seen: list[torch.Tensor] = []

    def hook(grad):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(there)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(9)
                seen.append(torch.rand(3))
            assert torch.equal(torch.get_rng_state(), there)
            assert torch.equal(torch.default_generator.get_state(), state)
            seen.append(torch.rand(3))
        assert torch.equal(torch.get_rng_state(), state)

    x = torch.ones(1, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    torch.set_rng_state(there)
    assert torch.equal(seen[1], torch.rand(3))
    torch.manual_seed(9)
    assert torch.equal(seen[0], torch.rand(3))


def seeded(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_fork_in_backward_that_seeds_draws_the_seeds_numbers_and_leaves_the_state_as_it_was():
    # As PyTorch's PowerSGD hook draws its first guess, the same on all ranks.
    parallel_apply([lambda _: torch.rand(1)] * 2, [0, 1])
    drawn = []

    def hook(gradient):
        for seed in (5, 6):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn.append(torch.randn(3))
        return gradient

    x = torch.ones(2, requires_grad=True)
    between = x * 2
    for tensor in (between, x):  # two nodes of the graph
        tensor.register_hook(hook)
    state = torch.get_rng_state()
    (between * 3).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.stack(drawn), torch.stack([seeded(seed, 3) for seed in (5, 6, 5, 6)]))


def test_a_state_that_a_hook_of_backward_sets_for_good_does_not_part_later_seeds_from_their_numbers():
    parallel_apply([lambda _: torch.rand(1)] * 2, [0, 1])
    drawn = []

    def sets(gradient):
        torch.set_rng_state(torch.Generator().manual_seed(1).get_state())

    def seeds(gradient):
        torch.manual_seed(7)
        drawn.append(torch.randn(3))

    x = torch.ones(2, requires_grad=True)
    between = x * 2
    between.register_hook(sets)
    x.register_hook(seeds)
    (between * 3).sum().backward()
    assert torch.equal(drawn[0], seeded(7, 3))


def test_forks_in_backward_that_seed_at_the_same_time_are_the_threads_own():
    parallel_apply([lambda _: torch.rand(1)] * 2, [0, 1])
    both, drawn = threading.Barrier(2), {}

    def backward(seed):
        def hook(gradient):
            both.wait(TIMEOUT)
            with torch.random.fork_rng(devices=[]):
                both.wait(TIMEOUT)
                torch.manual_seed(seed)
                both.wait(TIMEOUT)
                drawn[seed] = torch.randn(3)

        x = torch.ones(2, requires_grad=True)
        x.register_hook(hook)
        x.sum().backward()

    state = torch.get_rng_state()
    threads = [threading.Thread(target=backward, args=(seed,)) for seed in (5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert all(torch.equal(drawn[seed], seeded(seed, 3)) for seed in (5, 6))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("how", ["forward", "step", "backward"])
def test_runs_from_one_seed_are_alike(how):
    def run():
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        parallel = DataParallel(network, ["cpu"] * 3)
        outputs = []
        for _ in range(3):
            if how == "step":
                outputs.append(parallel.step(lambda output: output.mean(), torch.ones(9, 4)))
            else:
                outputs.append(parallel(torch.ones(9, 4)))
            if how == "backward":
                outputs[-1].sum().backward()
        return [*outputs, *(torch.zeros(1) if p.grad is None else p.grad for p in network.parameters())]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))


def test_replicas_and_uses_differ_and_the_first_goes_on_in_the_callers_stream():
    torch.manual_seed(5)
    expected = torch.rand(8)
    torch.manual_seed(5)
    draw = lambda _: torch.rand(8)  # noqa: E731
    first, second, third = parallel_apply([draw] * 3, [0] * 3)
    assert torch.equal(first, expected)
    again = parallel_apply([draw] * 3, [0] * 3)
    assert len({tuple(row.tolist()) for row in (first, second, third, *again)}) == 6


def test_the_callers_stream_moves_only_if_a_replica_draws():
    network, x = nn.Linear(2, 2), torch.ones(4, 2)
    state = torch.get_rng_state()
    data_parallel(network, x, ["cpu", "cpu"])
    assert torch.equal(torch.get_rng_state(), state)
    only_the_second = lambda i: torch.rand(3) if i else torch.zeros(3)  # noqa: E731
    one, other = (parallel_apply([only_the_second] * 2, [0, 1])[1] for _ in range(2))
    assert not torch.equal(one, other)
    torch.set_rng_state(state)
    assert torch.equal(parallel_apply([only_the_second] * 2, [0, 1])[1], one)


def test_replicas_on_the_cpu_draw_while_tensors_are_made_on_accelerators(sim):
    draw = lambda _: torch.rand(4, device="cpu")  # noqa: E731
    expected = [parallel_apply([draw] * 2, [0, 1]) for _ in range(2)]
    torch.manual_seed(0)  # as before each test
    with torch.device("sim:0"):
        found = [parallel_apply([draw] * 2, [0, 1]) for _ in range(2)]
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_seeding_in_a_replica():
    """Each seeds its own stream, whatever the others draw meanwhile."""

    def seeded(index):
        torch.manual_seed(11)
        met = current_replica()
        met.exchange.all_gather("seeded", met.index, None)
        drawn = torch.rand(4)
        assert torch.initial_seed() == 11
        return drawn

    first, second, third = parallel_apply([seeded] * 3, [0, 1, 2])
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_nested_replicas():
    def inner(_):
        return torch.rand(4)

    def outer(_):
        return parallel_apply([inner] * 2, [0, 0])

    torch.manual_seed(2)
    drawn = parallel_apply([outer] * 2, [0, 0])
    torch.manual_seed(2)
    assert all(
        torch.equal(a, b)
        for one, other in zip(drawn, parallel_apply([outer] * 2, [0, 0]), strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert len({tuple(row.tolist()) for pair in drawn for row in pair}) == 4


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(5),
    "rand without a generator": lambda: torch.rand(5, generator=None),
    "rand of the process's generator": lambda: torch.rand(5, generator=torch.default_generator),
    "randn": lambda: torch.randn(5),
    "randint": lambda: torch.randint(1000, (5,)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal of tensors": lambda: torch.normal(torch.zeros(5), torch.ones(5)),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 5),
    "poisson": lambda: torch.poisson(torch.full((20,), 50.0)),
    "binomial": lambda: torch.binomial(torch.full((20,), 50.0), torch.full((20,), 0.5)),
    "exponential": lambda: torch.empty(5).exponential_(),
    "cauchy": lambda: torch.empty(5).cauchy_(),
    "log_normal": lambda: torch.empty(5).log_normal_(),
    "geometric": lambda: torch.empty(20).geometric_(0.05),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample((5,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(5)).sample(),
    "dropout": lambda: F.dropout(torch.ones(64)),
    "native dropout": lambda: torch.native_dropout(torch.ones(64), 0.5, True)[0],
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(64), 0.5, True),
    "feature dropout": lambda: F.dropout2d(torch.ones(1, 64, 2, 2)),
    "rrelu": lambda: F.rrelu(-torch.ones(5), training=True),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(5)),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 8, 8)] * 3, dropout_p=0.5),
    "an initialisation": lambda: nn.init.kaiming_normal_(torch.empty(3, 3)),
    "under vmap": lambda: torch.vmap(lambda x: x * torch.rand(3), randomness="different")(torch.ones(2, 3)),
    "sparse attention's sampling": lambda: F.fractional_max_pool2d(torch.randn(1, 4, 16, 16), 2, output_size=6),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_way_to_draw_draws_from_the_stream(draw):
    """So that a state read before gives the same again, and the process's generator is left alone."""

    def twice(index):
        if index == 0:
            return None
        process = torch.default_generator.get_state()
        state = torch.get_rng_state()
        one = draw()
        assert not torch.equal(torch.get_rng_state(), state)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            other = draw()
        assert torch.equal(torch.default_generator.get_state(), process)
        return one, other

    one, other = parallel_apply([twice] * 2, [0, 1])[1]
    assert torch.equal(one, other)


def test_a_generator_that_is_given_is_the_one_that_is_used():
    def draw(_):
        return torch.rand(4, generator=torch.Generator().manual_seed(3))

    expected = draw(0)
    assert all(torch.equal(drawn, expected) for drawn in parallel_apply([draw] * 2, [0, 1]))


def test_accelerators_draw_from_their_own_generators(sim):
    devices = sim.devices(2)
    network = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).to(devices[0])
    parallel = DataParallel(network, devices)
    state = torch.get_rng_state()
    parallel(torch.ones(4, 4, device=devices[0])).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def compiler():
    """Nothing that was compiled before, and nothing left; the compiler hides its warnings from users, but not here."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_call_that_compiles_draws_the_same_numbers(compiler):
    """It runs what it has compiled inside of a dispatch mode."""
    network = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="aot_eager")
    parallel, x = DataParallel(network, ["cpu", "cpu"]), torch.ones(6, 4)
    outputs = []
    for _ in range(3):
        torch.manual_seed(1)
        outputs.append(parallel(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_replicas(compiler):
    network = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="aot_eager")
    parallel, x = DataParallel(network, ["cpu", "cpu"]), torch.ones(6, 4)
    parallel(x)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(parallel(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    outputs[0].sum().backward()


# ---------------------------------------------------------------------------------- dispatch modes of users


class Unchanged(TorchDispatchMode):
    """Runs every operation as it is, as modes that count or log do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Draws(nn.Module):
    """What `operation` draws, inside of a dispatch mode or not."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, x, with_mode):
        with Unchanged() if with_mode else contextlib.nullcontext():
            return self.operation(x)


def attention(x):
    return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def recurrent(x):
    cell = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    return cell(x)[0]


DRAWING = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "native_dropout": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    "feature_dropout": lambda x: nn.functional.dropout1d(x, 0.5),
    "rand": lambda x: torch.rand(len(x), 4),
    "randn": lambda x: torch.randn(len(x), 4),
    "randint": lambda x: torch.randint(100, (len(x), 4)),
    "randperm": lambda x: torch.randperm(10)[None],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "normal_": lambda x: x.clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x[0], 3)[None],
    "rrelu": lambda x: nn.functional.rrelu(-x, training=True),
    "attention": attention,
    "recurrent": recurrent,
}


@pytest.mark.parametrize("operation", DRAWING.values(), ids=DRAWING)
def test_a_dispatch_mode_does_not_change_what_replicas_draw(operation):
    parallel, x = DataParallel(Draws(operation), ["cpu"] * 3), torch.ones(6, 2, 4)
    drawn = []
    for with_mode in (False, True):
        torch.manual_seed(1)
        drawn.append(parallel(x, with_mode))
    assert torch.equal(*drawn)
    assert drawn[0].unique().numel() > 1


def test_operations_that_draw_and_take_no_generator_are_known():
    """All but those that are made of others before a mode sees them, and those of other devices."""
    others = ("cudnn", "mps", "miopen", "triton", "flash", "efficient", "mem_eff", "fused", "nested")
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name == schema.name or any(argument.name == "generator" for argument in schema.arguments):
            continue
        operation = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
        if operation is None or torch.Tag.nondeterministic_seeded not in operation.tags:
            continue
        is_made_of_others = operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        if not is_made_of_others and not any(other in name for other in others):
            assert name in _WITHOUT_GENERATOR


def test_selective_checkpointing_computes_again_with_the_numbers_of_forward():
    """y = (m * w)^2 with w = 1 and a mask m, so that the gradient of w is 2 * y, if backward has the same mask."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def inner(self, x):
            return nn.functional.dropout(x * self.weight, 0.5).pow(2)

        def forward(self, x):
            contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)

    def recompute_all(context, operation, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    network = Checkpointed()
    out = DataParallel(network, ["cpu"] * 4)(torch.ones(4, 64))
    out.sum().backward()
    assert torch.equal(network.weight.grad, 2 * out.detach().sum(0))
