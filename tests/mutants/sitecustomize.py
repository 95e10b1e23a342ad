"""What tests/mutants/mutants.py has in each process of its test runs: which lines a test executes, and tests in order.

Python imports a module of this name when it starts, in each process that has this folder in PYTHONPATH; pytest gets it
as a plugin. Lines are recorded by coverage's tracer in C: one in Python would hold references to the locals of what it
traces, which the library counts. A process that is killed, or a thread that Python has not started, records nothing.

PYTEST_DONT_REWRITE (pytest finds it imported already)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
from pathlib import Path
from typing import Any

SOURCE = os.environ.get("MUTANTS_SOURCE", "")  # the only place that the package may come from
RECORD = os.environ.get("MUTANTS_RECORD", "")  # a folder: record into it, else run the tests of MUTANTS_TESTS
MEMORY = 8 * 2**30
PASSED: dict[str, float] = {}  # seconds of each test, of which all phases have passed


class Recorder:
    """Records for this process; the test is the one that the process of the tests has written to a file."""

    def __init__(self) -> None:
        self.start()
        atexit.register(self.save)
        os.register_at_fork(after_in_child=self.forked)
        end = os._exit

        def save_and_end(status: int) -> None:  # how processes of multiprocessing end
            with contextlib.suppress(Exception):
                self.save()
            end(status)

        os._exit = save_and_end  # type: ignore[assignment]

    def start(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            Path(RECORD, "part"), data_suffix=True, config_file=False, concurrency="thread", include=[f"{SOURCE}*"]
        )
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self.coverage.start()
        current = Path(RECORD, "current")
        self.switch(current.read_text() if current.exists() else "")

    def switch(self, test: str) -> None:
        self.coverage.switch_context(test)

    def forked(self) -> None:
        self.coverage.stop()  # what the parent has recorded, the parent saves
        self.start()

    def save(self) -> None:
        self.coverage.stop()
        self.coverage.save()


recorder = Recorder() if RECORD else None
if SOURCE and not RECORD:  # of a fault that never stops to ask for memory, others shall not notice
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Runs after that of conftest.py."""
    import lockstep

    assert lockstep.__file__.startswith(SOURCE), f"{lockstep.__file__} is not of {SOURCE}"
    if recorder is None:
        places = {test: place for place, test in enumerate(json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text()))}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
        items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    if recorder is not None:
        Path(RECORD, "current").write_text(nodeid)
        recorder.switch(nodeid)
        PASSED[nodeid] = 0.0


def pytest_runtest_logreport(report: Any) -> None:
    if report.passed and report.nodeid in PASSED:
        PASSED[report.nodeid] += report.duration
    else:
        PASSED.pop(report.nodeid, None)


def pytest_sessionfinish() -> None:
    if recorder is not None:
        Path(RECORD, "passed.json").write_text(json.dumps(PASSED))
