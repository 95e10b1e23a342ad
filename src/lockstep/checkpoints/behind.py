"""Writes a checkpoint behind the training: on a thread of its own, one at a time."""

import threading
from collections.abc import Callable

from lockstep.checkpoints.ranks import Ranks
from lockstep.checkpoints.saving import Saving


class WriteBehind:
    """The save in flight of one rank, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, saving: Saving, ranks: Callable[[], Ranks]) -> None:
        """Write what a save has taken; on the thread, ``ranks`` returns the ranks, which do not use the group."""
        self.wait()

        def write() -> None:
            try:
                saving.write(ranks())
            except BaseException as error:
                self._error = error

        # Not one that ends with the process: an interpreter that ends waits for it, as a session does.
        self._thread = threading.Thread(target=write, name="lockstep saves", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no save is in flight; raise the error of the last one, if it has failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
