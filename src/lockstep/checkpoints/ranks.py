"""The ranks that save or resume together: all take each step, and a failure on one raises on all."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from torch.optim import Optimizer

from lockstep._base.store import BoundedStore
from lockstep._base.texts import shortened
from lockstep.distributed.comm.agreement import all_gather_object
from lockstep.distributed.comm.collectives import Collectives
from lockstep.distributed.comm.groups import Group, resolve_group
from lockstep.distributed.replication.in_sync import Values, check_alike
from lockstep.errors import AgreementError, CheckpointError, CommunicationError
from lockstep.phases import Phases

LONGEST_ERROR = 16 * 1024
"""Number of characters of an error's message that other ranks are told."""
SHORTEST_WAIT, LONGEST_WAIT = 0.005, 0.2
"""Seconds between two looks into a store for what other ranks say."""


class Ranks:
    """The ranks of a group; this process alone if there is none."""

    def __init__(self, group: Group | None) -> None:
        group = resolve_group(group)
        self._collectives = None if group is None or group.size() == 1 else Collectives(group, Phases())
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.host = socket.gethostname()
        self.names = range(self.size) if self._collectives is None else self._collectives.global_ranks
        """The ranks as messages name them."""
        self._met = False
        """True once all ranks have taken a step: then all have made the same call."""

    def together(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """Take a step on every rank; return its results on all, in rank order: values that JSON can represent.

        If the step has failed on some ranks, raises :class:`CheckpointError` on every rank, with their errors.
        """
        problem: BaseException | None = None
        result = None
        try:
            result = step()
        except BaseException as error:
            problem = error
        answer = {"result": result} if problem is None else {"host": self.host, "error": _describe(problem)}
        try:
            answers = self.tell(answer, what)
        except Exception as error:
            if problem is not None:
                raise problem from error
            if not self._met:
                error.add_note(
                    f"If only some ranks have called {what}: call {what} on every rank, not under `if run.is_main`. It "
                    "lets one rank write what is the same on all."
                )
            raise
        self._met = True
        failed = [(name, each) for name, each in zip(self.names, answers, strict=True) if "error" in each]
        with self.in_unison():
            if problem is not None and not isinstance(problem, Exception):
                raise problem
            if failed:
                raise CheckpointError(f"{what} failed{self._where(failed)}") from problem
        return [each["result"] for each in answers]

    def _where(self, failed: list[tuple[int, dict[str, Any]]]) -> str:
        errors = {each["error"] for _, each in failed}
        if len(errors) == 1 and len(failed) == self.size:
            return (" on every rank" if self.size > 1 else "") + f": {errors.pop()}"
        return " on " + "; ".join(f"rank {name} (host {each['host']}): {each['error']}" for name, each in failed)

    def tell(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self._collectives is None:
            return [value]
        return all_gather_object(value, what, self._collectives)

    @contextlib.contextmanager
    def in_unison(self) -> Iterator[None]:
        """Let an error of the block, which all ranks raise or none, leave it when all ranks have come to it.

        A rank that still waits for what the others have sent before would otherwise hear that another rank has failed,
        and raise a ``PeerFailure`` instead (``test_an_error_of_all_ranks_waits_for_the_slowest_one``).
        """
        try:
            yield
        except BaseException:
            with contextlib.suppress(CommunicationError):  # of a rank that is already further: then all have come
                self.tell(None, "an error of all ranks")
            raise

    def check_alike(self, values: Values, optimizers: Sequence[Optimizer]) -> None:
        """Raise :class:`OutOfSyncError`, on every rank, if replicas have drifted apart."""
        if self._collectives is not None and (values or optimizers):
            check_alike(
                values,
                optimizers,
                self._collectives,
                "Nothing has been saved. If each rank is to have its own, save "
                "lockstep.checkpoints.per_rank(module.state_dict()); save(check=False) saves what the first rank has",
            )

    def check_equal(self, what: str, values: list[dict[str, Any]]) -> None:
        """Raise :class:`AgreementError`, on every rank, unless all ranks have the same values."""
        with self.in_unison():
            self._check_equal(what, values)

    def _check_equal(self, what: str, values: list[dict[str, Any]]) -> None:
        for name, theirs in zip(self.names, values, strict=True):
            for key in {**values[0], **theirs}:
                mine, other = values[0].get(key, "nothing"), theirs.get(key, "nothing")
                if mine != other:
                    raise AgreementError(
                        f"{what}: ranks differ in {key}: {mine} on rank {self.names[0]}, {other} on rank {name}; call "
                        "it with the same on all ranks"
                    )


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    with contextlib.suppress(AttributeError):
        text = "\n".join([text, *error.__notes__])
    return shortened(text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}", LONGEST_ERROR)


class RanksByStore(Ranks):
    """The ranks of a group, which communicate through a store: for a thread beside the thread that uses the group.

    Each rank writes one value and reads one: the first rank collects the values, and writes them together, equal ones
    of neighbours once. What has been read by all is removed from the store: only the last round's values, together,
    stay. ``check`` raises if another rank has failed, or the session has given up. ``timeout`` is the number of seconds
    to wait for a rank.
    """

    def __init__(self, ranks: Ranks, store: BoundedStore, check: Callable[[], object], timeout: float) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.host = ranks.host
        self.names = ranks.names
        self._collectives = None
        self._met = True
        self._bounded_store = store
        self._check = check
        self._timeout = timeout
        self._round = 0

    def tell(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        bounded_store = self._bounded_store
        keys, together = self._keys()
        bounded_store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            self._wait(keys, what)
            texts = groupby(bounded_store.get_all(keys))
            bounded_store.set(together, json.dumps([[text, len(list(same))] for text, same in texts]))
        else:
            self._wait([together], what)
        pairs = [(json.loads(text), count) for text, count in json.loads(bounded_store.get(together))]
        with contextlib.suppress(CommunicationError):  # the answers are known
            bounded_store.delete(keys[self.rank])
            if self.rank == 0 and self._round:  # all have come to this round, and so have read the last one
                bounded_store.delete(f"{self._round - 1} of all")
        self._round += 1
        return [value for value, count in pairs for _ in range(count)]

    def _keys(self) -> tuple[list[str], str]:
        """Return the keys of this round: of each rank's value, and of all together."""
        return [f"{self._round} of {rank}" for rank in range(self.size)], f"{self._round} of all"

    def _wait(self, keys: list[str], what: str) -> None:
        until, pause = time.monotonic() + self._timeout, SHORTEST_WAIT
        while not self._bounded_store.check(keys):
            self._check()
            if time.monotonic() > until:
                named = zip(self.names, self._keys()[0], strict=True)
                late = [str(name) for name, key in named if not self._bounded_store.check([key])]
                raise CommunicationError(
                    f"{what}, behind the training: rank {', '.join(late or [str(self.names[0])])} has not answered "
                    f"within {self._timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)
