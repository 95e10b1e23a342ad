"""Draws pictures of the documentation, beside whose pages it puts them: ``python docs/pictures/draw.py``."""

from pathlib import Path

HERE = Path(__file__).parents[1]
BLUE, ORANGE, GREEN, GREY, PALE = "#cfe3ff", "#ffe0c2", "#d8f0d2", "#dfe5ec", "#f4f6f9"
INK, LINE = "#123", "#345"
DEEP_BLUE, RED = "#2463b5", "#c8352b"


class Picture:
    """An SVG that grows: boxes, words, arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
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

    def curve(self, points: list[tuple[float, float]], colour: str) -> None:
        """A thick line through points, each of which is a dot."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="4"/>')
        self._parts += [f'<circle cx="{x}" cy="{y}" r="6" fill="{colour}"/>' for x, y in points]

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([self._head, *self._parts, "</svg>\n"])


def drift() -> str:
    """Why replicas drift, and what lockstep does about it: one chart below the other, for the screen of a phone."""
    p = Picture(480, 744, "Two replicas drift apart after a mistake on one rank; lockstep stops them with an error")
    p.text(240, 28, "Every step averages the gradients.", 18, bold=True)
    p.text(240, 52, "Nothing ever averages the weights.", 18, bold=True)
    p.text(240, 76, "A difference between replicas never goes away.", 17)
    steps = [40, 85, 130, 175, 220, 265, 310, 355, 400]
    up, down = (174, 166, 158, 150, 142, 134, 128, 122, 116), (182, 174, 166, 178, 184, 190, 198, 206, 214)
    for top, title, colour, seen in ((94, "without a check", ORANGE, 9), (420, "with lockstep", GREEN, 5)):
        p.box(20, top, 440, 308, PALE)
        p.box(20, top, 440, 32, colour, title, 17)
        p.text(38, top + 66, "weights", 16, "start")
        p.text(442, top + 296, "steps", 16, "end")
        p.arrow(38, top + 276, 442, top + 276)
        p.text(235, top + 245, "one rank only: another checkpoint,", 16)
        p.text(235, top + 265, "a missed step, a bit that flips", 16)
        p.arrow(200, top + 228, 196, top + 190)
        for heights, line in ((up, DEEP_BLUE), (down, RED)):
            p.curve([(20 + x, top + y) for x, y in list(zip(steps, heights, strict=True))[:seen]], line)
    p.text(270, 164, "The loss still falls. Nobody notices.", 16)
    p.text(440, 194, "rank 0", 16, "end", bold=True)
    p.text(440, 332, "rank 1", 16, "end", bold=True)
    p.box(254, 480, 24, 146, GREEN)
    p.text(266, 474, "a later backward", 16)
    p.text(290, 536, "OutOfSyncError", 16, "start", bold=True)
    p.text(290, 558, "on every rank:", 16, "start")
    p.text(290, 580, "what differs, where,", 16, "start")
    p.text(290, 602, "since which step", 16, "start")
    return p.svg()


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


def sharding() -> str:
    """A step of a sharded optimizer on two ranks: from top to bottom, for the screen of a phone."""
    p = Picture(
        480, 446, "A sharded optimizer: each rank steps on its half of the weights, then all get the other half"
    )
    for rank, (left, own) in enumerate([(16, BLUE), (264, ORANGE)]):
        p.text(left + 100, 24, f"rank {rank}", 17, bold=True)
        for row, name in enumerate(("gradients: the mean, whole", "weights")):
            y = 60 + row * 56
            p.text(left, y - 6, name, 15, "start")
            p.box(left, y, 100, 26, BLUE)
            p.box(left + 100, y, 100, 26, ORANGE)
        p.text(left, 166, "state: two numbers for", 15, "start")
        p.text(left, 184, "each weight of its half", 15, "start")
        for row in range(2):
            p.box(left + rank * 100, 192 + row * 16, 100, 14, own)
        p.arrow(left + 100, 230, left + 100, 268)
        p.text(left + 110, 254, "step", 16, "start")
        for half in range(2):
            is_new = half == rank
            p.box(left + half * 100, 270, 100, 28, GREEN if is_new else GREY, "new" if is_new else "old", 15)
            p.box(left + half * 100, 404, 100, 28, GREEN, "new", 15)
        p.arrow(left + 100, 300, left + 100, 402)
    p.arrow(120, 350, 360, 350, both=True)
    p.text(240, 340, "all-gather:", 15)
    p.text(240, 370, "each sends its half", 15)
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
        p.box(320, top, 350, 70, colour, f"replica {number}:\nforward, loss, backward")
        p.arrow(671, top + 35, 818, 150 + (8 if number else -8))
        p.text(
            495,
            top + 92 if number else top - 12,
            f"device {number}" + ("" if number else ": replica 0 is the network itself"),
            12,
        )
    p.text(724, 155, "summed in their order", 12)
    return p.svg()


def tree_of_shares() -> str:
    """Eight shares on three ranks."""
    p = Picture(960, 380, "Eight shares on three ranks, added in a fixed tree over their numbers")
    places = [(30 + number * 100 + 40 * owner, owner) for number, owner in enumerate((0, 0, 0, 1, 1, 1, 2, 2))]
    middle = [x + 40 for x, _ in places]
    for owner, (first, last) in enumerate(((0, 2), (3, 5), (6, 7))):
        left = places[first][0] - 12
        p.box(left, 212, places[last][0] + 92 - left, 152, PALE)
        p.text(left + 12, 356, f"rank {owner}", 14, "start", bold=True)
    for number, (x, owner) in enumerate(places):
        p.box(x, 300, 80, 34, (BLUE, ORANGE, GREEN)[owner], f"share {number}")
    sums = []
    for first, top, owner in ((0, 228, 0), (2, 140, None), (4, 228, 1), (6, 228, 2)):
        x = (middle[first] + middle[first + 1]) / 2
        colour = GREY if owner is None else (BLUE, ORANGE, GREEN)[owner]
        p.box(x - 40, top, 80, 34, colour, f"{first} + {first + 1}")
        for each in (first, first + 1):
            p.arrow(middle[each], 299, x + (16 if each > first else -16), top + 35)
        sums.append((x, top))
    halves = []
    for (x1, top1), (x2, top2), text in ((*sums[:2], "(0 + 1) + (2 + 3)"), (*sums[2:], "(4 + 5) + (6 + 7)")):
        x = (x1 + x2) / 2
        p.box(x - 70, 78, 140, 34, GREY, text)
        p.arrow(x1, top1 - 1, x - 40, 113)
        p.arrow(x2, top2 - 1, x + 40, 113)
        halves.append(x)
    x = sum(halves) / 2
    p.box(x - 130, 14, 260, 34, GREY, "the sum, divided by the rows of the world")
    p.arrow(halves[0], 77, x - 90, 49)
    p.arrow(halves[1], 77, x + 90, 49)
    p.text(20, 176, "between ranks", 12, "start")
    return p.svg()


def rooms() -> str:
    """Return what imports what."""
    p = Picture(960, 560, "The rooms of the library, and the main imports, from the upper ones to those below")
    named = {
        "cli": (140, 14, "cli/\nthe lockstep command", GREEN),
        "session": (400, 14, "session/\nsession(), watch()", GREEN),
        "checkpoints": (520, 100, "checkpoints/\nsave(), resume()", GREEN),
        "failures": (20, 130, "failures/\nchannel, progress, stacks", ORANGE),
        "check": (170, 240, "check/\nN ranks beside one process", GREEN),
        "loop": (400, 186, "loop/\nbatches(), accumulate(), agree()", BLUE),
        "shares": (740, 110, "shares/\nthe same bits, GlobalBatches", BLUE),
        "sharding": (740, 270, "sharding/\nshard_optimizer()", BLUE),
        "replication": (400, 262, "distributed/replication/\nreplicate(), DDP", BLUE),
        "local": (740, 190, "local/\none process, many devices", BLUE),
        "reduction": (400, 338, "distributed/reduction/\none round of gradients", BLUE),
        "shm": (140, 414, "shm/\nthrough shared memory", ORANGE),
        "comm": (400, 414, "distributed/comm/\ncollectives, agreement", BLUE),
    }
    p.box(20, 500, 920, 40, GREY, "errors, phases, and _base/: buckets, devices, nested values, stores")
    for x, y, text, colour in named.values():
        p.box(x, y, 200, 46, colour, text)
    p.arrow(450, 61, 450, 185)  # session to loop
    for upper, lower in (("loop", "replication"), ("replication", "reduction"), ("reduction", "comm")):
        p.arrow(500, named[upper][1] + 47, 500, named[lower][1] - 1)
    p.arrow(180, 61, 120, 129)  # cli to failures
    p.arrow(300, 61, 300, 239)  # cli to check
    p.arrow(371, 270, 399, 280)  # check to replication
    p.arrow(399, 437, 341, 437)  # comm to shm
    p.arrow(399, 45, 221, 145)  # session to failures
    p.arrow(560, 61, 600, 99)  # session to checkpoints
    p.arrow(640, 147, 590, 261)  # checkpoints to replication
    p.arrow(739, 293, 601, 293)  # sharding to replication
    p.arrow(739, 140, 601, 270)  # shares to replication
    p.arrow(739, 152, 601, 352)  # shares to reduction
    p.arrow(840, 157, 840, 189)  # shares to local
    p.arrow(739, 209, 601, 209)  # local to loop
    p.arrow(60, 177, 60, 499)  # what rests on the files beside the rooms alone
    p.arrow(240, 461, 240, 499)
    p.arrow(500, 461, 500, 499)
    return p.svg()


def balance() -> str:
    """What each rank does in a step, before and after shares and samples are dealt by what they cost."""
    p = Picture(
        960, 400, "A step of two ranks with equal shares of the work, and with shares dealt by speed or by cost"
    )
    unit, wide = 26, 12
    for top, label in ((90, "equally\nmany"), (250, "dealt")):
        for number, line in enumerate(label.split("\n")):
            p.text(16, top + 66 + 18 * number, line, 14, "start", bold=True)
        p.text(96, top + 36, "rank 0", 13, "start")
        p.text(96, top + 92, "rank 1", 13, "start")
    left = 150
    p.text(left, 40, "rank 1 is half as fast: deal by speed", 15, "start", bold=True)
    for top, ranks in ((90, ((4, unit), (4, 2 * unit))), (250, ((6, unit), (2, 2 * unit)))):
        ready = max(count * width for count, width in ranks)
        for row, (count, width) in enumerate(ranks):
            for share in range(count):
                p.box(left + share * width, top + 16 + 56 * row, width, 30, BLUE if row == 0 else ORANGE)
            if count * width < ready:
                p.box(left + count * width, top + 16 + 56 * row, ready - count * width, 30, PALE, "waits", 12)
        p.box(left + ready, top + 8, wide, 102, GREEN)
        p.text(left + ready + 18, top + 64, "step", 12, "start")
    left = 560
    p.text(left, 40, "rank 1 has longer samples: deal by cost", 15, "start", bold=True)
    batches = (
        (90, [[30, 24, 20, 16], [124, 60, 40, 34]]),
        (250, [[124, 16, 34], [60, 40, 30, 24, 20]]),
    )
    for top, ranks in batches:
        ready = max(map(sum, ranks))
        for row, samples in enumerate(ranks):
            x = left
            for length in samples:
                p.box(x, top + 16 + 56 * row, length, 30, BLUE if row == 0 else ORANGE)
                x += length
            if x < left + ready:
                p.box(x, top + 16 + 56 * row, left + ready - x, 30, PALE, "waits" if left + ready - x > 40 else "", 12)
        p.box(left + ready, top + 8, wide, 102, GREEN)
        p.text(left + ready + 18, top + 64, "step", 12, "start")
    p.text(
        16,
        384,
        "A box is a share, or a sample. The gradient is the same above and below, whoever computes what.",
        13,
        "start",
    )
    return p.svg()


PICTURES = {
    "drift.svg": drift,
    "round.svg": a_round,
    "two_levels.svg": two_levels,
    "replicas.svg": replicas,
    "sharding.svg": sharding,
    "balance.svg": balance,
    "shares.svg": tree_of_shares,
    "rooms.svg": rooms,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
