"""Whether every synchronised backward uses the same parameters on this rank, as far as there have been any."""


class Usage:
    """Compares the parameters that rounds use."""

    __slots__ = ("_first", "is_static", "latest")

    def __init__(self) -> None:
        self._first: bytes | None = None
        self.is_static = True
        self.latest = b""
        """What the last round has used."""

    def look(self, used: bytearray) -> None:
        """A round has ended well; ``used`` has a one for each parameter that had a gradient."""
        if self._first is None:
            self._first = self.latest = bytes(used)
        elif used != self._first:
            self.is_static = False
            self.latest = bytes(used)
        else:
            self.latest = self._first
