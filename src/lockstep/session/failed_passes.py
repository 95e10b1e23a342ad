"""What a backward pass that has failed leaves behind in PyTorch's autograd engine."""

import torch


def forget_failed_passes() -> None:
    """Let go of what backward passes of this thread had not come to when they failed.

    The engine keeps it in a queue until the thread's next pass: a part of the graph, with its memory, and what hooks on
    its tensors refer to, such as a replicated model and its group, whose connections would stay open. So this is one.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.grad(leaf.clone(), leaf)
