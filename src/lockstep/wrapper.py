"""What wrapper modules share: checkpoints with and without the prefix of the wrapped module."""

from collections.abc import Mapping
from typing import Any

from torch.nn import Module


def is_of_module(state_dict: Mapping[str, Any], module: Module) -> bool:
    """Whether a checkpoint has the keys of the wrapped module itself, and not those behind ``module.``."""
    plain = module.state_dict().keys()
    return len(state_dict.keys() & plain) > len(state_dict.keys() & {f"module.{key}" for key in plain})
