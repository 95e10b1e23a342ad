"""PURE: texts of messages: shortened ones, first lines of errors, and ranks in words."""

from collections.abc import Iterable
from itertools import groupby

LONGEST_HEADLINE = 4 * 1024
"""The number of characters of an exception's type and message that are sent to other ranks."""

DOCUMENTATION = "https://torch-lockstep.github.io/lockstep"
"""Where the pages are that messages name: an installed package has none of them."""

IN_LOOP, LEFT_LOOP = ", in its loop over batches()", ", after it has left its loop over batches()"
"""Where in its loop a rank is that waits in a call: advice depends on it."""


def shortened(text: str, longest: int) -> str:
    """Return a text as it travels: the beginning and the end of one that is too long. Characters that UTF-8 cannot
    encode, such as a byte of a file name, are escaped."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return some ranks as they stand in messages, in order: ``ranks 0, 2, 5 to 8191``; runs of four and more have only
    their ends."""
    names = sorted(ranks)
    parts: list[str] = []
    for _, numbered in groupby(enumerate(names), lambda each: each[1] - each[0]):
        run = [rank for _, rank in numbered]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run)
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(parts)}"
