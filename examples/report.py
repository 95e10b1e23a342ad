"""The picture of a training run: its loss, its accuracy, and what each replica did in one step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

INK, FAINT, GRID = "#22262e", "#7a808c", "#e6e8ec"
BLUE, ORANGE, GREEN = "#2f6fb3", "#e07b39", "#3a9d6e"
PHASE_COLOURS = {
    "refresh": "#8e7cc3",
    "scatter": "#d8a531",
    "forward": BLUE,
    "loss": "#c2476b",
    "backward": ORANGE,
    "gather": "#4fb3bf",
    "reduce": GREEN,
}
OTHER_PHASE = "#a5abb5"
NAMED_SHARE = 0.08  # of the whole step: from here on a bar is wide enough for its own figure

Span = tuple[str, int | None, float, float]
"""Phase, replica (None: the calling thread), start and end in seconds."""


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


def median_step(timelines: Sequence[list[Span]]) -> list[Span]:
    """The timeline of the step that is neither fast nor slow: the one to show."""
    return sorted(timelines, key=duration)[len(timelines) // 2]


def innermost(timeline: Sequence[Span]) -> list[Span]:
    """The spans without those that are made up of others on the same row, such as the step as a whole."""

    def made_up(span: Span) -> bool:
        _, replica, start, end = span
        return any(s is not span and s[1] == replica and start <= s[2] and s[3] <= end for s in timeline)

    return [span for span in timeline if not made_up(span)]


def duration(timeline: Sequence[Span]) -> float:
    return max(end for *_, end in timeline) - min(start for _, _, start, _ in timeline)


def write_report(history: History, steps_per_epoch: int, path: Path) -> None:
    """Draw on a canvas of its own: no window, and no state shared with other figures."""
    rows = len({replica for _, replica, _, _ in history.timeline})
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, hspace=0.06, wspace=0.05)
    figure = Figure(figsize=(11, 6.2 + 0.32 * rows), facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[4.2, 1 + 0.4 * rows])
    draw_loss(figure.add_subplot(grid[0, 0]), history, steps_per_epoch)
    draw_accuracy(figure.add_subplot(grid[0, 1]), history)
    draw_timeline(figure.add_subplot(grid[1, :]), history.timeline)
    figure.savefig(path, dpi=150)


def draw_loss(axes: Axes, history: History, steps_per_epoch: int) -> None:
    style(axes, "Loss", "cross-entropy, on a logarithmic scale")
    epochs = [(step + 1) / steps_per_epoch for step in range(len(history.losses))]
    axes.plot(epochs, history.losses, color=BLUE, alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(epochs, smoothed(history.losses), color=BLUE, linewidth=2, label="training, smoothed")
    draw_each_epoch(axes, history.validation_losses, ORANGE, label="validation")
    axes.set_yscale("log")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_accuracy(axes: Axes, history: History) -> None:
    """Once a run is good, its differences lie in the last percents: those fill the axis then."""
    last = history.accuracies[-1]
    style(axes, "Validation accuracy", "on images held out of the training")
    draw_each_epoch(axes, history.accuracies, GREEN, clip_on=True)
    axes.annotate(
        f"{last:.2%}",
        (len(history.accuracies), last),
        (0, -16),
        textcoords="offset points",
        ha="right",
        color=GREEN,
        fontweight="bold",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylim(0.9 if last > 0.95 else 0, 1.002)


def draw_each_epoch(axes: Axes, values: Sequence[float], colour: str, **options: Any) -> None:
    epochs = range(1, len(values) + 1)
    axes.plot(epochs, values, color=colour, linewidth=2, marker="o", markersize=4, **options)
    axes.set_xlim(0, len(values) * 1.02)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def draw_timeline(axes: Axes, timeline: Sequence[Span]) -> None:
    """One row for the caller and one for each replica, or one for each process; time runs to the right."""
    begin = min(start for _, _, start, _ in timeline)
    length = duration(timeline)
    spans = innermost(timeline)
    style(axes, "One training step", f"{1000 * length:.1f} ms, the median step of the last epoch")
    replicas = sorted({replica for _, replica, _, _ in spans}, key=lambda i: -1 if i is None else i)
    for row, replica in enumerate(replicas):
        for phase, _, start, end in (span for span in spans if span[1] == replica):
            span = (1000 * (start - begin), 1000 * (end - start))
            axes.broken_barh([span], (row - 0.36, 0.72), color=colour_of(phase), linewidth=0)
            if end - start > NAMED_SHARE * duration(timeline):
                middle = (span[0] + span[1] / 2, row)
                axes.annotate(f"{span[1]:.1f} ms", middle, ha="center", va="center", color="white")
    kind = "replica" if None in replicas else "process"  # processes have no caller beside them
    axes.set_yticks(range(len(replicas)), [row_name(replica, kind) for replica in replicas])
    axes.set_ylim(len(replicas) - 0.5, -0.5)
    axes.set_xlim(0, 1000 * length)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="y", visible=False)
    draw_phase_legend(axes, spans)


def draw_phase_legend(axes: Axes, spans: Sequence[Span]) -> None:
    """The phases in the order in which they begin, above the right end of the bars."""
    phases = dict.fromkeys(phase for phase, *_ in sorted(spans, key=lambda span: span[2]))
    axes.legend(
        handles=[Patch(color=colour_of(phase), label=phase) for phase in phases],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(phases),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
        borderaxespad=0.3,
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


def colour_of(phase: str) -> str:
    return PHASE_COLOURS.get(phase, OTHER_PHASE)


def row_name(replica: int | None, kind: str) -> str:
    return "caller" if replica is None else f"{kind} {replica}"
