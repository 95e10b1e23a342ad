"""A small GPT that learns the characters of a module of Python's own library, in micro-batches.

    python examples/programs/gpt.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/programs/gpt.py  # each rank draws its own passages

docs/programs.md shows the lines that differ from a program for one process.
"""

import argparse
import inspect

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import lockstep

LENGTH, MICRO_BATCHES = 32, 2


class Layer(nn.Module):
    """Attention to what came before, and a network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From (rows, length, width) to the same."""
        heads = self.to_heads(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.from_heads(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next character; inputs and outputs share their weights."""

    def __init__(self, characters: int, width: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.inputs, self.places = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(layers)), nn.LayerNorm(width))
        self.outputs = nn.Linear(width, characters, bias=False)
        for table in (self.inputs, self.places):
            nn.init.normal_(table.weight, std=0.1)
        self.outputs.weight = self.inputs.weight

    def forward(self, x: Tensor) -> Tensor:
        """From numbers of characters of (rows, length) to logits of (rows, length, characters)."""
        return self.outputs(self.layers(self.inputs(x) + self.places.weight))


def train(run: lockstep.Session, steps: int = 100) -> None:
    torch.manual_seed(0)
    source = inspect.getsource(argparse)
    characters = sorted(set(source))
    text, device = torch.tensor([characters.index(each) for each in source]), run.device
    model = lockstep.replicate(GPT(len(characters)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + run.rank)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICRO_BATCHES):
            begins = torch.randint(len(text) - LENGTH, (16, 1))
            passages = text[begins + torch.arange(LENGTH + 1)].to(device)
            with lockstep.accumulate(model, last=number == MICRO_BATCHES - 1):
                loss = cross_entropy(model(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten()) / MICRO_BATCHES
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            mean = lockstep.mean(total)
            if run.is_main:
                print(f"step {step}: loss {mean:.5f}")


if __name__ == "__main__":
    with lockstep.session() as run:
        train(run)
