"""Train a small transformer, character by character, on the sources of Python's own library.

    python examples/characters.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/characters.py  # each process has a part of every batch

Passages differ in length, so what one process sees in one micro-batch counts more characters than another. Weighted by
their numbers (`lockstep.accumulate`), the gradient of a step is the mean over all characters of its batch all the same,
however the batch is split. Only the last micro-batch of a step communicates.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

import lockstep
from passages import ALPHABET, LONGEST, decode, encode, load_passages

NO_TARGET = -1  # behind the end of a passage that is shorter than its neighbours


class Block(nn.Module):
    """Attention to the characters before, then a small network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """From (passages, characters, width) to the same."""
        parts = self.inputs(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        attended = scaled_dot_product_attention(*parts.unbind(2), is_causal=True)
        x = x + self.outputs(attended.transpose(1, 2).flatten(2))
        return x + self.network(self.before_network(x))


class Transformer(nn.Module):
    """What comes next, for each character of a passage."""

    def __init__(self, width: int = 96, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.outputs = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)  # learns much sooner than from PyTorch's 1.0

    def forward(self, characters: Tensor) -> Tensor:
        """From (passages, characters) to the logits of the next ones."""
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.outputs(self.blocks(self.characters(characters) + self.places(places)))


def leave_gradients(
    model: nn.Module, passages: Sequence[Tensor], micro_batch: int, autocast_dtype: torch.dtype | None = None
) -> tuple[float, int]:
    """Gradients of the mean loss over all characters of all processes; of this process the sum, and how many.

    Args:
        model: replicated.
        passages: those of this process, at least one.
        micro_batch: how many of them go through the model at once.
        autocast_dtype: what matrix products are computed in; None leaves it to the model.
    """
    device = next(model.parameters()).device
    loss_sum, characters = 0.0, 0
    for begin in range(0, len(passages), micro_batch):
        part = passages[begin : begin + micro_batch]
        inputs = pad_sequence([passage[:-1] for passage in part], batch_first=True).to(device)
        targets = pad_sequence([passage[1:] for passage in part], batch_first=True, padding_value=NO_TARGET).to(device)
        with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
            logits = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
        count = sum(len(passage) - 1 for passage in part)
        with lockstep.accumulate(model, last=begin + micro_batch >= len(passages), weight=count):
            loss.backward()
        loss_sum, characters = loss_sum + loss.item(), characters + count
    return loss_sum, characters


@torch.no_grad()
def generate(model: nn.Module, start: str, length: int, heat: float = 0.8) -> str:
    """The start, and what the model goes on with; the places that most passages reach are those it knows well."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    written = encode(start).tolist()
    while len(written) < length:
        logits = model(torch.tensor([written[-LONGEST // 2 :]], device=device))[0, -1].cpu()
        written += torch.multinomial(torch.softmax(logits / heat, 0), 1, generator=generator).tolist()
    return decode(written)


def train(run: lockstep.Session, options: argparse.Namespace) -> None:
    """Print the loss as it falls, and at the end what the model has learnt to write."""
    torch.set_num_threads(1)  # matrices so small are not split further
    passages = load_passages()
    model = lockstep.replicate(Transformer().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.2)
    loss_sum, characters, begin = 0.0, 0, time.perf_counter()
    for step in run.batches(range(1, options.steps + 1)):
        batch = torch.randint(len(passages), (options.batch_size,), generator=run.shared_generator)  # on all the same
        own = [passages[index] for index in batch[run.rank :: run.world_size].tolist()]
        optimizer.zero_grad()
        losses, count = leave_gradients(model, own, options.micro_batch_size, torch.bfloat16)
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        loss_sum, characters = loss_sum + losses, characters + count
        if step % 10 == 0 or step == options.steps:
            loss, per_process = lockstep.mean(loss_sum / characters, weight=characters), lockstep.mean(characters)
            speed = per_process * run.world_size / (time.perf_counter() - begin)
            if run.is_main:
                place = f"step {step:{len(str(options.steps))}}/{options.steps}"
                print(f"{place}  loss {loss:.3f} per character  gradient norm {norm:.2f}  {speed:7,.0f} characters/s")
            loss_sum, characters, begin = 0.0, 0, time.perf_counter()
        if run.should_stop:  # Ctrl-C
            break
    if run.is_main:
        print(generate(model, "\n    def ", options.length))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small transformer on the sources of Python's library.")
    parser.add_argument("--steps", type=int, default=300, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="passages of all processes together")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="passages at once in a process")
    parser.add_argument("--lr", type=float, default=6e-3, help="highest learning rate")
    parser.add_argument("--length", type=int, default=400, help="characters to write at the end")
    parser.add_argument("--device", help="such as cpu; default: an accelerator for each process, or the CPU")
    options = parser.parse_args(arguments)
    with lockstep.session(device=options.device) as run:
        if options.batch_size < run.world_size:
            parser.error(f"--batch-size is at least {run.world_size}, the number of processes")
        train(run, options)
    return 0


if __name__ == "__main__":
    main()
