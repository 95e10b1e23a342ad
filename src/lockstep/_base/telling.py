"""Tells now and then what a rank waits for."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from lockstep._base.texts import first_line

FIRST_SECONDS = 10.0
"""Seconds after which a rank says for the first time what it waits for."""
EACH_SECONDS = 60.0
"""Seconds between that and the next time, and so on."""
_CLOSE_SECONDS = 0.5


@contextlib.contextmanager
def telling(what: Callable[[], str]) -> Iterator[None]:
    """Log, as a warning, what the block waits for, as ``what`` says on another thread: after ten seconds, and then once
    a minute. Without handlers of the program, Python writes it to stderr."""
    over = threading.Event()

    def tell() -> None:
        seconds = FIRST_SECONDS
        while not over.wait(seconds):
            try:
                text = what()
            except RuntimeError as error:  # the store does not answer
                text = first_line(error)
            if not over.is_set():
                logging.getLogger("lockstep").warning("%s", text)
            seconds = EACH_SECONDS

    thread = threading.Thread(target=tell, name="lockstep tells", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_CLOSE_SECONDS)
