"""A module that is replicated with shares, with the methods that the public functions call."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, get_args

import torch
from torch.nn import Module

from lockstep._base.deal import Dealt
from lockstep.distributed.comm.agreement import Line
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import resolve_group
from lockstep.distributed.reduction.module.drift import DriftWatch
from lockstep.distributed.reduction.module.managed_parameters import Owner
from lockstep.distributed.reduction.module.selection import Contents
from lockstep.distributed.replication.options import Options
from lockstep.distributed.replication.replicate import Loss, replicate_shares_with
from lockstep.distributed.replication.replication import Replication
from lockstep.errors import CommunicationError, NotReplicableError, OptionError
from lockstep.local.sync_batch_norm import SyncBatchNorm
from lockstep.shares.module import ShareModule
from lockstep.shares.share_settings import check_repeatable, check_settings, settings_of
from lockstep.shares.share_state import ShareWorld, check_shares, world_of


class ShareReplication(Replication):
    """The state of one module that is replicated with shares."""

    training_is_common = True

    def __init__(self, module: Module, options: Options, ignored: Collection[Module], shares: int, loss: Loss) -> None:
        super().__init__(module, options, ignored, taking_over=False)
        if loss not in get_args(Loss):
            raise OptionError(f"loss must be one of {', '.join(get_args(Loss))}, got {loss!r}")
        _check_options(options)
        _check_layers(module)
        group = resolve_group(options.group)
        self._shares = check_shares(shares, None if group is None else group.size(), "replicate()")
        self._loss = loss
        self._module: ShareModule | None = None
        self._world: ShareWorld | None = None
        """Kept for as long as the module has this."""

    @property
    def ready(self) -> bool:
        """See :class:`Replication`."""
        return self._module is not None

    @property
    def drift(self) -> DriftWatch | None:
        """See :class:`Replication`."""
        return None if self._module is None else self._module.drift

    def _check_group(self) -> None:
        group = resolve_group(self.options.group)
        if group is None:
            raise CommunicationError(
                "a module that is replicated with shares was used before there is a process group; put the training "
                "into `with lockstep.session():`, or call torch.distributed.init_process_group() first, also for one "
                "process, or pass process_group"
            )
        check_shares(self._shares, group.size(), "replicate()")

    def _describe(self, contents: Contents, collectives: Collectives) -> tuple[list[Line], list[int]]:
        devices = {parameter.device for _, parameter in contents.parameters}
        check_repeatable(devices)
        lines = [
            Line("shares", f"{self._shares}, loss {self._loss!r}"),
            Line("option reduce_dtype", str(self.options.reduce_dtype)),
            Line("modules that are replicated with shares before", str(world_of(collectives.group).joined)),
            *(Line(name, value) for name, value in settings_of(devices).items()),
            *contents.describe(),
        ]
        return lines, []

    def _synchronise(self, contents: Contents, collectives: Collectives, rows: object, undo: ExitStack) -> list[Owner]:
        module = ShareModule(
            self._selection,
            collectives,
            self._shares,
            self._loss,
            self.options.reduce_dtype,
            self.options.init_sync,
        )
        world = world_of(collectives.group)
        undo.callback(self._forget_module)
        self._world, self._module = world, module
        undo.callback(module.withdraw)
        module.watch()
        world.join(module, undo)
        return []

    def retire(self) -> None:
        """See :class:`Replication`."""
        if self._module is not None:
            self._module.withdraw()

    def _forget_module(self) -> None:
        self._world = self._module = None

    # ------------------------------------------------------------------------------------- forward

    def before_forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :class:`Replication`."""
        if self._module is None:
            self._start_at_forward()
        if self._module is not None and not torch.compiler.is_compiling():
            self._module.note_forward(module.training)
        return self._moved(args, kwargs) if self._moves_inputs else (args, kwargs)

    def after_forward(self, module: Module, args: object, outputs: Any) -> None:
        """Do nothing: it is known to which share a backward belongs."""

    # ------------------------------------------------------------------------------------- methods

    def check_rounds(self, what: str) -> NoReturn:
        """Raise: there are no rounds, and a share's gradients always belong to its step."""
        raise OptionError(
            f"{what}: this module is replicated with shares={self._shares}, whose gradients are put together when the "
            "loop over a batch's shares has ended. Backward passes inside of one share add up; for gradients beside "
            "training use torch.autograd.grad"
        )

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Raise if that asks for gradients that are not synchronised."""
        if not requires_gradient_sync:
            self.check_rounds("no_sync(), set_requires_gradient_sync(False) and accumulate(last=False)")

    def no_sync(self) -> NoReturn:
        """Raise: see :meth:`check_rounds`."""
        self.check_rounds("no_sync()")

    def register_comm_hook(self, state: Any, hook: Any) -> NoReturn:
        """Raise: see :meth:`check_rounds`."""
        self.check_rounds("register_comm_hook()")

    @contextmanager
    def accumulating(self, last: bool, weight: float | None) -> Iterator[None]:
        """Add a weight to the loss of the share under way, if one is given."""
        self.set_requires_gradient_sync(last)
        if weight is not None:
            self._started.weigh(weight)
        yield

    def audit(self, every: int | None) -> None:
        """See :func:`lockstep.shares.audit`."""
        if self._module is None:
            self.start()
        world_of(self.group).audits_every = every

    @property
    def dealt(self) -> Dealt | None:
        """See :class:`Replication`."""
        return None if self._world is None else self._world.dealt

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
    "delay_all_reduce_named_params": None,
    "buffer_policy": "rank0",
    "bucket_cap_mb": None,
    "bucket_cap_mb_list": None,
}


def _check_options(options: Options) -> None:
    if options.reduce_dtype is torch.float16:
        raise OptionError(
            "replicate() got reduce_dtype=torch.float16 beside shares: gradients of shares are added before they are "
            "divided, so a sum may be too large for float16; use torch.bfloat16"
        )
    for name, usual in _WITHOUT.items():
        if getattr(options, name) != usual:
            raise OptionError(
                f"replicate() got {name}={getattr(options, name)!r} beside shares, which decide it: leave it out"
            )


replicate_shares_with(ShareReplication)


def _check_layers(module: Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm | torch.nn.SyncBatchNorm):
            raise OptionError(
                f"replicate() got shares for a module with a SyncBatchNorm, {name or 'the module itself'}: a share "
                "runs before the rows of the other shares are known. Use torch.nn.BatchNorm, which normalises the "
                "rows of each share, on any number of ranks alike"
            )
