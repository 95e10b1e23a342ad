"""PURE: how ranks find out together, by messages of any delay, that they wait for each other for ever.

A report is true when it is sent; when it arrives, its rank may have gone on. So ranks decide in two rounds:

1. A rank that waits tells all others its :class:`WaitReport`, with a number. It changes with everything that the
   report says: as long as it stays the same, each thread has been in the same wait, and nothing has been launched.
2. A rank that finds itself in a stuck set, according to the last reports of all, looks at itself once more. If its
   number is still the same, it votes for the set: it sends the numbers of the set's reports. The set is stuck once all
   of its ranks have voted for the same numbers.

Why no alarm is false: a rank votes after it has got the reports of all ranks of the set, and its own number is the same
in its report and in its vote. So between the two it was in its waits all the time. Take the moment at which the last of
these reports was sent. All votes come later, and no report comes later; so at this moment all ranks of the set were in
the waits that they have reported, had launched what they have reported, and had no other thread that could launch
anything. The first of them to go on would need a rank that had not launched the collective at this moment. That rank
has left, or belongs to the set, and would have had to go on before: so none goes on. A set that is stuck stays stuck;
therefore it does not matter how late the votes arrive. (test_deadlock_votes.py tries it, with messages that are late.)

Why none is missed: ranks that wait for ever report once, and their last reports reach all. From then on all of them
find the same set, the largest one, and vote for the same numbers.
"""

from collections.abc import Callable
from typing import Any

from lockstep.failures.deadlock import WaitReport, could_be_stuck, stuck

Numbers = dict[int, int]
"""The numbers of the reports of a set of ranks."""


class Votes:
    """What one rank knows of the reports and votes of all."""

    def __init__(self, rank: int, look: Callable[[], int | None], tell: Callable[..., object]) -> None:
        """``look`` returns the number of this rank's present state, None if it does not wait; ``tell`` sends a message
        to all other ranks."""
        self._rank = rank
        self._look = look
        self._tell = tell
        self.reports: dict[int, WaitReport] = {}
        """The last report of each rank."""
        self._numbers: Numbers = {}
        self._votes: dict[int, Numbers] = {}

    def report(self, number: int, report: WaitReport) -> None:
        """Tell the others what this rank waits for."""
        self._note(self._rank, number, report)
        self._tell("waits", rank=self._rank, number=number, report=report.fields())

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message of another rank."""
        if message["kind"] == "waits":
            self._note(message["rank"], message["number"], WaitReport.of_fields(message["report"]))
        elif message["kind"] == "left":
            self._note(message["rank"], -1, WaitReport(launched=message["launched"], has_left=True))
        else:
            self._votes[message["rank"]] = {int(rank): number for rank, number in message["numbers"].items()}

    def _note(self, rank: int, number: int, report: WaitReport) -> None:
        self.reports[rank] = report
        self._numbers[rank] = number

    def decide(self) -> frozenset[int]:
        """Vote, if there is something to vote for; return the ranks that are known to be stuck, this one among them."""
        if not could_be_stuck(self._rank, self.reports):
            return frozenset()
        found = stuck(self.reports)
        if self._rank not in found or self._look() != self._numbers[self._rank]:
            return frozenset()
        numbers = {rank: self._numbers[rank] for rank in found}
        if self._votes.get(self._rank) != numbers:
            self._votes[self._rank] = numbers
            self._tell("votes", rank=self._rank, numbers=numbers)
        return found if all(self._votes.get(rank) == numbers for rank in found) else frozenset()
