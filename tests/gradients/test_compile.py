"""`torch.compile` before, after and inside: gradients are those of the same module without it, whatever is compiled.

Dynamo is not thread-safe, so ranks are processes.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lockstep
from ddp_reference import gradients
from lockstep.errors import PeerError
from processes import on_processes
from programs.networks import Applying

KINDS = [("replicate", "eager"), ("wrapper", "aot_eager")]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return self.layer(x).tanh() * 2


class Network(nn.Module):
    """Blocks, one of which is used on demand, and a buffer that forward counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = Block(6, 12), Block(6, 12), Block(12, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, extra=False):
        self.calls += 1
        hidden = self.first(x)
        if extra:
            hidden = hidden + self.extra(x)
        return self.last(hidden)


WAYS = {
    "replicate": lambda module: lockstep.replicate(module),
    "wrapper": lambda module: lockstep.DistributedDataParallel(module),
    "torch": lambda module: nn.parallel.DistributedDataParallel(module, find_unused_parameters=True),
}


def by_method(module, **options):
    module.compile(**options)
    return module


def by_blocks(module, **options):
    module.first = torch.compile(module.first, **options)
    module.last.compile(**options)
    return module


PLACES = {
    "before": lambda way, module, **options: way(torch.compile(module, **options)),
    "after": lambda way, module, **options: torch.compile(way(module), **options),
    "method before": lambda way, module, **options: way(by_method(module, **options)),
    "method after": lambda way, module, **options: by_method(way(module), **options),
    "blocks": lambda way, module, **options: way(by_blocks(module, **options)),
}


def allow_warnings():
    """What the compiler warns of in its own code, which would fail it here."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)


def inputs(rank, step):
    return torch.randn(4, 6, generator=rank.generator(step))


def train(rank, model, backward=contextlib.nullcontext, steps=5):
    """Steps with accumulation under no_sync, and with a block that only rank 0 uses; the gradients of each."""
    seen = []
    update = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            loss = model(inputs(rank, step), extra=step == 3 and rank.rank == 0).square().mean()
            with backward():
                loss.backward()
        seen.append(gradients(model))
        if step != 1:
            update.step()
            update.zero_grad()
    return seen


def assert_same(got, wanted, what):
    for step, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, step=step: f"{what}, step {step}: {text}"
        )


OTHERS = ["before", "after", "method before"]  # of the wrapper also beside the reference, below


@pytest.mark.parametrize(
    ("name", "backend", "places"),
    [
        (*KINDS[0], [*PLACES]),
        (*KINDS[1], ["method after", "blocks"]),
        pytest.param(*KINDS[1], OTHERS, marks=pytest.mark.soak),
    ],
)
@on_processes(2)
def test_compiled_before_after_and_inside_as_one_graph(rank, name, backend, places):
    """Nothing of ours breaks the graph, or has it made anew: with and without the extra block is all there is."""
    allow_warnings()
    plain = rank.make(Network)
    wanted = train(rank, WAYS[name](copy.deepcopy(plain)))
    graphs = {}
    for place in places:
        torch._dynamo.reset()
        counters.clear()
        model = PLACES[place](WAYS[name], copy.deepcopy(plain), backend=backend, fullgraph=True)
        assert_same(train(rank, model), wanted, f"{name}, {backend}, {place}")
        lockstep.check_in_sync(model)
        graphs[place] = counters["stats"]["unique_graphs"]
        assert not counters["graph_break"]
    # Rank 0 has used the extra block. Two blocks are compiled each on its own.
    assert graphs == {place: 2 if place == "blocks" or rank.rank == 0 else 1 for place in places}


@on_processes(2)
def test_the_reference_compiled_in_the_same_places_has_the_same_gradients(rank):
    """Where it can be: it breaks the graph after wrapping."""
    plain = rank.make(Network)
    for place in OTHERS:
        torch._dynamo.reset()
        models = [PLACES[place](WAYS[name], copy.deepcopy(plain), backend="eager") for name in ("torch", "wrapper")]
        for step in range(3):
            for model in models:
                model.zero_grad()
                model(inputs(rank, step), extra=True).square().mean().backward()
            torch.testing.assert_close(*map(gradients, models), rtol=0, atol=0)


# ------------------------------------------------------------------------------- compiled backward


def train_whole_steps(rank, model, compiled_step, steps=3):
    seen = []
    for step in range(steps):
        model.zero_grad()
        compiled_step(model, inputs(rank, step), step == 1 and rank.rank == 1)
        seen.append(gradients(model))
    return seen


def whole_step(model, x, extra):
    model(x, extra=extra).square().mean().backward()


@pytest.mark.parametrize(("name", "backend", "fullgraph"), [(*KINDS[0], True), (*KINDS[1], False)])
@on_processes(2)
def test_compiled_autograd(rank, name, backend, fullgraph):
    """Backward becomes one graph, or several; the hooks of parameters wait in it for the end, as they do without it."""
    allow_warnings()
    plain = rank.make(Network)
    wanted = train(rank, WAYS[name](copy.deepcopy(plain)))
    torch._dynamo.reset()
    counters.clear()
    compiler = torch.compile(backend=backend, fullgraph=fullgraph)
    inner, held = copy.deepcopy(plain), []
    model = torch.compile(WAYS[name](inner), backend=backend)
    inner.last.layer.weight.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.clone()))
    got = train(rank, model, lambda: compiled_autograd._enable(compiler))
    assert_same(got, wanted, f"compiled autograd, fullgraph {fullgraph}")
    torch.testing.assert_close(held, [each[2] for step, each in enumerate(got) if step != 1])  # not under no_sync
    # Observed, alone, on top of others, with the extra block.
    assert counters["compiled_autograd"]["captures"] == 4 - rank.rank
    assert not (fullgraph and counters["graph_break"])

    fail = WAYS[name](copy.deepcopy(plain))  # an error in the compiled backward of one rank reaches the others
    loss = fail(inputs(rank, 0)).square().mean()
    if rank.rank == 0:
        next(fail.parameters()).register_hook(raises)
    kind, message = (PeerError, "failed on") if rank.rank else (RuntimeError, "a hook fails")
    with pytest.raises(kind, match=message), compiled_autograd._enable(compiler):
        loss.backward()
    fail.zero_grad()


def raises(grad):
    raise RuntimeError("a hook fails")


@on_processes(2)
def test_whole_steps(rank):
    """Backward is called inside what is compiled: with compiled autograd it becomes a graph, too."""
    allow_warnings()
    plain = rank.make(Network)
    wanted = train_whole_steps(rank, lockstep.replicate(copy.deepcopy(plain)), whole_step)
    for enabled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch._dynamo.config.compiled_autograd = enabled
        step = torch.compile(whole_step, backend="eager")
        got = train_whole_steps(rank, lockstep.replicate(copy.deepcopy(plain)), step)
        assert_same(got, wanted, f"a whole step, compiled autograd {enabled}")
        assert bool(counters["compiled_autograd"]["captures"]) == enabled


# ------------------------------------------------------------------------------------ around it


def recomputed(inner):
    return Applying(lambda m, x, extra=False: checkpoint(m.inner, x, extra, use_reentrant=False), (), inner=inner)


@on_processes(2)
def test_compiled_modules_in_use(rank):
    """Compiled modules in everyday use: getting ready late, copies, checkpointing, state, hooks, several at once."""
    allow_warnings()
    plain = rank.make(Network)
    wanted = train(rank, lockstep.replicate(copy.deepcopy(plain)))

    with torch.device("meta"):
        late = lockstep.replicate(Network())
    late.to_empty(device="cpu")
    late.load_state_dict(plain.state_dict())
    assert_same(train(rank, torch.compile(late, backend="eager")), wanted, "from the meta device")

    copied = copy.deepcopy(lockstep.DistributedDataParallel(copy.deepcopy(plain)))
    assert_same(train(rank, torch.compile(copied, backend="eager")), wanted, "copied")

    model = lockstep.replicate(recomputed(copy.deepcopy(plain)))
    assert_same(train(rank, torch.compile(model, backend="aot_eager")), wanted, "recomputed")
    inner = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    assert_same(train(rank, lockstep.replicate(recomputed(inner))), wanted, "recomputed, inside")

    replicated = lockstep.replicate(copy.deepcopy(plain))
    compiled = torch.compile(replicated, backend="eager")
    assert [*compiled._orig_mod.state_dict()] == [*plain.state_dict()]
    compiled.register_comm_hook(None, twofold)
    with lockstep.accumulate(compiled, weight=2.0):
        compiled(inputs(rank, 0)).square().sum().backward()
    assert lockstep.distributed.training_state_dict(compiled)["round"] == 1
    assert lockstep.loop.statistics(compiled).calls["collective"] > 0
    assert lockstep.replicate.state(compiled).ready
    assert rank.all_equal(compiled.last.layer.weight.grad.sum())


def twofold(state, bucket):
    return bucket.buffer() * 2


@pytest.mark.soak  # the C++ compiler needs half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@on_processes(2, timeout=200)
def test_inductor(rank):
    allow_warnings()
    plain = rank.make(Network)
    wanted = train(rank, lockstep.replicate(copy.deepcopy(plain)), steps=3)
    model = torch.compile(lockstep.replicate(copy.deepcopy(plain)), fullgraph=True)
    assert_same(train(rank, model, steps=3), wanted, "inductor")


@on_processes(2)
def test_a_step_in_which_ranks_exchange_more_than_gradients(rank):
    allow_warnings()

    def loss_of(x):
        features, own = lockstep.loop.gather_rows(model(x), model)
        (gradient,) = torch.autograd.grad(features[own].tanh().sum(), [model[0].weight], create_graph=True)
        return lockstep.loop.mean_over_ranks(gradient).square().sum() + features.sin().sum()

    def step(x, skips):
        model.zero_grad()
        with lockstep.loop.skip_on(ValueError):
            if skips and rank.rank:
                raise ValueError
            loss = model[0](x).sum() if skips else loss_of(x)
            loss.backward()
        if lockstep.loop.skipped():
            return model[0].weight.grad
        lockstep.check_in_sync(model)
        numbers = lockstep.mean(x.sum()), lockstep.loop.total(len(x)), lockstep.loop.agree(rank.rank == 1)
        return torch.stack([*map(torch.as_tensor, numbers), *model[0].weight.grad.flatten()])

    model = rank.make(lambda: nn.Sequential(nn.Linear(3, 2), lockstep.local.SyncBatchNorm(2)).double())
    lockstep.replicate(model)
    x = torch.randn(3, 3, generator=rank.generator(), dtype=torch.float64)
    compiled = torch.compile(step, backend="eager")
    wanted, found = ([each(x, False), each(x, True), each(x, False)] for each in (step, compiled))
    assert found[1] is wanted[1] is None
    torch.testing.assert_close(found, wanted)
