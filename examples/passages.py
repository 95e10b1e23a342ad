"""The text of the character examples: sources of Python's own library, in passages of many lengths."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SOURCES = ("argparse", "enum", "functools", "heapq", "pickle", "random", "statistics", "subprocess")
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else counts as its last one
SHORTEST, LONGEST = 32, 128  # characters of a passage that go into a model; one more comes out


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
