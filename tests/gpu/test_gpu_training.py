"""Whole trainings on GPUs, with what their programs use there, beside PyTorch's DDP or one process.

Two ranks over NCCL where it allows them on the GPUs that there are, else over Gloo. Ranks are processes.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from lockstep.sharding import full_state_dict, shard_optimizer
from one_gpu import CYCLES, LIMIT, NCCL, allows_several_ranks, place_of
from processes import on_processes, run_processes

TORCHS = nn.parallel.DistributedDataParallel


@pytest.fixture
def backend(home):
    return NCCL if home.type == "cuda" and allows_several_ranks() else "gloo"


class Block(nn.Module):
    """A layer of a language model."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.again(x))


class Language(nn.Module):
    """A small language model whose first and last weights are one."""

    def __init__(self, width=64, vocabulary=96, depth=3, checkpointed=False):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, ids):
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def texts(step, rank, device):
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(96, (4, 17), generator=chance).to(device)


def language_loss(model, ids):
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def same(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **(tolerance or {"rtol": 0, "atol": 0}))


# ---------------------------------------------------------------------------------- beside PyTorch's DDP


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_processes(2, "backend", timeout=LIMIT)
def test_mixed_precision_trains_as_the_reference(rank, dtype, accumulates):
    """Autocast, a scaler for float16, clipped gradients, micro-batches, a schedule."""
    device = place_of(rank)
    torch.use_deterministic_algorithms(True)
    for kernels in (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        kernels(False)  # their backward is not deterministic
    found = []
    for way in (TORCHS, lockstep.replicate, lockstep.DistributedDataParallel):
        model = rank.make(lambda: Language(checkpointed=accumulates)).to(device)
        model = way(model, static_graph=True) if accumulates and way is TORCHS else way(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16, init_scale=2.0**12)
        for step in range(8):
            optimizer.zero_grad()
            for micro in range(2 if accumulates else 1):
                with torch.autocast(device.type, dtype):
                    loss = language_loss(model, texts(2 * step + micro, rank.rank, device)) / (1 + accumulates)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        found.append(weights(model))
        if way is not TORCHS:
            lockstep.check_in_sync(model)
        del model, optimizer
    same(found[1], found[2])
    same(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("gpu")
@on_processes(2, "backend", timeout=LIMIT)
def test_prefetched_batches_on_a_stream_of_their_own(rank):
    """Batches that a stream of its own copies ahead, losses that are read late, and kernels that keep the GPU busy."""
    device = place_of(rank)
    found = []
    for way in (TORCHS, lockstep.replicate):
        model = way(rank.make(Language).to(device))
        optimizer, copies = torch.optim.SGD(model.parameters(), 0.05), torch.cuda.Stream()
        losses, ahead = [], None
        for step in range(60):
            with torch.cuda.stream(copies):
                upcoming = texts(step, rank.rank, "cpu").pin_memory().to(device, non_blocking=True)
            ids, ahead = ahead, upcoming
            if ids is None:
                torch.cuda.current_stream().wait_stream(copies)
                continue
            optimizer.zero_grad()
            if step % 20 == 7:
                torch.cuda._sleep(CYCLES // 10)
            loss = language_loss(model, ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            torch.cuda.current_stream().wait_stream(copies)
            ahead.record_stream(torch.cuda.current_stream())
        found.append((torch.stack(losses), weights(model)))
        del model, optimizer
    same(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    same(found[1][1], found[0][1], rtol=1e-3, atol=1e-4)


# -------------------------------------------------------------------------------------- beside one process


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2)
        )
        self.head = nn.Linear(8 * 49, 10)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.usefixtures("gpu")
@on_processes(2, "backend", timeout=LIMIT)
def test_synchronised_normalisation_is_that_of_one_process(rank, layout):
    """Batch normalisation over the rows of all ranks; weights in channels_last."""
    device, layout = place_of(rank), getattr(torch, layout)
    x, y = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 10
    x, y = x.to(device, memory_format=layout), y.to(device)
    alone = rank.make(Images).to(device, memory_format=layout)
    model = lockstep.replicate(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)))
    own = slice(6 * rank.rank, 6 * rank.rank + 6)
    for module, rows in ((alone, slice(None)), (model, own)):
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, foreach=True)
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    same(weights(model), weights(alone), rtol=1e-3, atol=1e-4)
    same([*model.buffers()], [*alone.buffers()], rtol=1e-3, atol=1e-4)
    assert model.layers[0].weight.is_contiguous(memory_format=layout)


FORMS = ["module, then replicated", "replicated, then module", "wrapped", "in place"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("gpu")
@on_processes(2, "backend", timeout=150.0)
def test_compiled_modules_have_the_gradients_of_the_plain_one(rank, form):
    device = place_of(rank)
    warnings.simplefilter("ignore")  # the compiler has several
    plain = rank.make(Language).to(device)
    model = copy.deepcopy(plain)
    model = {
        "module, then replicated": lambda: lockstep.replicate(torch.compile(model)),
        "replicated, then module": lambda: torch.compile(lockstep.replicate(model)),
        "wrapped": lambda: torch.compile(lockstep.DistributedDataParallel(model)),
        "in place": lambda: (model.compile(), lockstep.replicate(model))[1],
    }[form]()
    for step in range(3):
        ids = texts(step, 0, device)
        for module in (plain, model):
            module.zero_grad()
            language_loss(module, ids).backward()
        got, wanted = ([each.grad for each in module.parameters()] for module in (model, plain))
        same(got, wanted, rtol=1e-3, atol=1e-5)


def sharded(rank, options):
    """A sharded optimizer leaves the weights of a whole one, and its whole state is that of a whole one."""
    device = place_of(rank)
    found = []
    for shards in (False, True):
        model = lockstep.replicate(rank.make(Language).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
        if shards:
            optimizer = shard_optimizer(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            language_loss(model, texts(step, rank.rank, device)).backward()
            optimizer.step()
        lockstep.check_in_sync(model)
        state = full_state_dict(optimizer) if shards else optimizer.state_dict()  # of all ranks, the first has it
        averages = [each["exp_avg"].to(device) for each in state["state"].values()] if rank.rank == 0 else []
        found.append((weights(model), averages))
        del model, optimizer
    same(found[1], found[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_a_sharded_optimizer_is_a_whole_one(gpu, backend, options):
    run_processes(2, sharded, options, timeout=LIMIT, backend=backend)


@on_processes(2, "backend", timeout=LIMIT)
def test_a_loss_over_the_rows_of_all_ranks(rank):
    """A loss over the rows of all ranks has the gradients of one process."""
    device = place_of(rank)
    x = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).to(device)
    alone = rank.make(lambda: nn.Linear(16, 8)).to(device)
    model, own = lockstep.replicate(copy.deepcopy(alone)), (slice(0, 4), slice(4, 10))[rank.rank]

    def loss(features):
        features = nn.functional.normalize(features, dim=-1)
        return cross_entropy(features @ features.T * 5, torch.arange(10, device=device).roll(1))

    for _ in range(3):
        for module in (alone, model):
            module.zero_grad()
        loss(alone(x)).backward()
        features, found = lockstep.loop.gather_rows(model(x[own]), model)
        assert (found, features.device) == (own, device)
        loss(features).backward()
        same(model.weight.grad, alone.weight.grad, rtol=1e-4, atol=1e-6)


@on_processes(2, "backend", timeout=LIMIT)
def test_gradients_that_travel_in_half_precision(rank):
    """Gradients that travel in bfloat16 are close to those that do not."""
    device = place_of(rank)
    plain = rank.make(Language).to(device)
    whole, half = lockstep.replicate(copy.deepcopy(plain)), lockstep.replicate(plain, reduce_dtype=torch.bfloat16)
    for step in range(3):
        for model in (whole, half):
            model.zero_grad()
            language_loss(model, texts(step, rank.rank, device)).backward()
        for ours, theirs in zip(half.parameters(), whole.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() <= 2**-7 * theirs.grad.norm()


# ------------------------------------------------------------------------------------------- loops


def train_for(rank, folder, steps, saves_at=None):
    device = place_of(rank)
    with lockstep.session(device=str(device), seed=3) as run:
        model = lockstep.replicate(Language().to(device))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if saves_at is None:
            assert run.resume(folder, model=model, optimizer=optimizer).step == 3
        for step in range(run.step, steps):
            optimizer.zero_grad()
            language_loss(model, texts(step, rank.rank, device)).backward()
            optimizer.step()
            if step + 1 == saves_at:
                run.save(folder, model=model, optimizer=optimizer, wait=False)
    return [each.cpu() for each in weights(model)]


def test_a_resumed_training_ends_with_the_weights_of_one_that_went_on(home, backend, tmp_path):
    whole = run_processes(2, train_for, tmp_path, 6, 3, timeout=LIMIT, backend=backend)
    same(run_processes(2, train_for, tmp_path, 6, timeout=LIMIT, backend=backend), whole, rtol=1e-5, atol=1e-6)


def kept(rank):
    """What `batches` leaves out and weighs on GPUs: ranks have different numbers of batches, and rows in them."""
    device = place_of(rank)
    sizes = [[3, 1, 2], [4]][rank.rank]
    rows = [torch.randn(size, 16, generator=rank.generator(n)) for n, size in enumerate(sizes)]
    model = lockstep.replicate(rank.make(lambda: nn.Linear(16, 4)).to(device))
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    with lockstep.session(device=str(device)) as run:
        for x in run.batches(rows):
            optimizer.zero_grad()
            loss = model(x.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(lockstep.mean(loss, weight=len(x)))
        lockstep.check_in_sync(model)
    assert all(each.device == device for each in seen)
    return len(seen), model.weight.detach().cpu()


def test_ranks_with_different_numbers_of_batches(home, backend):
    (steps, first), (_, second) = run_processes(2, kept, timeout=LIMIT, backend=backend)
    assert steps == 3
    same(first, second)


def by_speed(rank):
    """A rank whose shares take longer on its GPU gets fewer of them, and the bits are those of an equal deal."""
    device = place_of(rank)
    torch.use_deterministic_algorithms(True)
    rows, ends = TensorDataset(torch.randn(16 * 30, 16, generator=torch.Generator().manual_seed(0))), []
    for balance in (None, "speed"):
        model = rank.make(lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))).to(device)
        model = lockstep.replicate(model, shares=8)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for batch in lockstep.shares.GlobalBatches(rows, 16, 8, balance=balance):
            optimizer.zero_grad()
            for (x,) in batch:
                if rank.rank == 1 and balance:
                    torch.cuda._sleep(CYCLES // 20)
                model(x.to(device)).square().sum().backward()
            optimizer.step()
        ends.append(weights(model))
        dealt = lockstep.loop.statistics(model).shares
        del model, optimizer
    same(*ends)
    return dealt


def test_shares_are_dealt_by_the_speed_of_the_gpu(gpu, backend):
    for dealt in run_processes(2, by_speed, timeout=LIMIT, backend=backend):
        assert dealt[0] > dealt[1]
