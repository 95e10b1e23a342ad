"""What each process, or each replica, did in one training step, and for whom it waited: collected, and drawn."""

import time
from collections.abc import Sequence
from itertools import chain, pairwise

import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn

import lockstep

Span = tuple[str, int | None, float, float]
"""Phase, process or replica (None: the thread that calls the replicas), start and end in seconds."""

WORK, COMMUNICATION = ("forward", "loss", "backward"), "communication"
HIDDEN, EXPOSED, WAITS = "communication, hidden", "communication, exposed", "waits for others"
INK, GREEN = "#22262e", "#3a9d6e"
COLOURS = {
    "refresh": "#8e7cc3",
    "scatter": "#d8a531",
    "forward": "#2f6fb3",
    "loss": "#c2476b",
    "backward": "#e07b39",
    WAITS: "#d9dce1",
    HIDDEN: "#a9d8bf",
    EXPOSED: GREEN,
    "reduce": GREEN,
}
"""Of the phases that are drawn, in the order of the legend."""
NAMED_SHARE = 0.05  # of the whole step: from here on a bar is wide enough for its own figure


def duration(timeline: Sequence[Span]) -> float:
    return max(end for *_, end in timeline) - min(start for _, _, start, _ in timeline)


def median_step(timelines: Sequence[list[Span]]) -> list[Span]:
    """The timeline of the step that is neither fast nor slow: the one to show."""
    return sorted(timelines, key=duration)[len(timelines) // 2]


class StepTimes:
    """Times what a process does in each step: work by the caller's laps, communication by `lockstep`."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._steps: list[list[Span]] = []
        self._spans: list[Span] = []

    def begin(self) -> None:
        """A step begins."""
        self._spans, self._hidden = [], lockstep.loop.statistics(self._model).hidden_seconds
        self._start_lap()

    def lap(self, phase: str) -> None:
        """What has run since the last call was this; what backward has only waited for is not part of it."""
        waited = lockstep.loop.statistics(self._model).exposed_seconds - self._exposed
        self._spans.append((phase, self._rank, self._start - self._begin, time.perf_counter() - waited - self._begin))
        self._start_lap()

    def end(self) -> None:
        """All gradients are there."""
        sent = self._spans[-1][3] - (lockstep.loop.statistics(self._model).hidden_seconds - self._hidden)
        self._steps.append([*self._spans, (COMMUNICATION, self._rank, sent, time.perf_counter() - self._begin)])

    def median_step(self) -> list[Span]:
        """The one that is neither fast nor slow of the steps since the last call, with the spans of all processes."""
        of_all: list[list[list[Span]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_all, self._steps)
        self._steps = []
        return median_step([list(chain.from_iterable(step)) for step in zip(*of_all, strict=True)])

    def _start_lap(self) -> None:
        self._exposed, self._start = lockstep.loop.statistics(self._model).exposed_seconds, time.perf_counter()
        if not self._spans:
            self._begin = self._start


def draw_timeline(axes: Axes, timeline: Sequence[Span]) -> None:
    """A row for each process, or for the caller and each replica; what backward has hidden is a thin bar below it."""
    rows = rows_of(timeline)
    spans = with_waiting(timeline if None in rows else on_one_clock(timeline))
    begin, length = min(start for _, _, start, _ in spans), duration(spans)
    for phase, row, start, end in spans:
        left, width, middle = 1000 * (start - begin), 1000 * (end - start), rows.index(row) - 0.1
        low, height = (middle + 0.33, 0.16) if phase == HIDDEN else (middle - 0.3, 0.6)
        axes.broken_barh([(left, width)], (low, height), color=COLOURS[phase], linewidth=0, label=phase)
        if end - start > NAMED_SHARE * length and phase != HIDDEN:
            colour = INK if phase == WAITS else "white"
            axes.annotate(f"{width:.1f} ms", (left + width / 2, middle), ha="center", va="center", color=colour)
    axes.set_yticks([place - 0.1 for place in range(len(rows))], [name_of(row, rows) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1000 * length)
    axes.set_xlabel("milliseconds")
    axes.grid(axis="y", visible=False)


def describe(timeline: Sequence[Span]) -> str:
    """How long the step took, and who was the last to end its own work."""
    rows = rows_of(timeline)
    spans = timeline if None in rows else on_one_clock(timeline)
    last = max((span for span in spans if span[0] in WORK), key=lambda span: span[3])[1]
    told = f"{1000 * duration(spans):.1f} ms to the last gradient, the median step of the last epoch"
    return told + (f"; {name_of(last, rows)} came last" if len(rows) > 1 else "")


def rows_of(timeline: Sequence[Span]) -> list[int | None]:
    return sorted({row for _, row, _, _ in timeline}, key=lambda row: -1 if row is None else row)


def name_of(row: int | None, rows: Sequence[int | None]) -> str:
    """Processes have no caller beside them."""
    return "caller" if row is None else f"{'replica' if None in rows else 'process'} {row}"


def on_one_clock(timeline: Sequence[Span]) -> list[Span]:
    """Processes' clocks differ, but all have the last gradient at the same time, nearly."""
    ends = {row: max(end for _, other, _, end in timeline if other == row) for row in rows_of(timeline)}
    return [(phase, row, start - ends[row], end - ends[row]) for phase, row, start, end in timeline]


def with_waiting(timeline: Sequence[Span]) -> list[Span]:
    """Who works no more waits until the last one has ended its work; communication is exposed from then on."""
    came = max(end for phase, _, _, end in timeline if phase in WORK)
    found = [span for span in timeline if span[0] in COLOURS]
    for row in {row for phase, row, _, _ in timeline if phase in WORK}:
        work = [(start, end) for phase, other, start, end in timeline if other == row and phase in WORK]
        sent = [(start, end) for phase, other, start, end in timeline if other == row and phase == COMMUNICATION]
        work = [*sorted(work), (came, came)]
        found += [(WAITS, row, end, start) for (_, end), (start, _) in pairwise(work)]
        found += [(HIDDEN, row, start, work[-2][1]) for start, _ in sent]
        found += [(EXPOSED, row, came, end) for _, end in sent]
    return [span for span in found if span[2] < span[3]]
