"""What this rank's contribution to the next round counts."""

from lockstep.errors import OptionError


class Weights:
    """Adds up what is announced for each micro-batch (``accumulation.py``), once a backward has used it."""

    def __init__(self) -> None:
        self.total = 0.0
        self.given = False
        """Whether this rank weighs its contributions."""
        self._announced: float | None = None
        self._news = True
        self._passes = 0

    def announce(self, weight: float | None) -> None:
        """The weight of the backward passes that come next, all together; None if they are not weighed."""
        self._announced, self._news = weight, True

    def use(self) -> None:
        """A backward pass begins; raises :class:`OptionError` if only some of those since the last round have a
        weight."""
        weighed = self._announced is not None
        if self._news and self._passes and weighed != self.given:
            raise OptionError(
                f"this backward pass has {'a' if weighed else 'no'} weight, an earlier one since the last "
                "synchronisation had "
                f"{'none' if weighed else 'one'}; give accumulate() a weight in every micro-batch, or in none"
            )
        if self._news and self._announced is not None:
            self.total += self._announced
            self.given = True
        self._news = False
        self._passes += 1

    def clear(self) -> None:
        """The contribution has been made."""
        self.total, self.given, self._passes = 0.0, False, 0
