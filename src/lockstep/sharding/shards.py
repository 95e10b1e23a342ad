"""The step of a sharded optimizer on one rank, and its messages to the other ranks.

A step goes in this order, on every rank:

1. *place* - parameters that have a gradient and no place yet (new groups, unfrozen layers) are cut and assigned.
2. *agree* - one small all-gather checks that all ranks take the same step, with the same options and gradients, over
   the same parameters. If not, every rank raises an error by name, and nothing has been changed.
3. *step* - the optimizer itself steps, while its groups and its state have this rank's pieces alone. If that fails on
   any rank, a mark in the first chunk of its weights says so. Then every rank gets the old values of its pieces from
   another rank, since no rank has copied new values yet.
4. *gather* - each rank sends its pieces, and all ranks copy them into their parameters.

Other methods that change weights (``train()`` and ``eval()`` of schedule-free optimizers) go in the same order.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lockstep._base.compiler import calls_compiled, outside_compiler
from lockstep._base.digests import text_digest
from lockstep._base.inner_tensors import as_bytes
from lockstep._base.texts import LONGEST_HEADLINE, shortened
from lockstep.distributed.comm.agreement import all_gather_object, first_differing
from lockstep.distributed.comm.collectives import Collectives
from lockstep.errors import AgreementError, PeerError, ShardingError
from lockstep.sharding.granularity import Granularity, is_known
from lockstep.sharding.pieces import flat_gradient, is_like
from lockstep.sharding.placement import Groups, Placement
from lockstep.sharding.promises import RandomNumbers, check_slices
from lockstep.sharding.reduced import LateNumber, digests_of_gradients, number_of_gradients
from lockstep.sharding.shown_state import ShownState
from lockstep.sharding.streams import GatheredStreams, Moves, Targets

Action = Callable[[Optimizer], Any]


class Shards:
    """A rank's part of an optimizer's state and of its step."""

    def __init__(self, kind: type[Optimizer], granularity: Granularity, collectives: Collectives) -> None:
        self.collectives = collectives
        self.placement = Placement(granularity, not is_known(kind), collectives.rank, collectives.world)
        self.shown = ShownState(self.placement)
        """What ``optimizer.state`` is between steps."""
        self.steps = 0
        self._kind = kind
        self._is_known = is_known(kind)
        self._is_cut = granularity == "element"
        self._streams: GatheredStreams | None = None  # None if there is one rank
        self._moves: list[Moves] = []  # the places of each rank's pieces in the parameters
        self._others = Targets([])  # those of the other ranks
        self._outside: list[tuple[list[Tensor], Any]] = []  # what the groups have between steps
        self._hooks: dict[str, Any] = {}
        self.has_loaded = False
        """True if state has been loaded since the last step."""
        self._late: LateNumber | None = None  # of the gradients of the last step
        self._cut_short = ""  # why the weights or the state may be of two steps; other ranks may not know it
        self._failed = ""  # the same, known on all ranks

    def __repr__(self) -> str:
        return f"Shards({self._kind.__name__}, step {self.steps}, {self.placement})"

    # ------------------------------------------------------------------------------------- placing

    def place(self, groups: Groups, all_groups: Groups, find_names: Callable[[], dict[int, str]]) -> None:
        """Assign the parameters of ``groups`` that have no place yet, and follow those of ``all_groups``."""
        self.placement.place(groups, find_names)
        if self.placement.follow(all_groups) and self.collectives.world > 1:
            places = [[as_bytes(self.placement.memory_of(piece)) for piece in each] for each in self.placement.by_rank]
            lengths = [sum(place.numel() for place in each) for each in places]
            device = self.placement.placed[0].parameter.device if self.placement.placed else self.collectives.device
            self._streams = GatheredStreams(lengths, self.collectives, device)
            self._moves = [self._streams.moves(each) for each in places]
            own_rank = self.collectives.rank
            self._others = Targets([None if rank == own_rank else moves for rank, moves in enumerate(self._moves)])

    # -------------------------------------------------------------------------------------- a step

    @outside_compiler
    def prepare(self, optimizer: Optimizer, find_names: Callable[[], dict[int, str]], check: Callable[[], None]) -> str:
        """Get ready for one step, with all ranks; ``check`` raises an error if this rank cannot take it.

        If this fails on any rank, raises on every rank. :meth:`act` and :meth:`finish` follow. Returns the name of the
        step.
        """
        what, number = f"step {self.steps + 1}", 0
        cause: Exception | None = None
        earlier, late = self._late, None
        self._late = None
        self._check_not_cut_short()
        try:
            self._check_whole()
            check()
            groups = optimizer.param_groups
            self.place([_with_gradients(group) for group in groups], groups, find_names)
            gradients = self._take_gradients()
            if isinstance(gradients, LateNumber):
                number, late = 0 if earlier is None else earlier.read(), gradients
            else:
                number = gradients
        except Exception as error:
            cause = error
        self._agree(optimizer, what, cause, number, is_late=late is not None)
        self._late = late
        self.steps += 1
        self.has_loaded = False
        self._begin(what)
        return what

    def _begin(self, what: str) -> None:
        if self._streams is not None:  # until finish() has ended
            self._cut_short = f"{what} of the optimizer was cut short, so the weights may be of two steps"

    @outside_compiler
    def prepare_other(self, optimizer: Optimizer, what: str, find_names: Callable[[], dict[int, str]]) -> None:
        """Prepare another method that changes weights, as :meth:`prepare` does for a step."""
        cause: Exception | None = None
        self._check_not_cut_short()
        try:
            self._check_whole()
            self.place([], optimizer.param_groups, find_names)
        except Exception as error:
            cause = error
        self._agree(optimizer, what, cause)
        self._begin(what)

    @calls_compiled
    def act(self, optimizer: Optimizer, action: Action) -> tuple[Any, Exception | None]:
        """Run a method of the optimizer on this rank's pieces; return its result, and what it raises. If the program
        compiles its step, this part is compiled."""
        self._enter(optimizer)
        try:
            random = None if self._is_known or self.steps > 1 else RandomNumbers(self.placement.own_devices())
            result = action(optimizer)
            if random is not None:
                random.check_none_drawn(self._kind)
            return result, None
        except Exception as error:
            return None, error
        finally:
            self._leave(optimizer)

    @outside_compiler
    def _enter(self, optimizer: Optimizer) -> None:
        """Give the optimizer this rank's pieces, with their state, and no hooks, which run around the whole step."""
        own, tensors = vars(optimizer), self.placement.tensors
        self._outside = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            places = [place for place, each in enumerate(group["params"]) if id(each) in tensors]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][place] for place in places]
            group["params"] = [tensors[id(group["params"][place])] for place in places]
        self._hooks = {name: own[name] for name in _STEP_HOOKS if name in own}
        own.update({name: OrderedDict() for name in self._hooks}, state=self.placement.state)

    @outside_compiler
    def _leave(self, optimizer: Optimizer) -> None:
        attributes = vars(optimizer)
        for group, (params, names) in zip(optimizer.param_groups, self._outside, strict=False):
            group["params"] = params
            if names is not None:
                group["param_names"] = names
        self.placement.state = attributes["state"]  # the step may have replaced it
        attributes.update(self._hooks, state=self.shown)

    @outside_compiler
    def finish(self, optimizer: Optimizer, what: str, failure: Exception | None) -> None:
        """Send this rank's new values and copy those of the others; if the step failed on any rank, restore the old
        ones."""
        self._drop_gradients()
        try:
            if failure is None and self._is_cut and not self._is_known:
                check_slices(self._kind, self.placement.state_of_slices())
            if self.placement.has_whole:  # a step may give a parameter other memory
                self.place([], optimizer.param_groups, dict)
        except Exception as error:
            failure = failure or error
        if self._streams is None:
            if failure is not None:
                raise failure
            return
        own_moves = self._moves[self.collectives.rank]
        failed = self._streams.gather(own_moves, self._others, f"weights, {what}", int(failure is not None))
        self._cut_short = ""
        # All ranks read the same marks, so all of them come here, or none: what follows is collective.
        if failed:
            self._give_back(self._streams, what)
            self._failed = f"{what} of the optimizer has failed, after some ranks had changed their state"
            self._raise(what, failure)

    def _check_not_cut_short(self) -> None:
        if self._cut_short:
            raise ShardingError(f"{self._cut_short}. {_LOAD}")

    def _check_whole(self) -> None:
        if self._failed:
            raise ShardingError(f"{self._failed}. {_LOAD}")

    def _take_gradients(self) -> int | LateNumber:
        """Give the slices of this rank their gradients, and return a number of all gradients."""
        for piece, tensor in self.placement.own:
            placed = self.placement.placed[piece.number]
            gradient = placed.parameter.grad
            if gradient is None or placed.is_whole:  # the optimizer has a whole parameter itself, with its gradient
                continue
            if not is_like(gradient, tensor):
                gradient = flat_gradient(placed.parameter, placed.name)[piece.start : piece.stop]
                gradient = gradient.as_strided(tensor.shape, tensor.stride())
            tensor.grad = gradient
        return number_of_gradients(self._with_gradients(), self.steps) if self._streams is not None else 0

    def _with_gradients(self) -> list[tuple[str, Tensor]]:
        return [(each.name, each.parameter) for each in self.placement.placed if each.parameter.grad is not None]

    def _drop_gradients(self) -> None:
        for piece, tensor in self.placement.own:
            if not self.placement.placed[piece.number].is_whole:
                tensor.grad = None  # else the gradient's memory could not be used again

    def _give_back(self, streams: GatheredStreams, what: str) -> None:
        """Restore the old values of every rank's pieces: each rank sends those of the next rank, which it still has."""
        # This rank's step has overwritten its own pieces, but nobody has copied them yet: the others have the old ones.
        rank, world = self.collectives.rank, self.collectives.world
        targets: list[Moves | None] = [None] * world
        targets[(rank - 1) % world] = self._moves[rank]
        streams.gather(self._moves[(rank + 1) % world], Targets(targets), f"weights from before {what}")

    def _raise(self, what: str, failure: Exception | None) -> NoReturn:
        text = "" if failure is None else shortened(f"{type(failure).__name__}: {failure}", LONGEST_HEADLINE)
        errors = all_gather_object(text, "error of a sharded step", self.collectives)
        if failure is not None:
            raise failure
        rank = next(rank for rank, each in zip(self.collectives.global_ranks, errors, strict=True) if each)
        raise PeerError(
            f"rank {self.collectives.global_rank}: {what} of the optimizer has failed on rank {rank} "
            f"({next(filter(None, errors))}); every rank has the weights from before it"
        )

    # ----------------------------------------------------------------------------------- agreeing

    def agree_on_places(self, optimizer: Optimizer, error: Exception | None) -> None:
        """Compare the places with all ranks; raise on every rank if ranks differ or one has an ``error``."""
        self._agree(optimizer, "step 1", error)

    def _agree(
        self,
        optimizer: Optimizer,
        what: str,
        cause: Exception | None,
        number: int | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        """Raise on every rank unless all do the same, and a step has the same ``number`` of gradients; a rank with a
        ``cause`` not to do it reports that to all. ``is_late``: the number is of the gradients of the step before."""
        if cause is not None:
            self._drop_gradients()
        if self.collectives.world == 1:
            if cause is not None:
                raise cause
            return
        problem = "" if cause is None else f"{type(cause).__name__}: {cause}"
        lines = self._describe(optimizer.param_groups, what, number is not None)
        answers = all_gather_object(
            [problem, text_digest(json.dumps(lines)), number], "step of a sharded optimizer", self.collectives
        )
        if first_differing(answers) is None and not problem:
            return
        self._drop_gradients()
        if cause is not None:
            raise cause
        for rank, (their_problem, *_) in zip(self.collectives.global_ranks, answers, strict=True):
            if their_problem:
                raise PeerError(f"rank {rank} cannot take {what} of its sharded optimizer: {their_problem}")
        if first_differing([digest for _, digest, _ in answers]) is None:
            self._raise_gradients(is_late)
        self._raise_difference(lines)

    def _describe(self, groups: Groups, what: str, takes_gradients: bool) -> list[tuple[str, str]]:
        loaded = "has been loaded" if self.has_loaded else "has not been loaded"
        lines = [("what they do", what), ("the number of parameter groups", str(len(groups)))]
        lines += [("the state since the last step", loaded), ("the parameters and their parts", self.placement.digest)]
        for number, group in enumerate(groups):
            options = {name: _plain(value) for name, value in group.items() if name != "params" and _is_compared(value)}
            lines += [(f"the options of parameter group {number}", str(options))]
            if takes_gradients:
                without = [place for place, p in enumerate(group["params"]) if p.grad is None]
                lines += [(f"the places of the parameters of group {number} that have no gradient", str(without))]
        return lines

    def _raise_gradients(self, is_late: bool) -> NoReturn:
        ending = "No weight has changed"
        if is_late:
            self._failed = f"step {self.steps} of the optimizer was made with gradients that differ by rank"
            ending = f"On accelerators this is noticed one step later: {self._failed}. {_LOAD}"
        named = self._with_gradients()
        rows = all_gather_object(digests_of_gradients(named), "digests of gradients", self.collectives)
        for rank, row in zip(self.collectives.global_ranks, rows, strict=True):
            for (name, _), mine, theirs in zip(named, rows[0], row, strict=True):
                if mine != theirs:
                    raise ShardingError(
                        f"the gradient of parameter {name} on rank {rank} is not that on rank "
                        f"{self.collectives.global_ranks[0]}: a sharded optimizer steps on the mean over all ranks. "
                        "backward() makes it; torch.autograd.grad() returns the gradient of one rank alone, and what "
                        "changes a gradient after backward() has to do it alike on all ranks. "
                        f"{ending}"
                    )
        raise ShardingError(f"gradients were not the same on all ranks. {ending}")

    def _raise_difference(self, lines: list[tuple[str, str]]) -> NoReturn:
        rows = all_gather_object(lines, "what ranks step with", self.collectives)
        ranks = self.collectives.global_ranks
        differing = (
            (rank, mine, theirs)
            for rank, row in zip(ranks, rows, strict=True)
            for mine, theirs in zip(rows[0], row, strict=False)
            if mine != theirs
        )
        rank, (what, mine), (_, theirs) = next(differing)
        hint = ""
        if self.steps and not self._is_known:
            name = self._kind.__name__
            hint = f"; if {name}.step() changes it by what it sees of several parameters, use {name} as it is"
        raise AgreementError(
            f"ranks differ in {what} of a sharded optimizer: {mine} on rank {ranks[0]}, {theirs} on rank {rank}; no "
            f"weight has been changed. Make it the same on all ranks{hint}"
        )

    def load(self, state: dict[Any, Any]) -> None:
        """Take loaded state, by tensor of this rank's pieces; this ends the error state after a failed step."""
        self.placement.state.clear()
        self.placement.state.update(state)
        self.has_loaded = True
        self._late = None
        self._cut_short = self._failed = ""


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_LOAD = "Load a checkpoint: model.load_state_dict() and optimizer.load_state_dict()"


def _with_gradients(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [each for each in group["params"] if each.grad is not None]}


def _is_compared(value: Any) -> bool:
    """Return True if an option is compared; a tensor only if it is on the CPU, as a step does not wait for a device."""
    return value.device.type == "cpu" if isinstance(value, Tensor) else isinstance(value, int | float | str | tuple)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value if _is_compared(each))
    return value.tolist() if isinstance(value, Tensor) else value
