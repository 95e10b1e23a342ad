"""How much a module's collectives have moved, and how long beside backward: plain numbers."""

from lockstep.distributed.pace import Pace


class Traffic:
    """Counts what one module sends."""

    __slots__ = ("bytes_reduced", "hidden_seconds", "pace")

    def __init__(self) -> None:
        self.bytes_reduced = 0
        """Bytes of this rank's tensors that have gone into all-reduces."""
        self.hidden_seconds = 0.0
        """From the first collective of each round to the end of backward: time in which backward hid them."""
        self.pace = Pace()

    def reduces(self, size: int) -> None:
        """An all-reduce of so many bytes begins."""
        self.bytes_reduced += size

    def was_hidden(self, seconds: float) -> None:
        """In a round, collectives were under way for so long before anything waited for them."""
        self.hidden_seconds += seconds
