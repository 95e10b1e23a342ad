"""The picture of a training run: loss and accuracy of all epochs, and who did what in one step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from timeline import COLOURS, GREEN, INK, Span, describe, draw_timeline

FAINT, GRID = "#7a808c", "#e6e8ec"
BLUE, ORANGE = "#2f6fb3", "#e07b39"
LEAST_ERROR = 0.0007  # what the axis of accuracies adds to every error, so that 100% has a place on it


@dataclass
class History:
    """All that the picture shows, as plain lists, so that a checkpoint can hold it."""

    losses: list[float] = field(default_factory=list)
    """One of every step."""
    validation_losses: list[float] = field(default_factory=list)
    """One of every epoch, as are the accuracies."""
    accuracies: list[float] = field(default_factory=list)
    timeline: list[Span] = field(default_factory=list)
    """The spans of one step."""

    @property
    def accuracy(self) -> float | None:
        """The last one; None before the first."""
        return self.accuracies[-1] if self.accuracies else None

    def add_epoch(self, validation_loss: float, accuracy: float, timeline: list[Span]) -> None:
        """The figures of one more epoch, and the timeline of one of its steps."""
        self.validation_losses.append(validation_loss)
        self.accuracies.append(accuracy)
        self.timeline = timeline

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name, value in state.items():
            setattr(self, name, value)


def write_report(history: History, steps_per_epoch: int, path: Path) -> None:
    """Draw on a canvas of its own: no window, and no state shared with other figures."""
    rows = len({row for _, row, _, _ in history.timeline})
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, hspace=0.06, wspace=0.05)
    figure = Figure(figsize=(11, 6.4 + 0.4 * rows), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[4.2, 1 + 0.5 * rows])
    draw_loss(figure.add_subplot(grid[0, 0]), history, steps_per_epoch)
    draw_accuracy(figure.add_subplot(grid[0, 1]), history.accuracies)
    draw_step(figure, figure.add_subplot(grid[1, :]), history.timeline)
    figure.savefig(path, dpi=150)


def draw_loss(axes: Axes, history: History, steps_per_epoch: int) -> None:
    style(axes, "Loss", "cross-entropy, on a logarithmic scale")
    epochs = [(step + 1) / steps_per_epoch for step in range(len(history.losses))]
    axes.plot(epochs, history.losses, color=BLUE, alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(epochs, smoothed(history.losses), color=BLUE, linewidth=2, label="training, smoothed")
    draw_each_epoch(axes, history.validation_losses, ORANGE, label="validation")
    axes.set_yscale("log")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_accuracy(axes: Axes, accuracies: Sequence[float]) -> None:
    """From 0 to 100%, with more room for the last percents, in which good runs differ."""
    style(axes, "Validation accuracy", "on held-out images; errors on a logarithmic scale")
    draw_each_epoch(axes, accuracies, GREEN)
    axes.annotate(
        f"{accuracies[-1]:.2%}",
        (len(accuracies), accuracies[-1]),
        (0, -20),
        textcoords="offset points",
        ha="right",
        color=GREEN,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.set_yscale("function", functions=(errors_in_decades, accuracies_of))
    axes.set_ylim(-0.02, 1 + LEAST_ERROR / 4)
    axes.set_yticks(ticks := [0, 0.5, 0.9, 0.97, 0.99, 0.997, 1], [f"{100 * tick:.3g}%" for tick in ticks])


def errors_in_decades(accuracies: np.ndarray) -> np.ndarray:
    return -np.log10(1 + LEAST_ERROR - accuracies)


def accuracies_of(decades: np.ndarray) -> np.ndarray:
    return 1 + LEAST_ERROR - 10**-decades


def draw_each_epoch(axes: Axes, values: Sequence[float], colour: str, **options: Any) -> None:
    axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=2, marker="o", markersize=4, **options)
    axes.set_xlim(0, len(values) * 1.02)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def draw_step(figure: Figure, axes: Axes, timeline: Sequence[Span]) -> None:
    style(axes, "One training step", describe(timeline))
    draw_timeline(axes, timeline)
    bars = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    phases = [phase for phase in COLOURS if phase in bars]
    handles = [bars[phase] for phase in phases]
    figure.legend(
        handles, phases, loc="outside lower center", ncols=len(phases), frameon=False, labelcolor=INK, fontsize=9
    )


def style(axes: Axes, title: str, subtitle: str) -> None:
    """A title to the left with its reading below it, a light grid, and no box."""
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=24)
    axes.annotate(subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", color=FAINT, labelcolor=INK, length=0, pad=6)
    axes.xaxis.label.set_color(FAINT)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.8)


def smoothed(values: Sequence[float], reach: int = 7) -> list[float]:
    """The median of each value and its neighbours: unlike a running mean it does not lag behind."""
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [median(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]
