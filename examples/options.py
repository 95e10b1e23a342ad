"""The options of the digits example, with errors that are one line each."""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """Leaves it to the program to say what is wrong: of many processes only one may speak."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, and exit with, at once."""
        raise ValueError(message)


def make_parser() -> Parser:
    parser = Parser(
        description="Train a convolutional network on handwritten digits, on several replicas at once.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=positive_int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=positive_int, default=96, help="rows of all replicas together")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="highest learning rate of the cycle")
    parser.add_argument("--seed", type=seed, default=0, help="for the first weights and the order of images")
    parser.add_argument("--shares", type=positive_int, help="of a batch: the same bits on up to as many processes")
    parser.add_argument("--devices", type=devices, default=default_devices(), help="one replica on each")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="folder for what is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in that folder")
    return parser


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def default_devices() -> str:
    """All accelerators where there are any, two replicas on the CPU elsewhere; under torchrun one device a process."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    found = accelerators()
    enough = len(found) >= max(1, processes)
    return ",".join(found[: processes or None] if enough else ["cpu"] * (processes or 2))


def accelerators() -> list[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [] if kind is None else [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]


def devices(text: str) -> list[str]:
    present = ["cpu", *accelerators()]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in present:
            raise argparse.ArgumentTypeError(f"no device {name!r} here, only {', '.join(present)}")
    return names


def resuming(arguments: Sequence[str]) -> str:
    """The options that go on with this very run."""
    return shlex.join([*(argument for argument in arguments if argument != "--resume"), "--resume"])
