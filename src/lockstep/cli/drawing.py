"""Pictures that subcommands write: SVG, which every browser shows and which needs no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {"compute": "#9dbdf0", "communication": "#f2a65a", "waiting": "#e9e2d6", "other": "#bfe3b4"}
INK = "#112233"


@dataclass(frozen=True)
class Bar:
    """A part of a lane, in the units of the axis."""

    begin: float
    end: float
    kind: str
    label: str = ""


def lanes(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Rows of bars over one axis that begins at zero; the legend names the kinds that occur."""
    left, width, height = 190, 720, 30
    end = max((bar.end for _, bars in rows for bar in bars), default=1.0) or 1.0
    bottom = 70 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 50}" font-family="Helvetica, Arial, '
        f'sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="960" height="{bottom + 50}" fill="#fff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_legend([bar.kind for _, bars in rows for bar in bars]),
    ]
    for number, (name, bars) in enumerate(rows):
        y = 62 + number * height
        parts.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts += [_bar(bar, left, y, width / end, height - 8) for bar in bars]
    parts += _axis(left, bottom, width, end, unit)
    return "\n".join([*parts, "</svg>\n"])


def _bar(bar: Bar, left: float, y: float, scale: float, height: float) -> str:
    x, width = left + bar.begin * scale, max((bar.end - bar.begin) * scale, 0.5)
    label = f"<title>{escape(bar.label)}</title>" if bar.label else ""
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{COLOURS[bar.kind]}">{label}</rect>'


def _legend(kinds: Sequence[str]) -> list[str]:
    there = [kind for kind in COLOURS if kind in kinds]
    return [
        f'<rect x="{190 + 150 * i}" y="38" width="12" height="12" fill="{COLOURS[kind]}"/>'
        f'<text x="{208 + 150 * i}" y="49">{kind}</text>'
        for i, kind in enumerate(there)
    ]


def _axis(left: float, y: float, width: float, end: float, unit: str) -> list[str]:
    step = next(each for each in _steps(end / 5) if each >= end / 5)
    marks = [step * i for i in range(int(end / step) + 1)]
    line = f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="{INK}"/>'
    texts = [
        f'<line x1="{left + width * mark / end:.1f}" y1="{y}" x2="{left + width * mark / end:.1f}" y2="{y + 4}" '
        f'stroke="{INK}"/><text x="{left + width * mark / end:.1f}" y="{y + 18}" text-anchor="middle">{mark:.3g}</text>'
        for mark in marks
    ]
    return [line, *texts, f'<text x="{left + width}" y="{y + 36}" text-anchor="end">{escape(unit)}</text>']


def _steps(least: float) -> list[float]:
    """Distances between marks that are easily read, of which one is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return [power, 2 * power, 5 * power, 10 * power]
