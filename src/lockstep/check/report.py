"""The result of a check: what was compared, and what was found."""

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.check.diagnosis import Finding
from lockstep.check.measuring import Comparison


@dataclass(frozen=True)
class Report:
    """What N ranks and one process have computed, compared."""

    ranks: int
    wrap: str
    precision: str
    tolerance: float
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Empty if all is equal; the first is what to look at first."""
    error: str = ""
    """The traceback of the program, if it failed."""

    @property
    def is_equal(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @property
    def title(self) -> str:
        """One line: what was compared."""
        return f"{self.ranks} ranks, wrapped by {self.wrap}, beside one process, in {self.precision}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return a table of the comparisons, without its head."""
        return [
            (each.what, f"{each.largest:.1e}", f"{len(each.differing)} of {each.count}")
            for each in self.comparisons
            if each.count
        ]

    def conclusion(self) -> str:
        """Return in words what was found."""
        if self.is_equal:
            largest = max((each.largest for each in self.comparisons), default=0.0)
            return f"equal: the largest difference is {largest:.1e}, of {self.tolerance:.1e} that rounding may make"
        lines = [f"not equal ({each.cause}): {each.text}\n  see {each.link}" for each in self.findings]
        return "\n".join([*lines, *([self.error] if self.error else [])])

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {
            "equal": self.is_equal,
            "ranks": self.ranks,
            "wrap": self.wrap,
            "precision": self.precision,
            "tolerance": self.tolerance,
            "findings": [{**asdict(each), "section": each.section} for each in self.findings],
            "comparisons": [asdict(each) for each in self.comparisons],
            "error": self.error,
        }

    def __str__(self) -> str:
        table = "\n".join(f"  {what:32} {largest:>8}   {differ}" for what, largest, differ in self.rows())
        return f"{self.title}\n{table}\n{self.conclusion()}"
