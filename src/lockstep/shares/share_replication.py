"""A module that is replicated with shares, as the public functions use it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

import torch
from torch.nn import Module, Parameter

from lockstep.distributed.comm.agreement import Line
from lockstep.distributed.comm.collectives import Collectives, resolve_group
from lockstep.distributed.reduction.parameters import SlotSnapshot
from lockstep.distributed.reduction.selection import Selection
from lockstep.distributed.replication.options import Options, input_device, move_to
from lockstep.distributed.replication.replicate import Loss, replicate_shares_with
from lockstep.distributed.replication.replication import Replication
from lockstep.errors import NotReplicableError, OptionError
from lockstep.shares.module import ShareModule
from lockstep.shares.share_agreement import Members
from lockstep.shares.share_settings import check_settings, describe_settings, settings_of
from lockstep.shares.share_state import check_shares, world_of


class ShareReplication(Replication):
    """The state of one module that is replicated with shares."""

    training_is_common = True

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], shares: int, loss: Loss) -> None:
        super().__init__(module, options, ignored, taking_over=False)
        if loss not in get_args(Loss):
            raise OptionError(f"loss must be one of {', '.join(get_args(Loss))}, got {loss!r}")
        _check_options(options)
        group = resolve_group(options.group)
        self._shares = check_shares(shares, None if group is None else group.size(), "replicate()")
        self._loss = loss
        self._module: ShareModule | None = None

    @property
    def ready(self) -> bool:
        """True if gradients are synchronised already."""
        return self._module is not None

    def _without_group(self) -> str:
        return (
            "a module that is replicated with shares was used before there is a process group; call "
            "torch.distributed.init_process_group() first, also for one process, or pass process_group"
        )

    def _start(self, collectives: Collectives) -> None:
        check_shares(self._shares, collectives.world, "replicate()")
        world = world_of(collectives.group)
        contents, failure = self._contents()
        if self.options.init_sync:
            devices = {parameter.device for _, parameter in contents.parameters}
            lines = [
                Line("shares", f"{self._shares}, loss {self._loss!r}"),
                Line("modules that are replicated with shares before", str(world.joined)),
                *describe_settings(settings_of(devices)),
                *Members(contents).describe(),
            ]
            self._compare(lines, collectives, (), failure)
        if failure is not None:
            raise failure
        if self.options.init_sync:
            self._make_equal(contents, collectives)
        self._module = ShareModule(
            _Watch(self._selection), world, collectives, self._shares, self._loss, self.options.init_sync
        )
        world.join(self._module)
        if self._restored is not None:
            self.restore(self._restored)

    # ------------------------------------------------------------------------------------- forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Get ready if necessary; move inputs to the device of the options."""
        if self._module is None:
            self._start_at_forward()
        if self._module is not None and not torch.compiler.is_compiling():
            self._module.note_forward(self._selection.module.training)
        device = input_device(self.options)
        if device is not None:
            args, kwargs = move_to(args, device), move_to(kwargs, device)
        return args, kwargs

    def after_forward(self, outputs: Any) -> None:
        """Do nothing: it is known to which share a backward belongs."""

    # ------------------------------------------------------------------------------------- methods

    def no_sync(self) -> NoReturn:
        """Raise: a share's gradients always belong to its step."""
        self._refuse("no_sync()")

    @contextmanager
    def synchronising(self, required: bool) -> Iterator[None]:
        """Raise if that asks for gradients that are not synchronised."""
        self.set_requires_gradient_sync(required)
        yield

    def set_requires_gradient_sync(self, required: bool) -> None:
        """Raise if that asks for gradients that are not synchronised."""
        if not required:
            self._refuse("no_sync(), set_requires_gradient_sync(False) and accumulate(last=False)")

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raise: hooks would see partial sums."""
        self._refuse("register_comm_hook()")

    @property
    def started_reducer(self) -> NoReturn:
        """Refused: with shares there are no rounds for skip_batch(), batches() and the like."""
        self._refuse("batches(), skip_batch(), skip_on() and other functions that go by a module's rounds of gradients")

    def _refuse(self, what: str) -> NoReturn:
        raise OptionError(
            f"{what}: this module is replicated with shares={self._shares}, whose gradients are put together when the "
            "loop over a batch's shares has ended. Backward passes inside of one share add up; for gradients beside "
            "training use torch.autograd.grad"
        )

    @contextmanager
    def weighing(self, weight: float | None) -> Iterator[None]:
        """Add a weight to the loss of the share under way, if one is given."""
        if weight is not None:
            self._started.weigh(weight)
        yield

    def watch_values(self, every: int) -> None:
        """Compare values in every ``every``-th step from now on, or in none if it is 0; all ranks must."""
        self._started.agreement.watch_values(every)

    def audit(self, every: int | None) -> None:
        """See :func:`lockstep.shares.audit`."""
        self._started.world.audit(every)

    @property
    def _started(self) -> ShareModule:
        if self._module is None:
            self.start()
        assert self._module is not None
        return self._module

    # ----------------------------------------------------------------------------- training state

    def training_state(self) -> dict[str, Any]:
        """See :func:`lockstep.distributed.training_state_dict`."""
        module = self._started
        settings = dict(module.settings)
        if module.precision:
            settings["autocast"] = module.precision
        return {"steps": module.steps, "shares": module.shares, "loss": module.loss, "settings": settings}

    def restore(self, state: dict[str, Any]) -> None:
        """See :func:`lockstep.distributed.load_training_state_dict`."""
        if self._module is None:
            self._restored = state
            return
        if "shares" not in state:
            raise NotReplicableError(
                "the training state is of a module that was replicated without shares, this one has "
                f"shares={self._shares}; replicate it in the same way"
            )
        if (state["shares"], state["loss"]) != (self._shares, self._loss):
            raise OptionError(
                f"the run was begun with shares={state['shares']} and loss={state['loss']!r}, this module has "
                f"shares={self._shares} and loss={self._loss!r}; they are fixed for a run"
            )
        rank = Collectives(self.group, self.phases).global_rank
        check_settings(state["settings"], self._module.settings, rank, "when this run was saved")
        self._module.expect(state["settings"].get("autocast"), int(state["steps"]))


_WITHOUT = {
    "mixed_precision": None,
    "delay_all_reduce_named_params": None,
    "buffer_policy": "rank0",
    "bucket_cap_mb": None,
    "bucket_cap_mb_list": None,
}


def _check_options(options: Options) -> None:
    """Raise :class:`OptionError` for options that have no meaning with shares."""
    for name, usual in _WITHOUT.items():
        if getattr(options, name) != usual:
            raise OptionError(
                f"replicate() got {name}={getattr(options, name)!r} beside shares, which decide it: leave it out"
            )


class _Watch:
    """Observes the replicated parameters and buffers of a module."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._parameters: list[Parameter] = []

    @property
    def alive(self) -> bool:
        return self._selection.alive

    def look(self) -> Members:
        members = Members(self._selection.contents())
        self._slots = SlotSnapshot([owner for _, owner in self._selection.owners()])
        self._buffers = self._selection.buffers()
        self._parameters = [parameter for _, parameter in members.parameters]
        self._kinds = self._kinds_now()
        return members

    def changed(self) -> bool:
        return self._slots.changed() or self._buffers.changed() or self._kinds_now() != self._kinds

    def new_parameters(self) -> list[str]:
        known = set(map(id, self._parameters))
        return [name for name, parameter in self._selection.contents().parameters if id(parameter) not in known]

    def _kinds_now(self) -> list[tuple[bool, torch.dtype, torch.Size, torch.device]]:
        return [(p.requires_grad, p.dtype, p.shape, p.device) for p in self._parameters]


replicate_shares_with(ShareReplication)
