"""The entries of a ``state_dict`` that may differ from rank to rank: what is not replicated, and local buffers."""

from torch.nn import Module

from lockstep.distributed.replication import find_replication


def own_names(module: Module, inner: Module) -> set[str]:
    """Names of parameters and buffers in ``inner`` - the module, or what is in that wrapper - that each rank has for
    itself.

    They are those that a replicated module at or below it leaves out (``ignored_modules``,
    ``params_and_buffers_to_ignore``), and its buffers under the policy ``"local"``.
    """
    own: set[int] = set()
    shared: set[int] = set()
    for each in module.modules():
        replication = find_replication(each)
        if replication is not None:
            kept, equal = replication.own_and_replicated()
            own.update(map(id, kept))
            shared.update(map(id, equal))
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in named if id(tensor) in own - shared}
