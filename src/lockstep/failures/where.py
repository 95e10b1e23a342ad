"""In which phase of its training an exception was raised: read off its traceback, so that a step costs nothing."""

from collections.abc import Iterable
from traceback import walk_tb
from types import TracebackType

TRAINING = "training"
"""The phase of a rank that is in none that has a name: between those of a step, in the program's own code."""

_FILES = (
    # The outermost frame that is known decides: a forward that is recomputed in backward is backward.
    ("/torch/utils/data/", "data"),
    ("/torch/optim/", "optimizer"),
    ("/torch/amp/grad_scaler.py", "optimizer"),
    ("/torch/_tensor.py", "backward"),
    ("/torch/autograd/__init__.py", "backward"),
    ("/torch/autograd/graph.py", "backward"),
    ("/torch/serialization.py", "checkpoint"),
    ("/lockstep/checkpoints/sampler.py", "data"),  # goes through a loader
    ("/lockstep/checkpoints/", "checkpoint"),
    ("/torch/nn/modules/module.py", "forward"),
)


def phase_of(traceback: TracebackType | None, otherwise: str) -> str:
    """The phase in which a traceback was in PyTorch's or our code; ``otherwise`` if it was in neither.

    A phase that the program has named itself, such as ``evaluation``, is given as ``otherwise`` and is kept in front.
    """
    return phase_of_files((frame.f_code.co_filename for frame, _ in walk_tb(traceback)), otherwise)


def phase_of_files(files: Iterable[str], otherwise: str) -> str:
    """The same, from the files of the frames, from the outermost to the innermost."""
    found = next((phase for file in files if (phase := _phase_of_file(file))), None)
    if found is None or found == otherwise:
        return otherwise
    return found if otherwise in _KNOWN else f"{otherwise}, in {found}"


OF_A_STEP = frozenset({"data", "forward", "backward", "optimizer", TRAINING})
"""The phases of a step; each other one has been named as such."""
_KNOWN = OF_A_STEP | {"start-up", "checkpoint"}


def _phase_of_file(file: str) -> str | None:
    name = file.replace("\\", "/")
    return next((phase for part, phase in _FILES if part in name), None)
