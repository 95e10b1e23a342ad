"""Which process of a run this one is: what ``torchrun`` says in the environment, or a process that runs alone."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import OptionError


@dataclass(frozen=True)
class Environment:
    """The place of a process in its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the processes of this host."""
    local_world_size: int = 1
    alone: bool = True
    """Whether nothing has started this process as a rank: then there is no store to meet others at."""
    run: str = ""
    """The name of the run, the same on all ranks; empty if it has none."""
    address: str = ""
    port: int = 0
    """Where the ranks meet."""
    launcher_has_store: bool = False
    """Whether the launcher hosts the store there; else rank 0 does."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The place of this process, from the variables that ``torchrun`` sets.

    Without ``RANK`` and ``WORLD_SIZE`` the process is alone. Raises :class:`OptionError` if only some of the variables
    are set, or one is no number.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return Environment()
    missing = [name for name in _NEEDED if name not in variables]
    if missing:
        raise OptionError(
            f"the environment has {', '.join(name for name in _NEEDED if name in variables)}, but not "
            f"{', '.join(missing)}: start the processes with torchrun, which sets all of them, or unset all of them to "
            "run alone"
        )
    rank, world = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise OptionError(f"RANK is {rank}, but WORLD_SIZE is {world}: ranks are 0 to {world - 1}")
    return Environment(
        rank=rank,
        world_size=world,
        local_rank=_number(variables, "LOCAL_RANK", rank),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 0),  # 0: not known
        alone=False,
        run=variables.get("TORCHELASTIC_RUN_ID", ""),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        launcher_has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(variables: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = variables.get(name)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(str(text))
    except ValueError:
        raise OptionError(f"the environment variable {name} is {text!r}, expected a whole number") from None
