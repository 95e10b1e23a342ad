"""Draws the pictures of docs/concepts.md, beside which it puts them: ``python docs/pictures/draw.py``."""

from pathlib import Path

HERE = Path(__file__).parents[1]
BLUE, ORANGE, GREEN, GREY, PALE = "#cfe3ff", "#ffe0c2", "#d8f0d2", "#dfe5ec", "#f4f6f9"
INK, LINE = "#123", "#345"


class Picture:
    """An SVG that grows: boxes, words, arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{title}">\n'
            '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#fff"/>'
        )
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 12) -> None:
        """A rectangle, with a text in its middle whose lines are separated by newlines."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="#789"/>')
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            middle = y + h / 2 + size * 0.36 + (number - (len(lines) - 1) / 2) * size * 1.3
            self.text(x + w / 2, middle, line, size)

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "middle", bold: bool = False) -> None:
        """One line of text; ``y`` is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{INK}">{text}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False, both: bool = False) -> None:
        """A line with a head at its end, or at both."""
        more = (' stroke-dasharray="5 4"' if dashed else "") + (' marker-start="url(#a)"' if both else "")
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5"{more} '
            'marker-end="url(#a)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([self._head, *self._parts, "</svg>\n"])


def a_round() -> str:
    """One backward pass of two ranks, of which rank 1 is slower."""
    p = Picture(960, 300, "A round: backward and all-reduces of two ranks, side by side in time")
    for rank, (top, width) in enumerate([(24, 112), (196, 140)]):
        p.text(20, top + 23, f"rank {rank}", 14, "start", bold=True)
        for number, (layer, colour) in enumerate((("layer 3", BLUE), ("layer 2", BLUE), ("layer 1", ORANGE))):
            p.box(100 + number * width, top, width, 38, colour, f"backward of\n{layer}", 11)
        end = 100 + 3 * width
        p.box(
            end,
            top,
            700 - end,
            38,
            PALE,
            "waits" if rank else "waits, also for rank 1",
        )
        p.box(700, top, 100, 38, GREEN, "takes gradients", 11)
        p.box(800, top, 140, 38, GREY, "optimizer.step()")
        for filled, begun in ((100 + 2 * width, 382), (end, 522)):
            p.arrow(filled, top + (0 if rank else 39), begun, 146 if rank else 112)
        p.arrow(692, 146 if rank else 112, 716, top + (-1 if rank else 39))
    p.text(20, 134, "all-reduce", 14, "start", bold=True)
    p.box(380, 112, 140, 34, BLUE, "bucket 0: layers 3, 2", 11)
    p.box(522, 112, 170, 34, ORANGE, "bucket 1: layer 1 | report", 11)
    p.arrow(100, 262, 940, 262)
    p.text(100, 282, "time", 12, "start")
    return p.svg()


def two_levels() -> str:
    """Eight ranks on two hosts."""
    p = Picture(960, 330, "Two levels: shared memory in each host, one message between hosts")
    for host, left in enumerate([20, 530]):
        p.box(left, 16, 410, 298, PALE)
        p.text(left + 205, 40, f"host {host}", 14, bold=True)
        for place in range(4):
            x = left + 18 + place * 96
            p.box(x, 56, 86, 40, BLUE if host == 0 else ORANGE, f"rank {host * 4 + place}")
            p.arrow(x + 43, 97, x + 43, 139, both=True)
        p.box(
            left + 18, 140, 374, 46, GREEN, "memory that all four ranks map:\ngradients lie here, and are added up here"
        )
        p.arrow(left + 61, 187, left + 61, 239, both=True)
        p.text(left + 76, 217, "the sums of this host, once", 12, "start")
        p.box(left + 18, 240, 86, 40, BLUE if host == 0 else ORANGE, f"rank {host * 4}")
        p.text(left + 118, 264, "speaks for its host", 12, "start")
    p.arrow(431, 260, 529, 260, both=True)
    p.text(480, 248, "Gloo", 12)
    return p.svg()


def replicas() -> str:
    """DataParallel.step with two devices."""
    p = Picture(
        960, 300, "One process: the batch is split, each replica runs forward, loss and backward, gradients are summed"
    )
    p.box(20, 96, 110, 108, GREY, "a batch\nof 9 rows")
    p.box(820, 96, 120, 108, GREY, "parameters\nand gradients\nof the network")
    for number, (top, rows, colour) in enumerate([(40, 5, BLUE), (190, 4, ORANGE)]):
        p.arrow(131, 150, 178, top + 35)
        p.box(180, top, 90, 70, colour, f"{rows} rows")
        p.arrow(271, top + 35, 318, top + 35)
        p.box(320, top, 350, 70, colour, f"replica {number}, on a thread of its own:\nforward, loss, backward")
        p.arrow(671, top + 35, 818, 150 + (8 if number else -8))
        p.text(
            495,
            top + 92 if number else top - 12,
            f"device {number}" + ("" if number else ": replica 0 is the network itself"),
            12,
        )
    p.text(724, 155, "summed as they come", 12)
    return p.svg()


PICTURES = {"round.svg": a_round, "two_levels.svg": two_levels, "replicas.svg": replicas}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
