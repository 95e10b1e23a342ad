"""Draws docs/ratios.svg and docs/scale.svg from files in benchmarks/results: ``python benchmarks/chart.py``."""

import math
import re
from collections.abc import Iterator
from html import escape
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCALE = "scale-cpu-2-cores-2026-11-27.txt"
INK, GOOD, BAD, LINE = "#123", "#5b8def", "#f2a65a", "#889"

# (what a group of bars shows, the file, by bar: its label and the name of the ratio in the file)
GROUPS = [
    (
        "A training step, lockstep / DistributedDataParallel: Gloo, two ranks",
        "ddp-cpu-2-cores-2026-11-26.txt",
        [
            ("400 small tensors", "many small, two ranks: step, lockstep / DDP"),
            ("25 M parameters in three layers", "wide, two ranks: step, lockstep / DDP"),
            ("6-layer encoder", "encoder, two ranks: step, lockstep / DDP"),
            ("53-layer conv-BN, with buffers", "conv-BN, two ranks: step, lockstep / DDP"),
            ("a third of the parameters unused", "unused, two ranks: step, lockstep / DDP"),
        ],
    ),
    (
        "All-reduce, shm / Gloo: two ranks",
        "shm-cpu-2-cores-2026-11-20.txt",
        [
            ("4 KB", "4 KB: shm / gloo"),
            ("1 MB", "1 MB: shm / gloo"),
            ("64 MB", "64 MB: shm / gloo"),
            ("64 MB, where gradients lie", "64 MB: shm, in place / gloo"),
        ],
    ),
]
LEFT, WIDTH, HEIGHT, MOST = 260, 560, 24, 1.25


def read(file: str, name: str) -> float:
    """A ratio from a file of results; a name that is not there is an error."""
    found = re.search(rf"^ratio  {re.escape(name)}: ([\d.]+)", (RESULTS / file).read_text(), re.MULTILINE)
    assert found, f"{file} has no ratio {name!r}"
    return float(found[1])


def draw() -> str:
    """The picture: bars that end left of the line took less time than PyTorch's way."""
    rows = sum(len(bars) for _, _, bars in GROUPS)
    bottom = 58 + rows * HEIGHT + len(GROUPS) * 36
    one = LEFT + WIDTH / MOST
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {bottom + 34}" font-size="13" fill="{INK}" '
            'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="Ratios of times: lockstep to PyTorch">',
            f'<rect width="900" height="{bottom + 34}" fill="#fff"/>',
            '<text x="20" y="28" font-size="16" font-weight="bold">Time: lockstep / PyTorch (less is better)</text>',
            f'<line x1="{one}" y1="44" x2="{one}" y2="{bottom}" stroke="{LINE}" stroke-dasharray="5 4"/>',
            *_groups(),
            f'<text x="{one}" y="{bottom + 18}" text-anchor="middle">1: as long as PyTorch\'s</text>',
            "</svg>\n",
        ]
    )


def _groups() -> Iterator[str]:
    y = 44.0
    for title, file, bars in GROUPS:
        y += 26
        yield f'<text x="20" y="{y}" font-weight="bold">{escape(title)}</text>'
        y += 10
        for label, name in bars:
            yield from _bar(y, label, read(file, name))
            y += HEIGHT


def _bar(y: float, label: str, ratio: float) -> Iterator[str]:
    width = min(ratio, MOST) / MOST * WIDTH
    yield f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'
    colour = GOOD if ratio <= 1 else BAD
    yield f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{HEIGHT - 7}" rx="2" fill="{colour}"/>'
    inside = ratio > 0.5  # beside a long bar it would stand on the line
    place = f'x="{LEFT + width - 8:.1f}" text-anchor="end"' if inside else f'x="{LEFT + width + 8:.1f}"'
    yield f'<text {place} y="{y + 16}">{ratio:.2f}</text>'


def draw_scale() -> str:
    """CPU times of one rank over the number of ranks, both with logarithmic axes."""
    head, _, *lines = (RESULTS / SCALE).read_text().partition("ranks   ")[2].splitlines()
    rows = list(takewhile(lambda line: line[:1].isdigit(), lines))
    worlds = [int(row.partition(" ")[0].replace(",", "")) for row in rows]
    values = [[float(number) for number in re.findall(r"([\d.]+) \(", row)] for row in rows]
    names = [name.removesuffix(", ms").strip() for name in re.split(r"\s{2,}", head.strip())]

    def x(world: int) -> float:
        return 90 + 560 * math.log(world / worlds[0]) / math.log(worlds[-1] / worlds[0])

    def y(milliseconds: float) -> float:
        return 330 - 270 * math.log10(milliseconds) / 2  # 1 to 100 ms

    def text(left: float, top: float, what: str, anchor: str = "start", more: str = "") -> str:
        return f'<text x="{left:.0f}" y="{top:.0f}" text-anchor="{anchor}"{more}>{escape(what)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 390" font-size="13" fill="{INK}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Processor time of one rank for worlds of 2 to 65,536 ranks">',
        '<rect width="900" height="390" fill="#fff"/>',
        text(20, 28, "Processor time of one rank, in milliseconds", more=' font-size="16" font-weight="bold"'),
    ]
    for tick in (1, 10, 100):
        parts += [f'<line x1="90" y1="{y(tick):.0f}" x2="650" y2="{y(tick):.0f}" stroke="{LINE}" stroke-width=".4"/>']
        parts += [text(80, y(tick) + 4, str(tick), "end")]
    parts += [text(x(world), 352, f"{world:,}", "middle") for world in worlds]
    parts += [text(370, 376, "ranks", "middle")]
    shown = {"replicate": "replicate()", "sharded step": "a sharded step", "first step": "the first step"}
    for name, colour in (*zip(shown, (BAD, LINE, INK), strict=True), ("step", GOOD)):
        series = [row[names.index(name)] for row in values]
        points = " ".join(f"{x(world):.1f},{y(value):.1f}" for world, value in zip(worlds, series, strict=True))
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>']
        parts += [text(664, y(series[-1]) + 4, f"{shown.get(name, 'a settled step')}: {series[-1]:g}")]
    return "\n".join([*parts, "</svg>\n"])


PICTURES = {"ratios.svg": draw, "scale.svg": draw_scale}


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (ROOT / "docs" / name).write_text(picture())
