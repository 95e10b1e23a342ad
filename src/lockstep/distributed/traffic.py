"""How much a module's collectives have moved, and how long beside backward: plain numbers."""

from torch import Tensor

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

    def reduces(self, tensor: Tensor) -> None:
        """An all-reduce of a tensor begins; of a sparse one the values count (test_a_sparse_bucket)."""
        self.bytes_reduced += tensor._values().nbytes if tensor.is_sparse else tensor.nbytes

    def waits(self, begun: float | None, now: float) -> None:
        """A round is waited for from ``now`` on, of which the first collective had ``begun`` before, if any has."""
        self.pace.waits(now)
        if begun is not None:
            self.hidden_seconds += now - begun
