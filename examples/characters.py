"""Train a small transformer, character by character, on the sources of Python's own library.

    python examples/characters.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/characters.py  # each process has a share of every batch

Passages differ in length, so what one process sees in one micro-batch counts more characters than another. Weighted by
their numbers (`lockstep.accumulate`), the gradient of a step is the mean over all characters of its batch all the same,
however the batch is shared out. Only the last micro-batch of a step communicates.
"""

import argparse
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

import lockstep
from options import Parser, positive_float, positive_int, seed

SOURCES = ("argparse", "enum", "functools", "heapq", "pickle", "random", "statistics", "subprocess")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else counts as its last one
SHORTEST, LONGEST = 32, 128  # characters of a passage that go into the model; one more comes out
NO_TARGET = -1  # behind the end of a passage that is shorter than its neighbours
HIGHEST_NORM = 1.0
LINE_EVERY = 10  # steps


def load_passages() -> list[Tensor]:
    """The text of those modules, in pieces of many lengths."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = encode("".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES))
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(SHORTEST + 1, LONGEST + 2, (len(text) // SHORTEST,), generator=generator).cumsum(0)
    return list(text.tensor_split(ends[ends < len(text)])[:-1])


def encode(text: str) -> Tensor:
    return torch.tensor([ALPHABET.find(character) % len(ALPHABET) for character in text])


def decode(numbers: Sequence[int]) -> str:
    return "".join(ALPHABET[number] for number in numbers)


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
        passages: the share of this process, at least one.
        micro_batch: how many of them go through the model at once.
        autocast_dtype: what matrix products are computed in; None leaves it to the model.
    """
    device = next(model.parameters()).device
    loss_sum, characters = torch.tensor(0.0, device=device), 0
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
        loss_sum = loss_sum + loss.detach()
        characters += count
    return loss_sum.item(), characters


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


def make_parser() -> Parser:
    parser = Parser(
        description="Train a small transformer on the sources of Python's library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=positive_int, default=300, help="batches to train on")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="passages of all processes together")
    parser.add_argument("--micro-batch-size", type=positive_int, default=8, help="passages at once in a process")
    parser.add_argument("--lr", type=positive_float, default=6e-3, help="highest learning rate")
    parser.add_argument("--seed", type=seed, default=0, help="for the first weights and the order of passages")
    parser.add_argument("--quick", action="store_true", help="a look at whether it runs: 20 steps of 16 passages")
    return parser


def train(options: argparse.Namespace, run: lockstep.Session) -> None:
    """Print the loss as it falls, and at the end what the model has learnt to write."""
    rank, world, device = run.rank, run.world_size, run.device
    torch.set_num_threads(1)  # matrices so small are not split further
    passages = load_passages()
    torch.manual_seed(options.seed)
    model = lockstep.replicate(Transformer().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps, pct_start=0.2)
    order = torch.Generator().manual_seed(options.seed)  # of every process: they agree on each batch
    sums, begin = torch.zeros(2, dtype=torch.float64), time.perf_counter()
    if rank == 0:
        characters = sum(map(len, passages))
        print(f"{characters:,} characters in {len(passages):,} passages; ranks: {world}, on {device.type}")
    for step in run.batches(range(1, options.steps + 1)):
        batch = torch.randint(len(passages), (options.batch_size,), generator=order).tolist()
        share = [passages[index] for index in batch[rank::world]]
        optimizer.zero_grad()
        sums += torch.tensor(leave_gradients(model, share, options.micro_batch_size, torch.bfloat16), dtype=sums.dtype)
        norm = clip_grad_norm_(model.parameters(), HIGHEST_NORM)
        optimizer.step()
        scheduler.step()
        if step % LINE_EVERY == 0 or step == options.steps:
            dist.all_reduce(sums)
            loss, speed = sums[0] / sums[1], sums[1] / (time.perf_counter() - begin)
            if rank == 0:
                print(
                    f"step {step:{len(str(options.steps))}}/{options.steps}  loss {loss:.3f} per character  "
                    f"gradient norm {norm:.2f}  {speed:7,.0f} characters/s"
                )
            sums, begin = torch.zeros_like(sums), time.perf_counter()
    if rank == 0:
        print(generate(model, "\n    def ", 60 if options.quick else 400))


def main(arguments: Sequence[str]) -> int:
    with lockstep.session() as run:
        parser = make_parser()
        try:
            options = parser.parse_args(arguments)
            if options.quick:
                options.steps, options.batch_size, options.micro_batch_size = 20, 16, 3
            if options.batch_size < run.world_size:
                raise ValueError(f"--batch-size is at least {run.world_size}, the number of processes")
        except ValueError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n" if run.is_main else None)
        train(options, run)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost that would need saving
    sys.exit(main(sys.argv[1:]))
