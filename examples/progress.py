"""Progress of a training run: one moving line on a terminal, one plain line an epoch elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TextIO

LONGEST_BAR = 40
SHORTEST_BAR = 6


@dataclass(frozen=True)
class Status:
    """Where a run stands; epochs and steps count from one."""

    epoch: int
    step: int
    loss: float
    images_per_second: float
    accuracy: float | None
    """Of the last validation; None before the first."""


@contextmanager
def printing(wanted: bool) -> Iterator[None]:
    """What is printed inside is shown, or not: of many processes only one should speak."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if wanted else nowhere):
        yield


class Progress:
    """Shows each status in the way that suits the stream."""

    def __init__(self, stream: TextIO, epochs: int, steps_per_epoch: int) -> None:
        self.stream = stream
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.moving = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.drawn = False

    def after_step(self, status: Status) -> None:
        """Move the bar on; plain output stays silent until the epoch ends."""
        if self.moving:
            line = self._moving_line(status, self._columns() - 1)
            self._write("\r" + line.ljust(self._columns() - 1))
            self.drawn = True

    def after_epoch(self, status: Status) -> None:
        """Show the epoch's result, which brings a new validation accuracy."""
        if self.moving:
            self.after_step(status)
        else:
            self._write("  ".join([self._epoch(status), *self._figures(status)]) + "\n")

    def close(self) -> None:
        """Leave the moving line standing, so that what is printed next starts below it."""
        if self.drawn:
            self._write("\n")
            self.drawn = False

    def stop(self, epoch: int, step: int) -> None:
        """Tell where the run stopped; how to go on with it can follow on the same line."""
        self.close()
        self._write(f"stopped in epoch {epoch} after step {step} of {self.steps_per_epoch}; ")

    def _moving_line(self, status: Status, width: int) -> str:
        """As much as fits: the bar gives way first, then the figures from the last one on."""
        epoch, figures = self._epoch(status), self._figures(status)
        while figures and len("  ".join([epoch, *figures])) > width:
            figures.pop()
        room = width - len("  ".join([epoch, "", *figures]))
        bar = [self._bar(status, min(room, LONGEST_BAR))] if room >= SHORTEST_BAR else []
        return "  ".join([epoch, *bar, *figures])[:width]

    def _bar(self, status: Status, length: int) -> str:
        """One bar for the whole run, in whatever characters the stream can encode."""
        steps_done = (status.epoch - 1) * self.steps_per_epoch + status.step
        filled = length * steps_done // (self.epochs * self.steps_per_epoch)
        done, left = ("━", "─") if "utf" in (self.stream.encoding or "").lower() else ("#", "-")
        return done * filled + left * (length - filled)

    def _epoch(self, status: Status) -> str:
        return f"epoch {status.epoch:{len(str(self.epochs))}}/{self.epochs}"

    @staticmethod
    def _figures(status: Status) -> list[str]:
        accuracy = "  --  " if status.accuracy is None else f"{status.accuracy:6.2%}"
        return [
            f"loss {status.loss:.4f}",
            f"validation {accuracy}",
            f"{status.images_per_second:6,.0f} images/s",
        ]

    def _columns(self) -> int:
        """The terminal's width now: it may change while training runs, and some report none."""
        return os.get_terminal_size(self.stream.fileno()).columns or 80

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
