"""The lines of the program itself in the stack of a thread."""

import linecache
import sysconfig
from pathlib import Path

import torch

from lockstep.failures.stacks import Frame, Thread

STANDARD = sysconfig.get_path("stdlib")
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])


def is_of_program(file: str) -> bool:
    """Return True if a file is neither of Python's libraries, nor of PyTorch, nor of this library."""
    return not file.startswith((STANDARD, TORCH, OURS, "<")) and "site-packages" not in file


def program_frame(thread: Thread) -> Frame | None:
    """Return the innermost frame of the program itself, not of Python's libraries, PyTorch or this library."""
    return next((frame for frame in reversed(thread.frames) if is_of_program(frame.file)), None)


def place_of(thread: Thread | None) -> str:
    """Return the innermost line of the program that a thread is at, with its text, or ""."""
    frame = program_frame(thread) if thread is not None else None
    if frame is None:
        return ""
    text = linecache.getline(frame.file, frame.line).strip()
    return f"line {frame.line} of {frame.file}, in {frame.function}" + (f": `{text}`" if text else "")
