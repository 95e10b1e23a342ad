"""Random programs, in one form: what holds for all of a program, and its lines, each of which may be left out.

A module of this folder is a *language*: its ``draw(seed, length)`` makes the program of a seed, and ``play(program)``
runs it, and raises if it is not what its oracle says:

==================  ==========================================================  ======================================
language            a line is                                                   beside
==================  ==========================================================  ======================================
``many_processes``  a backward pass, a change, a fault of some ranks            one process in float64, and the verdict
``optimizers``      what else is done in a step                                 other ranks: alike, and no warning
``second_order``    a step with a penalty on gradients                          one process in float64
``left_out``        an epoch, of steps that ranks leave out, or fail in         one process in float64
``shares``          a step, and what is changed before it                       one rank, bit for bit
``data_parallel``   a change of a module, or a use of it                        the module itself, on one device
==================  ==========================================================  ======================================

``seeds.toml`` has the seeds that tests play. A program that fails is made shorter, and shown as Python.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

SHORTEN_SECONDS = 60  # within the limit of a test, with a program that does not end before and after it
SEEDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("seeds.toml").read_text())


def numbers(text: str) -> list[int]:
    """Return the numbers of "0-3, 25": 0, 1, 2, 3, 25."""
    ends = [each.split("-") for each in text.split(",") if text]
    return [number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)]


class Program(NamedTuple):
    """A program of any language."""

    setting: Any
    """What holds for all of it: ranks, backend, options."""
    lines: tuple[Any, ...]

    def __str__(self) -> str:
        lines = "".join(f"    {line!r},\n" for line in self.lines)
        return f"Program({self.setting!r}, (\n{lines}))"


class Language(Protocol):
    """What each module has."""

    def draw(self, seed: int, length: int, device: str = "") -> Program: ...

    def play(self, program: Program) -> None: ...


def check(language: Language, seed: int, length: int, **options: Any) -> Program:
    """Play the program of a seed; if it fails, raise what a shorter one does, with its text."""
    program = language.draw(seed, length, **options)
    error = failure(language.play, program)
    if error is None:
        return program
    print(f"This program fails; it is now made shorter.\n{program}\n{error}", flush=True)
    program, error = shorten(language.play, program, error)
    error.add_note(f"seed {seed}: play({program})")
    raise error


def failure(play: Callable[[Program], None], program: Program) -> Exception | None:
    try:
        play(program)
    except Exception as error:
        return error
    return None


def shorten(play: Callable[[Program], None], program: Program, error: Exception) -> tuple[Program, Exception]:
    """Leave out lines for as long as what is left fails, and there is time: first half of them, then less at once."""
    end, size = time.monotonic() + SHORTEN_SECONDS, max(1, len(program.lines) // 2)
    while size:
        start = 0
        while start < len(program.lines) and time.monotonic() < end:
            fewer = program._replace(lines=program.lines[:start] + program.lines[start + size :])
            if fewer.lines and (other := failure(play, fewer)) is not None:
                program, error = fewer, other
            else:
                start += size
        size //= 2
    return program, error
