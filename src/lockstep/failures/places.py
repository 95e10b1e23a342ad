"""PURE: what the stack of a thread says about what it is doing."""

import sysconfig
from pathlib import Path

import torch

from lockstep.failures.stacks import Frame, Thread

_STANDARD = sysconfig.get_path("stdlib")
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_WAITS = (f"{_TORCH}/distributed/", f"{_OURS}/shm/", f"{_OURS}/distributed/collectives.py")
_COMPILES = (f"{_TORCH}/_dynamo/convert_frame.py", f"{_TORCH}/_inductor/compile_fx.py")


def program_frame(thread: Thread) -> Frame | None:
    """The innermost frame of the program itself, rather than of Python's or PyTorch's libraries or this one."""
    for frame in reversed(thread.frames):
        if not frame.file.startswith((_STANDARD, _TORCH, _OURS, "<")) and "site-packages" not in frame.file:
            return frame
    return None


def collective_of(thread: Thread) -> str:
    """The function of ``torch.distributed``, or of this library, in which a thread waits for other ranks, if any."""
    inner = [frame for frame in thread.frames if not frame.file.startswith("<")]
    while inner and inner[-1].file.startswith(_STANDARD) and "site-packages" not in inner[-1].file:
        inner.pop()  # the lock or the socket that is waited for
    if not inner or not inner[-1].file.startswith(_WAITS):
        return ""
    function = inner[-1].function
    while inner and inner[-1].file.startswith(_WAITS):
        if "logger" not in inner[-1].file:
            function = inner[-1].function
        inner.pop()
    return function


def compiles(thread: Thread) -> bool:
    """Whether a thread is compiling a model."""
    return any(frame.file.startswith(_COMPILES) for frame in thread.frames)
