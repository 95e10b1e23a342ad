"""How workers of pytest-xdist share the tests, and which tests run beside no other."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Files whose tests share what one of them has started: they go to one worker. All other tests go where there is room.
TOGETHER = ("test_digits.py", "test_benchmarks.py", "test_beside_ddp.py", "test_rank_names.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

        def remove_node(self, node: Any) -> str | None:
            """Gives the tests that a worker has left to the others, without the one that ended it.

            pytest-xdist gives them those as well that the worker has run. A worker that is given nothing but such tests
            reports nothing, so it gets nothing else: the run never ends.
            """
            units = self.assigned_work[node]
            unfinished = ((unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done)
            unit, ended_by = next(unfinished, (None, None))
            if unit is not None:
                unit[ended_by] = True
            for scope in [scope for scope, unit in units.items() if all(unit.values())]:
                del units[scope]
            super().remove_node(node)
            return ended_by

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:  # not one that takes a worker's place, and is still collecting
                with contextlib.suppress(
                    OSError
                ):  # it has just ended, too: what it was to get comes back with the rest
                    super()._reschedule(node)

    return Scheduling(config, log)


@contextlib.contextmanager
def turn(folder: str | None, alone: bool) -> Iterator[None]:
    """Within: a test marked `alone` runs beside no other. The queue lets it in though others never stop running."""
    if folder is None:
        yield
        return
    with open(Path(folder, "queue"), "w") as queue, open(Path(folder, "running"), "w") as running:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # not left to close(): a process that the test has forked holds it, too
